"""Clients that never read, go without a word, or are many: each costs a connection and bounded buffers for a bounded
time, and nobody else's answer."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import grpc.aio
import pytest
from support.fakes import ToyTarget, target_info, until
from support.gateways import PROMPT, gateway, over_grpc, toy_tokenizer
from uvicorn.server import ServerState

from outrider.gateway import servicer
from outrider.gateway.engine import EngineConfig, GenerationEngine
from outrider.gateway.http import hardening, shares
from outrider.gateway.http import server as http_server
from outrider.gateway.http.protocol import HttpOptions
from outrider.gateway.http.slow_clients import StallProtocol
from outrider.gateway.servicer import GenerationServicer
from outrider.v1 import generation_pb2 as pb
from outrider.v1 import generation_pb2_grpc

LONG = 90_000  # tokens: more than all buffers between server and client hold


def post(body: dict[str, Any], length: int | None = None) -> bytes:
    raw = json.dumps(body).encode()
    length = len(raw) if length is None else length
    lines = [
        "POST /v1/completions HTTP/1.1",
        "host: localhost",
        "content-type: application/json",
        f"content-length: {length}",
    ]
    return "\r\n".join([*lines, "", ""]).encode() + raw


async def test_who_goes_in_the_middle_of_its_body_is_no_fault(caplog: pytest.LogCaptureFixture) -> None:
    async with gateway() as served, served.client() as other:
        host, _, port = served.http.address.rpartition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(post({"prompt": PROMPT}, length=100_000))
        await writer.drain()
        assert (await other.get("/livez")).status_code == 200
        writer.close()
        await writer.wait_closed()
        await until(lambda: not served.http._server.server_state.tasks)
        assert not served.target.opens
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_who_reads_slowly_is_no_stall() -> None:
    """The time counts from its last reading, and while it is held back alone."""
    async with gateway(ToyTarget(step_s=0.3), options=HttpOptions(stall_s=0.05)) as served, served.client() as client:
        answer = await client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 3})
        assert answer.status_code == 200


async def test_who_never_reads_is_ended_and_holds_nobody_up() -> None:
    """Its credit is withheld, so what it left unread is bounded; it gives its place to who waits."""
    target = ToyTarget(info=target_info(max_model_len=100_000))
    async with gateway(target, options=HttpOptions(stall_s=0.5), max_active=1) as served, served.client() as other:
        host, _, port = served.http.address.rpartition(":")
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(deaf, (host, int(port)))
            await loop.sock_sendall(deaf, post({"prompt": PROMPT, "max_tokens": LONG, "stream": True}))
            await until(lambda: target.opens)
            waiting = asyncio.create_task(other.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 2}))
            await until(lambda: target.num_closed == 1)
            assert len(target.links[0].sequence.tokens) < LONG
            assert (await waiting).status_code == 200


class Clock:
    """A loop's time and timers, which a test moves on."""

    def __init__(self) -> None:
        self.now, self._timers = 0.0, list[tuple[float, Callable[[], None]]]()

    def time(self) -> float:
        return self.now

    def call_later(self, delay: float, callback: Callable[[], None]) -> Any:
        timer = (self.now + delay, callback)
        self._timers.append(timer)
        return SimpleNamespace(cancel=lambda: self._timers.remove(timer) if timer in self._timers else None)

    def advance(self, seconds: float) -> None:
        self.now += seconds
        for timer in [timer for timer in self._timers if timer[0] <= self.now]:
            self._timers.remove(timer)
            timer[1]()


@pytest.mark.parametrize("answers", [1, 20])
def test_who_reads_a_little_now_and_then_is_ended_as_well(answers: int) -> None:
    """Never silent for long, and never done: what an answer is held back is bounded in sum, or it would keep its place.
    The next answer on its connection begins anew."""
    ended, clock, protocol = list[float](), Clock(), StallProtocol.__new__(StallProtocol)
    flow = SimpleNamespace(pause_writing=lambda: None, resume_writing=lambda: None)
    transport = SimpleNamespace(abort=lambda: ended.append(clock.now), is_closing=lambda: True)
    for name, value in {"loop": clock, "flow": flow, "transport": transport, "server_state": ServerState()}.items():
        setattr(protocol, name, value)
    for number in range(20):
        protocol.pause_writing()
        clock.advance(59)
        if ended:
            break
        protocol.resume_writing()
        clock.advance(1000)  # it reads as fast as it is sent
        if number % (20 // answers) == 0 and answers > 1:
            protocol.on_response_complete()
    assert ended == ([] if answers > 1 else [5 * 1059 + 59])
    protocol.pause_writing()
    clock.advance(60)
    assert len(ended) == 2 - (answers > 1), "silence is one, too"


async def test_who_reads_a_little_now_and_then_over_grpc_is_ended_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow:
        """A call's context that is held up at each response."""

        num_written = 0
        peer, time_remaining, invocation_metadata = (lambda self: "ipv4:10.0.0.1:5"), lambda self: None, lambda self: ()

        async def write(self, response: Any) -> None:
            self.num_written += 1
            await asyncio.sleep(0.5)

    monkeypatch.setattr(servicer, "MOST_STALLS", 2)
    target, context = ToyTarget(), Slow()
    engine = GenerationEngine(toy_tokenizer(), target, config=EngineConfig(num_draft_tokens=0))
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT))
    request.sampling.max_tokens = 200
    with pytest.raises(TimeoutError):
        await GenerationServicer(engine, stall_s=2.0).Generate(request, context)
    assert 3 < context.num_written <= 8 and target.num_closed == 1


async def test_who_never_reads_over_grpc_is_ended_too() -> None:
    target = ToyTarget(info=target_info(max_model_len=100_000))
    engine = GenerationEngine(toy_tokenizer(), target, config=EngineConfig(num_draft_tokens=0, max_active=1))
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT))
    request.sampling.max_tokens, request.sampling.logprobs = LONG, 1
    async with (
        over_grpc(GenerationServicer(engine, stall_s=0.5)) as address,
        grpc.aio.insecure_channel(address, options=[("grpc.http2.bdp_probe", 0)]) as channel,  # its window stays small
    ):
        stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
        deaf = stub.Generate(request)
        await until(lambda: target.opens)
        await until(lambda: target.num_closed == 1)
        assert len(target.links[0].sequence.tokens) < LONG and engine.admission.num_active == 0
        request.sampling.max_tokens = 2
        assert len([part async for part in stub.Generate(request)])
        deaf.cancel()


class Crowd:
    """Connections of one host, open until the end."""

    def __init__(self, address: str, host: str) -> None:
        self._address, self._host = address.rpartition(":"), host
        self.writers: list[asyncio.StreamWriter] = []

    async def open(self, sent: bytes = b"") -> asyncio.StreamReader:
        name, _, port = self._address
        reader, writer = await asyncio.open_connection(name, int(port), local_addr=(self._host, 0))
        writer.write(sent)
        self.writers.append(writer)
        return reader

    async def go(self) -> None:
        for writer in self.writers:
            writer.close()
        await asyncio.gather(*(writer.wait_closed() for writer in self.writers), return_exceptions=True)
        self.writers.clear()


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> str:
    """A host that is not this machine, though it is."""
    monkeypatch.setattr(shares, "is_local", lambda who: who in ("127.0.0.1", shares.LOCAL))
    return "127.0.0.9"


async def test_no_client_s_connections_keep_others_out(others: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter is one's: more are told when to come back, and end. Where there is no room at all, those that are
    connected go on."""
    monkeypatch.setattr(http_server, "CONNECTIONS_BESIDE", 8)
    monkeypatch.setattr(hardening, "HEAD_S", 60.0)
    async with gateway(max_active=2, max_waiting=2) as served, served.client() as client:
        crowd, own = Crowd(served.http.address, others), Crowd(served.http.address, "127.0.0.1")
        connections = served.http._server.server_state.connections
        for _ in range(3):
            await crowd.open()
        for _ in range(12):
            said = await asyncio.wait_for((await crowd.open()).read(), 20)
            assert said.startswith(b"HTTP/1.1 429") and b"retry-after: 1" in said
            assert b"at most 12 in all, 3 of one client" in said and said.endswith(b"}")
        assert (await client.get("/readyz")).status_code == 200
        assert (await client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 2})).status_code == 200
        for _ in range(12 - 3 - 1):
            await own.open()
        await until(lambda: len(connections) == 12)
        assert (await asyncio.wait_for((await own.open()).read(), 20)).startswith(b"HTTP/1.1 429")
        assert (await client.get("/readyz")).status_code == 200, "it was connected before"
        await crowd.go()
        await until(lambda: len(connections) == 12 - 3)
        reader = await crowd.open(b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)).startswith(b"HTTP/1.1 200")
        await crowd.go()
        await own.go()


async def test_no_client_s_bodies_take_all_memory(others: str) -> None:
    """A quarter is one's, and all together are bounded; what has ended counts no more."""
    async with gateway(options=HttpOptions(max_body_bytes=1000)) as served, served.client() as client:
        crowd, own = Crowd(served.http.address, others), Crowd(served.http.address, "127.0.0.1")
        unfinished, bodies = post({"prompt": "x" * 950}, length=1000), served.http._server.config.app.state.bodies  # type: ignore[union-attr]
        size = len(unfinished.partition(b"\r\n\r\n")[2])
        for _ in range(16_000 // size):
            await crowd.open(unfinished)
        await until(lambda: bodies._held == 16_000 // size * size)
        refused = await asyncio.wait_for((await crowd.open(unfinished)).readuntil(b"}"), 20)
        assert refused.startswith(b"HTTP/1.1 429") and b"retry-after: 1" in refused
        assert b"at most 64000 in all, 16000 of one client" in refused
        for _ in range((64_000 - bodies._held) // size):
            await own.open(unfinished)
        await until(lambda: bodies._held > 64_000 - size)
        assert (await client.post("/v1/completions", json={"prompt": "x" * 950})).status_code == 429
        await crowd.go()
        await until(lambda: others not in bodies._of)
        assert (await client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 2})).status_code == 200
        await own.go()
        await until(lambda: not bodies._held and not bodies._of)
