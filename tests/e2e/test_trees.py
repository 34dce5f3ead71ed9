"""Trees over gRPC before the embedded target: of its draft model, whatever the mode, and of its heads beside it. Tokens
and prefix hits are plain decoding's, greedy and coupled; under rejection what is drafted are chains."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from e2e.test_methods import NUM_TOKENS, PROMPTS, WAITING, Target, answer, cached, target, tokens_of
from support.proofs import on_a_diagonal

from outrider.draft_service.boot import start
from outrider.draft_service.settings import DraftSettings
from outrider.gateway.engine import GenerationEngine
from outrider.gateway.peers.remote import RemoteDrafts, RemoteTargets
from outrider.gateway.text.tokenizer import Tokenizer
from outrider.pairs import pair_path
from outrider.rpc.words.request import GenerationRequest
from outrider.rpc.words.sampling_params import AcceptanceRule
from outrider.target_service.boot import build, load
from outrider.target_service.settings import TargetSettings

__all__ = ["target"]

TREE, K = "[(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]", 7
MODES = ("sequential", "chains", "branches")


@asynccontextmanager
async def drafting(target: Target) -> AsyncIterator[GenerationEngine]:
    settings = DraftSettings(
        model=pair_path().draft, listen="127.0.0.1:0", threads=1, cache_mb=16, speculative_token_tree=TREE
    )
    service = await start(settings)
    await service.server.start()
    async with RemoteDrafts([service.server.address]) as pool:
        await pool.wait_usable()
        yield GenerationEngine(target.tokenizer, target.pool, pool, WAITING)
    await service.stop()


@asynccontextmanager
async def with_head(method: str) -> AsyncIterator[GenerationEngine]:
    settings = TargetSettings(
        model=pair_path().target, head=pair_path().head_by(method), listen="127.0.0.1:0", threads=1, cache_mb=48,
        batch_invariant=True, speculative_token_tree=TREE,
    )  # fmt: skip
    service = build(settings, load(settings))
    await service.server.start()
    async with RemoteTargets([service.server.address]) as pool:
        await pool.wait_usable()
        yield GenerationEngine(Tokenizer.load(pair_path().target), pool, config=WAITING)
    await service.stop()


def drafted(request: GenerationRequest, method: str, mode: str) -> GenerationRequest:
    options = replace(request.speculation, enabled=True, num_draft_tokens=K, method=method, mode=mode)
    return replace(request, speculation=options, salt=f"{request.salt} {mode}")


@pytest.mark.parametrize(("method", "temperature"), on_a_diagonal(["draft_model", *pair_path().heads], (0.0, 1.0)))
async def test_tokens_and_prefix_hits_are_plain_decodings(method: str, temperature: float, target: Target) -> None:
    is_head = method in pair_path().heads
    widest = drafts = accepted = 0
    async with with_head(method) if is_head else drafting(target) as engine:
        for place in range(len(PROMPTS)):
            alone = target.request(place, temperature, f"trees {method} {temperature}")
            cold, warm = [await answer(target.engine, alone) for _ in range(2)]
            plain = tokens_of(cold)
            for mode in MODES[:1] if is_head else MODES:
                request = drafted(alone, method, mode)
                first, again = [await answer(engine, request) for _ in range(2)]
                assert tokens_of(first) == tokens_of(again) == plain and len(plain) == NUM_TOKENS
                assert (cached(first), cached(again)) == (cached(cold), cached(warm))
                for delta in (*first, *again):
                    if delta.round is not None and delta.round.commit.num_drafted:
                        widest = max(widest, delta.round.commit.num_drafted)
                        drafts += delta.round.commit.num_drafted
                        accepted += delta.round.commit.num_accepted
                        assert delta.round.commit.num_accepted <= 3
    assert widest > 4 and 0 < accepted < drafts  # a busy machine's draft may be late with a part of a tree


async def test_under_rejection_drafts_are_chains(target: Target) -> None:
    alone = target.request(0, 1.0, "rejected")
    alone = replace(alone, speculation=replace(alone.speculation, acceptance=AcceptanceRule.REJECTION))
    async with drafting(target) as engine:
        deltas = await answer(engine, drafted(alone, "draft_model", "sequential"))
    commits = [delta.round.commit for delta in deltas if delta.round is not None]
    assert len(tokens_of(deltas)) == NUM_TOKENS and not any(commit.dropped for commit in commits)
    assert max(commit.num_drafted for commit in commits) == K
