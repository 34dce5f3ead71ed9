"""The draft's weights change while streams are under way: no token does, and the gateway knows."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.environment import START_S
from support.metrics import samples_of
from support.models import other_weights
from support.services import outrider_process, wait_for_draft

from outrider.cli.local_services import Services
from outrider.gateway.peers.remote import DRAFT_SERVICE, reload_model
from outrider.pairs import PairPaths, pair_path
from outrider.rpc.channel import connect
from outrider.rpc.errors import OutriderError
from outrider.rpc.hub import model_name
from outrider.rpc.messages import Reloaded
from outrider.v1 import generation_pb2 as pb
from outrider.v1 import generation_pb2_grpc

HTTP = re.compile(r"gateway http on (\S+)")
NUM_TOKENS = 240
REQUESTS: list[dict[str, Any]] = [
    {"text": "def parse_args(argv):", "temperature": 0.0},
    {"text": "class Reader:\n    def", "temperature": 0.0, "mode": "chains"},
    {"text": "import os\n", "temperature": 0.9, "seed": 5, "acceptance": 2, "mode": "branches"},
    {"text": "    for name in", "temperature": 1.0, "seed": 6, "acceptance": 2, "mode": "auto"},
]


@dataclass
class Running:
    """The embedded pair, and another draft, which is worse."""

    pair: PairPaths
    worse: Path
    target: str
    draft: str
    gateway: str
    http: str

    async def reload(self, folder: Path) -> Reloaded:
        """Returns once the gateway knows it."""
        async with connect(self.draft) as channel:
            done = await reload_model(channel, str(folder))
        async with httpx.AsyncClient(base_url=f"http://{self.http}") as client, asyncio.timeout(START_S):
            while True:
                samples = samples_of((await client.get("/metrics")).text)
                told = [dict(labels) for name, labels in samples if name == "replica_info"]
                (model,) = (labels for labels in told if labels["role"] == "draft")
                if done.after.digest.startswith(model["digest"]):
                    break
                await asyncio.sleep(0.05)
            (card,) = (await client.get("/v1/models")).json()["data"]
            assert card["speculation"]["draft"] == model_name(folder)
        return done


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    pair = pair_path()
    worse = other_weights(pair.draft, tmp_path_factory.mktemp("models") / "worse")
    with Services() as services:
        common = ["--listen", "127.0.0.1:0", "--threads", "1"]
        draft = services.start("draft", ["draft", *common, "--model", str(pair.draft), "--allow-reload"])
        target = services.start("target", ["target", *common, "--model", str(pair.target), "--batch-invariant"])
        for service in (draft, target):
            services.wait(service, START_S)
        peers = ["--target", target.address, "--draft", draft.address, "--tokenizer", str(pair.target)]
        flags = ["--draft-patience-ms", "10000", "--http", "127.0.0.1:0"]
        gateway = services.start("gateway", ["gateway", "--listen", "127.0.0.1:0", *peers, *flags])
        services.wait(gateway, START_S)
        wait_for_draft(gateway.address, START_S, services.check)
        yield Running(pair, worse, target.address, draft.address, gateway.address, gateway.find(HTTP))


async def stream(gateway: str, request: dict[str, Any], drafts: bool = True) -> AsyncIterator[Any]:
    sampling = {name: request[name] for name in ("temperature", "seed") if name in request}
    asked = pb.GenerateRequest(
        text=request["text"],
        sampling={"max_tokens": NUM_TOKENS, "ignore_eos": True, **sampling},
        speculation={
            "enabled": drafts,
            "acceptance": request.get("acceptance", 0),
            "mode": request.get("mode", "sequential"),
        },
    )
    async with connect(gateway) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        async for response in stub.Generate(asked, timeout=120, wait_for_ready=True):
            yield response


async def test_streams_under_way_change_no_token(running: Running) -> None:
    """Each request is asked again and again until four reloads have met several under way."""
    plain, digests, met = list[list[int]](), set[str](), 0
    for request in REQUESTS:
        plain.append([t async for part in stream(running.gateway, request, drafts=False) for t in part.token_ids])

    async def read(request: dict[str, Any], expected: list[int]) -> int:
        accepted = 0
        while met < 4:
            tokens, last = list[int](), None
            async for last in stream(running.gateway, request):
                tokens += last.token_ids
            assert tokens == expected and len(tokens) == NUM_TOKENS
            assert last is not None
            accepted += last.speculation.num_accepted_tokens
        return accepted

    async with asyncio.timeout(180), asyncio.TaskGroup() as group:
        readers = [group.create_task(read(*each)) for each in zip(REQUESTS, plain, strict=True)]
        while met < 4:
            for model in (running.worse, running.pair.draft):
                done = await running.reload(model)
                digests.add(done.after.digest)
                met += done.num_sequences > 1
    assert len(digests) == 2
    assert readers[0].result() > NUM_TOKENS / 8, "the others may hear from a busy draft too late"


async def test_what_cannot_be_loaded_is_told_and_changes_nothing(running: Running) -> None:
    tokens, told = list[int](), None
    async with connect(running.draft) as channel:
        digest = (await DRAFT_SERVICE.get_info(channel)).model.digest
        async for part in stream(running.gateway, REQUESTS[0]):
            tokens += part.token_ids
            if told is None and len(tokens) > 40:
                with pytest.raises(OutriderError, match="there is no such folder") as told:
                    await reload_model(channel, str(running.worse / "absent"))
        assert (await DRAFT_SERVICE.get_info(channel)).model.digest == digest
    assert told is not None and told.value.violations[0].field == "model"
    plain = [t async for part in stream(running.gateway, REQUESTS[0], drafts=False) for t in part.token_ids]
    assert tokens == plain


ACCEPTED = re.compile(r"accepted (\d+)% \(\d+/\d+\)")


async def test_the_command_tells_what_the_weights_are_worth(running: Running) -> None:
    at_target = ["--target", running.target, "--tokenizer", str(running.pair.target)]
    arguments = ["admin", "reload", "--draft", running.draft, "--num-draft-tokens", "4"]
    done = await asyncio.to_thread(outrider_process, *arguments, "--model", str(running.worse), *at_target)
    assert done.returncode == 0, done.stderr
    before, after = map(int, ACCEPTED.findall(done.stdout))
    assert before > after + 10 and "before  python/draft " in done.stdout and "after   worse " in done.stdout
    through = ["--model", str(running.pair.draft), "--gateway", running.gateway]
    done = await asyncio.to_thread(outrider_process, *arguments, *through)
    assert done.returncode == 0, done.stderr
    worse, better = map(int, ACCEPTED.findall(done.stdout))
    assert better > worse + 10
    refused = await asyncio.to_thread(outrider_process, *arguments, *through[2:], "--model", "nowhere")
    assert refused.returncode == 1 and "there is no such folder" in refused.stderr and not refused.stdout
