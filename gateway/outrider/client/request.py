"""What a gateway is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from inspect import Parameter, signature
from typing import Any

from outrider.client.fields import put, put_ids, put_messages
from outrider.v1 import common_pb2
from outrider.v1 import generation_pb2 as pb
from outrider.wire.checks import Violations
from outrider.wire.sampling import AcceptanceRule, SamplingParams
from outrider.wire.validate import MAX_N

_SAMPLING_FIELDS = tuple(field.name for field in fields(SamplingParams))


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
    model_digest: str = "",
    salt: str = "",
    **sampling_fields: Any,
) -> pb.GenerateRequest:
    """A request: one of prompt, token_ids and messages; whole SamplingParams, or single fields of them, of which those
    not given are the model's defaults."""
    if sum(given is not None for given in (prompt, token_ids, messages)) != 1:
        raise TypeError("exactly one of prompt, token_ids and messages is needed")
    found = Violations()
    found.integer("n", n, 1, MAX_N)  # the protocol's 0 is 1
    found.raise_if_any()
    request = pb.GenerateRequest(n=n, sampling=_encode_sampling(sampling, sampling_fields))
    put(request, "text", prompt, called="prompt")
    if token_ids is not None:
        put_ids(request, token_ids)
    if messages is not None:
        put_messages(request, messages, not add_generation_prompt)
    request.speculation.SetInParent()
    put(request.speculation, "enabled", speculate, called="speculate")
    put(request.speculation, "num_draft_tokens", num_draft_tokens, "speculation.")
    put(request.speculation, "method", method, "speculation.")
    put(request.speculation, "acceptance", acceptance, "speculation.")
    put(request.speculation, "mode", mode, "speculation.")
    put(request, "request_id", request_id)
    put(request, "priority", priority)
    put(request, "output_ids", output_ids)
    put(request, "model_digest", model_digest)
    put(request, "salt", salt)
    return request


def _encode_sampling(sampling: SamplingParams | None, given: Mapping[str, Any]) -> common_pb2.SamplingParams:
    """Whole parameters are sent whole; single fields leave the others to the gateway."""
    if unknown := sorted(given.keys() - set(_SAMPLING_FIELDS)):
        raise TypeError(f"unknown options: {', '.join(map(_with_near_miss, unknown))}")
    if sampling is not None and given:
        raise TypeError(f"sampling is given whole, and beside it {', '.join(sorted(given))}")
    if sampling is not None:
        given = {name: getattr(sampling, name) for name in _SAMPLING_FIELDS}
    out = common_pb2.SamplingParams()
    for name, value in given.items():
        put(out, name, value, "sampling.")
    return out


def _with_near_miss(name: str) -> str:
    own = (known for known, one in signature(build_request).parameters.items() if one.kind is not Parameter.VAR_KEYWORD)
    near = get_close_matches(name, (*_SAMPLING_FIELDS, *own, "timeout", "traceparent"), 1)
    return f"{name} (is {near[0]} meant?)" if near else name
