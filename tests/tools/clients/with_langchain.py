"""langchain's model for OpenAI, by chat completions and by the responses API."""

from __future__ import annotations

import json
import sys
from typing import Any

from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import SecretStr
from tools.clients.scenario import FORECAST, LONGEST, MAX_TOKENS, PROMPT, RESULT, Event, report, usage

MESSAGES = [HumanMessage(PROMPT)]


def used(message: AIMessage) -> dict[str, int | None]:
    told: Any = message.usage_metadata
    return usage(told["input_tokens"], told["output_tokens"], told["input_token_details"].get("cache_read"))


def called(message: AIMessage) -> list[str]:
    (call,) = message.tool_calls
    return [call["name"], json.dumps(call["args"])]


def joined(pieces: Any) -> Any:
    first, *rest = pieces
    for piece in rest:
        first += piece
    return first


def found(url: str, model: str, responses: bool) -> dict[str, Any]:
    def chat(max_tokens: int) -> Any:
        return ChatOpenAI(
            base_url=url, model=model, api_key=SecretStr("none"), temperature=0, max_retries=0, stream_usage=True,
            max_completion_tokens=max_tokens, use_responses_api=responses,
        )  # fmt: skip

    whole = chat(MAX_TOKENS).invoke(MESSAGES)
    streamed = joined(chat(MAX_TOKENS).stream(MESSAGES))
    parsed = chat(LONGEST).with_structured_output(Event).invoke(MESSAGES)

    calling = chat(LONGEST).bind_tools([FORECAST], tool_choice="required", parallel_tool_calls=False)
    message = calling.invoke(MESSAGES)
    answered = [*MESSAGES, message, ToolMessage(RESULT, tool_call_id=message.tool_calls[0]["id"])]
    after = chat(LONGEST).bind_tools([FORECAST], tool_choice="none", response_format=Event).invoke(answered)
    return {
        "text": whole.text,
        "streamed": streamed.text,
        "usage": used(whole),
        "streamed_usage": used(streamed),
        "parsed": parsed.model_dump(),
        "call": called(message),
        "streamed_call": called(joined(calling.stream(MESSAGES))),
        "parsed_after_result": after.additional_kwargs["parsed"].model_dump(),
        "usage_after_result": used(after),
    }


def main(url: str, model: str, interface: str = "completions") -> None:
    report("langchain-openai", "openai", **found(url, model, interface == "responses"))


main(*sys.argv[1:])
