"""The gRPC face of the gateway: decode, generate, encode."""

from __future__ import annotations

import asyncio
import math
from contextlib import aclosing
from dataclasses import asdict, replace
from importlib import metadata
from typing import Any

from outrider.gateway.admission import MOST_STALLS, SLOW_REQUEST_BYTES
from outrider.gateway.auth import CALLER
from outrider.gateway.engine import GenerationEngine
from outrider.gateway.media import MediaSource
from outrider.gateway.methods import offered
from outrider.gateway.prediction import decode_prediction
from outrider.gateway.request import GenerationDelta, GenerationRequest, SpeculationOptions, written
from outrider.gateway.text.chat import check_num_messages, decode_messages, decode_variables
from outrider.gateway.text.reasoning import decode_reasoning
from outrider.gateway.text.tools.use import MAX_TOOLS, decode_choice, decode_tools
from outrider.planner.policy import SpeculationTally
from outrider.rpc.codec import ADAPTER, MODEL_INFO, encode_position_logprobs
from outrider.rpc.errors import Violations
from outrider.rpc.interceptors import host_of
from outrider.rpc.media import MAX_MEDIA
from outrider.rpc.messages import MAX_N, ModelInfo
from outrider.rpc.sampling_params import AcceptanceRule, SamplingParams, decode_acceptance, decode_sampling
from outrider.rpc.server_calls import grpc_call
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


def decode_request(message: pb.GenerateRequest, defaults: SamplingParams) -> GenerationRequest:
    """The request, what it leaves open taken from the model's defaults. InvalidArgument for an enum's number that only
    a newer client knows."""
    kind = message.WhichOneof("input")
    return GenerationRequest(
        text=message.text if kind == "text" else None,
        token_ids=tuple(message.token_ids.ids) if kind == "token_ids" else None,
        messages=decode_messages(message.chat) if kind == "chat" else None,
        add_generation_prompt=not message.chat.omit_generation_prompt,
        prediction=decode_prediction(message.prediction) if message.HasField("prediction") else None,
        sampling=decode_sampling(message.sampling, defaults),
        reasoning=decode_reasoning(message.reasoning) if message.HasField("reasoning") else None,
        max_tokens_given=message.sampling.HasField("max_tokens"),
        speculation=_decode_speculation(message.speculation),
        request_id=message.request_id,
        n=message.n or 1,
        priority=message.priority,
        output_ids=tuple(tuple(entry.ids) for entry in message.output_ids),
        salt=message.salt,
        model_digest=message.model_digest,
        model=message.model,
        adapter=message.adapter,
        tools=decode_tools(message.tools) if message.tools else (),
        tool_choice=decode_choice(message.tool_choice) if message.tool_choice else None,
        parallel_tool_calls=message.parallel_tool_calls if message.HasField("parallel_tool_calls") else True,
        chat_template_kwargs=decode_variables(message.chat) if message.chat.chat_template_kwargs else {},
        media=tuple(map(_decode_media, message.media)),
    )


def _decode_media(message: pb.Media) -> MediaSource:
    return MediaSource(message.data if message.HasField("data") else None, "", message.path, message.mime_type)


def encode_delta(delta: GenerationDelta) -> pb.GenerateResponse:
    """A delta as a response of the protocol."""
    out = pb.GenerateResponse(
        request_id=delta.request_id,
        index=delta.index,
        text=delta.text,
        reasoning=delta.reasoning,
        token_ids=delta.token_ids,
        origins=delta.origins,  # type: ignore[arg-type]  # the numbers are the protocol's
        near_ties=delta.near_ties,
    )
    if delta.model_digest:  # the first one
        out.model_digest = delta.model_digest
        out.prompt_token_ids.extend(delta.prompt_token_ids)
    if delta.seed is not None:
        out.seed = delta.seed
    if delta.logprobs:
        out.logprobs.extend(map(encode_position_logprobs, delta.logprobs))
    if delta.prompt_logprobs:
        out.prompt_logprobs.extend(map(encode_position_logprobs, delta.prompt_logprobs))
    for call in delta.tool_calls:
        out.tool_calls.add(index=call.index, id=call.id, name=call.name, arguments=call.arguments)
    if delta.finish_reason is not None:
        out.finish_reason = int(delta.finish_reason)  # type: ignore[assignment]
    if delta.stop_string is not None:
        out.stop_string = delta.stop_string
    elif delta.stop_token_id is not None:
        out.stop_token_id = delta.stop_token_id
    if delta.usage is not None:
        out.usage.CopyFrom(pb.Usage(**asdict(delta.usage)))
    if delta.tally is not None:
        out.speculation.CopyFrom(_encode_tally(delta.tally, delta.acceptance))
    return out


def _decode_speculation(message: pb.SpeculationParams) -> SpeculationOptions:
    return SpeculationOptions(
        enabled=message.enabled if message.HasField("enabled") else True,
        num_draft_tokens=message.num_draft_tokens if message.HasField("num_draft_tokens") else None,
        method=message.method,
        methods=tuple(message.methods),
        acceptance=decode_acceptance(message.acceptance, "speculation.acceptance"),
        mode=message.mode,
        draft_confidence=message.draft_confidence,
    )


def _encode_tally(tally: SpeculationTally, acceptance: AcceptanceRule) -> pb.SpeculationStats:
    return pb.SpeculationStats(
        num_rounds=tally.num_rounds,
        num_drafts=tally.num_drafts,
        num_draft_tokens=tally.num_draft_tokens,
        num_accepted_tokens=tally.num_accepted_tokens,
        num_forced_tokens=tally.num_forced_tokens,
        num_accepted_forced_tokens=tally.num_accepted_forced_tokens,
        num_accepted_per_position=tally.accepted_per_position,
        num_tested_per_position=tally.tested_per_position,
        acceptance=int(acceptance),  # type: ignore[arg-type]  # the numbers are the protocol's
        overhead_us=tally.overhead_us,
        method=tally.method,
        mode=tally.mode,
        num_rounds_by_mode=tally.rounds_by_mode,
        by_method=[pb.MethodStats(method=method, **asdict(did)) for method, did in tally.by_method.items()],
    )


def _remaining_s(context: Any) -> float | None:
    """What remains of the call's deadline; gRPC reports none as none, or as a time beyond all use."""
    remaining = context.time_remaining()
    return None if remaining is None or not math.isfinite(remaining) or remaining > 1e9 else max(0.0, remaining)


def _traceparent(context: Any) -> str:
    return next((str(value) for key, value in context.invocation_metadata() or () if key == TRACEPARENT), "")
