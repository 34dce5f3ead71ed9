"""A target service whose vLLM drafts for itself, by a speculative configuration of its own, before a gateway that needs
no draft; and by every head of the embedded pair that vLLM reads."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file
from support.heads import random_head_of
from support.metrics import samples_of
from support.services import children_of, wait_gone
from vllm_engine.test_service import METRICS

from outrider.cli.local_services import LOOPBACK, Service, Services, wait_for_peers
from outrider.client import SyncClient
from outrider.llm import LLM, SamplingParams
from outrider.pairs import pair_path

START_S = 240.0
PROMPTS = ["def parse_args(argv):", "import os\n", "class Worker:"]
NUM_TOKENS = 32


@pytest.fixture(scope="module")
def ours() -> list[list[int]]:
    """What our own engine says greedily."""
    greedy = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(pair_path().target) as llm:
        return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, greedy, use_tqdm=False)]


def head_for_vllm(method: str, folder: Path) -> Path:
    """The pair's; EAGLE's is a random one. vLLM reads the output layer that Medusa's heads share from their own
    checkpoint."""
    pair = pair_path()
    if method == "eagle":
        return random_head_of(pair.target, method, folder / "eagle")
    if method != "medusa":
        return pair.head_by(method)
    shutil.copytree(pair.head_by(method), folder / "medusa")
    (file,) = (folder / "medusa").glob("*.safetensors")
    target = load_file(next(pair.target.glob("*.safetensors")))
    output = target.get("lm_head.weight", target["model.embed_tokens.weight"])  # [vocab, hidden]
    save_file({**load_file(file), "lm_heads.0.weight": output.clone()}, file, metadata={"format": "pt"})
    return folder / "medusa"


@pytest.fixture(scope="module", params=["eagle3", "medusa", "eagle"])
def served(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[tuple[str, Service, str]]:
    """The method, the target, and the address of a gateway."""
    pair, head = pair_path(), head_for_vllm(request.param, tmp_path_factory.mktemp("head"))
    speculative = {"method": request.param, "model": str(head), "num_speculative_tokens": 4}
    given = json.dumps({"speculative_config": speculative, "max_num_seqs": 8})
    with Services() as services:
        flags = ["--model", str(pair.target), "--max-model-len", "256", "--cache-mb", "64", "--listen", LOOPBACK]
        told = ["--metrics", "127.0.0.1:0", "--engine-args", given]
        target = services.start("target", ["target", "--engine", "vllm", *flags, *told])
        peers = ["--target", services.wait(target, START_S), "--tokenizer", str(pair.target)]
        gateway = services.wait(services.start("gateway", ["gateway", *peers, "--listen", LOOPBACK]), START_S)
        wait_for_peers(gateway, START_S, services.check, with_draft=False)
        yield request.param, target, gateway


def check_series(text: str) -> None:
    """Steps are counted as an engine's of ours, and vLLM says how full it is."""
    read = samples_of(text)
    num_steps = sum(value for (name, _), value in read.items() if name == "target_step_seconds_count")
    assert 3 * NUM_TOKENS / 5 <= num_steps <= 5 * NUM_TOKENS  # of four drafted tokens, and one of the target's own
    assert read["target_step_rows_total", (("kind", "verify"),)] >= num_steps
    assert read["target_step_rows_total", (("kind", "prompt"),)] > 0
    assert read["target_num_requests_running", ()] == 0
    assert 0 <= read["target_kv_cache_usage_perc", ()] < 0.1


def test_vllm_drafts_by_itself(served: tuple[str, Service, str], ours: list[list[int]]) -> None:
    method, target, address = served
    accepted = 0
    with SyncClient(address) as client:
        for prompt, expected in zip(PROMPTS, ours, strict=True):
            parts = list(client.generate(prompt, max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True))
            assert [token for part in parts for token in part.token_ids] == expected
            (stats,) = [part.speculation for part in parts if part.speculation is not None]
            assert stats.num_draft_tokens > 0 and stats.method in ("", method)
            accepted += stats.num_accepted_tokens
        assert method == "eagle" or accepted > 0
        sampled = list(client.generate(PROMPTS[0], max_tokens=NUM_TOKENS, seed=1, ignore_eos=True))
        assert sum(len(part.token_ids) for part in sampled) == NUM_TOKENS
        stopped = list(client.generate(PROMPTS[0], max_tokens=NUM_TOKENS, temperature=0.0, stop_token_ids=[ours[0][5]]))
        cut = ours[0][: ours[0].index(ours[0][5]) + 1]
        assert [token for part in stopped for token in part.token_ids] == cut
    check_series(httpx.get(f"http://{target.find(METRICS)}/metrics", trust_env=False).text)
    processes = [target.pid, *children_of(target.pid)]
    os.kill(target.pid, signal.SIGTERM)
    assert len(processes) > 1 and wait_gone(processes) == []
