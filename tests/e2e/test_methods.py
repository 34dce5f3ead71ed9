"""What holds for every method of the registry, each in a draft service over gRPC before the embedded target, and for
several in turn: its tokens and prefix hits are plain decoding's, greedy and coupled, also when it dies in mid-round;
and the proof of the law draws by it. A method joins by its row in the registry."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
from support.embedded import embedded_target
from support.proofs import on_a_diagonal

from outrider.cli.serve import ServeSettings
from outrider.draft_service.boot import DraftService
from outrider.draft_service.boot import start as start_draft
from outrider.draft_service.settings import DraftSettings
from outrider.gateway.engine import EngineConfig, GenerationEngine
from outrider.gateway.peers.remote import RemoteDrafts, RemoteTargets
from outrider.gateway.text.tokenizer import Tokenizer
from outrider.proposers.registry import METHODS
from outrider.rpc.settings import parse_settings
from outrider.rpc.words.answer import GenerationDelta
from outrider.rpc.words.request import GenerationRequest, SpeculationOptions
from outrider.rpc.words.sampling_params import AcceptanceRule, SamplingParams

PROMPTS = (
    "def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n    return a - b\n\n\ndef multiply(a, b):\n    return",
    "class Stack:\n    def push(self, item):\n        self.items.append(item)\n\n    def pop(self):\n        return",
)
NUM_TOKENS = 40
K = 4
WAITING = EngineConfig(num_draft_tokens=K, draft_patience_ms=60_000)  # however busy the machine is
EAGER: dict[str, Any] = {
    "prompt_lookup_min": 1,
    "suffix_decoding_max_spec_factor": 4.0,
}  # drafts from short matches, too
TEMPERATURES = pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "coupled"])
IN_TURN = "prediction,suffix,draft_model"
EACH_ONCE = pytest.mark.parametrize(("method", "temperature"), on_a_diagonal([*METHODS, IN_TURN], (0.0, 1.0)))


@dataclass(frozen=True)
class Target:
    """The embedded one, and what it says without a draft."""

    pool: RemoteTargets
    tokenizer: Tokenizer

    @property
    def engine(self) -> GenerationEngine:
        return GenerationEngine(self.tokenizer, self.pool, config=WAITING)

    def request(self, place: int, temperature: float, salt: str, num_tokens: int = NUM_TOKENS) -> GenerationRequest:
        sampling = SamplingParams(temperature=temperature, max_tokens=num_tokens, ignore_eos=True, seed=place)
        coupled = SpeculationOptions(enabled=False, acceptance=AcceptanceRule.COUPLED)
        return GenerationRequest(text=PROMPTS[place], sampling=sampling, speculation=coupled, salt=salt)


@dataclass
class Draft:
    """A service of one method, and the gateway's engine before it."""

    service: DraftService
    engine: GenerationEngine
    alive: bool = True

    async def kill(self) -> None:
        """Without grace; once."""
        if self.alive:
            self.alive = False
            await self.service.stop()


@pytest.fixture(scope="module")
async def target() -> AsyncIterator[Target]:
    async with embedded_target() as (pool, tokenizer):
        yield Target(pool, tokenizer)


@asynccontextmanager
async def drafting(method: str, target: Target) -> AsyncIterator[Draft]:
    """By the service that `outrider serve --draft.method METHOD` would start."""
    served = ServeSettings.model_validate({"draft": {"method": method, "threads": 1, "cache_mb": 16, **EAGER}})
    service = await start_draft(parse_settings(DraftSettings, served.draft_arguments()[1:], "draft", ""))
    await service.server.start()
    async with RemoteDrafts([service.server.address]) as pool:
        await pool.wait_usable()
        draft = Draft(service, GenerationEngine(target.tokenizer, target.pool, pool, WAITING))
        try:
            yield draft
        finally:
            await draft.kill()


async def answer(engine: GenerationEngine, request: GenerationRequest) -> list[GenerationDelta]:
    return [delta async for delta in engine.generate(request)]


def tokens_of(deltas: Sequence[GenerationDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def cached(deltas: Sequence[GenerationDelta]) -> int:
    usage = deltas[-1].usage
    assert usage is not None
    return usage.cached_tokens


def drafted_by(method: str, request: GenerationRequest, mode: str, plain: Sequence[int]) -> GenerationRequest:
    """The same request with drafts. A guess at its answer has a token in seven wrong, and lacks one in eleven; where
    others draft as well, it ends in the middle."""
    guess = tuple((token + (place % 7 == 3)) % 4096 for place, token in enumerate(plain) if place % 11 != 5)
    return replace(
        request,
        speculation=replace(request.speculation, enabled=True, num_draft_tokens=K, method=method, mode=mode),
        prediction=guess[: len(guess) // 2 if method == IN_TURN else None] if "prediction" in method else None,
    )


@EACH_ONCE
async def test_tokens_and_prefix_hits_are_plain_decodings(method: str, temperature: float, target: Target) -> None:
    drafted = accepted = 0
    by_methods = set[str]()
    async with drafting(method, target) as draft:
        for place in range(len(PROMPTS)):
            alone = target.request(place, temperature, f"{method} {temperature}")
            cold, warm = [await answer(target.engine, alone) for _ in range(2)]
            plain = tokens_of(cold)
            assert len(plain) == NUM_TOKENS and tokens_of(warm) == plain and 0 == cached(cold) < cached(warm)
            for mode in ("sequential", "branches"):
                request = drafted_by(method, replace(alone, salt=f"{alone.salt} {mode}"), mode, plain)
                first, again = [await answer(draft.engine, request) for _ in range(2)]
                assert tokens_of(first) == tokens_of(again) == plain
                assert (cached(first), cached(again)) == (cached(cold), cached(warm))
                for tally in (first[-1].speculation, again[-1].speculation):
                    assert tally is not None and tally.method == method
                    assert method == IN_TURN or tally.by_method.keys() <= {method}
                    shares = tally.by_method.values()
                    assert sum(share.num_draft_tokens for share in shares) == tally.num_draft_tokens
                    assert sum(share.num_accepted_tokens for share in shares) == tally.num_accepted_tokens
                    by_methods |= {name for name, share in tally.by_method.items() if share.num_accepted_tokens}
                    drafted, accepted = drafted + tally.num_draft_tokens, accepted + tally.num_accepted_tokens
    assert 0 < accepted < drafted and by_methods == set(method.split(","))


@EACH_ONCE
async def test_one_that_dies_in_mid_round_changes_no_token(method: str, temperature: float, target: Target) -> None:
    """The commit is read while the draft has credit for the next window."""
    plain_request = target.request(0, temperature, f"{method} {temperature} dies", 2 * NUM_TOKENS)
    plain = tokens_of(await answer(target.engine, plain_request))
    modes = list[str]()
    tokens = list[int]()
    async with drafting(method, target) as draft:
        request = drafted_by(method, plain_request, "sequential", plain)
        async with aclosing(draft.engine.generate(request)) as deltas:
            async for delta in deltas:
                tokens += delta.token_ids
                if delta.round is not None:
                    modes.append(delta.round.mode if delta.round.commit.num_drafted or not draft.alive else "waiting")
                if len(tokens) > NUM_TOKENS // 2 and "sequential" in modes:
                    await draft.kill()
    assert tokens == plain and "sequential" in modes and modes[-1] == "off"
