"""The gateway's process: it waits for its target, refuses what is no pair, and drains."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import pytest
from gateway.toys import DraftServicer, TargetServicer, ToyDraft, ToyTarget, draft_info, expected, serving, target_info
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tokenizer_factory import train_byte_level

from outrider.client import Client
from outrider.gateway.__main__ import GatewaySettings, main
from outrider.gateway.servicer import SERVICE_NAME
from outrider.gateway.text.tokenizer import Tokenizer
from outrider.rpc.errors import ResourceExhausted
from outrider.rpc.settings import SettingsError, load_settings

PROMPT = (11, 12, 13)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    train_byte_level().save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@asynccontextmanager
async def running(folder: Path, *arguments: str) -> AsyncIterator[Process]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "outrider.gateway", "--tokenizer", str(folder), "--listen", "127.0.0.1:0", *arguments),
        stdout=PIPE, stderr=PIPE, env=environment,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def address_of(process: Process) -> str:
    assert process.stdout is not None
    line = (await asyncio.wait_for(process.stdout.readline(), 20)).decode()
    assert "listening on" in line
    return line.split()[-1]


async def health(address: str, service: str = SERVICE_NAME) -> int:
    async with grpc.aio.insecure_channel(address) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))
        return int(answer.status)


async def until_serving(address: str) -> None:
    async with asyncio.timeout(15):
        while await health(address) != health_pb2.HealthCheckResponse.SERVING:  # noqa: ASYNC110 (another process's)
            await asyncio.sleep(0.05)


async def test_waits_for_its_target_serves_and_drains(folder: Path) -> None:
    async with serving(TargetServicer(ToyTarget())) as server:
        target_address = server.address
    flags = ("--drain-delay-s", "0.3", "--max-request-bytes", "2048")
    name = f"dns:///localhost:{target_address.rpartition(':')[2]}"
    async with running(folder, "--target", name, "--draft", "127.0.0.1:1", *flags) as process:
        address = await address_of(process)
        assert await health(address) == health_pb2.HealthCheckResponse.NOT_SERVING
        assert await health(address, "") == health_pb2.HealthCheckResponse.SERVING, "it is alive without a target"
        async with serving(TargetServicer(ToyTarget(step_s=0.01)), target_address), Client(address) as client:
            await until_serving(address)
            with pytest.raises(ResourceExhausted, match="larger than max"):
                _ = [part async for part in client.generate("x" * 2048)]
            parts = []
            async for part in client.generate(token_ids=PROMPT, temperature=0.0, max_tokens=30):
                parts.append(part)
                if len(parts) == 1:
                    process.send_signal(signal.SIGTERM)
                    while await health(address) == health_pb2.HealthCheckResponse.SERVING:  # noqa: ASYNC110
                        await asyncio.sleep(0.01)
                    assert await health(address, "") == health_pb2.HealthCheckResponse.SERVING
                    late = [part async for part in client.generate(token_ids=PROMPT, temperature=0.0, max_tokens=2)]
                    assert [token for part in late for token in part.token_ids] == expected(PROMPT, 2)
            assert [token for part in parts for token in part.token_ids] == expected(PROMPT, 30)
            assert await asyncio.wait_for(process.wait(), 10) == 0
        assert process.stderr is not None
        log = (await process.stderr.read()).decode()
        assert log.count("decoding goes on without a draft") == 1


@pytest.mark.parametrize("wrong", ["draft", "tokenizer"])
async def test_refuses_what_is_no_pair(folder: Path, wrong: str) -> None:
    fingerprint = Tokenizer.load(folder).fingerprint
    info = target_info(tokenizer_fingerprint="other" if wrong == "tokenizer" else fingerprint)
    other = draft_info(tokenizer_fingerprint="another" if wrong == "draft" else fingerprint)
    async with (
        serving(TargetServicer(ToyTarget(info=info))) as target,
        serving(DraftServicer(ToyDraft(info=other))) as draft,
        running(folder, "--target", target.address, "--draft", draft.address) as process,
    ):
        assert await asyncio.wait_for(process.wait(), 20) == 2
        assert process.stderr is not None
        last = (await process.stderr.read()).decode().splitlines()[-1]
        assert "outrider gateway: error:" in last and "toy" in last
        assert ("toy-draft" if wrong == "draft" else folder.name) in last


async def test_starts_in_the_middle_of_a_change_of_the_model(folder: Path) -> None:
    fitting = target_info(tokenizer_fingerprint=Tokenizer.load(folder).fingerprint)
    other = target_info(name="other", digest="d9", tokenizer_fingerprint="other")
    async with (
        serving(TargetServicer(ToyTarget(info=other))) as one,
        serving(TargetServicer(ToyTarget(info=fitting))) as two,
        running(folder, "--target", f"{one.address},{two.address}") as process,
    ):
        address = await address_of(process)
        await until_serving(address)
        async with Client(address) as client:
            assert (await client.info()).target.name == "toy"


@pytest.mark.parametrize("flag", ["target", "draft"])
def test_an_address_that_is_none_is_refused(tmp_path: Path, flag: str) -> None:
    given = {"target": ["a:1"], "tokenizer": str(tmp_path)} | {flag: ["b:2,ipv4:nobody"]}
    with pytest.raises(SettingsError, match=f"--{flag}: is 'ipv4:nobody'; allowed: host:port"):
        load_settings(GatewaySettings, given, environ={})


def test_settings(tmp_path: Path) -> None:
    settings = load_settings(GatewaySettings, {"target": ["a:1", "b:2"], "tokenizer": str(tmp_path)}, environ={})
    assert settings.listen == "127.0.0.1:50050" and settings.num_draft_tokens == 4 and settings.draft == []
    assert (settings.draft_patience_ms, settings.max_active, settings.max_waiting) == (500, 64, 256)
    assert (settings.max_admitted_tokens, settings.max_request_bytes) == (None, 4 << 20)
    assert (settings.drain_delay_s, settings.sse_keep_alive_s, settings.trust_traceparent) == (0, 15, False)


def test_bad_command_lines_end_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--target", "a:1"])
    assert "gateway.tokenizer is required" in capsys.readouterr().err
    assert main(["--target", "a:1", "--tokenizer", str(tmp_path / "none")]) == 2
    assert "is not a folder" in capsys.readouterr().err
