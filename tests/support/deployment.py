"""A target, a draft and a gateway with tiny random models and one tokenizer, in this process and over the loopback:
what callers of any of them do, and whether all is afterwards as it was."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
from support.fakes import until
from support.gateways import Gateway, gateway, save_toy_tokenizer
from support.heads import random_head_of
from support.models import save_tiny

from outrider.draft_service import boot as draft_boot
from outrider.draft_service.boot import DraftService
from outrider.draft_service.settings import DraftSettings
from outrider.gateway.peers.remote import RemoteDrafts, RemoteTargets
from outrider.gateway.text.tokenizer import Tokenizer
from outrider.rpc.channel import connect
from outrider.rpc.learning.lessons import UNSALTED
from outrider.target_service import boot as target_boot
from outrider.target_service.boot import TargetService
from outrider.target_service.settings import TargetSettings
from outrider.v1 import generation_pb2 as pb
from outrider.v1 import generation_pb2_grpc

VOCAB = 400
PROMPT = [11, 12, 13]
AWAY_WAIT_S = 60.0  # a connection that was cut is opened again in less, on any machine


class Errors(logging.Handler):
    """Keeps what the project logs as errors: nobody's request may cause one."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.startswith("outrider"):
            raised = "" if record.exc_info is None else f": {record.exc_info[1]!r}"
            self.lines.append(f"{record.getMessage()}{raised}")


@dataclass
class Deployment:
    """The three services and channels to them."""

    folder: Path  # the draft's model, tokenizer included
    target: TargetService
    draft: DraftService
    gateway: Gateway
    to_target: grpc.aio.Channel
    to_draft: grpc.aio.Channel
    to_gateway: grpc.aio.Channel
    http: httpx.AsyncClient
    errors: Errors = field(default_factory=Errors)

    async def generate(self, **fields: Any) -> list[Any]:
        """The responses to one request."""
        stub: Any = generation_pb2_grpc.GenerationServiceStub(self.to_gateway)
        return [response async for response in stub.Generate(pb.GenerateRequest(**fields), timeout=60)]

    async def answers(self) -> list[Any]:
        """Of a few requests all that their seeds decide, log probabilities to the bit."""
        greedy = {"temperature": 0, "max_tokens": 12, "seed": 3, "logprobs": 2}
        found: list[Any] = []
        for sampling in (greedy, {**greedy, "temperature": 1.5}):
            for mode in ("sequential", "chains"):
                speculation = {"num_draft_tokens": 3, "acceptance": 2, "mode": mode}
                answer = await self.generate(token_ids={"ids": PROMPT}, sampling=sampling, speculation=speculation)
                found.append([token for part in answer for token in part.token_ids])
                found.append("".join(part.text for part in answer))
                found.append([one.SerializeToString() for part in answer for one in part.logprobs])
        body = {"messages": [{"role": "user", "content": "the quick"}], "max_tokens": 8, "temperature": 1, "seed": 5}
        response = await self.http.post("/v1/chat/completions", json={**body, "speculation": {"acceptance": "coupled"}})
        assert response.status_code == 200, response.text
        return [*found, response.json()["choices"][0]["message"]]

    async def settled(self) -> None:
        """Nothing is open any more, all blocks are free, both devices work, and nobody has logged an error."""
        pools = self.target.engine.cache.pool, self.draft.engine.cache.pool
        await until(lambda: not self.target.engine.scheduler.sequences and not self.draft.engine.sequences)
        await until(lambda: all(pool.num_free == pool.num_blocks for pool in pools))
        assert self.target.thread.is_alive and self.draft.thread.is_alive
        assert self.gateway.engine.admission.num_active == 0
        assert not self.errors.lines, "\n".join(self.errors.lines[:10])


async def _directly(role: str, address: str) -> str:
    return address


@asynccontextmanager
async def deployed(
    folder: Path,
    through: Callable[[str, str], Awaitable[str]] = _directly,
    allow_adapter_changes: bool = False,
    allow_target_reload: bool = False,
    head: str = "",
    **of_draft: Any,
) -> AsyncIterator[Deployment]:
    """Starts all, and ends all. `through` says, by a service's role and address, where the gateway is to reach it.
    Beside the target a random head of this method drafts, and learns; empty: none does."""
    models = [save_tiny(folder / name, seed=seed, vocab_size=VOCAB) for name, seed in (("target", 1), ("draft", 2))]
    for model in models:
        save_toy_tokenizer(model)
    common: dict[str, Any] = {"listen": "127.0.0.1:0", "num_blocks": 512, "threads": 1}
    of_target = {"batch_invariant": True, "allow_adapter_changes": allow_adapter_changes, **common}
    of_target["allow_reload"] = allow_target_reload
    if head:
        made = random_head_of(models[0], head, folder / "head")
        of_target |= {"head": made, "head_trial": "off", "learn_from": [UNSALTED]}
    target = await target_boot.start(TargetSettings(model=models[0], **of_target))
    draft = await draft_boot.start(DraftSettings(model=models[1], allow_reload=True, **common, **of_draft))
    tokenizer = Tokenizer.load(models[0])
    tokenizer.tool_parser = "json"
    errors = Errors()
    logging.getLogger().addHandler(errors)
    try:
        for service in (target, draft):
            await service.server.start()
        async with (
            RemoteTargets([await through("target", target.server.address)]) as targets,
            RemoteDrafts([await through("draft", draft.server.address)]) as drafts,
            connect(target.server.address) as to_target,
            connect(draft.server.address) as to_draft,
        ):
            await targets.wait_usable()
            assert await drafts.wait_attempted() is None
            options: dict[str, Any] = {"max_active": 128, "max_waiting": 4096, "max_admitted_tokens": 1 << 24}
            options["away_wait_s"] = AWAY_WAIT_S
            async with (
                gateway(targets, drafts, tokenizer=tokenizer, **options) as served,  # type: ignore[arg-type]
                connect(served.grpc_address) as to_gateway,
                served.client() as http,
            ):
                found = Deployment(models[1], target, draft, served, to_target, to_draft, to_gateway, http, errors)
                yield found
    finally:
        logging.getLogger().removeHandler(errors)
        for service in (draft, target):
            await service.stop()
