"""Learned weights of a head: they draft as a head would that they were merged into, for whom they are meant; what a
head keeps of a text is the same; what ended sequences teach; and all of it through the service."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from support.adapters import merged, save_adapter
from support.engines import COUPLED, REJECTION, TargetHarness, opened, tiny_model
from support.heads import load_in_turn, random_head, random_head_of, save_head, target_weights
from support.models import save_tiny

from outrider.engine.adapters.config import UnsupportedAdapter
from outrider.engine.adapters.loader import load_adapter
from outrider.engine.adapters.resident import AdapterRoom, ResidentAdapters
from outrider.engine.loader import LoadedModel
from outrider.engine.models.base import UnsupportedModel
from outrider.engine.token_tree import TokenTree
from outrider.gateway.peers.remote import TARGET_SERVICE, lessons_of, put_learned, reload_weights
from outrider.proposers.heads.head import Head
from outrider.proposers.heads.loading import head_digest
from outrider.rpc.channel import connect
from outrider.rpc.errors import OutriderError
from outrider.rpc.learning.lessons import SALTED, UNSALTED, Lessons, group_of
from outrider.rpc.messages import Adapter, Credit, LearningKey, LearningNews, Lesson, Open
from outrider.target_service.boot import TargetService, build, load
from outrider.target_service.heads.drafter import HeadDrafter
from outrider.target_service.heads.learning import HeadLearning
from outrider.target_service.heads.lines import HeadLine
from outrider.target_service.settings import TargetSettings

LEARNING = {"eagle": "layers.0.", "eagle3": "midlayer.", "mtp": "model.mtp_layers.0."}  # and what layers are named by
MODULES = ("q_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TARGET = "d" * 64
KEY = LearningKey(TARGET, "")
PROMPT = [(7 * index) % 90 + 3 for index in range(40)]


class Learning:
    """A random head, beside a target, with an adapter that may be put in use, and the head that both are together."""

    def __init__(self, method: str, folder: Path, models: tuple[Any, LoadedModel]) -> None:
        self.loaded, self._hf = models[1], models[0]
        self.head = random_head(method, folder / "head", *models)
        self._prefix, self.folder = LEARNING[method], folder / "adapter"
        state = load_file(folder / "head/model.safetensors")
        layer = {name.replace(self._prefix, "model.layers.0."): tensor for name, tensor in state.items()}
        save_adapter(self.folder, layer, MODULES, scale=0.3)
        whole = {n.replace("model.layers.0.", self._prefix): one for n, one in merged(layer, self.folder).items()}
        config = (folder / "head/config.json").read_text()
        save_head(folder / "merged", {}, whole)
        (folder / "merged/config.json").write_text(config)
        self.merged = self._load(folder / "merged")

    def _load(self, folder: Path) -> Head:
        model = self.loaded.model
        return load_in_turn(folder, target_weights(self._hf, self.loaded), model.dtype, model.device)

    def harness(self, *salts: str, **options: Any) -> TargetHarness:
        """An engine in which those of these salts learn."""
        room = AdapterRoom(2, 16)
        learning = HeadLearning(self.head, "h" * 64, TARGET, salts or (UNSALTED,), room, Lessons())
        return TargetHarness.of(self.loaded, head=self.head, learning=learning, **options)

    def put(self, harness: TargetHarness, key: LearningKey = KEY, left_out: tuple[str, ...] = ()) -> int:
        """The adapter in use."""
        learning = learning_of(harness)
        return learning.put_learned(key, learning.load_learned(self.folder), left_out)


def learning_of(harness: TargetHarness) -> HeadLearning:
    assert harness.engine.learning is not None
    return harness.engine.learning


@pytest.fixture(scope="module")
def models() -> tuple[Any, LoadedModel]:
    return tiny_model()


@pytest.fixture(params=LEARNING)
def made(request: pytest.FixtureRequest, models: tuple[Any, LoadedModel], tmp_path: Path) -> Learning:
    return Learning(request.param, tmp_path, models)


def asked(number: int, head: Any, seed: int = 5, prompt: list[int] = PROMPT, **options: Any) -> Open:
    fresh = options.pop("fresh_seed", False)
    said = {"max_tokens": 24, "ignore_eos": True, "seed": seed, "method": head.name} | options
    return replace(opened(number, prompt, **said), fresh_seed=fresh)


Windows = list[tuple[tuple[int, ...], tuple[int, ...]]]  # what was drafted of each, and its parents in a tree


def run(harness: TargetHarness, *requests: Open, k: int = 4) -> list[Windows]:
    """What was drafted for each, all open at once."""
    found: dict[int, Windows] = {request.sequence_id: [] for request in requests}
    drafter = drafter_of(harness)
    hold = drafter._hold

    def note(line: HeadLine, draft_us: int) -> None:
        hold(line, draft_us)
        if line.count:
            found[line.target.open.sequence_id].append((line.piece().ids, tuple(line.piece().parents)))

    drafter._hold = note  # type: ignore[method-assign]
    for request in requests:
        harness.send(request, Credit(request.sequence_id, 1 << 20, k))
    harness.run()
    drafter._hold = hold  # type: ignore[method-assign]
    return list(found.values())


def drafter_of(harness: TargetHarness) -> HeadDrafter:
    (drafter,) = (part for part in harness.engine.parts if isinstance(part, HeadDrafter))
    return drafter


SAMPLED = {"temperature": 1.0, "acceptance": COUPLED}
REJECTED: dict[str, Any] = {"temperature": 1.0, "acceptance": REJECTION, "fresh_seed": True}


@pytest.mark.parametrize("sampling", [{}, SAMPLED, REJECTED], ids=["greedy", "coupled", "rejection"])
@pytest.mark.parametrize("tree", [None, TokenTree.of([(0,), (1,), (0, 0), (0, 1)])], ids=["chains", "trees"])
def test_they_draft_as_the_head_would_that_they_were_merged_into(
    made: Learning, sampling: dict[str, Any], tree: TokenTree | None
) -> None:
    harness = made.harness(tree=tree)
    assert made.put(harness) == 0
    (found,) = run(harness, asked(1, made.head, **sampling))
    (expected,) = run(TargetHarness.of(made.loaded, head=made.merged, tree=tree), asked(1, made.head, **sampling))
    (alone,) = run(TargetHarness.of(made.loaded, head=made.head, tree=tree), asked(1, made.head, **sampling))
    assert found == expected != alone and len(found) > 4


def test_each_of_a_step_has_its_own(made: Learning) -> None:
    """With them, and without: another's salt, a caller who is left out, a seed that may have come before under
    rejection."""
    strange: dict[str, Any] = {"temperature": 1.0, "acceptance": REJECTION}
    requests: list[Open] = [
        asked(1, made.head, salt="a"),
        asked(2, made.head),
        asked(3, made.head, salt="b"),
        asked(4, made.head, salt="a", **strange),
        asked(5, made.head, salt="a", **REJECTED),
        replace(asked(6, made.head, salt="a"), caller="x"),
    ]
    harness = made.harness(UNSALTED, SALTED)
    made.put(harness, LearningKey(TARGET, group_of("a")), ("x",))
    found = run(harness, *requests)
    learned = run(TargetHarness.of(made.loaded, head=made.merged), *requests)
    alone = run(TargetHarness.of(made.loaded, head=made.head), *requests)
    for place, request in enumerate(requests):
        expected = learned if request.sequence_id in (1, 5) else alone
        assert found[place] == expected[place], request


def test_what_is_kept_of_a_text_is_the_same(made: Learning) -> None:
    """Keys and values of committed tokens."""
    caches = []
    for learns in (False, True):
        harness = made.harness()
        if learns:
            made.put(harness)
        harness.send(asked(1, made.head, max_tokens=40), Credit(1, len(PROMPT) + 20, 4))
        harness.run()
        drafter, (target,) = drafter_of(harness), harness.engine.scheduler.sequences.values()
        assert target.head_end > len(PROMPT) + 15
        table = torch.tensor(target.sequence.block_table)
        kept = [
            tensor[table].flatten(0, 1)[1 : len(PROMPT) + 15]
            for tensor in (*drafter._cache.keys, *drafter._cache.values)
        ]
        assert all(part.abs().sum() > 0 for part in kept)
        caches.append(kept)
    for alone, with_learned in zip(*caches, strict=True):
        assert torch.equal(alone, with_learned)


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "coupled"])
def test_open_sequences_go_on_with_others(made: Learning, sampling: dict[str, Any]) -> None:
    """Not a token differs, whenever that is; and drafts are the others' from then on."""
    request = asked(1, made.head, max_tokens=60, **sampling)
    plain = TargetHarness.of(made.loaded).decode_plain(1, request)
    harness = made.harness()
    harness.send(request, Credit(1, 1 << 20, 4))
    for turn in range(1000):
        if turn % 3 == 0:
            is_put = turn % 2 == 0
            count = made.put(harness) if is_put else learning_of(harness).put_learned(KEY, None)
            assert count == len(harness.engine.scheduler.sequences)
        if harness.engine.step(harness.now) is None:
            break
    assert harness.output(1) == plain


def test_what_ended_sequences_teach(made: Learning) -> None:
    harness = made.harness(UNSALTED)
    run(
        harness,
        replace(asked(1, made.head), caller="x"),
        asked(2, made.head, salt="a"),  # who may not
        asked(3, made.head, temperature=1.0, acceptance=REJECTION),  # whose seed may have come before
        asked(4, made.head, temperature=1.0, acceptance=REJECTION, top_k=4, fresh_seed=True),  # a cut law
    )
    ids = harness.output(1)
    (lesson,), lost = learning_of(harness).lessons.take()
    assert (lesson.key, list(lesson.prompt_ids), list(lesson.output_ids)) == (KEY, PROMPT, ids)
    assert (lesson.num_given, lesson.seed, lesson.caller, lost) == (0, 5, "x", 0)
    assert harness.engine.learning is not None and harness.engine.learning.stats()["lesson_bytes"] == 0


def test_sequences_with_an_adapter_of_the_target_teach_nothing_and_are_drafted_for_by_the_head_alone(
    made: Learning, models: tuple[Any, LoadedModel], tmp_path: Path
) -> None:
    model, state = made.loaded.model, models[0].state_dict()
    resident = ResidentAdapters(model, AdapterRoom(1, 16))
    loaded = load_adapter(save_adapter(tmp_path / "own", state), model, made.loaded.digest)
    harness = made.harness(adapters=resident)
    harness.engine.adapters.table.add(Adapter("a", loaded.digest, loaded.rank), resident.prepare(loaded))
    made.put(harness)
    (found,) = run(harness, asked(1, made.head, adapter="a"))
    learning_of(harness).put_learned(KEY, None)
    (alone,) = run(harness, asked(2, made.head, adapter="a"))
    assert found == alone and len(found) > 4 and learning_of(harness).lessons.take() == ([], 0)


def test_weights_that_would_change_what_is_kept_are_refused(made: Learning, tmp_path: Path) -> None:
    linears = {f"model.layers.0.self_attn.{name}.weight": torch.zeros(64, 64) for name in ("k_proj", "q_proj")}
    folder = save_adapter(tmp_path / "keys", linears, ("k_proj", "q_proj"))
    with pytest.raises(UnsupportedAdapter, match=r"k_proj.lora_A.weight is there, which no targeted module"):
        learning_of(made.harness()).load_learned(folder)


@pytest.mark.parametrize("layout", ["medusa", "mlp_speculator", "p-eagle", "dflash"])
def test_other_heads_do_not_learn(layout: str, models: tuple[Any, LoadedModel], tmp_path: Path) -> None:
    head = random_head(layout, tmp_path, *models)
    with pytest.raises(UnsupportedModel, match=f"a {head.name} head does not learn here; allowed: one of a single"):
        HeadLearning(head, "h", TARGET, (UNSALTED,), AdapterRoom(1, 16), Lessons())


def test_what_the_settings_refuse(tmp_path: Path) -> None:
    common: dict[str, Any] = {"model": tmp_path, "learn_from": [UNSALTED]}
    with pytest.raises(ValidationError, match="is for a head, whose weights learn; give --head DIR, too"):
        TargetSettings.model_validate(common)
    with pytest.raises(ValidationError, match="others reach listen"):
        TargetSettings.model_validate(common | {"head": tmp_path, "listen": "0.0.0.0:1", "insecure": True})


class Running:
    """A target service with an eagle3 head that learns."""

    def __init__(self, service: TargetService, channel: Any, head: Path) -> None:
        self.service, self.channel, self.head = service, channel, head


@pytest_asyncio.fixture
async def running(tmp_path: Path) -> AsyncIterator[Running]:
    model = save_tiny(tmp_path / "target")
    head = random_head_of(model, "eagle3", tmp_path / "head")
    settings = TargetSettings.model_validate({
        "model": model, "head": head, "listen": "127.0.0.1:0", "num_blocks": 64, "threads": 1, "allow_reload": True,
        "learn_from": [UNSALTED],
    })  # fmt: skip
    service = build(settings, load(settings))
    await service.server.start()
    channel = connect(service.server.address)
    try:
        yield Running(service, channel, head)
    finally:
        await channel.close()
        await service.stop()


async def test_the_service_hands_out_lessons_and_takes_what_was_learned(running: Running, tmp_path: Path) -> None:
    state = {
        name.replace("midlayer.", "model.layers.0."): tensor
        for name, tensor in load_file(running.head / "model.safetensors").items()
    }
    folder = save_adapter(tmp_path / "adapter", state, MODULES)
    info = await TARGET_SERVICE.get_info(running.channel)
    stream = lessons_of(running.channel)
    begin = LearningNews(model_digest=head_digest(running.head), max_learned=8, max_rank=32)
    assert await anext(stream) == begin
    ids = array("I", (1, 2)), array("I", (3, 4))
    given = Lesson(info.model.digest, "", *ids, opened(1, [1]).sampling, COUPLED, seed=3)
    learning = running.service.engine.learning
    assert learning is not None
    learning.lessons.add(given)
    assert await anext(stream) == LearningNews((given,))
    done = await put_learned(running.channel, info.model.digest, "", str(folder), ["x"])
    assert (done.before, done.num_sequences) == ("", 0) and done.after
    (row,) = (await TARGET_SERVICE.get_info(running.channel)).learned
    assert row.digest == done.after and row.left_out == ("x",)
    with pytest.raises(OutriderError, match=r"path: .*there is no such folder; allowed: the folder of an adapter"):
        await put_learned(running.channel, info.model.digest, "", str(tmp_path / "nowhere"))
    await reload_weights(running.channel)
    with pytest.raises(StopAsyncIteration):  # who learns asks again, and hears that nothing is in use
        async with asyncio.timeout(30):
            await anext(stream)
    assert not (await TARGET_SERVICE.get_info(running.channel)).learned
    assert await anext(lessons_of(running.channel)) == begin
    again = await put_learned(running.channel, info.model.digest, "", str(folder))
    assert (again.before, again.after) == ("", done.after)


async def test_it_has_to_be_allowed(tmp_path: Path) -> None:
    settings = TargetSettings.model_validate({
        "model": save_tiny(tmp_path / "target"), "listen": "127.0.0.1:0", "num_blocks": 64, "threads": 1,
    })  # fmt: skip
    service = build(settings, load(settings))
    await service.server.start()
    channel = connect(service.server.address)
    try:
        for asking in (anext(lessons_of(channel)), put_learned(channel, TARGET, "", "")):
            with pytest.raises(OutriderError, match="the target was not started with --learn-from"):
                await asking
    finally:
        await channel.close()
        await service.stop()
