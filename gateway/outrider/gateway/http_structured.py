"""Constraints on the text, in OpenAI's form (`response_format`) and vLLM's (`structured_outputs`)."""

from __future__ import annotations

import json

from outrider.gateway.http_body import Body
from outrider.gateway.http_errors import invalid
from outrider.wire.checks import quoted
from outrider.wire.sampling import StructuredOutput

_FORMATS = ("text", "json_object", "json_schema")


def structured_output(response_format: Body | None, structured_outputs: Body | None) -> StructuredOutput | None:
    """The constraint; None for free text."""
    if structured_outputs is not None:
        if response_format is not None:
            raise invalid("structured_outputs", "is given beside response_format; allowed: one of them")
        return _from_vllm(structured_outputs)
    return None if response_format is None else _from_openai(response_format)


def _from_openai(body: Body) -> StructuredOutput | None:
    kind = body.text("type")
    if kind not in _FORMATS:
        raise invalid(
            "response_format.type", f"is {quoted(kind) if kind else 'missing'}; allowed: {', '.join(_FORMATS)}"
        )
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutput(json_object=True)
    schema = body.inner("json_schema")
    if schema is None or schema.inner("schema") is None:
        raise invalid("response_format.json_schema.schema", "is missing; allowed: a JSON schema")
    return StructuredOutput(json_schema=json.dumps(schema.get("schema")))


def _from_vllm(body: Body) -> StructuredOutput:
    schema = body.get("json")
    return StructuredOutput(
        json_schema=schema if schema is None or isinstance(schema, str) else json.dumps(schema),
        regex=body.get("regex"),
        grammar=body.get("grammar"),
        choice=body.items("choice") if body.get("choice") is not None else None,
        json_object=body.flag("json_object"),
    )
