"""A line of the log for each request at its end: what it was, how much came of it and why it ended. The prompt is in it
only where that is asked for, and the generated text never."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

from outrider.gateway.goals import outcomes
from outrider.gateway.prepare import Prepared
from outrider.gateway.request_record import RequestObserver, RequestRecord
from outrider.gateway.text.chat import TEMPLATE_REFUSED
from outrider.rpc.errors import OutriderError
from outrider.rpc.logs import about, cut
from outrider.rpc.messages import MAX_NAME_CHARS
from outrider.rpc.server_calls import SERVER_FAULTS, as_outrider_error
from outrider.rpc.words.request import GenerationRequest

HIDDEN = "the chat template refused the conversation"
log = logging.getLogger(__name__)


class RequestLog(RequestObserver):
    """Writes the line of one request when it has ended, with the ids of its trace where it has one."""

    def __init__(self, model_name: str, with_prompt: bool) -> None:
        self._model_name, self._with_prompt = model_name, with_prompt

    def ended(self, record: RequestRecord, error: BaseException | None) -> None:
        """Writes the line: a warning where the fault is ours. Counts of rounds are of completions that have ended."""
        known, request, prepared = as_outrider_error(error), record.request, record.prepared
        status, message = "OK" if known is None else known.code.name, _message_of(known)
        request_id = cut(str(request.request_id), MAX_NAME_CHARS) if prepared is None else prepared.request_id
        seconds = time.monotonic() - (record.arrived if prepared is None else record.started)
        if prepared is None:
            text = f"{status} before it ran, after {seconds:.3f} s: {message}"
        else:
            num_prompt = len(prepared.prompt_ids)
            text = f"{status}, {record.num_tokens} tokens after a prompt of {num_prompt} in {seconds:.3f} s"
        prompt = _prompt_of(request) if self._with_prompt else {}
        fields = {
            "request_id": request_id or None,
            "model": self._model_name,
            "adapter": request.adapter or None,
            "status": status,
            "error": message,
            **({} if prepared is None else _counts_of(record, prepared)),
            "duration_s": seconds,
            **prompt,
        }
        shown = request_id or "without an id", text, f", prompt {prompt}" if self._with_prompt else ""
        log.log(_level_of(known), "request %s: %s%s", *shown, extra=about(record.traceparent, **fields))


def _counts_of(record: RequestRecord, prepared: Prepared) -> dict[str, object]:
    return {
        "finish_reasons": record.finish_reasons,
        "num_prompt_tokens": len(prepared.prompt_ids),
        "num_cached_tokens": record.num_cached or 0,
        "num_output_tokens": record.num_tokens,
        "num_reasoning_tokens": record.num_reasoning,
        "num_rounds": record.tally.num_rounds,
        "num_draft_tokens": record.tally.num_draft_tokens,
        "num_accepted_tokens": record.tally.num_accepted_tokens,
        "num_forced_tokens": record.tally.num_forced_tokens,
        **({"goals": outcomes(record)} if record.request.goals.by_name else {}),
        "first_token_s": record.first_token - record.started if record.first_token else None,
    }


def _message_of(error: OutriderError | None) -> str | None:
    """An error's message, without the words of a template, which may be the conversation's."""
    if error is None or not any(violation.reason == TEMPLATE_REFUSED for violation in error.violations):
        return None if error is None else error.message
    hidden = (replace(one, problem=HIDDEN) if one.reason == TEMPLATE_REFUSED else one for one in error.violations)
    return "; ".join(map(str, hidden))


def _level_of(error: OutriderError | None) -> int:
    return logging.WARNING if error is not None and error.code in SERVER_FAULTS else logging.INFO


def _prompt_of(request: GenerationRequest) -> dict[str, object]:
    """The prompt in the form that it came in."""
    if request.text is not None:
        return {"prompt": request.text}
    if request.messages is not None:
        return {"messages": [dict(message) for message in request.messages]}
    return {"prompt_token_ids": list(request.token_ids or ())}
