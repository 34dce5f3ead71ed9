"""Clients that never read, or go without a word: each costs a connection and bounded buffers for a bounded time, and
nobody else's answer."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from typing import Any

import grpc.aio
import pytest
from support.fakes import ToyTarget, target_info, until
from support.gateways import PROMPT, gateway, over_grpc, toy_tokenizer

from outrider.gateway.engine import EngineConfig, GenerationEngine
from outrider.gateway.http.protocol import HttpOptions
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
