"""Constraints through draft, two targets and gateway as processes: JSON is what its schema says, the same for every k,
and a target that is killed in its middle changes no byte of it. A bad constraint ends its own request alone."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import httpx
import pytest
from support.environment import START_S
from support.gateways import METRICS
from support.metrics import Samples, samples_of
from support.models import ascii_backend, save_tiny

from outrider.cli.local_services import Service, Services
from outrider.rpc.channel import connect
from outrider.v1 import generation_pb2 as pb
from outrider.v1 import generation_pb2_grpc

VOCAB, END = 97, 2
NAMES = ["ada", "grace", "barbara", "katherine"]
SCHEMA = json.dumps(
    {"type": "array", "minItems": 8, "maxItems": 8, "items": {"enum": NAMES}},
)


# Long, and with little in it that is forced: its stream is still under way when a target is looked for.
LONG = json.dumps(
    {
        "type": "array",
        "minItems": 30,
        "maxItems": 30,
        "items": {"type": "string", "pattern": "^[a-z]{8}$"},
        "x-guidance": {"whitespace_flexible": False},
    },
)


@dataclass(frozen=True)
class Deployment:
    """Two targets, and where the gateway before them listens."""

    targets: list[Service]
    gateway: str
    metrics: str

    def signal_targets(self, number: signal.Signals, but: Service | None = None) -> None:
        for target in self.targets:
            if target is not but:
                os.killpg(target.pid, number)

    async def samples(self) -> Samples:
        """What the gateway counts."""
        async with httpx.AsyncClient(timeout=60) as client:
            return samples_of((await client.get(f"http://{self.metrics}/metrics")).text)

    async def holder(self) -> Service:
        """The one target that has a sequence."""
        samples = await self.samples()
        where = ("role", "target")
        (found,) = [
            target for target in self.targets if samples["replica_sequences", (("address", target.address), where)] == 1
        ]
        return found


@pytest.fixture(scope="module")
def services() -> Iterator[Services]:
    with Services() as running:
        yield running


@pytest.fixture(scope="module")
def deployment(services: Services, tmp_path_factory: pytest.TempPathFactory) -> Deployment:
    """Two targets, and a gateway before them and a draft."""
    target = save_tiny(tmp_path_factory.mktemp("target"), seed=1, vocab_size=VOCAB, eos_token_id=END)
    draft = save_tiny(tmp_path_factory.mktemp("draft"), seed=1, vocab_size=VOCAB, eos_token_id=END, num_hidden_layers=1)
    for folder in (target, draft):
        ascii_backend(VOCAB, END).save(str(folder / "tokenizer.json"))
    common = ["--listen", "127.0.0.1:0", "--threads", "1"]
    invariant = ["target", "--model", str(target), "--batch-invariant", *common]
    running = [services.start(name, invariant) for name in ("target", "target-2")]
    drafting = services.start("draft", ["draft", "--model", str(draft), *common])
    for service in (*running, drafting):
        services.wait(service, START_S)
    peers = ["--target", ",".join(service.address for service in running), "--draft", drafting.address]
    flags = ["--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0", "--tokenizer", str(target)]
    gateway = services.start("gateway", ["gateway", *flags, *peers])
    services.wait(gateway, START_S)
    services.wait_ready(gateway, START_S)
    return Deployment(running, gateway.address, gateway.find(re.compile(METRICS)))


@pytest.fixture
async def stub(deployment: Deployment) -> AsyncIterator[Any]:
    channel = connect(deployment.gateway)
    yield generation_pb2_grpc.GenerationServiceStub(channel)
    await channel.close()


def asked(k: int = 4, acceptance: Any = 0, schema: str = SCHEMA, **sampling: Any) -> pb.GenerateRequest:
    request = pb.GenerateRequest(text="names: ", sampling={"max_tokens": 200, "temperature": 0.0, **sampling})
    request.sampling.structured_output.json_schema = schema
    request.speculation.enabled, request.speculation.acceptance = k > 0, acceptance
    if k:
        request.speculation.num_draft_tokens = k
    return request


async def text_of(stub: Any, request: pb.GenerateRequest) -> str:
    return "".join([response.text async for response in stub.Generate(request, timeout=60, wait_for_ready=True)])


def check(text: str) -> None:
    names = json.loads(text)
    assert len(names) == 8 and set(names) <= set(NAMES)


async def test_json_is_what_was_asked_for_whatever_was_drafted(stub: Any) -> None:
    sampling: Any
    for sampling in ({}, {"temperature": 1.0, "seed": 7}):
        rule = 2 if sampling else 0  # coupled
        texts = await asyncio.gather(*(text_of(stub, asked(k, rule, **sampling)) for k in (0, 1, 4, 8)))
        assert len(set(texts)) == 1
        check(texts[0])
    for rule in (1, 3):  # rejection, and by blocks
        check(await text_of(stub, asked(4, rule, temperature=1.0, seed=3)))


async def test_a_bad_constraint_among_others_ends_alone(stub: Any) -> None:
    good = [text_of(stub, asked(4)) for _ in range(15)]
    bad = text_of(stub, asked(4, schema='{"type": "integer", "multipleOf": 999983}'))
    *texts, error = await asyncio.gather(*good, bad, return_exceptions=True)
    assert len(set(map(str, texts))) == 1
    check(str(texts[0]))
    assert isinstance(error, grpc.aio.AioRpcError) and error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "structured_output" in str(error.details())


async def test_a_target_killed_in_the_middle_of_json_changes_nothing(stub: Any, deployment: Deployment) -> None:
    """Runs last: it takes one of the targets away, the one that has the stream."""
    request = asked(3, schema=LONG, max_tokens=400)
    expected = await text_of(stub, request)
    texts: list[str] = []
    victim: Service | None = None
    async for response in stub.Generate(request, timeout=60):
        texts.append(response.text)
        if victim is None and len("".join(texts)) >= 2:
            deployment.signal_targets(signal.SIGSTOP)  # the stream must not end while its target is looked for
            victim = await deployment.holder()
            os.killpg(victim.pid, signal.SIGKILL)
            deployment.signal_targets(signal.SIGCONT, but=victim)
    assert victim is not None and "".join(texts) == expected
    names = json.loads(expected)
    assert len(names) == 30 and all(re.fullmatch("[a-z]{8}", name) for name in names)
    samples = await deployment.samples()
    assert samples.get(("target_failovers_total", (("output", "equal"),))) == 1, "the stream did not move"
    assert await text_of(stub, request) == expected
