"""What holds for every head that comes with the embedded pair, beside its target over gRPC: tokens and prefix hits are
plain decoding's, greedy and coupled, also when the target dies in mid-round and another goes on, with a head or without
one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from e2e.test_methods import NUM_TOKENS, PROMPTS, WAITING, K, answer, cached, tokens_of
from support.heads import random_head_of
from support.proofs import on_a_diagonal

from outrider.gateway.engine import GenerationEngine
from outrider.gateway.peers.remote import RemoteTargets
from outrider.gateway.text.tokenizer import Tokenizer
from outrider.pairs import pair_path
from outrider.proposers.registry import HEADS
from outrider.rpc.words.request import GenerationRequest, SpeculationOptions
from outrider.rpc.words.sampling_params import AcceptanceRule, SamplingParams
from outrider.target_service.boot import TargetService, build, load
from outrider.target_service.settings import TargetSettings

HEADS_OF_PAIR = pair_path().heads
BLOCKS = ("dflash", "dspark")  # of random weights: none comes with the pair


@dataclass
class Targets:
    """Services of the embedded target, and the gateway's engine before them."""

    services: Sequence[TargetService]
    engine: GenerationEngine

    def holding(self) -> TargetService:
        """The one that has the sequence."""
        return next(service for service in self.services if service.engine.scheduler.sequences)


@asynccontextmanager
async def serving(*heads: Path | None) -> AsyncIterator[Targets]:
    """One with each head."""
    async with AsyncExitStack() as stack:
        services = []
        for head in heads:
            settings = TargetSettings(
                model=pair_path().target, head=head, head_trial="off", listen="127.0.0.1:0", threads=1, cache_mb=48,
                batch_invariant=True,
            )  # fmt: skip
            service = build(settings, load(settings))
            await service.server.start()
            stack.push_async_callback(service.stop)
            services.append(service)
        pool = await stack.enter_async_context(RemoteTargets([service.server.address for service in services]))
        await pool.wait_admitted()
        yield Targets(services, GenerationEngine(Tokenizer.load(pair_path().target), pool, config=WAITING))


def request(place: int, temperature: float, method: str = "", num_tokens: int = NUM_TOKENS) -> GenerationRequest:
    """Without a method it is decoded plainly."""
    options = SpeculationOptions(
        enabled=bool(method), method=method, num_draft_tokens=K, acceptance=AcceptanceRule.COUPLED
    )
    sampling = SamplingParams(temperature=temperature, max_tokens=num_tokens, ignore_eos=True, seed=place)
    return GenerationRequest(text=PROMPTS[place], sampling=sampling, speculation=options, salt=f"{method}{temperature}")


@pytest.mark.parametrize(("method", "temperature"), on_a_diagonal(list(HEADS_OF_PAIR), (0.0, 1.0)))
async def test_tokens_and_prefix_hits_are_plain_decodings(method: str, temperature: float) -> None:
    drafted = accepted = 0
    async with serving(HEADS_OF_PAIR[method]) as targets:
        for place in range(len(PROMPTS)):
            cold, warm = [await answer(targets.engine, request(place, temperature)) for _ in range(2)]
            plain = tokens_of(cold)
            first, again = [await answer(targets.engine, request(place, temperature, method)) for _ in range(2)]
            assert tokens_of(first) == tokens_of(again) == tokens_of(warm) == plain and len(plain) == NUM_TOKENS
            assert (cached(first), cached(again)) == (cached(cold), cached(warm)) and cached(warm) > 0
            for tally in (first[-1].speculation, again[-1].speculation):
                assert tally is not None and tally.by_method.keys() == {method}
                drafted, accepted = drafted + tally.num_draft_tokens, accepted + tally.num_accepted_tokens
    assert 0 < accepted < drafted


@pytest.mark.parametrize(
    ("method", "temperature", "successor_has_one"),
    on_a_diagonal([*HEADS_OF_PAIR, *BLOCKS], (0.0, 1.0), (True, False)),
)
async def test_a_target_that_dies_in_mid_round_changes_no_token(
    method: str, temperature: float, successor_has_one: bool, tmp_path: Path
) -> None:
    drafted_by: dict[int, int] = {}  # of each target, tokens that were judged
    head = HEADS_OF_PAIR.get(method) or random_head_of(pair_path().target, method, tmp_path / method)
    async with serving(head, head if successor_has_one else None) as targets:
        num_tokens = 2 * NUM_TOKENS
        plain = tokens_of(await answer(targets.engine, request(0, temperature, "", num_tokens)))
        asked = replace(
            request(0, temperature, method, num_tokens), model_digest=targets.engine.verifier.info.model.digest
        )
        tokens: list[int] = []
        holder: TargetService | None = None
        async with aclosing(targets.engine.generate(asked)) as deltas:
            async for delta in deltas:
                tokens += delta.token_ids
                if delta.round is not None:
                    side = int(holder is not None)
                    drafted_by[side] = drafted_by.get(side, 0) + delta.round.commit.num_drafted
                if holder is None and len(tokens) > NUM_TOKENS // 2:
                    holder = targets.holding()
                    await holder.server.stop()
    assert tokens == plain and drafted_by[0] > 0
    assert (drafted_by[1] > 2 * K) or not successor_has_one


def test_the_pair_has_heads_of_the_registry_alone() -> None:
    assert HEADS_OF_PAIR.keys() <= HEADS.keys()
