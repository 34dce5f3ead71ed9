"""A head that learns while its target serves: lessons come of what clients are answered, versions are put in use by
`outrider learn`, and not a token that a client gets is another."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import pytest
from safetensors.torch import load_file
from support.adapters import save_adapter
from support.deployment import Deployment, deployed
from support.drawn_law import excess_of_a_token
from support.fakes import until
from support.learned_versions import changing

from outrider.gateway.peers.remote import TARGET_SERVICE, lessons_of, put_learned
from outrider.learning.head_student import HeadStudent
from outrider.learning.learn_command import main
from outrider.learning.student import StudentPlan
from outrider.learning.versions import Shelf, Version
from outrider.rpc.messages import LearnedDraft

MODULES = ("q_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Deployment]:
    async with deployed(tmp_path_factory.mktemp("models"), head="eagle3") as deployment:
        yield deployment


def head_of(served: Deployment) -> Path:
    return served.folder.parent / "head"


async def ask(served: Deployment, number: int, temperature: float, num_draft_tokens: int) -> tuple[list[int], int]:
    """The tokens of an answer, and how many were drafted."""
    said = await served.generate(
        token_ids={"ids": [(number + 3 * index) % 90 + 4 for index in range(8)]},
        sampling={"temperature": temperature, "max_tokens": 24, "seed": number, "ignore_eos": True},
        speculation={"num_draft_tokens": num_draft_tokens, "acceptance": 2, "method": "eagle3", "mode": "sequential"},
    )
    tokens = [token for part in said for token in part.token_ids]
    return tokens, said[-1].speculation.num_draft_tokens


async def learned_of(served: Deployment) -> tuple[LearnedDraft, ...]:
    return (await TARGET_SERVICE.get_info(served.to_target)).learned


async def has_stepped(client: httpx.AsyncClient) -> bool:
    return bool(re.search(r"^outrider_learner_steps_total.* [1-9]", (await client.get("/metrics")).text, re.M))


async def until_is_there(found: Callable[[], Awaitable[object]]) -> None:
    is_there = await found()
    while not is_there:
        await asyncio.sleep(0.1)
        is_there = await found()


async def versions(served: Deployment, folder: Path) -> tuple[grpc.aio.Channel, str, list[str]]:
    """Weights of the head in two folders, for whom, and where they are put in use."""
    digest = (await TARGET_SERVICE.get_info(served.to_target)).model.digest
    state = load_file(head_of(served) / "model.safetensors")
    layer = {name.replace("midlayer.", "model.layers.0."): tensor for name, tensor in state.items()}
    paths = [str(save_adapter(folder / str(seed), layer, MODULES, seed=seed, scale=0.3)) for seed in (1, 2)]
    return served.to_target, digest, paths


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "coupled"])
async def test_no_token_differs_while_versions_change(
    served: Deployment, tmp_path: Path, temperature: float, prove: bool
) -> None:
    count, at_once = (1000 if prove else 60), 12
    plain, found = list[Any](), list[Any]()
    for start in range(0, count, at_once):
        plain += await asyncio.gather(*(ask(served, n, temperature, 0) for n in range(start, start + at_once)))
    async with changing(*await versions(served, tmp_path)) as met:
        for start in range(0, count, at_once):
            found += await asyncio.gather(*(ask(served, n, temperature, 4) for n in range(start, start + at_once)))
    print(f"{len(met)} changes met {sum(met)} open sequences")
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in plain] and len(met) > 10 and sum(met) > 10
    assert sum(drafted for _, drafted in found) > 5 * count
    await served.settled()


async def test_under_rejection_tokens_follow_the_targets_law_while_versions_change(
    served: Deployment, tmp_path: Path, prove: bool
) -> None:
    count = 2000 if prove else 240
    async with changing(*await versions(served, tmp_path)) as met:
        z, drafted = await excess_of_a_token(served, count, method="eagle3")
    print(f"z {z:.2f}, {drafted} drafted, {len(met)} changes met {sum(met)} open sequences")
    assert abs(z) < 4 and drafted > count and sum(met) > 10


async def test_a_process_learns_from_what_is_served_and_puts_what_it_has_in_use(
    served: Deployment, tmp_path: Path
) -> None:
    stream = lessons_of(served.to_target)
    await anext(stream)
    given, _ = await ask(served, 7, 0.0, 4)
    while not (news := await anext(stream)).lessons or list(news.lessons[-1].output_ids) != given:
        continue
    lesson, target = news.lessons[-1], served.folder.parent / "target"
    assert len(lesson.caller) == 16, "whose it is"
    student = HeadStudent(head_of(served), target, StudentPlan(rank=4))
    shelf = Shelf(tmp_path, student.digest)
    number, path = shelf.place(lesson.key)
    state = {name: tensor + 0.05 for name, tensor in student.untrained().items()}
    version = Version(number, student.write(state, path), str(path), 1, 1, 1, 0.1, 0.01, 0.0)
    shelf.put(lesson.key, version)
    arguments = [
        "--model", str(target), "--head", str(head_of(served)), "--target", served.target.server.address,
        "--folder", str(tmp_path), "--rank", "4", "--metrics", "127.0.0.1:0", "--niceness", "0",
    ]  # fmt: skip
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "outrider", "learn", *arguments, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(120):
            address = (await process.stdout.readline()).decode().split()[-1]
            await until_is_there(lambda: learned_of(served))
        rows = await learned_of(served)
        assert [(row.key, row.digest) for row in rows] == [(lesson.key, version.digest)]
        plain = [await ask(served, number, 0.0, 0) for number in range(24)]
        found = [await ask(served, number, 0.0, 4) for number in range(24)]
        assert [tokens for tokens, _ in found] == [tokens for tokens, _ in plain]
        async with httpx.AsyncClient(base_url=f"http://{address}") as client, asyncio.timeout(120):
            await until_is_there(lambda: has_stepped(client))
        process.terminate()
        assert await asyncio.wait_for(process.wait(), 30) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    await put_learned(served.to_target, *lesson.key, "")
    await until(lambda: not served.target.engine.scheduler.sequences)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--target", "127.0.0.1:1"], "target (--target) is for a head; give --head DIR, too, or --draft"),
        (
            ["--head", "x", "--draft", "127.0.0.1:1"],
            "draft (--draft) is for a draft's model; with --head give --target",
        ),
    ],
)
def test_services_that_do_not_fit_are_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    with pytest.raises(SystemExit):
        main(["--model", str(tmp_path), "--folder", str(tmp_path), *arguments])
    assert said in capsys.readouterr().err
