"""When a difference between two outputs is a near-tie: where they part, both tokens have the highest score, up to
rounding.

Scores are what the arg max is taken of: processed logits under greedy decoding, logits / temperature - log(noise) under
coupling. How far may two orders of summation move a score? One sum of n products in float32 (unit roundoff u = 2^-24)
is off by about u sqrt(n) times the norm of its terms, roundings being as good as random (Higham and Mary, "A new
approach to probabilistic rounding error analysis", 2019). A logit ends a chain of sums of N terms in all; independent
errors add in quadrature, so to u sqrt(N) of the vectors that meet in the head, and these have norms of at most
W = max |row of the head| and H = sqrt(hidden size) max |weight of the last norm|:

    tau = u sqrt(N) W H

The norm of the head's terms is about W H / sqrt(hidden size): the factor between them is the allowance for what layers
amplify. Each of two evaluations may be off by tau, for each of two tokens: scores whose order differs are no more than
4 tau apart. Temperature divides that, a repetition penalty may multiply it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from exactness.identity_prompts import Prompt, first_difference
from torch import Tensor

from outrider.engine.batch import BatchEntry
from outrider.engine.kv_cache_manager import BLOCK_SIZE
from outrider.engine.loader import LoadedModel
from outrider.engine.model_runner import ModelRunner
from outrider.engine.sampler import SamplingRows, SequenceSampler, assemble
from outrider.kernels.random.reference import as_int64, exponential_noise
from outrider.kernels.sampling.reference import adjust_logits

UNIT_ROUNDOFF = 2.0**-24


@dataclass(frozen=True, slots=True)
class NearTie:
    """Where two outputs part for no other reason than rounding."""

    index: int  # of the output token
    tokens: tuple[int, int]
    gap: float  # between the highest score and the lower one of the two tokens'
    bound: float

    def __str__(self) -> str:
        return f"at token {self.index}: {self.tokens[0]} or {self.tokens[1]}, {self.gap:.1e} apart ({self.bound:.1e})"


def near_tie(plain: Sequence[int], other: Sequence[int], prompt: Prompt, loaded: LoadedModel, hf: Any) -> NearTie:
    """Judges the first difference of two outputs of a prompt. AssertionError if rounding cannot have made it. `hf` has
    the weights that `loaded` computes with."""
    index = first_difference(plain, other)
    assert index is not None and index < min(len(plain), len(other)), f"lengths {len(plain)} and {len(other)}"
    scores = plain_scores(prompt, plain[:index], loaded)  # [vocab]
    tokens = (plain[index], other[index])
    gap = float(scores.max() - scores[list(tokens)].min())
    bound = score_bound(prompt, len(prompt.ids) + index, hf)
    tie = NearTie(index, tokens, gap, bound)
    assert gap <= bound, f"no near-tie {tie}"
    return tie


def plain_scores(prompt: Prompt, output: Sequence[int], loaded: LoadedModel) -> Tensor:  # [vocab] float64
    """What the token after `output` is the arg max of, computed for this sequence alone. Of parameters that cut tokens
    off it knows nothing."""
    context = [*prompt.ids, *output]
    num_blocks = -(-len(context) // BLOCK_SIZE)
    runner = ModelRunner(loaded.model, num_blocks)
    logits = runner.forward([BatchEntry(context, 0, list(range(num_blocks)), 1)])  # [1, vocab]
    sampler = SequenceSampler(prompt.sampling, prompt.ids, output, loaded.eos_token_ids, loaded.vocab_size)
    scores = adjust_logits(logits, assemble([SamplingRows(sampler)]))[0].double()
    if prompt.sampling.greedy:
        return scores
    place = [torch.tensor([number]) for number in (as_int64(prompt.seed), len(context), 0)]
    noise = exponential_noise(*place, loaded.vocab_size)[0].double()  # [vocab]
    return scores / prompt.sampling.temperature - noise.log()


def score_bound(prompt: Prompt, context_len: int, hf: Any) -> float:
    """4 tau, as above, in units of the scores."""
    config = hf.config
    hidden, heads_dim = config.hidden_size, config.num_attention_heads * config.head_dim
    # Two norms, the products of query and key, key by query, of values, of the output, gate and up, and down.
    of_layer = 2 * hidden + hidden + config.head_dim + context_len + heads_dim + hidden + config.intermediate_size
    num_terms = config.num_hidden_layers * of_layer + 2 * hidden  # and the last norm and the head
    row_norm = float(hf.lm_head.weight.detach().norm(dim=1).max())
    hidden_norm = math.sqrt(hidden) * float(hf.model.norm.weight.detach().abs().max())
    tau = UNIT_ROUNDOFF * math.sqrt(num_terms) * row_norm * hidden_norm
    sampling = prompt.sampling
    return 4 * tau * max(sampling.repetition_penalty, 1.0) / (1.0 if sampling.greedy else sampling.temperature)
