"""Suffix decoding by a draft service before two gateways: what one answered speeds the other's, decoded with a draft or
without, under one salt, and after the draft has started again. That it changes no token: tests/e2e/test_methods.py."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.environment import START_S
from support.metrics import samples_of
from support.models import save_tiny, train_byte_level
from support.services import wait_for_draft

from outrider.cli.local_services import Service, Services
from outrider.proposers.suffix.proposer import SuffixProposer
from outrider.rpc.channel import connect
from outrider.rpc.codec import DRAFT_STREAM
from outrider.rpc.messages import Close, Commit, Credit, Open
from outrider.rpc.stream import client_stream
from outrider.rpc.words.sampling_params import SamplingParams
from outrider.v1 import draft_pb2_grpc, generation_pb2_grpc
from outrider.v1 import generation_pb2 as pb

VOCAB = 300
NUM_TOKENS = 64
METRICS = re.compile(r"draft metrics on (\S+)")
LEARNED = ("draft_learned", (("kind", "suffix_sequences"),))


@dataclass
class Running:
    """A draft with a store, and two gateways before it."""

    services: Services
    draft: Service
    gateways: tuple[str, str]
    store: Path

    async def learned(self, count: int) -> None:
        """Returns when the draft has so many sequences."""
        async with httpx.AsyncClient() as client:
            while True:
                text = (await client.get(f"http://{self.draft.find(METRICS)}/metrics")).text
                if samples_of(text)[LEARNED] >= count:
                    return
                await asyncio.sleep(0.05)

    def restart_draft(self) -> None:
        address = self.draft.address
        self.services.stop(self.draft)
        self.draft = start_draft(self.services, address, self.store)
        for gateway in self.gateways:
            wait_for_draft(gateway, START_S, self.services.check)


def start_draft(services: Services, address: str, store: Path) -> Service:
    flags = ["--method", "suffix", "--suffix-store-file", str(store), "--metrics", "127.0.0.1:0"]
    draft = services.start("draft", ["draft", "--listen", address, *flags])
    services.wait(draft, START_S)
    return draft


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = save_tiny(tmp_path_factory.mktemp("target"), seed=1, vocab_size=VOCAB)
    train_byte_level(VOCAB).save(str(folder / "tokenizer.json"))
    store = tmp_path_factory.mktemp("store") / "outputs"
    with Services() as services:
        arguments = ["target", "--listen", "127.0.0.1:0", "--model", str(folder), "--threads", "1", "--batch-invariant"]
        target = services.start("target", arguments)
        draft = start_draft(services, "127.0.0.1:0", store)
        services.wait(target, START_S)
        peers = ["--target", target.address, "--draft", draft.address, "--tokenizer", str(folder)]
        peers += ["--draft-patience-ms", "60000"]  # however busy the machine is, the draft is waited for
        gateways = [services.start("gateway", ["gateway", "--listen", "127.0.0.1:0", *peers]) for _ in range(2)]
        addresses = [services.wait(gateway, START_S) for gateway in gateways]
        for address in addresses:
            wait_for_draft(address, START_S, services.check)
        yield Running(services, draft, (addresses[0], addresses[1]), store)


PROMPT = (11, 12, 13)


async def stream(
    gateway: str, prompt: Sequence[int] = PROMPT, k: int = 8, salt: str = "", **sampling: float
) -> AsyncIterator[Any]:
    """The responses to a request, coupled: a seed has one answer, and no two have the same."""
    request = pb.GenerateRequest(
        token_ids={"ids": prompt},
        salt=salt,
        sampling={"max_tokens": NUM_TOKENS, "ignore_eos": True, **sampling},
        speculation={"num_draft_tokens": k, "enabled": k > 0, "acceptance": 2},
    )
    async with connect(gateway) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        async for response in stub.Generate(request, timeout=60, wait_for_ready=True):
            yield response


async def answer(gateway: str, **request: Any) -> list[Any]:
    """All of them."""
    return [response async for response in stream(gateway, **request)]


def tokens_of(responses: list[Any]) -> list[int]:
    return [token for response in responses for token in response.token_ids]


async def accepted(gateway: str, seed: int, salt: str = "", k: int = 8) -> int:
    """Drafted tokens in the answer to a request."""
    responses = await answer(gateway, k=k, salt=salt, temperature=1.0, seed=seed)
    assert len(tokens_of(responses)) == NUM_TOKENS
    return int(responses[-1].speculation.num_accepted_tokens)


async def test_what_one_gateway_answered_speeds_the_others(running: Running) -> None:
    first, second = running.gateways
    assert await accepted(first, seed=1) < 16  # a random model repeats itself by chance alone
    await running.learned(1)
    assert await accepted(second, seed=1, salt="another") < 16
    assert await accepted(second, seed=1) > 40
    await running.learned(3)
    assert await accepted(first, seed=1, salt="another") > 40
    await running.learned(4)

    assert await accepted(first, seed=2, k=0) == 0  # decoded without a draft, which is told of it all the same
    await running.learned(5)
    assert await accepted(second, seed=2) > 40
    await running.learned(6)

    await asyncio.to_thread(running.restart_draft)
    await running.learned(6)
    assert await accepted(second, seed=2) > 40
    assert await accepted(second, seed=2, salt="another") < 16


async def test_what_was_written_outlives_kill_9(tmp_path: Path) -> None:
    """Without an end, a store is in its file but for what the last moments brought."""
    store = tmp_path / "outputs"
    file = ["--suffix-store-file", str(store), "--suffix-store-minutes", "0.001"]
    arguments = ["draft", "--method", "suffix", "--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0", *file]
    answer = list(range(100, 200))
    with Services() as services:
        draft = services.start("draft", arguments)
        services.wait(draft, START_S)
        async with connect(draft.address) as channel:
            stub = draft_pb2_grpc.DraftServiceStub(channel)
            async with client_stream(DRAFT_STREAM, stub.Propose()) as stream:
                stream.send(Open(1, (1, 2, 3), SamplingParams()), Commit(1, 3, tuple(answer)), Credit(1, 110, 4))
                async with asyncio.timeout(START_S):
                    await anext(stream)  # a piece: it is open there
                    stream.send(Close(1))
                    while not store.exists():  # noqa: ASYNC110 (another process writes it)
                        await asyncio.sleep(0.01)
        os.killpg(draft.pid, signal.SIGKILL)
        services.stop(draft)
    again = SuffixProposer(suffix_store_file=store)
    assert again.open(answer[:10]).propose(8) == answer[10:18]
