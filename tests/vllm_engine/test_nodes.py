"""A target over several hosts, which are two processes on the loopback here: the first has the server, the other ends
with it."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Iterator

import pytest
from support.environment import START_S
from support.services import alive, wait_for_draft

from outrider.cli.local_services import LOOPBACK, Service, Services
from outrider.client import SyncClient
from outrider.llm import LLM, SamplingParams
from outrider.pairs import pair_path

END_S = 60.0
PROMPT = "def parse_args(argv):"
NUM_TOKENS = 32


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@pytest.fixture(scope="module")
def nodes(request: pytest.FixtureRequest) -> Iterator[tuple[Service, Service, str]]:
    """The first, the other, and the address of a gateway with a draft."""
    pair, where = pair_path(), {"nnodes": 2, "master_addr": "127.0.0.1", "master_port": free_port()}
    with pytest.MonkeyPatch.context() as patch, Services() as services:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        patch.setenv("VLLM_HOST_IP", "127.0.0.1")
        common = ["target", "--engine", "vllm", "--model", str(pair.target), "--tensor-parallel-size", "2"]
        common += ["--max-model-len", "512", "--listen", LOOPBACK, "--grace-s", "1"]
        first, other = (
            services.start(f"node {rank}", [*common, "--engine-args", json.dumps({**where, "node_rank": rank})])
            for rank in range(2)
        )
        draft = services.start("draft", ["draft", "--model", str(pair.draft), "--threads", "1", "--listen", LOOPBACK])
        peers = ["--target", services.wait(first, START_S), "--draft", services.wait(draft, START_S)]
        gateway = services.start("gateway", ["gateway", *peers, "--tokenizer", str(pair.target), "--listen", LOOPBACK])
        address = services.wait(gateway, START_S)
        wait_for_draft(address, START_S, services.check)
        yield first, other, address


def generate(address: str) -> tuple[str, int]:
    """The text, and how many drafted tokens were accepted."""
    with SyncClient(address) as client:
        parts = list(client.generate(PROMPT, max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True))
    (stats,) = [part.speculation for part in parts if part.speculation is not None]
    return "".join(part.text for part in parts), stats.num_accepted_tokens


@pytest.mark.timeout(600)
def test_two_hosts_share_a_model_and_end_together(nodes: tuple[Service, Service, str]) -> None:
    first, other, address = nodes
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    expected = LLM(str(pair_path().target)).generate([PROMPT], params, use_tqdm=False)[0].outputs[0].text
    text, num_accepted = generate(address)
    assert text == expected and num_accepted > 0
    os.kill(other.pid, signal.SIGTERM)  # streams may still run at the first
    assert generate(address)[0] == expected and alive(other.pid)
    first.terminate()
    end = time.monotonic() + END_S
    while (alive(first.pid) or alive(other.pid)) and time.monotonic() < end:
        time.sleep(0.2)
    assert not alive(other.pid), other.tail()
