"""The expansion of the embedded target in few bits: written and rounded, or made of a rounded checkpoint."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import logits_of

from outrider.cli.convert import main
from outrider.engine.loader import load_model
from outrider.llm import LLM, SamplingParams
from outrider.pairs import pair_path
from outrider.pairs.expansion import expand_llama, write_expanded

SIZES: dict[str, Any] = {
    "hidden_size": 384, "intermediate_size": 1024, "num_layers": 9, "num_heads": 8, "num_kv_heads": 4,
}  # fmt: skip
PROMPTS = ["def add(first, second):\n    return", "for index in range("]


@pytest.mark.parametrize("rounding", ["int8", "int4"])
def test_rounded_it_decodes_with_a_draft_as_without(rounding: str, tmp_path: Path) -> None:
    """Greedily, to the token, and most of what the small target's draft says is accepted."""
    pair = pair_path()
    write_expanded(pair.target, tmp_path / "large", **SIZES)
    assert main([str(tmp_path / "large"), str(tmp_path / "packed"), "--quantize", rounding]) == 0
    found, sampling = [], SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    for drafts in (None, {"model": str(pair.draft), "num_speculative_tokens": 4}):
        with LLM(tmp_path / "packed", speculative_config=drafts, per_request_spec_decode_metrics="summary") as llm:
            outputs = llm.generate(PROMPTS, sampling, use_tqdm=False)
            found.append([output.outputs[0].token_ids for output in outputs])
            accepted = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    assert found[0] == found[1] and all(len(ids) == 24 for ids in found[0])
    assert accepted["vllm:spec_decode_num_accepted_tokens"] > 10


def test_of_a_rounded_checkpoint_it_has_that_ones_function(tmp_path: Path) -> None:
    """Its decoded numbers need more than the 16 bits of the embeddings beside them."""
    assert main([str(pair_path().target), str(tmp_path / "packed"), "--quantize", "int8"]) == 0
    small = load_model(tmp_path / "packed")
    large = load_model(tmp_path / "packed", expand=partial(expand_llama, **SIZES))
    ids = list(range(100, 140))
    torch.testing.assert_close(logits_of(large, ids), logits_of(small, ids), atol=1e-3, rtol=1e-3)
