"""OpenAI's own client."""

from __future__ import annotations

import sys
from typing import Any

from openai import OpenAI
from openai.types import CompletionUsage
from tools.clients.scenario import FORECAST, LONGEST, MAX_TOKENS, MESSAGES, RESULT, Event, report, usage


def used(told: CompletionUsage | None) -> dict[str, int | None]:
    if told is None or told.prompt_tokens_details is None:
        return {}
    return usage(told.prompt_tokens, told.completion_tokens, told.prompt_tokens_details.cached_tokens)


def main(url: str, model: str) -> None:
    chat = OpenAI(base_url=url, api_key="none", max_retries=0).chat.completions
    asked: dict[str, Any] = {"model": model, "messages": MESSAGES, "temperature": 0}
    whole = chat.create(**asked, max_tokens=MAX_TOKENS)
    pieces = list(chat.create(**asked, max_tokens=MAX_TOKENS, stream=True, stream_options={"include_usage": True}))
    parsed = chat.parse(**asked, max_tokens=LONGEST, response_format=Event).choices[0].message.parsed

    calling = {**asked, "max_tokens": LONGEST, "tools": [FORECAST], "parallel_tool_calls": False}
    called = chat.create(**calling, tool_choice="required").choices[0].message
    (call,) = called.tool_calls
    with chat.stream(**calling, tool_choice="required") as stream:
        (streamed_call,) = stream.get_final_completion().choices[0].message.tool_calls or []
    either = chat.parse(**calling, response_format=Event).choices[0].message
    answered = [*MESSAGES, called, {"role": "tool", "tool_call_id": call.id, "content": RESULT}]
    after: Any = chat.parse(**{**calling, "messages": answered}, tool_choice="none", response_format=Event)
    report(
        "openai",
        text=whole.choices[0].message.content,
        streamed="".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices),
        usage=used(whole.usage),
        streamed_usage=used(pieces[-1].usage),
        parsed=None if parsed is None else parsed.model_dump(),
        call=[call.function.name, call.function.arguments],
        streamed_call=[streamed_call.function.name, streamed_call.function.arguments],
        either=int(either.parsed is not None) + len(either.tool_calls or []),
        parsed_after_result=after.choices[0].message.parsed.model_dump(),
        usage_after_result=used(after.usage),
    )


main(*sys.argv[1:])
