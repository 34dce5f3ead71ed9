"""What a gateway is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from outrider.v1 import common_pb2
from outrider.v1 import generation_pb2 as pb
from outrider.wire.codec_sampling import encode_logprobs_mode, encode_sampling, encode_structured_output
from outrider.wire.sampling import AcceptanceRule, LogprobsMode, SamplingParams, StructuredOutput

_SAMPLING_FIELDS = frozenset(field.name for field in fields(SamplingParams))


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
    mode: str = "",
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
            mode=mode,
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
