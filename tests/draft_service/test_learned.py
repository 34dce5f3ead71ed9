"""What a draft service hands to who learns, and what was learned at work: who teaches, who is drafted for by what, and
what becomes of open sequences when that changes."""

from __future__ import annotations

import asyncio
import tracemalloc
from array import array
from collections.abc import AsyncIterator, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from support.adapters import merged, save_adapter
from support.engines import GREEDY, SAMPLED, DraftHarness, commit, credit, new_open
from support.models import build_decoder, save_tiny, tiny_config, tiny_hf_model, tiny_state, train_byte_level

from outrider.draft_service import boot
from outrider.draft_service.settings import DraftSettings
from outrider.engine.adapters.loader import WEIGHTS_NAME, load_adapter
from outrider.engine.adapters.resident import AdapterRoom
from outrider.engine.batch import PreparedAdapter
from outrider.engine.loader import LoadedModel
from outrider.gateway.peers.remote import DRAFT_SERVICE, lessons_of, put_learned, reload_model
from outrider.rpc.channel import connect
from outrider.rpc.errors import OutriderError
from outrider.rpc.learning.lessons import MAX_BYTES, MAX_TOKENS, SALTED, UNSALTED, Lessons, Teaching, group_of
from outrider.rpc.messages import (
    LESSON_BYTES,
    Close,
    DraftTokens,
    LearningKey,
    LearningNews,
    Lesson,
    Open,
    TokenWeights,
)
from outrider.rpc.words.sampling_params import AcceptanceRule
from outrider.rpc.words.structured import Reasoning, StructuredOutput

PROMPT = [(7 * index) % 90 + 3 for index in range(40)]
TARGET = "d" * 64
KEY = LearningKey(TARGET, "")
REJECTION, BLOCK, COUPLED = AcceptanceRule.REJECTION, AcceptanceRule.BLOCK, AcceptanceRule.COUPLED
K = 4


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root, state = tmp_path_factory.mktemp("learned"), tiny_state(tiny_hf_model())
    return {name: save_adapter(root / name, state, seed=seed, scale=0.2) for seed, name in enumerate(("first", "next"))}


def decoder(folder: Path | None = None) -> LoadedModel:
    """With an adapter's weights merged in."""
    state = tiny_state(tiny_hf_model())
    return build_decoder(tiny_config(), state if folder is None else merged(state, folder), batch_invariant=True)


class Learning:
    """A draft that may learn, and what comes of it."""

    def __init__(self, salts: frozenset[str] = frozenset({UNSALTED, SALTED}), most: int = 4) -> None:
        self.base = decoder()
        self.draft = DraftHarness(loaded=self.base, learned=AdapterRoom(most, 16), learn_from=salts)

    def prepared(self, folder: Path) -> PreparedAdapter:
        adapters = self.draft.method.proposer.runner.adapters
        assert adapters is not None
        return adapters.prepare(load_adapter(folder, self.base.model, self.base.digest))

    def put(self, folder: Path | None, key: LearningKey = KEY, left_out: Collection[str] = ()) -> int:
        return self.draft.engine.put_learned(key, None if folder is None else self.prepared(folder), left_out)

    def lessons_from(self, request: Open) -> list[Lesson]:
        """Of a sequence that ended behind two tokens."""
        self.draft.run(request, credit(1, 0, K))
        length = len(request.prompt_ids) + len(request.output_ids)
        self.draft.run(commit(1, length, 5, 6), Close(1))
        return self.draft.engine.lessons.take()[0]


def drafted(draft: DraftHarness, request: Open, until: int = len(PROMPT) + K) -> list[tuple[int, ...]]:
    found = draft.ids(request, credit(request.sequence_id, until, K))
    draft.run(Close(request.sequence_id))
    return found


def asked(**options: Any) -> Open:
    given: dict[str, Any] = {"model_digest": TARGET, "seed": 7} | options
    return new_open(1, PROMPT, **given)


SALTS = frozenset({UNSALTED, SALTED})
CUT = replace(SAMPLED, top_p=0.9)
# What is asked, whose texts may be had, and whether it teaches, and learned weights draft for it.
CASES: dict[str, tuple[dict[str, Any], frozenset[str], bool, bool]] = {
    "greedy": ({"sampling": GREEDY, "one_hot": True}, SALTS, True, True),
    "coupled": ({"sampling": SAMPLED, "acceptance": COUPLED}, SALTS, True, True),
    "a seed of its own": ({"sampling": SAMPLED, "acceptance": REJECTION, "fresh_seed": True}, SALTS, True, True),
    "a caller's seed": ({"sampling": SAMPLED, "acceptance": REJECTION}, SALTS, False, False),
    "a caller's seed, by blocks": ({"sampling": SAMPLED, "acceptance": BLOCK}, SALTS, False, False),
    "a cut law": ({"sampling": CUT, "acceptance": COUPLED}, SALTS, False, True),
    "a cut law, greedily": ({"sampling": replace(CUT, temperature=0.0)}, SALTS, True, True),
    "reasoning without a bound": ({"sampling": GREEDY, "reasoning": Reasoning((5, 6), (9,))}, SALTS, True, True),
    "a bound of reasoning": (
        {"sampling": GREEDY, "reasoning": Reasoning((5, 6), (9,), max_tokens=1, open=True)}, SALTS, False, True,
    ),
    "a salt called as those without one": ({"sampling": GREEDY, "salt": UNSALTED}, frozenset({UNSALTED}), False, False),
    "a grammar": (
        {"sampling": replace(GREEDY, structured_output=StructuredOutput(json_object=True))}, SALTS, False, True,
    ),
    "no target's name": ({"sampling": GREEDY, "model_digest": ""}, SALTS, False, False),
    "a salt where none may": ({"sampling": GREEDY, "salt": "a"}, frozenset({UNSALTED}), False, False),
    "no salt where salts may": ({"sampling": GREEDY}, frozenset({SALTED}), False, False),
    "a salt that may": ({"sampling": GREEDY, "salt": "a"}, frozenset({"a"}), True, True),
    "another one": ({"sampling": GREEDY, "salt": "b"}, frozenset({"a"}), False, False),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_who_teaches_and_who_is_drafted_for(folders: dict[str, Path], case: str) -> None:
    options, salts, teaches, learns = CASES[case]
    request, learning = asked(**options), Learning(salts)
    lessons = learning.lessons_from(request)
    assert [list(lesson.output_ids) for lesson in lessons] == ([[5, 6]] if teaches else [])
    if teaches:
        (lesson,) = lessons
        assert list(lesson.prompt_ids) == PROMPT and lesson.sampling == request.sampling
        law = lesson.target_digest, lesson.group, lesson.acceptance, lesson.seed, lesson.num_given
        assert law == (TARGET, group_of(request.salt), request.acceptance, 7, 0)
    learning.put(folders["first"], LearningKey(TARGET, group_of(request.salt)))
    alone = [drafted(DraftHarness(loaded=decoder(folder)), request) for folder in (None, folders["first"])]
    assert alone[0] != alone[1]
    assert drafted(learning.draft, request) == alone[learns]


def test_a_salts_sequences_alone_are_drafted_for_by_what_it_taught(folders: dict[str, Path]) -> None:
    learning, plain = Learning(), drafted(DraftHarness(loaded=decoder()), asked())
    learning.put(folders["first"], LearningKey(TARGET, group_of("a")))
    assert drafted(learning.draft, asked(salt="a")) != plain
    for other in (asked(), asked(salt="b"), asked(salt="a", model_digest="e" * 64)):
        assert drafted(learning.draft, other) == plain


def test_a_caller_who_is_left_out_is_drafted_for_by_the_model_alone(folders: dict[str, Path]) -> None:
    learning, plain = Learning(), drafted(DraftHarness(loaded=decoder()), asked())
    for left_out in ("b", ""):  # and those who are unknown
        learning.put(folders["first"], KEY, [left_out])
        for caller in ("", "a", "b"):
            assert (drafted(learning.draft, asked(caller=caller)) == plain) is (caller == left_out)
    (lesson,) = learning.lessons_from(asked(caller="b"))
    assert lesson.caller == "b", "it teaches all the same"


def test_what_was_given_teaches_once() -> None:
    (lesson,) = Learning().lessons_from(asked(output_ids=(9, 8)))
    assert (list(lesson.output_ids), lesson.num_given) == ([9, 8, 5, 6], 2)
    learning = Learning()
    learning.draft.run(asked(output_ids=(9, 8)), Close(1))
    assert learning.draft.engine.lessons.take() == ([], 0), "nothing was committed here"


@pytest.mark.parametrize("rule", [REJECTION, COUPLED])
def test_a_chain_goes_on_with_what_is_put_in_use_and_taken_out(folders: dict[str, Path], rule: AcceptanceRule) -> None:
    """What was drafted stays, with the weights that it was drawn from; what follows is the new weights'."""
    learning, end = Learning(), len(PROMPT)
    request = asked(sampling=SAMPLED, acceptance=rule, fresh_seed=True)
    pieces = learning.draft.run(request, credit(1, end + K, K))
    for folder in (folders["first"], folders["next"], None):
        assert learning.put(folder) == 1
        end += K
        pieces += learning.draft.run(credit(1, end + K, K))
        learning.draft.check()
    text, followed = list(PROMPT), [piece for piece in pieces if isinstance(piece, DraftTokens)]
    for piece, folder in zip(followed, (None, folders["first"], folders["next"], None), strict=True):
        alone = DraftHarness(loaded=decoder(folder))
        begun = replace(request, prompt_ids=tuple(text))
        (expected,) = (one for one in alone.run(begun, credit(1, len(text) + K, K)) if isinstance(one, DraftTokens))
        assert (piece.ids, piece.position) == (expected.ids, len(text))
        for drew, again in zip(piece.weights, expected.weights, strict=True):
            assert torch.allclose(probs_of(drew), probs_of(again), atol=1e-5), (
                "of what was merged, but for its rounding"
            )
        text += piece.ids


def probs_of(weights: TokenWeights | None) -> torch.Tensor:  # [vocab]
    probs = torch.zeros(tiny_config()["vocab_size"])
    if weights is not None:
        ids, given = (np.frombuffer(part, "<u4").astype(np.int64) for part in (weights.ids, weights.weights))
        probs[torch.from_numpy(ids)] = torch.from_numpy(given).float() / float(given.sum())
    return probs


def test_the_one_that_was_wanted_longest_ago_goes(folders: dict[str, Path]) -> None:
    learning, keys = Learning(most=2), [LearningKey(TARGET, group_of(salt)) for salt in "abc"]
    plain = drafted(learning.draft, asked())
    learning.put(folders["first"], keys[0])
    learning.put(folders["next"], keys[1])
    opened = replace(asked(salt="b"), sequence_id=2)
    learning.draft.run(opened)
    assert drafted(learning.draft, asked(salt="a")) != plain
    assert learning.put(folders["first"], keys[2]) == 1, "b's goes, which is open"
    learning.draft.run(credit(2, len(PROMPT) + K, K))
    assert [drafted(learning.draft, asked(salt=salt)) == plain for salt in "abc"] == [False, True, False]
    assert [key in dict.fromkeys(row[:2] for row in rows_of(learning)) for key in keys] == [True, False, True]


def rows_of(learning: Learning) -> list[tuple[str, str, str]]:
    rows = learning.draft.engine.model.learned.rows
    return [(row.target_digest, row.group, row.digest) for row in rows]


def test_lessons_that_nobody_takes_make_room() -> None:
    room = 3 * (LESSON_BYTES + 4 * 5)
    lessons, made = (
        Lessons(room),
        [Lesson("d", "", [1, 2], [3, 4, index], GREEDY, COUPLED, index) for index in range(5)],
    )
    for lesson in made:
        lessons.add(lesson)
    assert lessons.num_bytes == room and lessons.take() == (made[2:], 2)
    assert lessons.take() == ([], 0) and lessons.num_bytes == 0
    longest = Lessons()
    for length in (MAX_TOKENS - 2, MAX_TOKENS - 1):
        longest.add(Lesson("d", "", [1, 2], [3] * length, GREEDY, COUPLED, 0))
    taken, lost = longest.take()
    assert ([len(lesson.output_ids) for lesson in taken], lost) == ([MAX_TOKENS - 2], 1)


def test_what_waits_is_bounded_with_its_biases() -> None:
    """By what is taken: 300 of them are thirty kilobytes of a short text."""
    lessons = Lessons()
    tracemalloc.start()
    try:
        for number in range(3000):
            biases = {5000 + place: float(number + place) for place in range(300)}
            request = asked(sampling=replace(GREEDY, logit_bias=biases))
            teaching = Teaching.of(request, SALTS)
            assert teaching is not None
            lesson = teaching.lesson([*PROMPT, 5, 6], len(PROMPT))
            assert lesson is not None
            lessons.add(lesson)
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    print(f"{taken / 2**20:.1f} MiB, {lessons.num_bytes / 2**20:.1f} counted")
    assert taken < 1.3 * MAX_BYTES and lessons.num_bytes <= MAX_BYTES
    many = asked(sampling=replace(GREEDY, bad_words_ids=(tuple(range(256)),) * 400))
    lesson = Teaching(KEY, many.sampling, COUPLED, 7, 0, 0).lesson([*PROMPT, 5, 6], len(PROMPT))
    assert lesson is not None and lesson.num_bytes > MAX_BYTES


# Over gRPC


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = save_tiny(tmp_path_factory.mktemp("draft"), vocab_size=300, eos_token_id=None)
    train_byte_level(300).save(str(made / "tokenizer.json"))
    return made


@pytest.fixture(scope="module")
def learned(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    state = load_file(model / "model.safetensors")
    return save_adapter(tmp_path_factory.mktemp("adapter") / "one", state, seed=1, scale=0.2)


class Running:
    """A draft service that may learn."""

    def __init__(self, service: boot.DraftService, channel: Any) -> None:
        self.service, self.channel = service, channel


def settings_of(model: Path, **options: Any) -> DraftSettings:
    given = {"learn_from": [UNSALTED], "learned_drafts": 2, "allow_reload": True} | options
    return DraftSettings(model=model, listen="127.0.0.1:0", threads=1, num_blocks=64, **given)


@pytest.fixture
async def running(model: Path) -> AsyncIterator[Running]:
    service = await boot.start(settings_of(model))
    await service.server.start()
    channel = connect(service.server.address)
    yield Running(service, channel)
    await channel.close()
    await service.stop()


async def test_it_is_put_in_use_told_and_taken_back(running: Running, learned: Path, model: Path) -> None:
    info = await DRAFT_SERVICE.get_info(running.channel)
    assert info.learned == () and [method.learns for method in info.methods if method.name == "draft_model"] == [True]
    done = await put_learned(running.channel, TARGET, "", str(learned), ["b", "a"])
    assert (done.before, done.num_sequences) == ("", 0) and done.after
    (row,) = (await DRAFT_SERVICE.get_info(running.channel)).learned
    assert (row.target_digest, row.group, row.digest, row.left_out) == (TARGET, "", done.after, ("a", "b"))
    back = await put_learned(running.channel, TARGET, "", "")
    assert (back.before, back.after) == (done.after, "")
    assert (await DRAFT_SERVICE.get_info(running.channel)).learned == ()
    await put_learned(running.channel, TARGET, "", str(learned))
    await reload_model(running.channel, str(model))
    assert (await DRAFT_SERVICE.get_info(running.channel)).learned == (), "another model has learned nothing"


def broken(folder: Path, copy: Path, change: Any) -> Path:
    copy.mkdir()
    (copy / "adapter_config.json").write_bytes((folder / "adapter_config.json").read_bytes())
    state = {name: change(tensor).contiguous() for name, tensor in load_file(folder / WEIGHTS_NAME).items()}
    save_file(state, copy / WEIGHTS_NAME)
    return copy


async def test_what_cannot_be_used_is_told_by_name_and_the_old_one_drafts(
    running: Running, learned: Path, tmp_path: Path
) -> None:
    before = await put_learned(running.channel, TARGET, "", str(learned))
    nan = broken(learned, tmp_path / "nan", lambda tensor: tensor * float("nan"))
    other = broken(learned, tmp_path / "other", lambda tensor: tensor[:, :2])
    for digest, group, path, said in (
        (TARGET, "", "absent", "path: absent: there is no such folder"),
        (TARGET, "", str(nan), "holds NaN"),
        (TARGET, "", str(other), "has shape"),
        (TARGET, "", "x" * 5000, "path: has 5000 characters"),
        ("", "", str(learned), "target_digest: has 0 characters"),
        (TARGET, "g" * 40, str(learned), "group: has 40 characters"),
    ):
        with pytest.raises(OutriderError, match=said):
            await put_learned(running.channel, digest, group, path)
    for left_out, said in ((["c"] * 65, "left_out: has 65 entries"), (["", "c" * 300], r"left_out\[1\]: has 300")):
        with pytest.raises(OutriderError, match=said):
            await put_learned(running.channel, TARGET, "", str(learned), left_out)
    (row,) = (await DRAFT_SERVICE.get_info(running.channel)).learned
    assert row.digest == before.after


async def test_the_latest_learner_has_the_lessons(running: Running) -> None:
    ids = array("I", (1, 2)), array("I", (3, 4))
    given = Lesson(TARGET, "", *ids, SAMPLED, COUPLED, seed=2**63 + 1, completion=3, num_given=1)
    first = lessons_of(running.channel)
    info = await DRAFT_SERVICE.get_info(running.channel)
    begin = LearningNews(model_digest=info.model.digest, max_learned=2, max_rank=32)
    assert await anext(first) == begin and begin.model_digest
    running.service.engine.lessons.add(given)
    assert await anext(first) == LearningNews((given,))
    second = lessons_of(running.channel)
    assert await anext(second) == begin
    with pytest.raises(OutriderError, match="another learner asked after this one"):
        await anext(first)
    for _ in range(70):
        running.service.engine.lessons.add(given)
    found = 0
    async with asyncio.timeout(30):
        while found < 70:
            found += len((await anext(second)).lessons)
    running.service.servicer.drain()
    with pytest.raises(StopAsyncIteration):
        await anext(second)


async def test_it_has_to_be_allowed(model: Path) -> None:
    service = await boot.start(settings_of(model, learn_from=[]))
    await service.server.start()
    channel = connect(service.server.address)
    try:
        for asking in (anext(lessons_of(channel)), put_learned(channel, TARGET, "", "")):
            with pytest.raises(OutriderError, match="was not started with --learn-from"):
                await asking
    finally:
        await channel.close()
        await service.stop()
    with pytest.raises(ValidationError, match="learn_from"):
        settings_of(model, method="ngram")
    with pytest.raises(ValidationError, match=r"learn_from \(--learn-from\): others reach listen"):
        DraftSettings(model=model, listen="0.0.0.0:1", learn_from=[UNSALTED], insecure=True)
