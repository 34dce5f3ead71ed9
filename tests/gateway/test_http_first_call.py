"""The README's "First OpenAI call", line by line, and the live page of what it starts: the embedded pair, as
processes of their own."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway.page_harness import PHONE, visit

START_S = 60
INSTALLS = ["make install", ". .venv/bin/activate"]  # what stands before; here it is installed
NAMED = "127.0.0.1:8000"
READY = "Ctrl-C ends all three."


def block(repository: Path, language: str) -> str:
    """The section's one block of a language."""
    text = (repository / "README.md").read_text(encoding="utf-8")
    found = re.search(r"^## First OpenAI call\n(.*?)^## ", text, re.MULTILINE | re.DOTALL)
    assert found is not None
    (one,) = re.findall(rf"^```{language}\n(.*?)^```", found[1], re.MULTILINE | re.DOTALL)
    return str(one)


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as bound:
        return f"127.0.0.1:{bound.getsockname()[1]}"


class Reader:
    """Does what the README says, on another port: the one that it names may be taken."""

    def __init__(self, repository: Path, log: Path) -> None:
        self._repository, self._log, self._address = repository, log, free_address()
        *installs, command = block(repository, "sh").splitlines()
        assert installs == INSTALLS
        program, *arguments = shlex.split(command.replace(NAMED, self._address))
        own = {"OUTRIDER_SERVE__LISTEN": "127.0.0.1:0", "OUTRIDER_SERVE__THREADS": "1"}
        with log.open("w") as out:
            self.process = subprocess.Popen(
                [Path(sys.executable).with_name(program), *arguments],
                env=os.environ | own, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
            )  # fmt: skip

    @property
    def url(self) -> str:
        return f"http://{self._address}"

    def waits(self) -> None:
        end = time.monotonic() + START_S
        while READY not in self._log.read_text():
            assert self.process.poll() is None and time.monotonic() < end, self._log.read_text()
            time.sleep(0.05)

    def runs_python(self) -> str:
        code = block(self._repository, "python").replace(NAMED, self._address)
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=START_S, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def reader(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    reading = Reader(repository, tmp_path_factory.mktemp("reader") / "serve.log")
    try:
        reading.waits()
        yield reading
    finally:
        reading.process.terminate()
        try:
            reading.process.wait(20)
        finally:
            reading.process.kill()
            reading.process.wait()


def test_the_first_call(reader: Reader) -> None:
    printed = reader.runs_python()
    body = {"model": "python", "prompt": "def parse_args(argv):", "max_tokens": 48, "temperature": 0}
    again = httpx.post(f"{reader.url}/v1/completions", json={**body, "speculation": {}}, timeout=30).json()
    choice = again["choices"][0]
    assert printed.startswith(choice["text"] + "\n") and "'num_rounds': " in printed
    did = choice["speculation"]
    assert sum(did["num_rounds_by_mode"].values()) == did["num_rounds"] > 0  # whether it drafts is the controller's


@pytest.mark.parametrize(("name", "options"), [
    ("light", {}),
    ("dark", {"color_scheme": "dark"}),
    ("phone", {"viewport": PHONE, "is_mobile": True}),
])  # fmt: skip
async def test_the_page_of_the_embedded_pair(
    reader: Reader, browser: Any, pictures: Path, name: str, options: dict[str, Any]
) -> None:
    seen = await visit(browser, reader.url, **options)
    await seen.generate(prompt='def parse_args(argv):\n    """', max_tokens="64", mode="chains", k="4")
    assert not await seen.text("#failure") and not seen.complaints
    assert await seen.count("#text .accepted") > 0 and await seen.modes() == ["chains, 4"]
    assert re.search(r"\d+ after the prompt's, [\d.]+ ms each", await seen.text("#scale"))
    assert "position 1" in await seen.text("#positions") and float((await seen.text("#gain")).split()[0]) > 0
    await seen.page.screenshot(path=pictures / f"embedded-pair-{name}.png", full_page=True)
    await seen.page.close()


def test_ctrl_c_ends_it(reader: Reader) -> None:
    reader.process.send_signal(signal.SIGINT)
    assert reader.process.wait(20) == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{reader.url}/health")
