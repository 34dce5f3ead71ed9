"""The Python client of a gateway, in two forms that share everything but the waiting:

    async with Client("localhost:50050") as client:
        async for part in client.generate("Once upon a time", max_tokens=64):
            print(part.text, end="")

    for part in generate("localhost:50050", messages=[{"role": "user", "content": "Hello"}]):
        print(part.text, end="")

Errors are OutriderError's classes, with what the gateway said: the fields that are wrong, when to try again."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio

from outrider.v1 import common_pb2, generation_pb2_grpc
from outrider.v1 import generation_pb2 as pb
from outrider.wire.address import dial_target
from outrider.wire.background import Background
from outrider.wire.channel import channel_options, connect
from outrider.wire.codec_info import decode_model_info
from outrider.wire.codec_parts import decode_position_logprobs
from outrider.wire.codec_sampling import encode_logprobs_mode, encode_sampling, encode_structured_output
from outrider.wire.errors import from_rpc_error
from outrider.wire.messages import ModelInfo, PositionLogprobs
from outrider.wire.sampling import (
    AcceptanceRule,
    FinishReason,
    LogprobsMode,
    SamplingParams,
    StructuredOutput,
    TokenOrigin,
)

_SAMPLING_FIELDS = frozenset(field.name for field in fields(SamplingParams))
_TRACEPARENT = "traceparent"


@dataclass(frozen=True, slots=True)
class Usage:
    """Counts of tokens of one completion."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """Sums over the rounds of one completion."""

    num_rounds: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_accepted_per_position: tuple[int, ...]
    num_tested_per_position: tuple[int, ...]
    acceptance: AcceptanceRule
    overhead_us: int

    @property
    def acceptance_rate(self) -> float:
        """The share of drafted tokens that were accepted; 0 without any."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens a verification with a draft committed, on average: one and the accepted ones."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0


@dataclass(frozen=True, slots=True)
class Part:
    """What one response adds to one completion. See GenerateResponse in generation.proto."""

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    origins: tuple[TokenOrigin, ...]
    logprobs: tuple[PositionLogprobs, ...]
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    usage: Usage | None
    speculation: SpeculationStats | None
    seed: int | None
    prompt_token_ids: tuple[int, ...]
    prompt_logprobs: tuple[PositionLogprobs, ...]


@dataclass(frozen=True, slots=True)
class GatewayInfo:
    """A gateway and its peers; `draft` is None where no draft is in use."""

    target: ModelInfo
    draft: ModelInfo | None
    num_draft_tokens: int
    methods: tuple[str, ...]


class Client:
    """An asynchronous client. Open it inside the running loop and keep it."""

    def __init__(self, address: str, *, credentials: grpc.ChannelCredentials | None = None) -> None:
        self._channel = connect(address, credentials=credentials)
        self._stub: Any = generation_pb2_grpc.GenerationServiceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends every call and the connection."""
        await self._channel.close()

    async def info(self, timeout: float | None = None) -> GatewayInfo:
        """What the gateway says of itself."""
        try:
            answer = await self._stub.GetGatewayInfo(pb.GetGatewayInfoRequest(), timeout=timeout)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        return _decode_info(answer)

    async def generate(
        self,
        prompt: str | None = None,
        *,
        timeout: float | None = None,
        traceparent: str = "",
        **options: Any,
    ) -> AsyncGenerator[Part, None]:
        """Yields the parts of all completions as they come; options as for `build_request`. Closing the iterator ends
        the request."""
        call = self._stub.Generate(build_request(prompt, **options), timeout=timeout, metadata=_metadata(traceparent))
        try:
            async for response in call:
                yield decode_response(response)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        finally:
            call.cancel()


def generate(
    address: str, prompt: str | None = None, *, timeout: float | None = None, traceparent: str = "", **options: Any
) -> Iterator[Part]:
    """The same for callers without an event loop; one connection a call."""
    request, metadata = build_request(prompt, **options), _metadata(traceparent)

    def iterate(on_stop: Callable[[Callable[[], object]], None]) -> Iterator[Part]:
        with grpc.insecure_channel(dial_target(address), options=channel_options()) as channel:
            call: Any = generation_pb2_grpc.GenerationServiceStub(channel).Generate(
                request, timeout=timeout, metadata=metadata
            )
            on_stop(call.cancel)
            try:
                yield from map(decode_response, call)
            except grpc.RpcError as error:
                raise from_rpc_error(error) from error
            finally:
                call.cancel()

    return Background(iterate).items()


def build_request(
    prompt: str | None = None,
    *,
    token_ids: Sequence[int] | None = None,
    messages: Sequence[Mapping[str, str]] | None = None,
    add_generation_prompt: bool = True,
    sampling: SamplingParams | None = None,
    n: int = 1,
    speculate: bool | None = None,
    num_draft_tokens: int | None = None,
    method: str = "",
    acceptance: AcceptanceRule = AcceptanceRule.AUTO,
    request_id: str = "",
    priority: int = 0,
    output_ids: Sequence[Sequence[int]] = (),
    salt: str = "",
    **sampling_fields: Any,
) -> pb.GenerateRequest:
    """A request: one of prompt, token_ids and messages; whole SamplingParams, or single fields of them, of which those
    not given are the model's defaults."""
    if sum(given is not None for given in (prompt, token_ids, messages)) != 1:
        raise TypeError("exactly one of prompt, token_ids and messages is needed")
    request = pb.GenerateRequest(
        text=prompt,
        sampling=_encode_sampling(sampling, sampling_fields),
        speculation=pb.SpeculationParams(
            enabled=speculate,  # type: ignore[arg-type]  # None leaves it out
            num_draft_tokens=num_draft_tokens,
            method=method,
            acceptance=int(acceptance),  # type: ignore[arg-type]  # the numbers are the protocol's
        ),
        request_id=request_id,
        n=n,
        priority=priority,
        output_ids=[common_pb2.TokenIds(ids=ids) for ids in output_ids],
        salt=salt,
    )
    if token_ids is not None:
        request.token_ids.CopyFrom(common_pb2.TokenIds(ids=token_ids))
    if messages is not None:
        request.chat.omit_generation_prompt = not add_generation_prompt
        for message in messages:
            request.chat.messages.add(role=message["role"], content=message["content"])
    return request


def decode_response(response: pb.GenerateResponse) -> Part:
    """One part."""
    stop = response.WhichOneof("stop_reason")
    return Part(
        request_id=response.request_id,
        index=response.index,
        text=response.text,
        token_ids=tuple(response.token_ids),
        origins=tuple(map(TokenOrigin, response.origins)),
        logprobs=tuple(map(decode_position_logprobs, response.logprobs)),
        finish_reason=FinishReason(response.finish_reason) if response.finish_reason else None,
        stop_reason=getattr(response, stop) if stop else None,
        usage=_decode_usage(response.usage) if response.HasField("usage") else None,
        speculation=_decode_stats(response.speculation) if response.HasField("speculation") else None,
        seed=response.seed if response.HasField("seed") else None,
        prompt_token_ids=tuple(response.prompt_token_ids),
        prompt_logprobs=tuple(map(decode_position_logprobs, response.prompt_logprobs)),
    )


def _encode_sampling(sampling: SamplingParams | None, given: Mapping[str, Any]) -> common_pb2.SamplingParams:
    """Whole parameters are sent whole; single fields leave the others to the gateway."""
    if unknown := given.keys() - _SAMPLING_FIELDS:
        raise TypeError(f"unknown options: {', '.join(sorted(unknown))}")
    if sampling is not None and given:
        raise TypeError(f"sampling is given whole, and beside it {', '.join(sorted(given))}")
    if sampling is not None:
        return encode_sampling(sampling)
    out = common_pb2.SamplingParams()
    for name, value in given.items():
        _set_field(out, name, value)
    return out


def _set_field(out: common_pb2.SamplingParams, name: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, LogprobsMode):
        out.logprobs_mode = encode_logprobs_mode(value)  # type: ignore[assignment]  # a protocol number
    elif isinstance(value, StructuredOutput):
        out.structured_output.CopyFrom(encode_structured_output(value))
    elif name == "bad_words_ids":
        out.bad_words_ids.extend(common_pb2.TokenIds(ids=ids) for ids in value)
    elif name == "logit_bias":
        out.logit_bias.update(value)
    elif name in ("stop", "bad_words"):
        getattr(out, name).extend([value] if isinstance(value, str) else value)
    elif isinstance(value, Sequence):
        getattr(out, name).extend(value)
    else:
        setattr(out, name, value)


def _metadata(traceparent: str) -> tuple[tuple[str, str], ...]:
    return ((_TRACEPARENT, traceparent),) if traceparent else ()


def _decode_usage(usage: pb.Usage) -> Usage:
    return Usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)


def _decode_stats(stats: pb.SpeculationStats) -> SpeculationStats:
    return SpeculationStats(
        num_rounds=stats.num_rounds,
        num_drafts=stats.num_drafts,
        num_draft_tokens=stats.num_draft_tokens,
        num_accepted_tokens=stats.num_accepted_tokens,
        num_accepted_per_position=tuple(stats.num_accepted_per_position),
        num_tested_per_position=tuple(stats.num_tested_per_position),
        acceptance=AcceptanceRule(stats.acceptance),
        overhead_us=stats.overhead_us,
    )


def _decode_info(answer: pb.GetGatewayInfoResponse) -> GatewayInfo:
    return GatewayInfo(
        target=decode_model_info(answer.target),
        draft=decode_model_info(answer.draft) if answer.HasField("draft") else None,
        num_draft_tokens=answer.num_draft_tokens,
        methods=tuple(answer.methods),
    )
