"""The embedded pair with its target in 8 and in 4 bits, as `outrider model convert --quantize` writes it, and its
expansion written and rounded so: whatever drafts, every token is plain decoding's, greedy and coupled.

With --prove each width decodes 1,000 prompts to 256 tokens, of which every way to draft has as many as every other. The
expansion, a token of which takes thirty times as long, has 40. Plain decoding is one sequence at a time, in a
process of its own beside the services."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from lossless.identity import AHEAD, MAX_UNREAD, build_draft
from lossless.plain import Prompt, decode_alone
from support.proofs import mostly_long

from outrider.cli.quantize import quantize
from outrider.engine.loader import LoadedModel, load_model
from outrider.engine.models.decoder_cpu import NativeDecoder
from outrider.engine.quantized.rounding import Rounding
from outrider.gateway.peers.remote import RemoteDrafts, RemoteTargets
from outrider.gateway.speculation.loop import speculate
from outrider.gateway.text.tokenizer import Tokenizer
from outrider.kernels.cpu.decoder import Kind
from outrider.pairs import pair_path
from outrider.pairs.expansion import write_expanded
from outrider.planner.policy import Policy, Round
from outrider.rpc.words.sampling_params import SamplingParams
from outrider.target_service.boot import build, load
from outrider.target_service.settings import TargetSettings

pytestmark = pytest.mark.timeout(3600)

HELD_OUT = Path(__file__).parents[1] / "pairs" / "data" / "held_out_sched.txt"
SMALL_EXPANSION: dict[str, Any] = {  # that of every run; the long one is the services' own
    "hidden_size": 384, "intermediate_size": 1024, "num_layers": 9, "num_heads": 8, "num_kv_heads": 4,
}  # fmt: skip
SELF = "self:int4"
DRAFTS = ("ngram", "suffix", "draft_model", SELF)
WAYS = (*DRAFTS, *pair_path().heads)
PATIENCE_MS = 20_000  # a draft may be as large as its target, and the machine may do other things
LONG_EACH = {False: 1000 // len(WAYS), True: 10}  # prompts of each way, of the pair and of its expansion
K, NUM_BLOCKS, AT_ONCE = 4, 1200, 16
GROUP = 32
ROUNDINGS: tuple[Rounding, ...] = ("int8", "int4")

Case = tuple[Rounding, bool, str]  # of what, whether of its expansion, and how it drafts


@dataclass(frozen=True, slots=True)
class Target:
    """A checkpoint in few bits."""

    folder: Path
    rounding: Rounding
    is_expanded: bool

    @property
    def name(self) -> str:
        """For what is printed."""
        return f"{'expansion' if self.is_expanded else 'pair'} in {self.rounding}"


@dataclass(slots=True)
class Outcome:
    """What services said."""

    outputs: dict[int, list[int]]
    counts: Counter[str]  # drafted and accepted tokens


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, prove: bool) -> Callable[[Rounding, bool], Target]:
    """Of a width, the pair's target or its expansion; written once."""

    @cache
    def write(rounding: Rounding, is_expanded: bool) -> Target:
        folder, source = tmp_path_factory.mktemp("target"), pair_path().target
        if is_expanded:
            write_expanded(source, folder / "expanded", **({} if prove else SMALL_EXPANSION))
            source = folder / "expanded"
        assert list(quantize(source, folder / rounding, rounding, GROUP))
        return Target(folder / rounding, rounding, is_expanded)

    return write


@pytest.fixture(scope="module")
def plain() -> Iterator[ProcessPoolExecutor]:
    """Started afresh: a forked one would share this one's threads."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, torch.set_num_threads, (1,)) as executor:
        yield executor


@cache
def loaded_once(folder: Path) -> LoadedModel:
    return load_model(folder)


def decode_plainly(folder: Path, prompt: Prompt) -> list[int]:
    return decode_alone(prompt, loaded_once(folder))


def make_prompts(first: int, count: int, num_tokens: int) -> dict[int, Prompt]:
    """By their numbers: beginnings of a text that no training saw, each at another place, of which every other is
    sampled under coupling."""
    text = Tokenizer.load(pair_path().target).encode(HELD_OUT.read_text(encoding="utf-8"))
    prompts = {}
    for number in range(first, first + count):
        start, length = number % (len(text) - 64), 24 + number % 40
        sampling = SamplingParams(temperature=number % 2 * 0.8, max_tokens=num_tokens, ignore_eos=True)
        prompts[number] = Prompt(tuple(text[start : start + length]), sampling, seed=number)
    return prompts


def draft_for(target: Target, way: str) -> LoadedModel:
    return load_model(target.folder, quantization="int4") if way == SELF else load_model(pair_path().draft)


@asynccontextmanager
async def connected(target: Target, way: str) -> AsyncIterator[tuple[RemoteDrafts | None, RemoteTargets]]:
    """Fresh services, and the gateway's ends; a head drafts beside the target, and needs no draft service."""
    settings = TargetSettings(
        model=target.folder, head=pair_path().heads.get(way), listen="127.0.0.1:0", threads=1, num_blocks=NUM_BLOCKS
    )
    async with AsyncExitStack() as stack:
        loaded = load(settings)
        assert isinstance(loaded.model, NativeDecoder) and loaded.model.kernel._layers[0].down.kind == Kind.PACKED
        service = build(settings, loaded)
        await service.server.start()
        stack.push_async_callback(service.stop)
        drafts = None
        if way in DRAFTS:
            draft = build_draft(draft_for(target, way), NUM_BLOCKS, {})
            await draft.server.start()
            stack.push_async_callback(draft.kill)
            drafts = await stack.enter_async_context(RemoteDrafts([draft.server.address]))
            await drafts.wait_usable()
        targets = await stack.enter_async_context(RemoteTargets([service.server.address]))
        await targets.wait_usable()
        yield drafts, targets


async def decode(target: Target, way: str, prompts: dict[int, Prompt]) -> Outcome:
    """Some at once, drafting ahead by as much as the prompt's number says."""
    outcome, waiting = Outcome({}, Counter()), iter(prompts.items())
    levels = list(AHEAD.values()) if way in DRAFTS else [AHEAD["sequential"]]
    async with connected(target, way) as (drafts, targets):

        async def decode_some() -> None:
            for number, prompt in waiting:
                request = prompt.open("draft_model" if way == SELF else way)
                windows_ahead, max_branches = levels[number // 2 % len(levels)]
                policy = Policy(
                    K, windows_ahead=windows_ahead, max_branches=max_branches, max_unread=MAX_UNREAD,
                    patience_ms=PATIENCE_MS,
                )  # fmt: skip
                ids: list[int] = []
                async for item in speculate(drafts, targets, request, policy, at_target=drafts is None):
                    if isinstance(item, Round):
                        ids += item.commit.ids
                        outcome.counts["drafted"] += item.commit.num_drafted
                        outcome.counts["accepted"] += item.commit.num_accepted
                outcome.outputs[number] = ids

        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(decode_some())
    return outcome


# A head fits the target that it was trained for, and no expansion of it that was written down. Short: each way once.
EVERY: list[Case] = [
    (rounding, is_expanded, way)
    for is_expanded in (False, True)
    for rounding in ROUNDINGS
    for way in (DRAFTS if is_expanded else WAYS)
]
SHORT = [case for case in EVERY if ROUNDINGS.index(case[0]) == (WAYS.index(case[2]) + case[1]) % 2]


@pytest.mark.parametrize("case", mostly_long(EVERY, SHORT), ids=lambda case: "-".join(map(str, case)))
async def test_every_token_is_plain_decodings(
    case: Case,
    written: Callable[[Rounding, bool], Target],
    plain: ProcessPoolExecutor,
    prove: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rounding, is_expanded, way = case
    target = written(rounding, is_expanded)
    each, num_tokens = (LONG_EACH[is_expanded], 256) if prove else (2, 32)
    prompts = make_prompts(WAYS.index(way) * each, each, num_tokens)
    expected: dict[int, Future[list[int]]] = {
        number: plain.submit(decode_plainly, target.folder, prompt) for number, prompt in prompts.items()
    }
    outcome = await decode(target, way, prompts)
    gc.collect()  # what served it is in cycles, and holds gigabytes until they are found
    outputs = {number: future.result() for number, future in expected.items()}
    differ = [number for number, ids in outputs.items() if outcome.outputs[number] != ids]
    with capsys.disabled():
        print(
            f"\n{target.name}, {way}: {len(outputs)} prompts, {sum(map(len, outputs.values()))} tokens, "
            f"{len(differ)} differ; {outcome.counts['accepted']} of {outcome.counts['drafted']} drafted were accepted"
        )
    assert {len(ids) for ids in outputs.values()} == {num_tokens} and not differ
    assert outcome.counts["drafted"] > 0 and (not prove or 0 < outcome.counts["accepted"] < outcome.counts["drafted"])
