"""Several gateway processes behind one address: what the supervisor makes of children that end, with scripts for
children; and the real ones over gRPC and HTTP, of which one is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx
import pytest
from support.environment import START_S
from support.fakes import TargetServicer, ToyTarget, expected, serving, target_info, until
from support.gateways import HTTP, METRICS, PROMPT, announced, running, save_toy_tokenizer, until_serving
from support.metrics import samples_of
from support.services import children_of

from outrider.client import Client
from outrider.gateway import supervisor as module
from outrider.gateway.processes import GatewayProcess
from outrider.gateway.settings import GatewaySettings
from outrider.gateway.supervisor import Supervisor, own_folder

SERVES = """
import time
print("gateway listening on here", flush=True)
while True:
    print("ready", flush=True)
    time.sleep(0.02)
"""
RUNS_A_SCRIPT = "import sys, pathlib; exec(pathlib.Path(sys.argv[2], sys.argv[1]).read_text())"


class Scripted:
    """A supervisor whose children do what a script of each says; every line that one runs is noted in a file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        settings = GatewaySettings(target=["a:1"], tokenizer=folder, listen="127.0.0.1:9", processes=2, grace_s=1)
        self.supervisor = Supervisor(settings, [GatewayProcess(index, folder) for index in range(2)])
        self.write(0, SERVES)
        self.write(1, SERVES)

    def write(self, index: int, script: str) -> None:
        (self.folder / str(index)).write_text(f"open({str(self.lives(index))!r}, 'a').write('x')\n{script}")

    def lives(self, index: int) -> Path:
        return self.folder / f"lives-{index}"

    @property
    def go(self) -> Path:
        """Scripts wait for this file."""
        return self.folder / "go"

    def dies(self, how: str, says: str) -> str:
        """A script that ends like this once it is told to."""
        return (
            f"import os, time\nprint({says!r}, flush=True)\n"
            f"while not os.path.exists({str(self.go)!r}): time.sleep(0.005)\n{how}"
        )

    def num_lives(self, index: int) -> int:
        return len(self.lives(index).read_text()) if self.lives(index).exists() else 0


@pytest.fixture
def scripted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scripted:
    monkeypatch.setattr(module, "COMMAND", (sys.executable, "-S", "-c", RUNS_A_SCRIPT))
    monkeypatch.setattr(module, "MIN_BACKOFF_S", 0.001)
    return Scripted(tmp_path)


def test_folders_of_killed_supervisors_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left, fresh, other = (tmp_path / name for name in ("outrider-gateway-left", "outrider-gateway-new", "another-left"))
    for folder in (left, fresh, other):
        folder.mkdir()
        (folder / "settings.json").write_text("{}")
    for folder in (left, other):
        os.utime(folder, (0, 0))
    with own_folder() as first:
        assert sorted(tmp_path.iterdir()) == sorted((fresh, other, first))
        os.utime(first, (0, 0))
        with own_folder() as second:
            assert first.is_dir() and second != first, "it is held, however old it is"
        assert not second.exists()
    assert sorted(tmp_path.iterdir()) == sorted((fresh, other))


@asynccontextmanager
async def listening(scripted: Scripted, capsys: pytest.CaptureFixture[str]) -> AsyncIterator[asyncio.Task[int]]:
    """Once all children listen; what it ends with is checked by the test."""
    running = asyncio.create_task(scripted.supervisor.run())
    out = ""
    async with asyncio.timeout(START_S):
        while "gateway listening on 127.0.0.1:9" not in out:
            await asyncio.sleep(0.01)
            out += capsys.readouterr().out
    yield running
    assert running.done()


@pytest.mark.parametrize("status", ["0", "1", "2", "-9"])
async def test_a_child_that_ends_is_started_again(
    scripted: Scripted, status: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever it ended with, once the gateway serves."""
    die = "os.kill(os.getpid(), 9)" if status == "-9" else f"sys.exit({status})"
    scripted.write(1, scripted.dies(die, "gateway listening on x\nready"))
    async with listening(scripted, capsys) as running:
        await until(lambda: scripted.supervisor._served, START_S)
        scripted.go.touch()
        await until(lambda: scripted.num_lives(1) > 2, START_S)
        assert scripted.num_lives(0) == 1
        well = scripted.folder / "well"
        scripted.write(1, f"open({str(well)!r}, 'w').close()\n{SERVES}")
        await until(well.exists, START_S)
        scripted.supervisor.stop()
        assert await running == 0


@pytest.mark.parametrize(("how", "status"), [("sys.exit(2)", 2), ("sys.exit(1)", 1), ("os.kill(os.getpid(), 11)", 1)])
async def test_one_that_cannot_start_ends_all(scripted: Scripted, how: str, status: int) -> None:
    scripted.write(1, f"import os\n{how}")
    assert await asyncio.wait_for(scripted.supervisor.run(), START_S) == status
    assert scripted.num_lives(1) == 1


async def test_one_that_the_system_does_not_start_ends_all(scripted: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COMMAND", ("/no/such/program",))
    assert await asyncio.wait_for(scripted.supervisor.run(), START_S) == 1


async def test_a_refusal_before_anything_was_served_ends_all(
    scripted: Scripted, capsys: pytest.CaptureFixture[str]
) -> None:
    """A gateway learns what its peers are after it listens."""
    for index in range(2):
        scripted.write(index, SERVES.replace('"ready"', '"not ready"'))
    scripted.write(1, scripted.dies("sys.exit(2)", "gateway listening on x"))
    async with listening(scripted, capsys) as running:
        scripted.go.touch()
        assert await asyncio.wait_for(running, START_S) == 2


async def test_a_child_that_hangs_is_killed(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "POLL_S", 0.01)
    scripted.write(1, "import time\nprint('gateway listening on x', flush=True)\ntime.sleep(60)")
    async with listening(scripted, capsys) as running:
        await until(lambda: scripted.num_lives(1) > 1, START_S)
        scripted.supervisor.stop()
        assert await running == 0


async def test_it_is_ready_while_one_child_is(scripted: Scripted, capsys: pytest.CaptureFixture[str]) -> None:
    scripted.write(0, SERVES.replace('"ready"', '"not ready"'))
    health = scripted.supervisor.health
    await health.start()
    async with listening(scripted, capsys) as running:
        await until(lambda: health.ready, START_S)
        scripted.supervisor.stop()
        assert await running == 0 and not health.ready and health.alive
    await health.stop()


async def test_two_processes_behind_one_address(tmp_path: Path) -> None:
    """Over gRPC and HTTP. One is killed: its streams go on at the other, whose streams do not notice, and it comes
    back. What is under way at SIGTERM is served. One answers for both on the addresses of health and metrics."""
    target = ToyTarget(step_s=0.05, info=target_info(max_model_len=4096))
    servicer = TargetServicer(target)
    ports = ("--http", "127.0.0.1:0", "--metrics", "127.0.0.1:0", "--health", f"127.0.0.77:{free_port()}")
    async with (
        serving(servicer) as server,
        running(save_toy_tokenizer(tmp_path), "--target", server.address, "--processes", "2", *ports) as process,
        AsyncExitStack() as stack,
    ):
        scrapes = httpx.AsyncClient(base_url=f"http://{await announced(process, METRICS)}", timeout=60)
        http = await announced(process, HTTP)
        address = await announced(process)
        await stack.enter_async_context(scrapes)
        await until_serving(ports[-1])
        streams: list[asyncio.Task[None]] = []
        received: list[list[int]] = []
        while min(await by_process(scrapes, "num_requests_running")) == 0:
            assert len(streams) < 64, "connections are not shared out"
            client = await stack.enter_async_context(Client(address))
            received.append([])
            streams.append(asyncio.create_task(read(client, LONG, received[-1])))
            await until(lambda: len(servicer.opens) == len(streams), START_S)
        await until(lambda: all(received), START_S)  # so that each is resumed with some output
        victim = (await by_process(scrapes, "num_requests_running"))[0]
        os.kill(min(children_of(process.pid), key=index_of), signal.SIGKILL)
        await until(lambda: sum(bool(opened.output_ids) for opened in servicer.opens) == victim, START_S)
        target.step_s = 0.0
        await asyncio.gather(*streams)
        assert received == [expected(PROMPT, LONG)] * len(streams)
        assert len(servicer.opens) == len(streams) + victim, "a stream of the other process was opened again"

        async with asyncio.timeout(START_S):
            while len(await by_process(scrapes, "num_requests_running")) < 2:  # noqa: ASYNC110 (it comes back)
                await asyncio.sleep(0.05)
        for _ in range(64):  # connections
            async with httpx.AsyncClient(base_url=f"http://{http}", timeout=60) as asking:
                answer = await asking.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 3})
                assert answer.status_code == 200, answer.text
                found = samples_of((await asking.get("/metrics")).text)
            if min(found.get(("generation_tokens_total", (("process", index),)), 0) for index in "01") > 0:
                break
        else:
            raise AssertionError("one process got no connection over HTTP")

        target.step_s = 0.01
        async with Client(address) as client:
            tokens: list[int] = []
            last = asyncio.create_task(read(client, 100, tokens))
            num_opens = len(servicer.opens)
            await until(lambda: len(servicer.opens) > num_opens, START_S)
            process.send_signal(signal.SIGTERM)
            await last
            assert tokens == expected(PROMPT, 100)
        assert await asyncio.wait_for(process.wait(), START_S) == 0


LONG = 400  # tokens: no stream ends before the kill


async def read(client: Client, max_tokens: int, received: list[int]) -> None:
    async for part in client.generate(token_ids=PROMPT, temperature=0.0, max_tokens=max_tokens):
        received.extend(part.token_ids)


async def by_process(scrapes: httpx.AsyncClient, name: str) -> list[float]:
    """What each process that answers says of itself."""
    found = samples_of((await scrapes.get("/metrics")).text)
    return [value for (series, labels), value in sorted(found.items()) if series == name and labels[0][0] == "process"]


def index_of(pid: int) -> str:
    """The number of a process, as its command line says it."""
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")[3]


def free_port() -> int:
    """On an address that nobody else here binds."""
    with socket.create_server(("127.0.0.77", 0)) as found:
        return int(found.getsockname()[1])
