"""A line of the log for each request at its end: what it was, how much came of it and why it ended. The prompt is in it
only where that is asked for, and the generated text never."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

from outrider.gateway.request import Prepared
from outrider.gateway.text.chat import TEMPLATE_REFUSED
from outrider.gateway.tracing import RequestTrace
from outrider.rpc.errors import OutriderError
from outrider.rpc.logs import about, cut
from outrider.rpc.messages import MAX_NAME_CHARS
from outrider.rpc.server_calls import SERVER_FAULTS, as_outrider_error
from outrider.rpc.words.answer import GenerationDelta
from outrider.rpc.words.request import GenerationRequest

HIDDEN = "the chat template refused the conversation"
log = logging.getLogger(__name__)


class RequestLog:
    """What will be said of one request, with the ids of its trace where it has one."""

    def __init__(self, prepared: Prepared, model_name: str, root: RequestTrace | None, with_prompt: bool) -> None:
        self._prepared, self._model_name, self._with_prompt = prepared, model_name, with_prompt
        self._traceparent = "" if root is None else root.traceparent
        self._began = time.monotonic()
        self._first_s: float | None = None
        self._num_output = self._num_cached = self._num_drafted = self._num_accepted = self._num_rounds = 0
        self._num_reasoning = self._num_forced = 0
        self._finish_reasons: list[str] = []

    def add_delta(self, delta: GenerationDelta) -> None:
        """What the client got."""
        if delta.token_ids and self._first_s is None:
            self._first_s = time.monotonic() - self._began
        self._num_output += len(delta.token_ids)
        self._num_reasoning += delta.num_reasoning
        if delta.finish_reason is not None:
            self._finish_reasons.append(delta.finish_reason.name.lower())
        if delta.usage is not None:
            self._num_cached = max(self._num_cached, delta.usage.cached_tokens)
        if delta.speculation is not None:
            self._num_rounds += delta.speculation.num_rounds
            self._num_drafted += delta.speculation.num_draft_tokens
            self._num_accepted += delta.speculation.num_accepted_tokens
            self._num_forced += delta.speculation.num_forced_tokens

    def end(self, error: BaseException | None = None) -> None:
        """Writes the line: a warning where the fault is ours. Counts of rounds are of completions that have ended."""
        prepared, known = self._prepared, as_outrider_error(error)
        status = "OK" if known is None else known.code.name
        duration_s = time.monotonic() - self._began
        prompt = _prompt_of(prepared.request) if self._with_prompt else {}
        fields = {
            "request_id": prepared.request_id,
            "model": self._model_name,
            "adapter": prepared.request.adapter or None,
            "status": status,
            "error": _told(known),
            "finish_reasons": self._finish_reasons,
            "num_prompt_tokens": len(prepared.prompt_ids),
            "num_cached_tokens": self._num_cached,
            "num_output_tokens": self._num_output,
            "num_reasoning_tokens": self._num_reasoning,
            "num_rounds": self._num_rounds,
            "num_draft_tokens": self._num_drafted,
            "num_accepted_tokens": self._num_accepted,
            "num_forced_tokens": self._num_forced,
            "first_token_s": self._first_s,
            "duration_s": duration_s,
            **prompt,
        }
        log.log(
            _level_of(known),
            "request %s: %s, %d tokens after a prompt of %d in %.3f s%s",
            prepared.request_id,
            status,
            self._num_output,
            len(prepared.prompt_ids),
            duration_s,
            f", prompt {prompt}" if self._with_prompt else "",
            extra=about(self._traceparent, **fields),
        )


def log_refusal(
    request: GenerationRequest,
    model_name: str,
    traceparent: str,
    error: BaseException,
    waited_s: float,
    with_prompt: bool,
) -> None:
    """The line of a request that ended before it ran: refused, or given up while it waited."""
    known = as_outrider_error(error)
    prompt = _prompt_of(request) if with_prompt else {}
    fields = {
        "request_id": cut(str(request.request_id), MAX_NAME_CHARS) or None,
        "model": model_name,
        "adapter": request.adapter or None,
        "status": None if known is None else known.code.name,
        "error": _told(known),
        "duration_s": waited_s,
        **prompt,
    }
    text = "request %s: %s before it ran, after %.3f s: %s%s"
    shown = fields["request_id"] or "without an id", fields["status"], waited_s, fields["error"]
    log.log(
        _level_of(known),
        text,
        *shown,
        f", prompt {prompt}" if with_prompt else "",
        extra=about(traceparent, **fields),
    )


def _told(error: OutriderError | None) -> str | None:
    """An error's message, without the words of a template, which may be the conversation's."""
    if error is None or not any(violation.reason == TEMPLATE_REFUSED for violation in error.violations):
        return None if error is None else error.message
    hidden = (replace(one, problem=HIDDEN) if one.reason == TEMPLATE_REFUSED else one for one in error.violations)
    return "; ".join(map(str, hidden))


def _level_of(error: OutriderError | None) -> int:
    return logging.WARNING if error is not None and error.code in SERVER_FAULTS else logging.INFO


def _prompt_of(request: GenerationRequest) -> dict[str, object]:
    """In the form that it came in."""
    if request.text is not None:
        return {"prompt": request.text}
    if request.messages is not None:
        return {"messages": [dict(message) for message in request.messages]}
    return {"prompt_token_ids": list(request.token_ids or ())}
