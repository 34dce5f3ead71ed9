"""The exact law of the first tokens after a prompt: transformers' own logits in float64, and the sampling processors
written a second time, plainly, one row after another. Nothing here is shared with the product."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.rpc.sampling_params import SamplingParams

Array = NDArray[np.float64]
ROWS = 512  # contexts of one forward pass


def exact_laws(hf: Any, prompt: Sequence[int], sampling: SamplingParams, depth: int) -> list[Array]:
    """For n below `depth` the law of the token after n drawn ones, [vocab] * n + [vocab]: the last axis is a law."""
    model, vocab_size = copy.deepcopy(hf).double(), hf.config.vocab_size
    laws = []
    for num_drawn in range(depth):
        outputs = list(itertools.product(range(vocab_size), repeat=num_drawn))
        logits = np.concatenate(
            [_last_logits(model, prompt, outputs[n : n + ROWS]) for n in range(0, len(outputs), ROWS)]
        )
        rows = [exact_law(row, prompt, output, sampling) for row, output in zip(logits, outputs, strict=True)]
        laws.append(np.stack(rows).reshape([vocab_size] * (num_drawn + 1)))
    return laws


def exact_law(logits: Array, prompt: Sequence[int], output: Sequence[int], sampling: SamplingParams) -> Array:
    """One row, [vocab] -> [vocab]. A repetition penalty counts prompt and output, the other two the output alone."""
    logits = logits.copy()
    for token in {*prompt, *output}:
        logits[token] *= sampling.repetition_penalty if logits[token] < 0 else 1 / sampling.repetition_penalty
    for token in set(output):
        logits[token] -= sampling.presence_penalty + sampling.frequency_penalty * list(output).count(token)
    law = np.exp((logits - logits.max()) / sampling.temperature)
    law /= law.sum()
    law[law < sampling.min_p * law.max()] = 0
    law /= law.sum()
    if sampling.top_p < 1:
        descending = np.argsort(-law, kind="stable")
        num_kept = int(np.searchsorted(np.cumsum(law[descending]), sampling.top_p)) + 1
        law[descending[num_kept:]] = 0
    return law / law.sum()


def of_position(laws: Sequence[Array], position: int) -> Array:
    """The law of the token at a position by itself, [vocab]."""
    joint = _joint(laws, position + 1)
    return joint.sum(axis=tuple(range(position)))


def of_pair(laws: Sequence[Array], position: int) -> Array:
    """The joint law of the tokens at a position and the next one, [vocab, vocab]."""
    joint = _joint(laws, position + 2)
    return joint.sum(axis=tuple(range(position)))


def _joint(laws: Sequence[Array], length: int) -> Array:
    """The law of the first `length` tokens, [vocab] * length."""
    joint = laws[0]
    for law in laws[1:length]:
        joint = joint[..., None] * law
    return joint


def _last_logits(model: Any, prompt: Sequence[int], outputs: Sequence[Sequence[int]]) -> Array:
    with torch.inference_mode():
        ids = torch.tensor([[*prompt, *output] for output in outputs])
        logits: Array = model(ids, use_cache=False, logits_to_keep=1).logits[:, -1].numpy()
    return logits
