"""Every block of docs/clients.md runs as it stands, on the addresses of services that are there.

The README's "From other languages": its `buf curl` lines run as they stand; under --prove all of it, to the first
call from Go, on what its own lines start."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.environment import START_S
from support.services import Trio

from outrider.client import Client

DOCS = Path(__file__).parents[2] / "docs" / "clients.md"
TEXT = DOCS.read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


async def run(code: str, trio: Trio) -> str:
    for named in ("127.0.0.1:50050", "127.0.0.1:50060"):
        code = code.replace(named, trio.gateway)
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


async def test_the_examples(trio: Trio) -> None:
    """Both clients print the same; a refusal names its fields; a second gateway is named, and not needed."""
    outputs = [await run(code, trio) for code in BLOCKS]
    async with Client(trio.gateway) as client:
        text = [part.text async for part in client.generate("def parse_args(argv):", max_tokens=24, temperature=0.0)]
    assert outputs[0] == outputs[1] == "".join(text) != ""
    assert [line.split()[0] for line in outputs[2].splitlines()] == ["sampling.temperature", "sampling.top_p"]
    assert outputs[3] and len(outputs) == 4


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`([\w/]+\.(?:py|js|go|cc|rb|sh))", TEXT))))
def test_the_programs_are_there(name: str) -> None:
    assert (DOCS.parents[1] / "examples" / "clients" / name).is_file()


def test_no_program_is_forgotten() -> None:
    folder = DOCS.parents[1] / "examples" / "clients"
    programs = [path for path in folder.rglob("*") if path.suffix in {".py", ".js", ".go", ".cc", ".rb"}]
    assert programs and not [path for path in programs if f"`{path.relative_to(folder)}`" not in TEXT]


REPOSITORY = Path(__file__).parents[2]
NAMED = "127.0.0.1:50050"
INSTALLS = ["make install", ". .venv/bin/activate"]  # what stands before; here it is installed
ENVIRONMENT = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
TIMEOUT_S = 240


def blocks() -> list[list[str]]:
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    found = re.search(r"^## From other languages\n(.*?)^## ", text, re.MULTILINE | re.DOTALL)
    assert found is not None
    return [block.splitlines() for block in re.findall(r"^```bash\n(.*?)^```", found[1], re.MULTILINE | re.DOTALL)]


def run_line(line: str, address: str) -> str:
    done = subprocess.run(
        ["bash", "-c", line.replace(NAMED, address)],
        cwd=REPOSITORY, env=ENVIRONMENT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_S,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{line}\n{done.stderr}"
    return done.stdout


def objects(text: str) -> Iterator[dict[str, Any]]:
    """The JSON objects that buf writes one after another."""
    decoder, text = json.JSONDecoder(), text.strip()
    while text:
        found, end = decoder.raw_decode(text)
        yield found
        text = text[end:].lstrip()


def check_buf(lines: list[str], address: str) -> str:
    """The text of the completion."""
    listing, health, generate = (run_line(line, address) for line in lines)
    assert {"outrider.v1.GenerationService/Generate", "grpc.health.v1.Health/Check"} <= set(listing.split())
    assert json.loads(health) == {"status": "SERVING"}
    parts = list(objects(generate))
    assert parts[-1]["usage"]["completionTokens"] == 24 == sum(len(part["tokenIds"]) for part in parts)
    return "".join(part.get("text", "") for part in parts)


async def test_buf_as_it_stands(trio: Trio) -> None:
    lines = blocks()[1]
    assert all(line.startswith("buf curl ") for line in lines)
    text = await asyncio.to_thread(check_buf, lines, trio.gateway)
    async with Client(trio.gateway) as client:
        parts = client.generate("def parse_args(argv):", max_tokens=24, temperature=0.0)
        assert text == "".join([part.text async for part in parts])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_to_the_first_call_from_go(tmp_path: Path) -> None:
    """Line by line, on another port: the one that is named may be taken."""
    if shutil.which("apt-get") is None:
        pytest.skip("the packages are Debian's")
    (*installs, serve), buf, go = blocks()
    assert installs == INSTALLS
    log = tmp_path / "serve.log"
    own = {"OUTRIDER_GATEWAY__LISTEN": "127.0.0.1:0", "OUTRIDER_TARGET__THREADS": "1", "OUTRIDER_SERVE__PLAIN": "true"}
    with log.open("w") as out:
        command = ["bash", "-c", serve.replace("outrider serve", "exec outrider serve")]
        server = subprocess.Popen(command, env=ENVIRONMENT | own, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    try:
        address = wait_for_address(server, log)
        text = check_buf(buf, address)
        *builds, call = go
        for line in builds:
            run_line(line, address)
        printed = run_line(call, address)
        assert printed.startswith(text + "\n24 tokens, FINISH_REASON_LENGTH\n")
        assert re.search(r"^refused: InvalidArgument\n  sampling\.temperature ", printed, re.MULTILINE)
    finally:
        server.terminate()
        server.wait(60)


def wait_for_address(server: subprocess.Popen[bytes], log: Path) -> str:
    end = time.monotonic() + START_S
    while "Ctrl-C ends" not in log.read_text():
        assert server.poll() is None and time.monotonic() < end, log.read_text()
        time.sleep(0.05)
    found = re.search(r"gateway listens on (\S+)|--gateway (\S+)", log.read_text())
    assert found is not None, log.read_text()
    return found[1] or found[2]
