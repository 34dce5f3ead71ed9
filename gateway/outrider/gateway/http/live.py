"""The live page and the events that it shows: a completion with each round's tokens, their origins, and what the
round's time went to."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from importlib import resources
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from outrider.gateway.engine import GenerationEngine
from outrider.gateway.http import sse
from outrider.gateway.http.errors import error_body, plain_error
from outrider.gateway.http.protocol import options_of, read_completion
from outrider.gateway.http.serving import engine_of, generate, stats_shape
from outrider.gateway.models import Models
from outrider.gateway.text.tokenizer import Detokenizer, make_detokenizer
from outrider.planner.policy import Round
from outrider.rpc.errors import OutriderError
from outrider.rpc.words.answer import GenerationDelta
from outrider.rpc.words.request import GenerationRequest
from outrider.rpc.words.sampling_params import SamplingParams

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"
_NUMBERS = {"max_tokens": int, "seed": int, "temperature": float, "top_p": float}


async def page(request: Request) -> Response:
    """Answers with the page, which is one static file."""
    text = resources.files("outrider.gateway.http").joinpath("page/index.html").read_text(encoding="utf-8")
    return HTMLResponse(text, headers={"content-security-policy": _POLICY, "cache-control": "no-cache"})


class LiveEndpoint:
    """GET /live?prompt=...: events `start`, `round` for each verification, then `end` or `failure`."""

    def __init__(self, models: Models) -> None:
        self._models = models

    async def stream(self, request: Request) -> Response:
        """Answers with the events. It is always a stream: an EventSource cannot read the body of a refusal."""
        if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            return plain_error(403, "the live page alone may ask for this")
        events = self._events(dict(request.query_params))
        return sse.EventStream(events, options_of(request).sse_keep_alive_s)

    async def _events(self, query: dict[str, str]) -> AsyncGenerator[str, None]:
        try:
            engine = engine_of(self._models, query)
            ask = read_completion(_body(query), None, engine)
            view = _View(engine, ask.requests[0])
            async with aclosing(generate(engine, ask)) as deltas:
                async for delta in deltas:
                    for text in view.events(delta):
                        yield text
        except OutriderError as error:
            yield sse.event("failure", error_body(error)["error"])


class _View:
    """Turns the deltas of one completion into events."""

    def __init__(self, engine: GenerationEngine, request: GenerationRequest) -> None:
        self._engine, self._request = engine, request
        self._detokenizer: Detokenizer | None = None
        self._started = 0.0

    def events(self, delta: GenerationDelta) -> list[str]:
        """What the page learns of one delta."""
        out = []
        if self._detokenizer is None:
            out.append(sse.event("start", self._start(delta)))
        if delta.round is not None:
            out.append(sse.event("round", {"tokens": self._tokens(delta), **self._times(delta.round)}))
        if delta.finish_reason is not None and delta.speculation is not None:
            end = {"finish_reason": delta.finish_reason.name.lower(), **stats_shape(delta.speculation)}
            out.append(sse.event("end", end))
        return out

    def _start(self, delta: GenerationDelta) -> dict[str, Any]:
        engine, speculation = self._engine, self._request.speculation
        sampling = self._request.sampling or SamplingParams()
        self._detokenizer = make_detokenizer(engine.tokenizer, sampling, delta.prompt_token_ids)
        self._started = delta.round.started if delta.round is not None else 0.0
        draft = None if engine.drafter is None else engine.drafter.info
        return {
            "model": self._request.adapter or engine.model_name,
            "draft": None if draft is None or not speculation.enabled else draft.model.name,
            "prompt_tokens": len(delta.prompt_token_ids),
            "constraint": None if sampling.structured_output is None else sampling.structured_output.kind,
        }

    def _tokens(self, delta: GenerationDelta) -> list[dict[str, str]]:
        if self._detokenizer is None:
            return []
        texts = [self._detokenizer.step(token_id) for token_id in delta.token_ids]
        return [
            {"text": text, "origin": origin.name.lower()} for text, origin in zip(texts, delta.origins, strict=True)
        ]

    def _times(self, closed: Round) -> dict[str, Any]:
        commit, timings = closed.commit, closed.commit.timings
        return {
            "index": closed.index,
            "mode": closed.mode,
            "k": closed.num_draft_tokens,
            "drafted": commit.num_drafted,
            "accepted": commit.num_accepted,
            "forced": commit.num_forced,
            "forced_accepted": commit.num_accepted_forced,
            "methods": [share.method for share in closed.drafted_by],
            "start_us": round((closed.started - self._started) * 1e6),
            "end_us": round((closed.ended - self._started) * 1e6),
            "draft_us": closed.draft_us,
            "wire_us": closed.wire_us,
            "queue_us": timings.queue_us,
            "verify_us": timings.verify_us,
            "sample_us": timings.sample_us,
            "mask_us": timings.mask_us,
            "compile_us": timings.compile_us,
        }


def _body(query: dict[str, str]) -> dict[str, Any]:
    """A query's fields as the completions endpoint has them."""
    values: dict[str, Any] = {name: query[name] for name in ("prompt", "model") if name in query}
    values.update({name: _number(kind, query[name]) for name, kind in _NUMBERS.items() if query.get(name)})
    if constraint := query.get("constraint"):
        values["structured_outputs"] = {constraint: constraint == "json_object" or query.get("match", "")}
    speculation: dict[str, Any] = {"enabled": query.get("speculate", "1") != "0"}
    if query.get("k"):
        speculation["num_draft_tokens"] = _number(int, query["k"])
    speculation |= {name: query[name] for name in ("acceptance", "mode", "method") if query.get(name)}
    return {**values, "speculation": speculation}


def _number(kind: type, text: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        return text  # the validator names it
