"""A target service whose vLLM drafts for itself, by a speculative configuration of its own, before a gateway that needs
no draft: by every head of the embedded pair that vLLM reads, and by the MTP layer that a checkpoint brings."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file
from support.adapters import save_adapter
from support.environment import START_S
from support.heads import random_head_of, save_mimo
from support.metrics import samples_of
from support.services import children_of, wait_gone
from vllm_engine.test_service import METRICS

from outrider.cli.local_services import LOOPBACK, Service, Services
from outrider.client import SyncClient
from outrider.llm import LLM, LoRARequest, SamplingParams
from outrider.pairs import pair_path
from outrider.rpc.errors import OutriderError

PROMPTS = ["def parse_args(argv):", "import os\n", "class Worker:"]
NUM_TOKENS = 32
K = 4
RANDOM = ("eagle", "mtp")  # of random weights, which the target takes nothing of but by chance
MIMO_CONFIG = """
from transformers import Qwen2Config


class MiMoConfig(Qwen2Config):
    model_type = "mimo"
"""


@dataclass
class Served:
    """A target service whose vLLM drafts, and a gateway before it."""

    method: str
    folder: Path  # the target's
    adapter: Path | None  # of it
    target: Service
    gateway: str


def greedily(folder: Path, adapter: Path | None = None) -> list[list[int]]:
    """What our own engine says."""
    greedy = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    lora = None if adapter is None else LoRARequest("sql", 1, adapter)
    with LLM(folder, threads=1, enable_lora=lora is not None) as llm:
        outputs = llm.generate(PROMPTS, greedy, lora_request=lora, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


def save_published_mimo(folder: Path) -> Path:
    """A target with an MTP layer as MiMo's are published: with the code of their configuration. vLLM's kernels for CPUs
    have no smaller heads."""
    save_mimo(folder, pair_path().target, num_attention_heads=2, num_key_value_heads=1, head_dim=32)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["MiMoForCausalLM"], "auto_map": {"AutoConfig": "configuration_mimo.MiMoConfig"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "configuration_mimo.py").write_text(MIMO_CONFIG)
    return folder


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


@pytest.fixture(scope="module", params=["eagle3", "medusa", "eagle", "mtp"])
def served(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Served]:
    method, folder = request.param, tmp_path_factory.mktemp("checkpoints")
    speculative: dict[str, Any] = {"method": method, "num_speculative_tokens": K}
    if method == "mtp":
        model, told = save_published_mimo(folder / "mimo"), ["--trust-remote-code"]
    else:
        model, told = pair_path().target, []
        speculative["model"] = str(head_for_vllm(method, folder))
    adapter = None
    if method == "eagle3":
        adapter = save_adapter(folder / "sql", load_file(next(model.glob("*.safetensors"))), scale=0.05)
        told = [f"--adapter=sql={adapter}"]
    given = json.dumps({"speculative_config": speculative, "max_num_seqs": 8})
    with Services() as services:
        flags = ["--model", str(model), "--max-model-len", "256", "--cache-mb", "64", "--listen", LOOPBACK]
        flags += ["--metrics", "127.0.0.1:0", "--engine-args", given]
        target = services.start("target", ["target", "--engine", "vllm", *flags, *told])
        peers = ["--target", services.wait(target, START_S), "--tokenizer", str(model)]
        gateway = services.wait(services.start("gateway", ["gateway", *peers, "--listen", LOOPBACK]), START_S)
        wait_for_target(gateway, services)
        yield Served(method, model, adapter, target, gateway)


def wait_for_target(gateway: str, services: Services) -> None:
    """Returns once the gateway has found its target."""
    end = time.monotonic() + START_S
    with SyncClient(gateway) as client:
        while True:
            try:
                client.info()
                return
            except OutriderError:
                services.check()
                if time.monotonic() > end:
                    raise
                time.sleep(0.1)


def check_series(text: str) -> None:
    """Steps are counted as an engine's of ours, and vLLM says how full it is."""
    read = samples_of(text)
    num_steps = sum(value for (name, _), value in read.items() if name == "target_step_seconds_count")
    assert 3 * NUM_TOKENS / (K + 1) <= num_steps <= 8 * NUM_TOKENS  # of drafted tokens, and one of the target's own
    assert read["target_step_rows_total", (("kind", "verify"),)] >= num_steps
    assert read["target_step_rows_total", (("kind", "prompt"),)] > 0
    assert read["target_num_requests_running", ()] == 0
    assert 0 <= read["target_kv_cache_usage_perc", ()] < 0.1


def test_vllm_drafts_by_itself(served: Served) -> None:
    ours, accepted = greedily(served.folder), 0
    with SyncClient(served.gateway) as client:
        for prompt, expected in zip(PROMPTS, ours, strict=True):
            parts = list(client.generate(prompt, max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True))
            assert [token for part in parts for token in part.token_ids] == expected
            (stats,) = [part.speculation for part in parts if part.speculation is not None]
            assert stats.num_draft_tokens > 0 and stats.method in ("", served.method)
            accepted += stats.num_accepted_tokens
        assert served.method in RANDOM or accepted > 0
        if served.adapter is not None:
            adapted = greedily(served.folder, served.adapter)
            assert adapted != ours
            for prompt, expected in zip(PROMPTS, adapted, strict=True):
                told = client.generate(prompt, max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, adapter="sql")
                assert [token for part in told for token in part.token_ids] == expected
        sampled = list(client.generate(PROMPTS[0], max_tokens=NUM_TOKENS, seed=1, ignore_eos=True))
        assert sum(len(part.token_ids) for part in sampled) == NUM_TOKENS
        stopped = list(client.generate(PROMPTS[0], max_tokens=NUM_TOKENS, temperature=0.0, stop_token_ids=[ours[0][5]]))
        cut = ours[0][: ours[0].index(ours[0][5]) + 1]
        assert [token for part in stopped for token in part.token_ids] == cut
    check_series(httpx.get(f"http://{served.target.find(METRICS)}/metrics", trust_env=False).text)
    processes = [served.target.pid, *children_of(served.target.pid)]
    os.kill(served.target.pid, signal.SIGTERM)
    assert len(processes) > 1 and wait_gone(processes) == []
