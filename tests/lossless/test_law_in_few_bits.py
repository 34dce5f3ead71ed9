"""The joint law of three tokens of a target in few bits, drafted for by its own weights in 4, by enumeration: the rows
that the target's engine computes for windows, from packed weights, give the very law of plain decoding.

The models say tokens of four. Windows of every two are verified by an engine, all in few steps, and what is plain
decoding is computed one token a pass; the two agree to the bit. Fractions need probabilities that are sixteenths, and
drafts' weights that are powers of two: both models' are rounded to these."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from lossless.law import (
    NUM_DRAFTED,
    PARTS,
    VOCAB_SIZE,
    Send,
    Tokens,
    Weights,
    distance,
    endings_of,
    law_of,
    one_hot,
    proposals_of,
    sparse,
)
from lossless.scenarios import Forward, watch_forward
from support.engines import TargetHarness, opened
from support.models import build_decoder, tiny_config, tiny_hf_model, tiny_state
from support.quantized import rounded_state
from torch import Tensor

from outrider.engine.batch import BatchEntry
from outrider.engine.loader import LoadedModel
from outrider.engine.model_runner import ModelRunner
from outrider.engine.quantized.rounding import Rounding
from outrider.kernels.cpu.library import cpu_library
from outrider.rpc.messages import Credit, DraftTokens

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(cpu_library() is None, reason="no C kernels"),
]

SHAPE: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "intermediate_size": 128}  # whole steps of packed inputs
FLATTER = 0.7  # factor on the head: few tokens are certain, and some have probability zero
PROMPT = tuple(3 - place**2 % 4 for place in range(20))
CONTEXTS = [ids for length in range(NUM_DRAFTED + 1) for ids in product(range(VOCAB_SIZE), repeat=length)]


@dataclass(frozen=True)
class Rows:
    """Logits behind the prompt and a few tokens more, by these."""

    windows: dict[Tokens, list[Tensor]]  # of the target, wherever a window had the row
    plain: dict[Tokens, Tensor]  # of the target, [vocab]
    draft: dict[Tokens, Tensor]


@cache
def rows_of(rounding: Rounding, seed: int) -> Rows:
    hf = tiny_hf_model("llama", seed, **SHAPE)
    with torch.no_grad():
        hf.lm_head.weight.mul_(FLATTER)
    state, config = rounded_state(tiny_state(hf), rounding), tiny_config("llama", **SHAPE)
    target, own = build_decoder(config, state), build_decoder(config, state, quantization="int4")
    return Rows(verified(target), alone(target), alone(own))


def alone(loaded: LoadedModel) -> dict[Tokens, Tensor]:
    """Of every context, one token a pass behind the prompt."""
    found = {}
    for context in CONTEXTS:
        runner, blocks = ModelRunner(loaded.model, 4), [0, 1, 2, 3]
        found[context] = runner.forward([BatchEntry(PROMPT, 0, blocks, 1)])[0].clone()
        for place, token in enumerate(context):
            found[context] = runner.forward([BatchEntry([token], len(PROMPT) + place, blocks, 1)])[0].clone()
    return found


def verified(loaded: LoadedModel) -> dict[Tokens, list[Tensor]]:
    """Of every context, as windows of an engine's steps have it: one for every two tokens."""
    found: dict[Tokens, list[Tensor]] = {}

    def watch(forward: Forward, entries: Sequence[BatchEntry]) -> Tensor:
        logits = forward(entries)
        rows = iter(logits.clone())
        for entry in entries:
            own = [next(rows) for _ in range(entry.num_logits)]
            if len(own) == NUM_DRAFTED + 1:
                ids = tuple(entry.token_ids)[-NUM_DRAFTED:]
                for length, row in enumerate(own):
                    found.setdefault(ids[:length], []).append(row)
        return logits

    harness = TargetHarness.of(loaded)
    watch_forward(harness.engine._runner, watch)
    for number, ids in enumerate(product(range(VOCAB_SIZE), repeat=NUM_DRAFTED), start=1):
        end = len(PROMPT) + NUM_DRAFTED + 1
        harness.send(opened(number, PROMPT, max_tokens=NUM_DRAFTED + 1, ignore_eos=True))
        harness.send(DraftTokens(number, 0, len(PROMPT), ids), Credit(number, end, NUM_DRAFTED))
    harness.run()
    return found


def law_at(rows: dict[Tokens, Tensor]) -> Callable[[Tokens], tuple[Fraction, ...]]:
    """Its probabilities, each rounded down to sixteenths; what is missing then goes to those that lost most."""

    @cache
    def law(context: Tokens) -> tuple[Fraction, ...]:
        parts = rows[context].double().softmax(-1) * PARTS
        whole = parts.floor()
        lost = (parts - whole).argsort(descending=True, stable=True)
        whole[lost[: PARTS - int(whole.sum())]] += 1
        return tuple(Fraction(int(part), PARTS) for part in whole)

    return law


def drawn_from(rows: dict[Tokens, Tensor]) -> Callable[[Tokens], Weights]:
    """A draft's probabilities as powers of two, the greatest 8."""

    def weights(context: Tokens) -> Weights:
        logs = rows[context].double().log_softmax(-1) / torch.tensor(2.0).log()
        powers = (logs - logs.amax() + 3).round().clamp(min=-1)
        return tuple(2 ** int(power) if power >= 0 else 0 for power in powers)

    return weights


FEW_BITS = pytest.mark.parametrize("rounding", ["int8", "int4"])
SEEDS = pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 10))])


@FEW_BITS
@SEEDS
def test_windows_have_the_bits_of_plain_decoding(rounding: Rounding, seed: int) -> None:
    rows = rows_of(rounding, seed)
    assert set(rows.windows) == set(rows.plain) and len(rows.windows[()]) == VOCAB_SIZE**NUM_DRAFTED
    for context, plain in rows.plain.items():
        assert all(torch.equal(row, plain) for row in rows.windows[context]), context
        assert not torch.equal(rows.draft[context], plain)


@FEW_BITS
@SEEDS
@pytest.mark.parametrize("send", [sparse, one_hot], ids=["weights", "one-hot"])
def test_joint_law_is_plain_decodings(rounding: Rounding, seed: int, send: Send) -> None:
    rows = rows_of(rounding, seed)
    of_windows = law_at({context: found[-1] for context, found in rows.windows.items()})
    plain = law_at(rows.plain)
    assert len({plain(context) for context in CONTEXTS}) > 1, "the law depends on what stands before"
    endings = endings_of(proposals_of(drawn_from(rows.draft), send), target=of_windows)
    accepted = {ending.num_accepted for ending in endings}
    assert NUM_DRAFTED in accepted and len(accepted) > 1
    assert distance(law_of(endings, target=plain), target=plain) == 0
