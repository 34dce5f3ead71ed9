"""A deployment that learns while it serves: what clients get does not change, whatever drafts, and a learner that
comes, goes or dies costs nothing but learning."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from safetensors.torch import load_file
from support.adapters import save_adapter
from support.deployment import Deployment, deployed
from support.drawn_law import excess_of_a_token
from support.fakes import until
from support.learned_versions import changing

from outrider.draft_service import boot
from outrider.draft_service.settings import DraftSettings
from outrider.gateway.peers.remote import DRAFT_SERVICE, TARGET_SERVICE, put_learned
from outrider.learning.learner import Learner, LearnerPlan, run
from outrider.learning.links import LearningLink
from outrider.learning.student import Student, StudentPlan
from outrider.learning.token_student import TokenStudent
from outrider.learning.traffic import PoolPlan
from outrider.learning.versions import Shelf, Version
from outrider.rpc.errors import FailedPrecondition
from outrider.rpc.learning.lessons import UNSALTED, group_of
from outrider.rpc.messages import LearningKey, PutLearned

PLAN = LearnerPlan(PoolPlan(hold_out=3), most_keys=2, candidate_steps=8, error=0.2, window=4)


@pytest.fixture(scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Deployment]:
    async with deployed(tmp_path_factory.mktemp("models"), learn_from=[UNSALTED], learned_drafts=2) as deployment:
        yield deployment


def draft_of(served: Deployment) -> Path:
    return served.folder.parent / "draft"


def learned_of(draft: boot.DraftService) -> list[str]:
    """The digests of what it has in use."""
    return [row.digest for row in draft.engine.model.learned.rows]


async def ask(served: Deployment, number: int, temperature: float, num_draft_tokens: int, **sampling: Any) -> list[int]:
    prompt = [(5 * number + 3 * index) % 90 + 4 for index in range(8)]
    said = await served.generate(
        token_ids={"ids": prompt},
        sampling={"temperature": temperature, "max_tokens": 24, "seed": number, "ignore_eos": True, **sampling},
        speculation={
            "num_draft_tokens": num_draft_tokens,
            "acceptance": 2,
            "mode": ("sequential", "chains")[number % 2],
        },
    )
    return [token for part in said for token in part.token_ids]


async def versions(served: Deployment, folder: Path) -> tuple[grpc.aio.Channel, str, list[str]]:
    """Weights of the draft in two folders, for whom, and where they are put in use."""
    digest = (await TARGET_SERVICE.get_info(served.to_target)).model.digest
    state = load_file(draft_of(served) / "model.safetensors")
    paths = [str(save_adapter(folder / str(seed), state, seed=seed, scale=0.3)) for seed in (1, 2)]
    return served.to_draft, digest, paths


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "coupled"])
async def test_no_token_differs_while_versions_change(
    served: Deployment, tmp_path: Path, temperature: float, prove: bool
) -> None:
    count, at_once = (1000 if prove else 60), 12
    plain = list[list[int]]()
    found = list[list[int]]()
    for start in range(0, count, at_once):
        plain += await asyncio.gather(*(ask(served, n, temperature, 0) for n in range(start, start + at_once)))
    async with changing(*await versions(served, tmp_path)) as met:
        for start in range(0, count, at_once):
            found += await asyncio.gather(*(ask(served, n, temperature, 4) for n in range(start, start + at_once)))
    print(f"{len(met)} changes met {sum(met)} open sequences")
    assert found == plain and len(met) > 10 and sum(met) > 10
    await served.settled()


async def test_under_rejection_tokens_follow_the_targets_law_while_versions_change(
    served: Deployment, tmp_path: Path, prove: bool
) -> None:
    count = 2000 if prove else 240
    async with changing(*await versions(served, tmp_path)) as met:
        z, drafted = await excess_of_a_token(served, count)
    print(f"z {z:.2f}, {drafted} drafted, {len(met)} changes met {sum(met)} open sequences")
    assert abs(z) < 4 and drafted > count and sum(met) > 10


@contextmanager
def learning(student: Student, folder: Path, plan: LearnerPlan = PLAN) -> Iterator[Learner]:
    learner = Learner(student, Shelf(folder, student.digest), plan)
    yield learner


@asynccontextmanager
async def linked(learner: Learner, *addresses: str) -> AsyncIterator[list[LearningLink]]:
    """While in it, lessons come, and what is in use is kept in use."""
    links = [LearningLink(address, None, learner, lambda: dict(learner.shelf.live)) for address in addresses]
    tasks = [asyncio.create_task(link.run()) for link in links]
    try:
        await until(lambda: all(link.is_there for link in links))
        yield links
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture(scope="module")
def student(served: Deployment) -> Student:
    return TokenStudent(draft_of(served), StudentPlan(rank=8, learning_rate=1e-2, batch_size=4, replay_weight=0.0))


def put(learner: Learner, key: LearningKey, seed: int) -> Version:
    """Says that some weights are in use, as if they had been judged better."""
    state = {name: 0.2 * tensor + 0.01 * seed for name, tensor in learner.student.untrained().items()}
    number, path = learner.shelf.place(key)
    version = Version(number, learner.student.write(state, path), str(path), 1, 1, 1, 0.1, 0.01, 0.0)
    learner.shelf.put(key, version)
    return version


async def test_lessons_come_of_all_that_a_target_answers_and_what_is_in_use_is_put_there(
    served: Deployment, student: Student, tmp_path: Path
) -> None:
    waiting = served.draft.engine.lessons
    waiting.take()  # of the tests before
    await ask(served, 299, 1.0, 4)
    await until(lambda: waiting.num_bytes > 0)
    ((lesson,), _) = waiting.take()
    assert len(lesson.caller) == 16, "whose it is"
    with learning(student, tmp_path) as learner:
        async with linked(learner, served.draft.server.address):
            for number in range(6):
                await ask(served, 300 + number, 1.0, 4)
            await ask(served, 310, 1.0, 4, top_p=0.9)
            await until(lambda: [one.pool.num_taken for one in learner.pupils()] == [6])
            (pupil,) = learner.pupils()
            digest = (await TARGET_SERVICE.get_info(served.to_target)).model.digest
            assert pupil.key == LearningKey(digest, group_of("")) and pupil.pool.num_tokens == 6 * 24
            version = put(learner, pupil.key, 1)
            await until(lambda: learned_of(served.draft))
            (row,) = (await DRAFT_SERVICE.get_info(served.to_draft)).learned
            assert (row.target_digest, row.digest) == (digest, version.digest)
            learner.shelf.put(pupil.key, replace(version, left_out=("c",)))
            await until(lambda: served.draft.engine.model.learned.rows[0].left_out == ("c",))
            learner.shelf.put(pupil.key, None)
            await until(lambda: not learned_of(served.draft))
    await served.settled()


async def test_a_learner_learns_of_served_traffic_and_dies(
    served: Deployment, student: Student, tmp_path: Path
) -> None:
    """It trains while requests are answered; when it is gone, what it put in use drafts on."""
    with learning(student, tmp_path) as learner:
        async with linked(learner, served.draft.server.address):
            over = asyncio.Event()
            training = asyncio.create_task(asyncio.to_thread(run, learner, over.is_set, 0.01))
            before = [await ask(served, number, 1.0, 4) for number in range(400, 440)]
            await until(lambda: any(one.num_steps >= 16 for one in learner.pupils()))
            over.set()
            await training
            put(learner, learner.pupils()[0].key, 2)
            await until(lambda: learned_of(served.draft))
    assert [await ask(served, number, 1.0, 4) for number in range(400, 410)] == before[:10]
    await served.settled()


async def test_drafts_of_the_same_weights_share_and_one_that_starts_again_is_brought_up(
    served: Deployment, student: Student, tmp_path: Path
) -> None:
    key = LearningKey("e" * 64, "")
    given: dict[str, Any] = {"model": draft_of(served), "threads": 1, "num_blocks": 64, "learn_from": [UNSALTED]}
    services = [await boot.start(DraftSettings(listen="127.0.0.1:0", **given)) for _ in range(2)]
    for service in services:
        await service.server.start()
    addresses = [service.server.address for service in services]

    def rows() -> list[list[str]]:
        return [learned_of(service) for service in services]

    try:
        with learning(student, tmp_path) as learner:
            version = put(learner, key, 3)
            async with linked(learner, *addresses):
                await until(lambda: rows() == [[version.digest]] * 2)
                await services[0].stop()
                services[0] = await boot.start(DraftSettings(listen=addresses[0], **given))
                await services[0].server.start()
                await until(lambda: rows() == [[version.digest]] * 2)
    finally:
        for service in services:
            await service.stop()


async def test_what_is_given_up_makes_room_for_what_is_put_in_use(
    served: Deployment, student: Student, tmp_path: Path
) -> None:
    """The draft has room for two."""
    keys = [LearningKey("e" * 64, f"{number:032x}") for number in range(4)]
    with learning(student, tmp_path) as learner:
        async with linked(learner, served.draft.server.address):
            wanted = {key: put(learner, key, seed).digest for seed, key in enumerate(keys[:2])}
            for place, key in enumerate(keys[2:]):
                await until(lambda: sorted(learned_of(served.draft)) == sorted(wanted.values()))
                learner.shelf.live = {old: one for old, one in learner.shelf.live.items() if old != keys[place]}
                del wanted[keys[place]]
                wanted[key] = put(learner, key, 5 + place).digest
            await until(lambda: sorted(learned_of(served.draft)) == sorted(wanted.values()))
            learner.shelf.live = {}
            await until(lambda: not learned_of(served.draft))


async def test_what_a_draft_cannot_take_now_is_put_in_use_later(
    served: Deployment, student: Student, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No lesson comes meanwhile: the link itself tries again."""
    refusals = [FailedPrecondition("another change is under way", reason="RELOADING")]

    async def busy(*given: Any) -> PutLearned:
        if refusals:
            raise refusals.pop()
        return await put_learned(*given)

    monkeypatch.setattr("outrider.learning.links.put_learned", busy)
    with learning(student, tmp_path) as learner:
        async with linked(learner, served.draft.server.address):
            version = put(learner, LearningKey("e" * 64, ""), 1)
            await until(lambda: learned_of(served.draft) == [version.digest])
            learner.shelf.live = {}
            await until(lambda: not learned_of(served.draft))
    assert not refusals


async def test_more_than_a_draft_has_room_for_is_told(served: Deployment, student: Student, tmp_path: Path) -> None:
    address, wide = served.draft.server.address, TokenStudent(draft_of(served), StudentPlan(rank=33))
    for student_of, plan, said in (
        (student, replace(PLAN, most_keys=3), "--learned-drafts is 2, and --keys 3; allowed: at most 2"),
        (wide, PLAN, "--learned-rank is 32, and --rank 33; allowed: at most 32"),
    ):
        with learning(student_of, tmp_path, plan) as learner, pytest.raises(FailedPrecondition, match=said):
            await LearningLink(address, None, learner, dict).run()


async def test_a_draft_of_other_weights_and_one_that_does_not_hand_out_are_told(
    served: Deployment, student: Student, tmp_path: Path
) -> None:
    with learning(student, tmp_path) as learner:
        address = served.draft.server.address
        student.digest, own = "f" * 64, student.digest
        try:
            with pytest.raises(FailedPrecondition, match="drafts with another model"):
                await LearningLink(address, None, learner, dict).run()
        finally:
            student.digest = own
        first = asyncio.create_task(LearningLink(address, None, learner, dict).run())
        await asyncio.sleep(0.5)
        async with linked(learner, address):
            with pytest.raises(FailedPrecondition, match="another learner asked after this one"):
                await first
