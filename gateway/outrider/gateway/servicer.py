"""The gRPC face of the gateway: decode, generate, encode."""

from __future__ import annotations

import asyncio
import math
from contextlib import aclosing
from dataclasses import replace
from importlib import metadata
from typing import Any, Self

from outrider.gateway.admission import MOST_STALLS, SLOW_REQUEST_BYTES
from outrider.gateway.auth import CALLER
from outrider.gateway.goals import goals_of
from outrider.gateway.methods import offered
from outrider.gateway.models import Models, may_ask, name_of, require_allowed
from outrider.gateway.off_loop import written
from outrider.gateway.text.chat import check_num_messages
from outrider.gateway.text.tools.use import MAX_TOOLS
from outrider.rpc.codec import ADAPTER, DRAFT_TRIAL, MODEL_INFO
from outrider.rpc.errors import Violations
from outrider.rpc.generation_codec import decode_request, encode_delta
from outrider.rpc.interceptors import host_of
from outrider.rpc.media import MAX_MEDIA
from outrider.rpc.messages import MAX_N, ModelInfo
from outrider.rpc.server_calls import grpc_call
from outrider.rpc.words.request import GenerationRequest
from outrider.v1 import generation_pb2 as pb
from outrider.v1 import generation_pb2_grpc

SERVICE_NAME = "outrider.v1.GenerationService"
CALL = grpc_call(f"{SERVICE_NAME}/Generate")
TRACEPARENT = "traceparent"
LEAST_STALL = 60  # a 60th of that: what is shorter is as well the gateway's own


class StallGuard:
    """Ends an answer by TimeoutError where its client reads nothing for `stall_s`, or holds up its writes MOST_STALLS
    times as long in sum. One timer looks after all writes: every round has one."""

    def __init__(self, stall_s: float) -> None:
        self._stall_s, self._left_s = stall_s, MOST_STALLS * stall_s
        self._loop = asyncio.get_running_loop()
        self._since: float | None = None  # of the write under way
        self._timeout = asyncio.timeout(None)

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        self._timer = self._loop.call_later(self._stall_s, self._look)
        return self

    async def __aexit__(self, *ended: Any) -> None:
        self._timer.cancel()
        await self._timeout.__aexit__(*ended)

    def begin(self) -> None:
        """A write begins."""
        self._since = self._loop.time()
        if self._left_s < self._stall_s:
            self._look()

    def end(self) -> None:
        """The client has taken it."""
        if self._since is not None:
            took_s, self._since = self._loop.time() - self._since, None
            self._left_s -= took_s if took_s > self._stall_s / LEAST_STALL else 0.0

    def _look(self) -> None:
        self._timer.cancel()
        now, most_s = self._loop.time(), min(self._stall_s, self._left_s)
        end = most_s + (now if self._since is None else self._since)
        if self._since is not None and end <= now:
            self._timeout.reschedule(now)
        else:
            self._timer = self._loop.call_at(end, self._look)


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """Serves GenerationService with an engine, or several models'."""

    def __init__(self, models: Models, stall_s: float = 60.0) -> None:
        self._models, self._stall_s = models, stall_s  # how long a client may read nothing

    def register(self, server: Any) -> None:
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(self, server)

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> None:
        """Streams completions. It writes by itself: so a cancelled call ends the generator at once."""
        engine = require_allowed(self._models.called(request.model or request.adapter))
        generation = await decoded(request, engine.verifier.info.model)
        metadata = dict(context.invocation_metadata() or ())
        generation = replace(
            generation,
            timeout_s=_remaining_s(context),
            goals=goals_of(metadata),
            traceparent=str(metadata.get(TRACEPARENT, "")),
            peer=host_of(context),
            call=CALL,
        )
        if (caller := CALLER.get()) is not None:
            generation = caller.own(generation)
        async with aclosing(engine.generate(generation)) as deltas, StallGuard(self._stall_s) as guard:
            async for delta in deltas:
                if delta.prompt_token_ids and (delta.index or generation.token_ids is not None):
                    delta = replace(delta, prompt_token_ids=())  # said, or the client's own
                response = await written(delta.num_logprobs, encode_delta, delta)
                guard.begin()
                await context.write(response)
                guard.end()

    async def GetGatewayInfo(self, request: pb.GetGatewayInfoRequest, context: Any) -> pb.GetGatewayInfoResponse:
        """Describes the gateway and its peers, of the model that is asked for; of the first that the caller may have
        where none is."""
        engines = [one for one in self._models.engines if may_ask(one)] or self._models.engines
        engine = require_allowed(self._models.called(request.model) if request.model else engines[0])
        draft = None if engine.drafter is None else engine.drafter.info
        target = replace(engine.verifier.info.model, name=engine.model_name)
        return pb.GetGatewayInfoResponse(
            target=MODEL_INFO.encode(target),
            draft=None if draft is None else MODEL_INFO.encode(draft.model),
            num_draft_tokens=engine.num_draft_tokens,
            methods=offered(engine.verifier.info, draft),
            version=metadata.version("outrider"),
            adapters=map(ADAPTER.encode, engine.verifier.info.adapters),
            media_types=engine.media_types,
            trials=map(DRAFT_TRIAL.encode, engine.trials),
            models=filter(None, map(name_of, engines)),
        )


async def decoded(message: pb.GenerateRequest, model: ModelInfo) -> GenerationRequest:
    """The request; a large one is decoded beside the event loop. InvalidArgument, before that, for a list in it that is
    longer than any request's."""
    if message.ByteSize() <= SLOW_REQUEST_BYTES:
        return decode_request(message, model.default_sampling)
    found = Violations()
    check_num_messages(found, len(message.chat.messages), model.max_model_len)
    found.length("tools", message.tools, MAX_TOOLS)
    found.length("media", message.media, MAX_MEDIA)
    found.length("output_ids", message.output_ids, MAX_N)
    found.raise_if_any()
    return await asyncio.to_thread(decode_request, message, model.default_sampling)


def _remaining_s(context: Any) -> float | None:
    """What remains of the call's deadline; gRPC reports none as none, or as a time beyond all use."""
    remaining = context.time_remaining()
    return None if remaining is None or not math.isfinite(remaining) or remaining > 1e9 else max(0.0, remaining)
