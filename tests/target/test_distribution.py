"""The law of the committed tokens, through the engine's own step: chi-square against the model's exact probabilities.

The draft's law is the target's turned upside down, so that most drafted tokens are refused and the residual decides.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from target_harness import COUPLED, REJECTION, Harness, opened
from tiny import tiny_config, tiny_hf_model, tiny_state

from outrider.engine.loader import build_decoder
from outrider.kernels.random.reference import Purpose, words
from outrider.kernels.sampling.reference import draft_sample
from outrider.rpc.messages import Credit, Piece, TokenWeights
from outrider.target_service.goodput import Goodput

VOCAB, DRAWS, BATCH, K = 16, 4000, 200, 2
PROMPT = (3, 1, 4, 1, 5)
ROWS = len(PROMPT) * BATCH  # of the first step with windows of one token
SAMPLING = {"temperature": 1.2, "min_p": 0.02, "max_tokens": 3}


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_hf_model("llama", 5, vocab_size=VOCAB)


def laws(hf: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Exact target law and the draft's: of the first token, [1, V], then of the second by the first, [V, V]."""
    contexts = [[*PROMPT], *([*PROMPT, token] for token in range(VOCAB))]
    with torch.inference_mode():
        logits = torch.stack([hf(torch.tensor([ids])).logits[0, -1] for ids in contexts])  # [1 + V, V]
    target = torch.softmax(logits.double() / SAMPLING["temperature"], dim=-1)
    target = torch.where(target < SAMPLING["min_p"] * target.amax(-1, keepdim=True), 0.0, target)
    return target / target.sum(-1, keepdim=True), torch.softmax(-logits, dim=-1)


def drafted(draft: torch.Tensor, seed: int) -> tuple[tuple[int, ...], tuple[TokenWeights, ...]]:
    """K tokens drawn from their weights, as a draft does it."""
    ids: list[int] = []
    weights: list[TokenWeights] = []
    for offset in range(K):
        row = draft[0] if offset == 0 else draft[1 + ids[-1]]
        counter = torch.tensor([seed]), torch.tensor([len(PROMPT) + offset]), Purpose.DRAFT, torch.tensor([0])
        sample = draft_sample(row[None].float(), words(*counter))
        ids.append(int(sample.token_ids[0]))
        weights.append(TokenWeights.of(sample.entry_ids.tolist(), sample.entry_weights.tolist()))
    return tuple(ids), tuple(weights)


@pytest.mark.parametrize("kind", ["weights", "weights, cut", "one-hot", "coupled", "plain"])
def test_committed_tokens_follow_the_targets_law(model: Any, kind: str) -> None:
    target, draft = laws(model)
    loaded = build_decoder(tiny_config("llama", vocab_size=VOCAB), tiny_state(model))
    counts = torch.zeros(VOCAB, VOCAB, dtype=torch.float64)
    acceptance = COUPLED if kind == "coupled" else REJECTION
    for start in range(0, DRAWS, BATCH):
        harness = Harness.of(loaded, num_blocks=512, max_rows=4 * ROWS)
        if kind == "weights, cut":  # no row beyond those of the prompts
            harness.engine.scheduler.goodput = Goodput([(1, 1), (ROWS, ROWS), (ROWS + 1, 1 << 40)])
        for seed in range(start + 1, start + BATCH + 1):
            request = opened(seed, PROMPT, acceptance=acceptance, seed=seed, **SAMPLING)
            ids, weights = drafted(draft, seed) if kind != "plain" else ((), ())
            piece = Piece(seed, 0, len(PROMPT), ids, weights if "weights" in kind else ())
            harness.send(request, piece, Credit(seed, 100, K, 0))
        for sequence in harness.engine.scheduler.sequences.values():
            sequence.acceptance.add(1, 1)  # its first window would be whole
        harness.run()
        for seed in range(start + 1, start + BATCH + 1):
            assert harness.commits(seed)[0].num_drafted == {"plain": 0, "weights, cut": 1}.get(kind, K)
            first, second, _ = harness.output(seed)
            counts[first, second] += 1
    expected = target[0][:, None] * target[1:] * DRAWS  # [V, V]
    assert counts[expected == 0].sum() == 0
    keep = expected >= 5
    observed = [*counts[keep].tolist(), float(counts[~keep].sum())]
    wanted = [*expected[keep].tolist(), float(expected[~keep].sum())]
    observed, wanted = (observed, wanted) if wanted[-1] >= 5 else (observed[:-1], wanted[:-1])
    scale = sum(observed) / sum(wanted)
    assert chisquare(observed, [w * scale for w in wanted]).pvalue > 1e-4
