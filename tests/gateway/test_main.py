"""The gateway's process, with --http and without it: it waits for its target, refuses what is no pair, and drains."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
from pathlib import Path

import httpx
import pytest
from support.environment import START_S
from support.fakes import DraftServicer, TargetServicer, ToyDraft, ToyTarget, draft_info, expected, serving, target_info
from support.gateways import (
    HTTP,
    METRICS,
    NOT_SERVING,
    PROMPT,
    SERVING,
    announced,
    gateway,
    health,
    running,
    save_toy_tokenizer,
    started,
    stream_events,
    until_serving,
)
from support.metrics import samples_of

from outrider.client import Client
from outrider.gateway.__main__ import main
from outrider.gateway.servicer import SERVICE_NAME
from outrider.gateway.settings import GatewaySettings
from outrider.gateway.text.tokenizer import Tokenizer
from outrider.rpc.errors import ResourceExhausted
from outrider.rpc.settings import SettingsError, load_settings

PROMPT_IDS = tuple(PROMPT)
BODY = {"prompt": PROMPT, "temperature": 0, "return_token_ids": True}
LIBRARIES = ("starlette", "uvicorn", "prometheus_client")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_toy_tokenizer(tmp_path)


async def test_waits_for_its_target_serves_and_drains(folder: Path) -> None:
    """Over gRPC and HTTP at once: what is under way at SIGTERM, and what comes within the drain delay, is served."""
    async with serving(TargetServicer(ToyTarget())) as server:
        target_address = server.address
    flags = ("--drain-delay-s", "5", "--max-request-bytes", "2048", "--http", "127.0.0.1:0")
    name = f"dns:///localhost:{target_address.rpartition(':')[2]}"
    async with running(folder, "--target", name, "--draft", "127.0.0.1:1", *flags) as process:
        url = f"http://{await announced(process, HTTP)}"
        address = await announced(process)
        async with Client(address) as client, httpx.AsyncClient(base_url=url, timeout=60) as http:
            assert [await health(address, service) for service in (SERVICE_NAME, "")] == [NOT_SERVING, SERVING]
            assert [(await http.get(path)).status_code for path in ("/livez", "/readyz", "/health")] == [200, 503, 503]
            early = await http.get("/v1/models")
            assert (early.status_code, early.json()["error"]["code"]) == (503, "no_target")
            async with serving(TargetServicer(ToyTarget(step_s=0.01)), target_address):
                await until_serving(address)
                with pytest.raises(ResourceExhausted, match="larger than max"):
                    _ = [part async for part in client.generate("x" * 2048)]
                streaming = asyncio.create_task(streamed(http, 60))
                parts = []
                async for part in client.generate(token_ids=PROMPT_IDS, temperature=0.0, max_tokens=60):
                    parts.append(part)
                    if len(parts) == 5:
                        process.send_signal(signal.SIGTERM)
                        while await health(address) == SERVING:  # noqa: ASYNC110 (another process)
                            await asyncio.sleep(0.01)
                        assert await health(address, "") == SERVING
                        statuses = [(await http.get(path)).status_code for path in ("/livez", "/readyz")]
                        assert statuses == [200, 503]
                        late = client.generate(token_ids=PROMPT_IDS, temperature=0.0, max_tokens=2)
                        assert [token async for part in late for token in part.token_ids] == expected(PROMPT_IDS, 2)
                        assert (await http.post("/v1/completions", json={**BODY, "max_tokens": 2})).status_code == 200
                assert [token for part in parts for token in part.token_ids] == expected(PROMPT_IDS, 60)
                assert await streaming == expected(PROMPT_IDS, 60), "the stream was cut short"
                with pytest.raises(httpx.TransportError):  # refused, or closed on a connection kept from before
                    while True:
                        await http.get("/health")
                assert await asyncio.wait_for(process.wait(), START_S) == 0
        assert process.stderr is not None
        log = (await process.stderr.read()).decode()
        assert log.count("decoding goes on without a draft") == 1


async def streamed(http: httpx.AsyncClient, max_tokens: int) -> list[int]:
    """The ids of a streamed answer."""
    events = await stream_events(http, "/v1/completions", {**BODY, "max_tokens": max_tokens, "stream": True})
    return [token for event in events if event != "[DONE]" for token in json.loads(event)["choices"][0]["token_ids"]]


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
        assert await asyncio.wait_for(process.wait(), START_S) == 2
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
        address = await announced(process)
        await until_serving(address)
        async with Client(address) as client:
            assert (await client.info()).target.name == "toy"


def test_origins_are_sites(tmp_path: Path) -> None:
    given = {"target": ["a:1"], "tokenizer": str(tmp_path)}
    assert load_settings(GatewaySettings, given, environ={}).allowed_origins == []
    two = given | {"allowed_origins": ["https://a.example, http://[::1]:8080"]}
    assert load_settings(GatewaySettings, two, environ={}).allowed_origins == ["https://a.example", "http://[::1]:8080"]
    for wrong in ("a.example", "https://a.example/", "null", "https://*.example", ""):
        with pytest.raises(SettingsError, match=re.escape(f"is {wrong!r}; allowed: scheme and host")):
            load_settings(GatewaySettings, given | {"allowed_origins": [wrong]}, environ={})


@pytest.mark.parametrize("flag", ["target", "draft"])
def test_an_address_that_is_none_is_refused(tmp_path: Path, flag: str) -> None:
    given = {"target": ["a:1"], "tokenizer": str(tmp_path)} | {flag: ["b:2,ipv4:nobody"]}
    with pytest.raises(SettingsError, match=f"--{flag}: is 'ipv4:nobody'; allowed: host:port"):
        load_settings(GatewaySettings, given, environ={})


def test_settings(tmp_path: Path) -> None:
    settings = load_settings(GatewaySettings, {"target": ["a:1", "b:2"], "tokenizer": str(tmp_path)}, environ={})
    assert settings.listen == "127.0.0.1:50050" and settings.num_draft_tokens == 4 and settings.draft == []
    assert (settings.draft_patience_ms, settings.max_active, settings.max_waiting) == (500, 64, 960)
    assert (settings.max_admitted_tokens, settings.max_request_bytes) == (None, 4 << 20)
    assert (settings.drain_delay_s, settings.sse_keep_alive_s, settings.trust_traceparent) == (0, 15, False)


def test_processes_share_a_port_and_no_path(tmp_path: Path) -> None:
    given = {"target": ["a:1"], "tokenizer": str(tmp_path), "listen": "unix:/here"}
    assert load_settings(GatewaySettings, given, environ={}).processes == 1
    with pytest.raises(SettingsError, match="processes: 2 cannot share unix:/here; allowed: HOST:PORT"):
        load_settings(GatewaySettings, given, environ={"OUTRIDER_GATEWAY__PROCESSES": "2"})


def test_bad_command_lines_end_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--target", "a:1"])
    assert "gateway.tokenizer is required" in capsys.readouterr().err
    assert main(["--target", "a:1", "--tokenizer", str(tmp_path / "none")]) == 2
    assert "is not a folder" in capsys.readouterr().err


async def test_nothing_of_http_is_imported_without_it(folder: Path) -> None:
    gateway_of = ("-m", "outrider.gateway", "--target", "127.0.0.1:1", "--tokenizer", str(folder))
    for http, imported in (((), False), (("--http", "127.0.0.1:0"), True)):
        async with started("-X", "importtime", *gateway_of, *http) as process:
            reading = asyncio.create_task(process.stderr.read())  # type: ignore[union-attr]
            await announced(process)
            process.kill()
            log = (await reading).decode()
        assert "outrider.gateway.engine" in log
        assert [library in log for library in LIBRARIES] == [imported] * len(LIBRARIES)


async def test_metrics_on_a_port_of_their_own(folder: Path) -> None:
    """Without the HTTP interface, and under vLLM's names where they are asked for."""
    async with serving(TargetServicer(ToyTarget())) as server:
        flags = ("--metrics", "127.0.0.1:0", "--vllm-metrics", "--gen-ai-metrics", "--target", server.address)
        async with running(folder, *flags) as process:
            url = f"http://{await announced(process, METRICS)}"
            address = await announced(process)
            await until_serving(address)
            async with Client(address) as client, httpx.AsyncClient(base_url=url, timeout=60) as http:
                parts = [part async for part in client.generate(token_ids=PROMPT_IDS, temperature=0.0, max_tokens=9)]
                assert [token for part in parts for token in part.token_ids] == expected(PROMPT_IDS, 9)
                found = samples_of((await http.get("/metrics")).text)
                assert [(await http.get(path)).status_code for path in ("/livez", "/readyz")] == [200, 200]
    assert found["generation_tokens_total", ()] == 9
    assert found["replica_up", (("address", server.address), ("role", "target"))] == 1
    for way in ("sent", "received"):
        assert found["wire_bytes_total", (("direction", way), ("role", "target"))] > 9
    assert found["vllm:num_requests_waiting", (("engine", "0"), ("model_name", "toy"))] == 0
    assert [value for (name, _), value in found.items() if name == "gen_ai_server_request_duration_seconds_count"] == [
        1
    ]


async def test_signals_stay_the_gateway_s() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    async with gateway():
        assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


@pytest.mark.parametrize("processes", ["1", "2"])
@pytest.mark.parametrize("flag", ["--listen", "--health", "--metrics", "--http"])
def test_an_address_in_use_is_refused_before_anything_is_loaded(
    tmp_path: Path, flag: str, processes: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        given = ["--target", "a:1", "--tokenizer", str(tmp_path / "none"), "--listen", "127.0.0.1:0"]
        assert main([*given, "--processes", processes, flag, address]) == 2
    assert f"cannot listen on {address}" in capsys.readouterr().err
