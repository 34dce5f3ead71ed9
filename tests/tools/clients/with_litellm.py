"""litellm, by its provider for servers like vLLM."""

from __future__ import annotations

import sys
from typing import Any

import litellm
from tools.clients.scenario import FORECAST, LONGEST, MAX_TOKENS, MESSAGES, PROMPT, RESULT, Event, report, usage


def used(answer: Any) -> dict[str, int | None]:
    told = answer.usage
    return usage(told.prompt_tokens, told.completion_tokens, told.prompt_tokens_details.cached_tokens)


def main(url: str, model: str) -> None:
    litellm.suppress_debug_info = True
    asked: dict[str, Any] = {
        "model": f"hosted_vllm/{model}", "api_base": url, "api_key": "none", "messages": MESSAGES, "temperature": 0
    }  # fmt: skip
    whole = litellm.completion(**asked, max_tokens=MAX_TOKENS)
    pieces = list(
        litellm.completion(**asked, max_tokens=MAX_TOKENS, stream=True, stream_options={"include_usage": True})
    )
    streamed = litellm.stream_chunk_builder(pieces, messages=MESSAGES)
    parsed = litellm.completion(**asked, max_tokens=LONGEST, response_format=Event).choices[0].message.content
    text = litellm.text_completion(
        model=f"text-completion-openai/{model}", api_base=url, api_key="none", prompt=PROMPT, max_tokens=MAX_TOKENS,
        temperature=0,
    )  # fmt: skip

    calling = {**asked, "max_tokens": LONGEST, "tools": [FORECAST], "parallel_tool_calls": False}
    called = litellm.completion(**calling, tool_choice="required").choices[0].message
    (call,) = called.tool_calls
    made = litellm.stream_chunk_builder(list(litellm.completion(**calling, tool_choice="required", stream=True)))
    (streamed_call,) = made.choices[0].message.tool_calls
    answered = [*MESSAGES, called, {"role": "tool", "tool_call_id": call.id, "content": RESULT}]
    after = litellm.completion(**{**calling, "messages": answered}, tool_choice="none", response_format=Event)
    report(
        "litellm",
        text=whole.choices[0].message.content,
        streamed=streamed.choices[0].message.content,
        usage=used(whole),
        streamed_usage=used(streamed),
        completed=[bool(text.choices[0].text), text.usage.completion_tokens],
        parsed=Event.model_validate_json(parsed).model_dump(),
        call=[call.function.name, call.function.arguments],
        streamed_call=[streamed_call.function.name, streamed_call.function.arguments],
        parsed_after_result=Event.model_validate_json(after.choices[0].message.content).model_dump(),
        usage_after_result=used(after),
    )


main(*sys.argv[1:])
