"""Drafts that are broken, or hostile: whatever one sends, says or fails to do, greedy and coupled output is plain
decoding's, to the token; what is drawn by rejection is whole, and under `--untrusted-draft` of the target's law even
where a draft lies about what it drew from. The served draft is real where its weights are what is wrong, and scripted
elsewhere."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e.test_methods import PROMPTS, TEMPERATURES, answer, tokens_of
from safetensors.torch import load_file, save_file
from support.embedded import embedded_target
from support.fakes import serving
from support.scripted_drafts import Hostile, HostileServicer, Send, packed

from outrider.draft_service.boot import start as start_draft
from outrider.draft_service.settings import DraftSettings
from outrider.gateway.engine import EngineConfig, GenerationEngine
from outrider.gateway.peers.remote import RemoteDrafts, RemoteTargets
from outrider.gateway.text.tokenizer import Tokenizer
from outrider.pairs import pair_path
from outrider.rpc.messages import MAX_WEIGHTS, DraftInfo, DraftMethod, Failure, TokenWeights
from outrider.rpc.words.request import GenerationRequest, SpeculationOptions
from outrider.rpc.words.sampling_params import AcceptanceRule, SamplingParams

NUM_TOKENS = 48
VOCAB = 4096
K = 4
IMPATIENT = EngineConfig(num_draft_tokens=K, draft_patience_ms=40)  # most of these send nothing of use


@dataclass(frozen=True)
class Target:
    """The embedded one, and what it says without a draft."""

    pool: RemoteTargets
    tokenizer: Tokenizer
    said: dict[tuple[str | None, str], list[int]] = field(default_factory=dict)  # plainly, by prompt and salt

    def engine(self, drafts: RemoteDrafts | None = None, config: EngineConfig = IMPATIENT) -> GenerationEngine:
        return GenerationEngine(self.tokenizer, self.pool, drafts, config)

    async def plain(self, asked: GenerationRequest) -> list[int]:
        alone = replace(asked, speculation=replace(asked.speculation, enabled=False, num_draft_tokens=None))
        key = (alone.text, alone.salt)
        if key not in self.said:
            self.said[key] = tokens_of(await answer(self.engine(), alone))
        return self.said[key]


@pytest.fixture(scope="module")
async def target() -> AsyncIterator[Target]:
    async with embedded_target() as (pool, tokenizer):
        yield Target(pool, tokenizer)


def asked(place: int, temperature: float, rule: AcceptanceRule = AcceptanceRule.COUPLED) -> GenerationRequest:
    sampling = SamplingParams(temperature=temperature, max_tokens=NUM_TOKENS, ignore_eos=True, seed=place)
    options = SpeculationOptions(enabled=True, num_draft_tokens=K, acceptance=rule)
    return GenerationRequest(text=PROMPTS[place], sampling=sampling, speculation=options, salt=f"{rule} {temperature}")


def constant(one: Hostile, send: Send) -> None:
    send(one.piece((5,) * K))


def foreign_ids(one: Hostile, send: Send) -> None:
    """No token of the target has such an id."""
    send(one.piece((VOCAB, VOCAB + 1, 2**31, 2**32 - 1)))
    send(one.piece((7, 2**32 - 1, 8)))


def lies(one: Hostile, send: Send) -> None:
    """By its weights each token was all but impossible, so that the target would have to take it."""
    weights = TokenWeights(packed(9, 5), packed((1 << 24) - 2, 1))
    send(one.piece((5,) * K, weights=(weights,) * K))


def broken_weights(one: Hostile, send: Send) -> None:
    """Of ids and weights that differ in number, are cut, come twice, are zero, or add up to too much."""
    broken = [
        TokenWeights(packed(5, 6), packed(1)),
        TokenWeights(b"abc", b"abc"),
        TokenWeights(packed(5, 5), packed(1, 1)),
        TokenWeights(packed(5, 6), packed(0, 0)),
        TokenWeights(packed(5, 6), packed(2**32 - 1, 2**32 - 1)),
        TokenWeights(packed(VOCAB, 2**32 - 1), packed(1, 1)),
        TokenWeights(packed(6), packed(1)),
        TokenWeights(packed(*range(VOCAB), VOCAB), packed(*range(VOCAB), VOCAB)),
    ]
    send(one.piece((5,), weights=(broken[one.num_heard % len(broken)],)))


def out_of_order(one: Hostile, send: Send) -> None:
    """A chain's pieces in reverse, twice, with gaps, from before the prompt, and by numbers that fall."""
    end = len(one.tokens)
    pieces = [one.piece((3 + place,), end + place, chain=50 + one.num_heard) for place in range(3)]
    for piece in (*pieces[::-1], *pieces, pieces[1]):
        send(piece)
    send(one.piece((5, 6), end + 200))
    send(one.piece((5, 6), 0))
    send(one.piece((5, 6), max(0, end - 1), chain=max(0, 1000 - one.num_heard)))
    send(one.piece((5, 6), parent=0))
    send(one.piece((5, 6), end + 1, parent=12345 + one.chain, chain=12346 + one.chain))


def broken_trees(one: Hostile, send: Send) -> None:
    """Parents that follow their children, and trees where none may stand. A piece that is no piece ends the draft's
    part, so that comes late."""
    if one.num_heard > 3:
        send(one.piece((5, 6), parents=(2, 1)))
    else:
        send(one.piece((5, 6, 7), parents=(0, 0, 0)))
        send(one.piece((5, 6, 7), 1, parents=(0, 1, 2)))
        send(one.piece((8,), chain=one.chain))


def highest_numbers(one: Hostile, send: Send) -> None:
    """After chains of these no further one has a number; then it says that it can take no more for the moment."""
    if one.num_heard % 3 == 0:
        send(Failure(0, 14, "no more", "GONE"))
    send(one.piece((5,), chain=2**32 - 1))
    send(one.piece((5,), 2**31 - 1, chain=2**32 - 2, draft_us=2**32 - 1))


def a_flood(one: Hostile, send: Send) -> None:
    """Far more than it has credit for."""
    for _ in range(400):
        send(one.piece(tuple(range(3, 30))))


def giants(one: Hostile, send: Send) -> None:
    """Pieces that no frame to the target can hold, though one from a draft can: its own side of the stream lets them
    pass."""
    packer = one.servicer.streams[-1]._packer
    packer._direction = replace(packer._direction, max_lone_bytes=1 << 30)
    weights = TokenWeights(bytes(4 * MAX_WEIGHTS), bytes(4 * MAX_WEIGHTS))
    send(one.piece((5,) * 64, weights=(weights,) * 64))


def others_sequences(one: Hostile, send: Send) -> None:
    """What it sends names sequences that it was not given."""
    stream = one.servicer.streams[-1]
    send(replace(one.piece((5,) * K), sequence_id=0))
    for number in (0, 2**32 - 1):
        if not stream.closed:
            with pytest.raises(ValueError):  # its own side of the stream refuses them
                stream.send(replace(one.piece((5,)), sequence_id=number))


def out_of_memory(one: Hostile, send: Send) -> None:
    send(one.piece((5,) * K))
    send(Failure(0, 8, "no blocks are left", "CACHE_FULL", retry_after_ms=50))


def fails(one: Hostile, send: Send) -> None:
    send(Failure(0, 13, "unexpected RuntimeError"))


def ends_the_stream(one: Hostile, send: Send) -> None:
    send(one.piece((5,) * K))
    asyncio.get_running_loop().call_soon(one.servicer.streams[-1].drain)


def silent(one: Hostile, send: Send) -> None:
    pass


def slow(one: Hostile, send: Send) -> None:
    """Ten times later than a round would take."""
    piece = one.piece((5,) * K)
    asyncio.get_running_loop().call_later(0.1, send, piece)


SCRIPTS = [
    constant, foreign_ids, lies, broken_weights, out_of_order, broken_trees, highest_numbers, a_flood, giants,
    others_sequences, out_of_memory, fails, ends_the_stream, silent, slow,
]  # fmt: skip
EVERY_SCRIPT = pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)


@asynccontextmanager
async def drafting(script: Callable[[Hostile, Send], None], target: Target) -> AsyncIterator[RemoteDrafts]:
    """By a draft of the target's vocabulary that follows the script."""
    model = replace(target.pool.info.model, name="hostile", digest="hostile")
    servicer = HostileServicer(script, DraftInfo(model, (DraftMethod("draft_model"),)))
    async with serving(servicer) as server, RemoteDrafts([server.address]) as drafts:
        await drafts.wait_usable()
        yield drafts


@pytest.fixture(autouse=True)
def soon_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft that says that it may be is asked for the same sequence again, while that runs."""
    monkeypatch.setattr("outrider.gateway.speculation.loop.DRAFT_RETRY_S", 0.01)


def in_turn(modes: tuple[str, ...], case: int, prove: bool) -> tuple[str, ...]:
    """Each mode of a script by one temperature or rule, and by each of these in every other script."""
    return modes if prove else (modes[case % len(modes)],)


@TEMPERATURES
@EVERY_SCRIPT
async def test_a_bad_draft_changes_no_token(script: Any, temperature: float, target: Target, prove: bool) -> None:
    requests = [asked(place, temperature) for place in range(len(PROMPTS))]
    plain = [await target.plain(one) for one in requests]
    async with drafting(script, target) as drafts:
        engine = target.engine(drafts)
        for mode in in_turn(("sequential", "branches"), SCRIPTS.index(script) + int(temperature), prove):
            found = await asyncio.gather(
                *(answer(engine, replace(one, speculation=replace(one.speculation, mode=mode))) for one in requests)
            )
            assert [tokens_of(deltas) for deltas in found] == plain


@EVERY_SCRIPT
@pytest.mark.parametrize("rule", [AcceptanceRule.REJECTION, AcceptanceRule.BLOCK])
async def test_a_bad_draft_ends_no_request_that_is_drawn_by_rejection(
    script: Any, rule: AcceptanceRule, target: Target, prove: bool
) -> None:
    async with drafting(script, target) as drafts:
        for mode in in_turn(("sequential", "chains"), SCRIPTS.index(script) + int(rule is AcceptanceRule.BLOCK), prove):
            one = asked(0, 1.0, rule)
            one = replace(one, speculation=replace(one.speculation, mode=mode))
            assert len(tokens_of(await answer(target.engine(drafts), one))) == NUM_TOKENS


def harmed(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """The embedded draft with other weights."""
    shutil.copytree(pair_path().draft, folder, ignore=shutil.ignore_patterns(".outrider-digest"))
    for file in folder.glob("*.safetensors"):
        weights = load_file(file)
        change(weights)
        save_file(weights, file, metadata={"format": "pt"})
    return folder


def not_numbers(weights: dict[str, torch.Tensor]) -> None:
    for tensor in weights.values():
        tensor.fill_(float("nan"))


def one_not_a_number(weights: dict[str, torch.Tensor]) -> None:
    """In the last matrix, so that a single logit of every row is none."""
    name = "lm_head.weight" if "lm_head.weight" in weights else "model.embed_tokens.weight"
    weights[name][7, 0] = float("nan")


def noughts(weights: dict[str, torch.Tensor]) -> None:
    for tensor in weights.values():
        tensor.zero_()


HARM = pytest.mark.parametrize("harm", [not_numbers, one_not_a_number, noughts], ids=lambda harm: harm.__name__)


@HARM
async def test_a_draft_of_broken_weights_changes_no_token(
    harm: Any, target: Target, tmp_path: Path, one_thread: None
) -> None:
    model = harmed(tmp_path / "draft", harm)
    service = await start_draft(DraftSettings(model=model, listen="127.0.0.1:0", threads=1, cache_mb=16))
    await service.server.start()
    try:
        async with RemoteDrafts([service.server.address]) as drafts:
            await drafts.wait_usable()
            for temperature in (0.0, 1.0):
                one = asked(0, temperature)
                plain = await target.plain(one)
                assert tokens_of(await answer(target.engine(drafts), one)) == plain
            for rule in (AcceptanceRule.REJECTION, AcceptanceRule.BLOCK):
                assert len(tokens_of(await answer(target.engine(drafts), asked(1, 1.0, rule)))) == NUM_TOKENS
    finally:
        await service.stop()
