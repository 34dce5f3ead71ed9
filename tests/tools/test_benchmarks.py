"""The commands of docs/benchmarking.md as they stand, in small sizes: what people read of them is there, no request has
failed, and what the page says of each figure is so."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tools.conftest import Run, Served

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
NUM_REQUESTS, NUM_TOKENS = 16, 32
SIZES = {"512": 24, "128": NUM_TOKENS, "64": NUM_REQUESTS}  # of the page: prompt, output, requests
VLLM = ".venv-vllm"
GUIDELLM = (
    "output_token_count", "output_tokens_per_second", "output_tokens_per_iteration", "time_to_first_token_ms",
    "time_per_output_token_ms", "inter_token_latency_ms",
)  # fmt: skip


@pytest.fixture
def lines(commands: dict[str, list[str]]) -> dict[str, str]:
    """By tool its command, in these sizes."""
    return {
        tool: re.sub(r"\b(?:512|128|64)\b", lambda found: str(SIZES[found[0]]), lines[0])
        for tool, lines in commands.items()
    }


def test_vllm_bench_serve(lines: dict[str, str], served: Served, run: Run, tmp_path: Path) -> None:
    metadata = tmp_path / "vllm-0+cpu.dist-info"  # the wheel for processors has another name, which the program misses
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0+cpu\n")
    print(run(VLLM, served.command(lines["vllm"]), tmp_path, PYTHONPATH=str(tmp_path)))
    found = read(tmp_path / "results/vllm.json")
    assert (found["completed"], found["failed"]) == (NUM_REQUESTS, 0)
    assert found["total_output_tokens"] == NUM_REQUESTS * NUM_TOKENS
    assert found["output_throughput"] == pytest.approx(found["total_output_tokens"] / found["duration"])
    # TPOT is spread over all tokens but the first, and ITL the time from piece to piece, which has several.
    after_the_first = (found["mean_e2el_ms"] - found["mean_ttft_ms"]) / (NUM_TOKENS - 1)
    assert found["mean_ttft_ms"] > 0 and found["mean_tpot_ms"] == pytest.approx(after_the_first)
    assert found["mean_itl_ms"] > 1.05 * found["mean_tpot_ms"] > 0


def test_guidellm(lines: dict[str, str], served: Served, run: Run, tmp_path: Path) -> None:
    print(run("build/tools/guidellm", served.command(lines["guidellm"]), tmp_path))
    (benchmark,) = read(tmp_path / "results/guidellm.json")["benchmarks"]
    found = benchmark["metrics"]
    assert found["request_totals"] == {
        "successful": NUM_REQUESTS, "errored": 0, "incomplete": 0, "total": NUM_REQUESTS
    }  # fmt: skip
    mean = {name: found[name]["successful"]["mean"] for name in GUIDELLM}
    assert mean["output_token_count"] == NUM_TOKENS and mean["output_tokens_per_second"] > 0
    assert mean["output_tokens_per_iteration"] > 1.05  # of a piece, which is a round's
    # Its time per output token counts the first, and the wait for it; its inter-token latency does not.
    first, rest = mean["time_to_first_token_ms"], mean["inter_token_latency_ms"]
    assert first > 0 and rest > 0
    assert mean["time_per_output_token_ms"] * NUM_TOKENS == pytest.approx(first + rest * (NUM_TOKENS - 1))


def test_aiperf(lines: dict[str, str], served: Served, run: Run, tmp_path: Path) -> None:
    # With these it would take a folder for a hub's name.
    print(
        run("build/tools/aiperf", served.command(lines["aiperf"]), tmp_path, HF_HUB_OFFLINE="", TRANSFORMERS_OFFLINE="")
    )
    found = read(tmp_path / "results/aiperf/profile_export_aiperf.json")
    mean = {name: value["avg"] for name, value in found.items() if isinstance(value, dict) and "avg" in value}
    assert found["error_summary"] == [] and mean["request_error_rate"] == 0
    assert (mean["request_count"], mean["output_sequence_length"]) == (NUM_REQUESTS, NUM_TOKENS)
    assert mean["usage_completion_tokens"] == NUM_TOKENS and mean["output_token_throughput"] > 0
    assert mean["time_to_first_token"] > 0
    # What came after the first piece, spread over its tokens alone: at least vLLM's TPOT.
    rest = mean["request_latency"] - mean["time_to_first_token"]
    assert mean["inter_token_latency"] >= 0.999 * rest / (NUM_TOKENS - 1) > 0
    assert mean["inter_chunk_latency"] > 1.05 * mean["inter_token_latency"]
    # And what the gateway says of its drafts in every answer.
    assert mean["spec_decode_acceptance_length"] > 1 and mean["total_accepted_draft_tokens"] > 0
    assert mean["total_draft_tokens"] > mean["total_accepted_draft_tokens"]


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
