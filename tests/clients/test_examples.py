"""The programs of examples/clients against a gateway with toy backends: what they stream, that a cancelled call frees
its sequence while the program goes on, and what they read of a refusal. Those that are compiled, and Ruby's, run under
--prove, which make test-clients gives."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field
from support.fakes import ToyDraft, ToyTarget, expected, until
from support.gateways import HTTP, over_grpc, text_of, toy_tokenizer
from support.services import Trio

from outrider.client import Client
from outrider.gateway.engine import GenerationEngine
from outrider.gateway.servicer import GenerationServicer
from outrider.rpc.words.answer import GenerationDelta
from outrider.rpc.words.request import GenerationRequest

FOLDER = Path(__file__).parents[2] / "examples" / "clients"
PROMPT = "the quick"
NEEDS = {
    "node": ("node", "npm"),
    "go": ("go", "protoc"),
    "cpp": ("g++", "protoc", "grpc_cpp_plugin"),
    "ruby": ("ruby", "protoc", "grpc_ruby_plugin"),
}
FIELDS = [
    "  sampling.temperature is -1.0; allowed: 0 (greedy), or 1e-05 to 100",
    "  sampling.top_p is 3.0; allowed: above 0 and at most 1",
]
BUILD_S = 240


class WatchedEngine(GenerationEngine):
    """Refuses the bad request only when the cancelled one is gone, which the program cannot have been: it waits."""

    async def generate(self, request: GenerationRequest, *how: Any) -> AsyncGenerator[GenerationDelta, None]:
        if request.sampling is not None and request.sampling.temperature < 0:
            await until(lambda: not any(link.open for link in self.verifier.links), 30)  # type: ignore[attr-defined]
        async for delta in super().generate(request, *how):
            yield delta


async def run(*command: str | Path, environment: dict[str, str] | None = None) -> str:
    process = await asyncio.create_subprocess_exec(
        *command, stdin=subprocess.DEVNULL, stdout=-1, stderr=-1, env=os.environ | (environment or {})
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), 60)
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, err.decode()
    return out.decode()


async def check(*command: str | Path, stopped: str, refused: str, build: Path | None = None) -> None:
    target = ToyTarget(step_s=0.15)  # 200 tokens, three a step, are ten seconds
    engine = WatchedEngine(toy_tokenizer(), target, ToyDraft(wrong_every=3))
    async with over_grpc(GenerationServicer(engine)) as address:
        environment = {} if build is None else {"OUT": str(build)}
        out = await run(*command, address, PROMPT, environment=environment)
    assert [request.sampling.max_tokens for request in target.opens] == [24, 200]
    prompt = target.opens[0].prompt_ids
    text = text_of(expected(prompt, 24), prompt)
    lines = [f"{text}", "24 tokens, FINISH_REASON_LENGTH", f"stopped: {stopped}", f"refused: {refused}", *FIELDS]
    assert out == "\n".join(lines) + "\n"
    sequence = target.links[1].sequence
    assert len(sequence.tokens) < len(prompt) + 100, "the call was not cancelled"


def made(language: str, build: Path) -> Path:
    """Builds a language's program, as its user does; skips where that cannot be had, and says why."""
    if absent := [tool for tool in NEEDS[language] if shutil.which(tool) is None]:
        pytest.skip(f"no {', '.join(absent)} on this machine: examples/clients/install.sh {language}")
    if language == "node":
        needed = json.loads((FOLDER / "node/package.json").read_text(encoding="utf-8"))["dependencies"]
        if all((build / "node/node_modules" / name).exists() for name in needed):
            return build
    environment = os.environ | {"OUT": str(build), "PYTHON": sys.executable, "npm_config_fetch_retries": "0"}
    command = [str(FOLDER / "build.sh"), language]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=BUILD_S, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip(f"examples/clients/build.sh {language} took more than {BUILD_S} s")
    if done.returncode:
        why = " ".join((done.stderr or done.stdout).split())[:300]
        if language == "node":  # its libraries come from a registry, which not every machine reaches
            pytest.skip(f"npm cannot install what the example needs: {why}")
        pytest.fail(f"examples/clients/build.sh {language}: {why}")
    return build


@pytest.fixture(scope="session")
def build(repository: Path) -> Path:
    """Where examples/clients/build.sh puts what it makes."""
    return repository / "build" / "clients"


@pytest.mark.parametrize("name", ["python_sync.py", "python_aio.py"])
async def test_python(name: str) -> None:
    await check(sys.executable, FOLDER / name, stopped="CANCELLED", refused="INVALID_ARGUMENT")


@pytest.mark.parametrize(
    ("language", "command", "stopped", "refused"),
    [
        ("node", ("node", FOLDER / "node/generate.js"), "CANCELLED", "INVALID_ARGUMENT"),
        pytest.param("go", ("go/generate",), "Canceled", "InvalidArgument", marks=pytest.mark.slow),
        pytest.param("cpp", ("cpp/generate",), "code 1", "code 3", marks=pytest.mark.slow),
        pytest.param("ruby", ("ruby", FOLDER / "ruby/generate.rb"), "code 1", "code 3", marks=pytest.mark.slow),
    ],
)
async def test_other_languages(
    language: str, command: tuple[str | Path, ...], stopped: str, refused: str, build: Path
) -> None:
    await asyncio.to_thread(made, language, build)
    program = command if len(command) > 1 else (build / command[0],)
    await check(*program, stopped=stopped, refused=refused, build=build)


class Place(BaseModel, extra="forbid"):
    city: Annotated[str, Field(max_length=12)]
    country: Literal["de", "fr", "it"]


class Event(BaseModel, extra="forbid"):
    name: Annotated[str, Field(min_length=1, max_length=16)]
    day: Annotated[int, Field(ge=1, le=31)]
    places: Annotated[list[Place], Field(max_length=2)]


@pytest.mark.slow
async def test_openai_s_client_for_node_parses_what_the_services_give(trio: Trio, build: Path) -> None:
    """An answer and a call, whole and streamed: its own schemas take them, and so do ours."""
    await asyncio.to_thread(made, "node", build)
    flags = ("--mode", "sequential", "--http", "127.0.0.1:0", "--model-name", "python", "--tool-parser", "json")
    gateway = trio.start_gateway(*flags)
    try:
        await asyncio.to_thread(trio.wait, gateway)
        url = f"http://{gateway.find(re.compile(HTTP))}/v1"
        out = await run("node", FOLDER / "node/structured.js", url, "python", environment={"OUT": str(build)})
    finally:
        trio.services.stop(gateway)
    answer, streamed, call, streamed_call = (json.loads(line) for line in out.splitlines())
    Event.model_validate(answer)
    assert call["name"] == "add_event"
    Event.model_validate(call["arguments"])
    assert streamed == answer and streamed_call == call


async def test_the_services_without_a_gateway(trio: Trio) -> None:
    """Propose and Verify by hand give what the gateway gives, and drafts are accepted."""
    prompt = "def parse_args(argv):"
    arguments = (trio.target, trio.draft, str(trio.pair.target / "tokenizer.json"), prompt)
    out = await run(sys.executable, FOLDER / "direct.py", *arguments)
    async with Client(trio.gateway) as client:
        text = [part.text async for part in client.generate(prompt, max_tokens=24, temperature=0.0)]
    assert out.startswith("".join(text) + "\n24 tokens, ")
    assert int(out.splitlines()[-1].split()[2]) > 10
