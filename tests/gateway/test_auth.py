"""Who is served with a file of tokens, over gRPC and HTTP, and what each caller's requests become."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc.aio
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from openai import AsyncOpenAI, AuthenticationError
from support.fakes import ToyDraft, ToyTarget
from support.gateways import PROMPT, toy_tokenizer

from outrider.client import Client, SyncClient
from outrider.gateway import boot
from outrider.gateway.auth import CALLER, OPEN_PATHS, Caller, Tokens
from outrider.gateway.engine import EngineConfig, GenerationEngine
from outrider.gateway.http.server import HttpServer, build_app
from outrider.gateway.metrics import GatewayMetrics
from outrider.gateway.servicer import SERVICE_NAME, GenerationServicer
from outrider.gateway.settings import GatewaySettings
from outrider.rpc.channel import connect
from outrider.rpc.errors import FailedPrecondition, Unauthenticated
from outrider.rpc.interceptors import Gate
from outrider.rpc.messages import MAX_NAME_CHARS
from outrider.rpc.server import build_server
from outrider.rpc.words.request import GenerationRequest

ALICE, BATCH, BOB = "alice-has-this-token", "batch-has-this-token", "bob-has-this-token"
FILE = f"""\
alice: {ALICE}
batch:
  token: {BATCH}
  priority: 5
  salt: alice
bob: {{token: {BOB}, priority: -3}}
"""
ASK: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 2}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "tokens.yaml"
    file.write_text(FILE)
    return file


@dataclass
class Guarded:
    """One gateway whose callers have tokens."""

    address: str
    url: str
    target: ToyTarget

    @property
    def salts(self) -> list[str]:
        return [message.salt for message in self.target.opens]

    async def complete(self, token: str, **further: Any) -> Any:
        """By OpenAI's client."""
        async with AsyncOpenAI(base_url=f"{self.url}/v1", api_key=token, max_retries=0, timeout=20) as client:
            name = (await client.models.list()).data[0].id
            return await client.completions.create(model=name, **ASK, extra_body=further)


@asynccontextmanager
async def guarded(path: Path) -> AsyncIterator[Guarded]:
    tokens, target = Tokens(path), ToyTarget()
    engine = GenerationEngine(toy_tokenizer(), target, ToyDraft(), EngineConfig())
    servicer = GenerationServicer(engine)
    gates = [Gate(tokens.check_call)]
    server = build_server("127.0.0.1:0", [SERVICE_NAME], servicer.register, enable_reflection=True, interceptors=gates)
    http = HttpServer(engine, "127.0.0.1:0", grace_s=1, tokens=tokens)
    await server.start()
    await http.start()
    try:
        yield Guarded(server.address, f"http://{http.address}", target)
    finally:
        await http.stop(0)
        await server.stop(0)


async def test_a_token_is_asked_for_over_grpc(path: Path) -> None:
    async with guarded(path) as gateway:
        reasons = {"": "NO_TOKEN", "nobody-has-this-token": "UNKNOWN_TOKEN", ALICE[:-1]: "UNKNOWN_TOKEN"}
        for token, reason in reasons.items():
            async with Client(gateway.address, token=token) as client:
                for answer in (client.info(), anext(client.generate(token_ids=PROMPT))):
                    with pytest.raises(Unauthenticated) as error:
                        await answer
                    assert error.value.reason == reason
                    assert not token or token not in error.value.message
        assert not gateway.target.opens
        async with Client(gateway.address, token=ALICE) as client:
            assert (await client.info()).target.name
            assert [part async for part in client.generate(token_ids=PROMPT, max_tokens=2)]


async def test_the_blocking_client_has_a_token_too(path: Path) -> None:
    def ask(address: str) -> int:
        with SyncClient(address, token=ALICE) as client:
            return len(client.info().target.name) and sum(1 for _ in client.generate(token_ids=PROMPT, max_tokens=2))

    async with guarded(path) as gateway:
        assert await asyncio.to_thread(ask, gateway.address)


async def test_a_caller_s_calls_leave_room_for_others(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of which no request comes, too."""
    monkeypatch.setattr(boot, "STREAMS_BESIDE", 0)
    settings = GatewaySettings(
        target=["127.0.0.1:1"], tokenizer=path.parent, listen="127.0.0.1:0", max_active=2, max_waiting=6
    )
    targets: Any = SimpleNamespace(wait_usable=lambda: asyncio.sleep(0), usable=True)
    engine = GenerationEngine(toy_tokenizer(), ToyTarget(), None, EngineConfig())
    server = boot._new_server(settings, engine, targets, None, Tokens(path), reuse_port=False)
    await server.start()
    try:
        async with connect(server.address) as channel, Client(server.address, token=BOB) as bob:
            open_call = channel.stream_stream(f"/{SERVICE_NAME}/Generate")
            calls = [open_call(metadata=(("authorization", f"Bearer {ALICE}"),)) for _ in range(8)]
            codes = asyncio.as_completed([call.code() for call in calls])
            assert [await code for code in islice(codes, 2)] == [grpc.StatusCode.RESOURCE_EXHAUSTED] * 2
            assert [part async for part in bob.generate(token_ids=PROMPT, max_tokens=2)] and (
                await bob.info()
            ).target.name
            assert sum(call.done() for call in calls) == 2, "one alone may have three quarters of all"
            for call in calls:
                call.cancel()
    finally:
        await server.stop(0)


async def test_over_grpc_health_alone_is_open(path: Path) -> None:
    async with guarded(path) as gateway, connect(gateway.address) as channel:
        request = health_pb2.HealthCheckRequest()
        assert await health_pb2_grpc.HealthStub(channel).Check(request)
        assert await health_pb2_grpc.HealthStub(channel).Watch(request).read()
        reflected = channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await reflected(iter([])).read()
        assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_token_is_asked_for_over_http(path: Path) -> None:
    async with guarded(path) as gateway:
        for token in ("nobody-has-this-token", BOB + "x"):
            with pytest.raises(AuthenticationError) as error:
                await gateway.complete(token)
            assert error.value.body == {
                "message": "the token is not known here",
                "type": "invalid_request_error",
                "param": None,
                "code": "invalid_api_key",
            }
        async with httpx.AsyncClient(base_url=gateway.url) as client:
            answer = await client.post("/v1/completions", json=ASK, headers={"authorization": f"Basic {ALICE}"})
            assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
            answer = await client.post("/v1/completions", json=ASK, headers={"authorization": f"bearer  {ALICE}"})
            assert answer.status_code == 200
        assert len(gateway.target.opens) == 1
        assert (await gateway.complete(ALICE)).choices


async def test_a_token_is_looked_at_before_a_body_comes(path: Path) -> None:
    async with guarded(path) as gateway:
        host, _, port = gateway.url.removeprefix("http://").rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        lines = [
            "POST /v1/completions HTTP/1.1",
            "host: x",
            "content-type: application/json",
            "content-length: 4000000",
        ]
        writer.write("\r\n".join([*lines, "authorization: Bearer nobody-has-this-token", "", ""]).encode())
        assert (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)).startswith(b"HTTP/1.1 401")
        writer.close()


async def test_over_http_the_open_paths_are_these_and_no_others(path: Path) -> None:
    async with guarded(path) as gateway, httpx.AsyncClient(base_url=gateway.url) as client:
        engine: Any = GenerationEngine(toy_tokenizer(), ToyTarget(), None, EngineConfig())
        paths = {getattr(route, "path", "") for route in build_app(engine, series=GatewayMetrics()).routes}
        assert OPEN_PATHS == {"/livez", "/readyz", "/health"} < paths
        for one in paths:
            one = one.replace("{model:path}", "toy")
            answers = [await client.get(one), await client.post(one, json={}), await client.get(f"/v1/..{one}")]
            assert all((answer.status_code == 401) != (one in OPEN_PATHS) for answer in answers[:2]), one
        for one in ("/livez/", "//livez", "/nowhere", "/livez/../v1/models", "/LIVEZ"):
            assert (await client.get(one)).status_code == 401, one


async def test_texts_are_kept_apart_by_the_callers_salts(path: Path) -> None:
    """Two callers whose entry says the same salt share; nobody can name another's."""
    async with guarded(path) as gateway:
        for token, salt in ((ALICE, ""), (BATCH, ""), (BOB, ""), (BOB, "alice"), (ALICE, "own"), (BOB, "own")):
            async with Client(gateway.address, token=token) as client:
                assert [part async for part in client.generate(token_ids=PROMPT, max_tokens=2, salt=salt, priority=9)]
        over_grpc = gateway.salts
        alice, batch, bob, *_ = over_grpc
        assert alice == batch and len(set(over_grpc)) == 5 and all(len(salt) == 64 for salt in over_grpc)
        assert bob not in ("", "bob")
        for token, salt in ((ALICE, ""), (BOB, "alice")):
            await gateway.complete(token, **({"cache_salt": salt} if salt else {}))
        assert gateway.salts[6:] == [over_grpc[0], over_grpc[3]]


async def test_nobody_is_served_before_its_turn(path: Path) -> None:
    asked = ((ALICE, -1, 0), (ALICE, 0, 0), (ALICE, 7, 7), (BATCH, 0, 5), (BATCH, 6, 6), (BOB, -4, -3), (BOB, -2, -2))
    async with guarded(path) as gateway:
        for token, priority, _ in asked:
            async with Client(gateway.address, token=token) as client:
                assert [part async for part in client.generate(token_ids=PROMPT, max_tokens=1, priority=priority)]
            await gateway.complete(token, priority=priority)
        given = [message.priority for message in gateway.target.opens]
        assert given == [granted for _, _, granted in asked for _ in range(2)]


def test_a_callers_requests_share_one_account_whatever_their_salts() -> None:
    callers = [Caller("alice", "research", 0), Caller("bob", "research", 0)]
    asked = [GenerationRequest(text="x", salt=salt, peer=peer) for salt, peer in (("", "a"), ("b", "a"), ("c", "b"))]
    accounts = [{caller.own(request).account for request in asked} for caller in callers]
    assert [len(one) for one in accounts] == [1, 1] and not accounts[0] & accounts[1]


def test_what_is_no_salt_and_no_priority_is_left_to_the_validator() -> None:
    caller = Caller("alice", "alice", 0)
    for salt in (7, None, ["x"], "x" * (MAX_NAME_CHARS + 1)):
        request = GenerationRequest(text="x", salt=salt, priority=True)  # type: ignore[arg-type]
        assert caller.own(request) == replace(request, caller="alice")
    assert CALLER.get() is None


def test_the_file_is_read_again(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokens = Tokens(path)
    assert tokens.caller_of(f"Bearer {ALICE}") == Caller("alice", "alice", 0)
    path.write_text(FILE.replace(ALICE, "alice-has-another-token"))
    with pytest.raises(Unauthenticated):
        tokens.caller_of(f"Bearer {ALICE}")
    assert tokens.caller_of("Bearer alice-has-another-token").name == "alice"
    path.write_text("alice: [")
    with caplog.at_level(logging.ERROR):
        assert tokens.caller_of(f"Bearer {BATCH}") == Caller("batch", "alice", 5)
    assert "what was read before holds" in caplog.text
    path.unlink()
    assert tokens.caller_of(f"Bearer {BOB}").priority == -3


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("alice: short", "alice.token: is shorter than 16 characters; allowed: "),
        ("alice: has a blank, and others", "alice.token: has other characters than visible ones of ASCII; allowed: "),
        ("alice: {priority: 1}", "alice.token: is missing; allowed: "),
        (
            f"alice: {{token: {ALICE}, limit: 3}}",
            "alice.limit: is not known; known are token, priority, ",
        ),
        (f"alice: {{token: {ALICE}, priority: much}}", "alice.priority: "),
        (f"alice: {ALICE}\nbob: {ALICE}", "two names have the same token"),
        (f"- {ALICE}", "the file: is no mapping; allowed: "),
        ("alice: 123456", "alice: is neither a token nor a mapping with one; allowed: "),
        ("", "the file: is no mapping; allowed: "),
        ("{}", "the file: has no callers: nobody could ask; allowed: "),
        ("alice: [", "is no YAML; allowed: "),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(path: Path, text: str, problem: str) -> None:
    path.write_text(text)
    with pytest.raises(FailedPrecondition) as error:
        Tokens(path)
    assert error.value.message.startswith(f"{path}: {problem}") and ALICE not in error.value.message
    assert "`alice: TOKEN`" in error.value.message or "two names" in problem


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FailedPrecondition, match=r"none\.yaml: cannot be read: No such file or directory$"):
        Tokens(tmp_path / "none.yaml")
