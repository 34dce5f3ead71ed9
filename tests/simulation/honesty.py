"""What an honest draft draws: a function of the table, the state and the position. A draft that kept a tail of tokens
from another context, or mixed up its weights, does not draw that."""

from __future__ import annotations

import struct
from collections.abc import Callable

import torch
from simulation.tables import NUM_STATES, Table
from torch import Tensor

from outrider.engine.sampler import SamplingRows, SequenceSampler, process
from outrider.kernels.random.reference import as_int64, exponential_noise
from outrider.kernels.sampling.reference import DEFAULT_MASS, MAX_ENTRIES, integer_weights
from outrider.rpc.messages import Open, TokenWeights
from outrider.rpc.sampling_params import AcceptanceRule, SamplingParams

IsHonest = Callable[[int, int, int, TokenWeights | None], bool]  # position, state, token, weights


def honesty_of(table: Table, request: Open) -> IsHonest:
    """For a request at temperature 0 or 1 without other processors."""
    if request.sampling.greedy:
        return lambda position, state, token, weights: token == table.choices[state] and weights is None
    probs = _probs(table)
    if request.acceptance == AcceptanceRule.COUPLED:
        return _coupled(probs, request)
    return _weighted(probs)


def _probs(table: Table) -> Tensor:
    """Of every state, [states, vocab]."""
    sampler = SequenceSampler(SamplingParams(), (), (), (), table.vocab_size)
    return process(table.logits.clone(), [SamplingRows(sampler)] * NUM_STATES)[0]


def _weighted(probs: Tensor) -> IsHonest:
    rows = integer_weights(probs, DEFAULT_MASS, MAX_ENTRIES).long().tolist()
    expected = [{token: weight for token, weight in enumerate(row) if weight} for row in rows]

    def is_honest(position: int, state: int, token: int, weights: TokenWeights | None) -> bool:
        if weights is None:
            return False
        count = len(weights.ids) // 4
        ids, values = (struct.unpack(f"<{count}I", packed) for packed in (weights.ids, weights.weights))
        law, sent = expected[state], dict(zip(ids, values, strict=True))
        return token in law and sent.keys() == law.keys() and all(abs(law[i] - sent[i]) <= 1 for i in law)

    return is_honest


def _coupled(probs: Tensor, request: Open) -> IsHonest:
    length = len(request.prompt_ids) + request.sampling.max_tokens
    positions = torch.arange(length)
    seeds = torch.full_like(positions, as_int64(request.seed))
    noise = exponential_noise(seeds, positions, torch.full_like(positions, request.completion), probs.shape[1])

    def is_honest(position: int, state: int, token: int, weights: TokenWeights | None) -> bool:
        ratios = noise[position] / probs[state]  # [vocab]
        return weights is None and bool(ratios[token] <= ratios.min() * 1.0001)

    return is_honest
