"""Pairs of everything on vLLM: each greedy row with the tokens of plain decoding there, each sampled one whole."""

from __future__ import annotations

from pathlib import Path

import pytest
from lossless.composition.driver import run
from lossless.composition.on_vllm import FACTORS, serving_on_vllm, vllm_rows
from support.environment import SEED

pytestmark = pytest.mark.filterwarnings("ignore:Unclosed context:ResourceWarning")  # ZeroMQ's, which vLLM leaves


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_row_is_plain_decoding(tmp_path: Path) -> None:
    chosen = vllm_rows(2, SEED)
    found = run(chosen, tmp_path, serving_on_vllm)
    assert not found.failures, "\n".join(found.failures)
    drafted = {one.row.method for one in found.outcomes if one.num_drafted}
    assert drafted == set(FACTORS["method"]) - {"none"} and len(found.outcomes) == len(chosen)
