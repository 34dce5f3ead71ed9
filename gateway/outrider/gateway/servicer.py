"""The gRPC face of the gateway: decode, generate, encode."""

from __future__ import annotations

import asyncio
import math
from contextlib import aclosing
from dataclasses import replace
from importlib import metadata
from typing import Any

from outrider.gateway.admission import MOST_STALLS, SLOW_REQUEST_BYTES
from outrider.gateway.auth import CALLER
from outrider.gateway.engine import GenerationEngine
from outrider.gateway.methods import offered
from outrider.gateway.off_loop import written
from outrider.gateway.text.chat import check_num_messages
from outrider.gateway.text.tools.use import MAX_TOOLS
from outrider.rpc.codec import ADAPTER, MODEL_INFO
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


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """Serves GenerationService with an engine."""

    def __init__(self, engine: GenerationEngine, stall_s: float = 60.0) -> None:
        self._engine, self._stall_s = engine, stall_s  # how long a client may read nothing

    def register(self, server: Any) -> None:
        """Adds this servicer to a server."""
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(self, server)

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> None:
        """Streams completions. It writes by itself: so a cancelled call ends the generator at once."""
        generation = await decoded(request, self._engine.verifier.info.model)
        generation = replace(generation, timeout_s=_remaining_s(context), traceparent=_traceparent(context), call=CALL)
        generation = replace(generation, peer=host_of(context))
        if (caller := CALLER.get()) is not None:
            generation = caller.own(generation)
        loop, left_s = asyncio.get_running_loop(), MOST_STALLS * self._stall_s
        async with aclosing(self._engine.generate(generation)) as deltas:
            async for delta in deltas:
                if delta.index or generation.token_ids is not None:  # said, or the client's own
                    delta = replace(delta, prompt_token_ids=())
                response = await written(delta.num_logprobs, encode_delta, delta)
                began = loop.time()
                async with asyncio.timeout(min(self._stall_s, left_s)):
                    await context.write(response)
                took_s = loop.time() - began
                left_s -= took_s if took_s > self._stall_s / LEAST_STALL else 0.0

    async def GetGatewayInfo(self, request: pb.GetGatewayInfoRequest, context: Any) -> pb.GetGatewayInfoResponse:
        """Describes the gateway and its peers."""
        engine = self._engine
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


def _traceparent(context: Any) -> str:
    return next((str(value) for key, value in context.invocation_metadata() or () if key == TRACEPARENT), "")
