"""The law of what clients get of a target in 8 or 4 bits, through the gateway's loop and services behind gRPC:
chi-square against transformers' probabilities in float64 from the numbers that the few bits stand for. Its own weights
in 4 bits draft, or the opposite of them, of which most is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lossless.chi_square import check
from lossless.statistics import (
    BLOCK,
    COUPLED,
    DRAFTS,
    LOGIT_SCALE,
    MODEL_SEED,
    TOKENS_20K,
    VOCAB,
    Pair,
    Setting,
    draft_in_process,
    target_in_process,
)
from support.models import tiny_hf_model
from support.proofs import mostly_long

from outrider.cli.quantize import quantize
from outrider.engine import checkpoint
from outrider.engine.quantized.rounding import Rounding

OWN, OPPOSITE = "own", "opposite"
SCALES = {OWN: 3 * LOGIT_SCALE, OPPOSITE: LOGIT_SCALE}  # of the head: else 4 bits say nearly the same


def settings_of(rounding: Rounding, draft: str) -> list[Setting]:
    common: dict[str, Any] = {"draft": draft, "k": 3, "depth": 4, "short": 750, "long": TOKENS_20K}
    return [
        Setting(f"{rounding}, {draft}", **common),
        Setting(f"{rounding}, {draft}, coupled", acceptance=COUPLED, **common),
        Setting(f"{rounding}, {draft}, block", acceptance=BLOCK, **common),
    ]


EVERY: list[tuple[Rounding, Setting]] = [
    (rounding, setting)
    for rounding in ("int8", "int4")
    for draft in (OWN, OPPOSITE)
    for setting in settings_of(rounding, draft)
]
SHORT = [EVERY[0], EVERY[9]]  # 8 bits and its own draft, 4 bits and the opposite


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("case", mostly_long(EVERY, SHORT), ids=lambda case: case[1].name)
async def test_tokens_follow_the_law_of_their_numbers(
    case: tuple[Rounding, Setting], tmp_path: Path, prove: bool
) -> None:
    rounding, setting = case
    hf = tiny_hf_model("llama", MODEL_SEED, vocab_size=VOCAB, intermediate_size=128)
    with torch.no_grad():
        hf.lm_head.weight *= SCALES[setting.draft]
        hf.save_pretrained(tmp_path / "float32")
        assert list(quantize(tmp_path / "float32", tmp_path / "target", rounding, 32))
        head = hf.lm_head.weight.clone()
        hf.lm_head.weight.copy_(DRAFTS[OPPOSITE](head))
        hf.save_pretrained(tmp_path / OPPOSITE)
    folder = tmp_path / "target"
    hf.load_state_dict(dict(checkpoint.read_weights(folder, checkpoint.weight_files(folder))))
    draft, bits = (folder, "int4") if setting.draft == OWN else (tmp_path / OPPOSITE, None)
    async with target_in_process(folder) as target, draft_in_process(draft, quantization=bits) as drafting:
        pair = Pair(hf, folder, target, None, None, {setting.draft: drafting.server.address})
        await check(pair, setting, setting.long if prove else setting.short)
