"""pydantic-ai: an agent that has to call its tool, gets the result, and ends with a value of a schema: as the text of
its answer, and as a call of the library's own tool."""

from __future__ import annotations

import sys
from typing import Any

from pydantic_ai import Agent, NativeOutput, RunContext, RunUsage, ToolCallPart, ToolOutput
from pydantic_ai.capabilities import AbstractCapability
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings
from tools.clients.scenario import LONGEST, MAX_TOKENS, PROMPT, RESULT, Event, Place, report, usage


def forecast(city: str) -> str:
    """The weather."""
    Place(city=city)
    return RESULT


class CallFirst(AbstractCapability[Any]):  # type: ignore[misc]
    """A call is required of the first step, and no other of the next."""

    def get_model_settings(self) -> Any:
        """By the step of the run."""

        def settings(context: RunContext[Any]) -> ModelSettings:
            return ModelSettings(tool_choice="required" if context.run_step == 1 else "none")

        return settings


def used(told: RunUsage) -> dict[str, int | None]:
    return usage(told.input_tokens, told.output_tokens, told.cache_read_tokens)


def agent_of(url: str, model: str, max_tokens: int, **rest: Any) -> Agent[Any, Any]:
    chat = OpenAIChatModel(model, provider=OpenAIProvider(base_url=url, api_key="none"))
    return Agent(chat, model_settings={"temperature": 0, "max_tokens": max_tokens}, retries=0, **rest)


def with_tool(url: str, model: str, output_type: Any) -> tuple[dict[str, Any], list[str], dict[str, int | None]]:
    """What the agent ends with, the calls that it made before, and the tokens of all its steps."""
    agent = agent_of(url, model, LONGEST, output_type=output_type, tools=[forecast], capabilities=[CallFirst()])
    ended = agent.run_sync(PROMPT)
    parts = [part for message in ended.all_messages() for part in message.parts]
    calls = [[part.tool_name, part.args_as_json_str()] for part in parts if isinstance(part, ToolCallPart)]
    return ended.output.model_dump(), calls[0], used(ended.usage)


def main(url: str, model: str) -> None:
    agent = agent_of(url, model, MAX_TOKENS)
    whole = agent.run_sync(PROMPT)
    streamed = agent.run_stream_sync(PROMPT)
    text = "".join(streamed.stream_text(delta=True))
    native, call, tokens = with_tool(url, model, NativeOutput(Event))
    by_tool, _, _ = with_tool(url, model, ToolOutput(Event))
    report(
        "pydantic-ai-slim", "openai",
        text=whole.output,
        streamed=text,
        usage=used(whole.usage),
        streamed_usage=used(streamed.usage),
        parsed=agent_of(url, model, LONGEST, output_type=NativeOutput(Event)).run_sync(PROMPT).output.model_dump(),
        call=call,
        parsed_after_result=native,
        usage_after_result=tokens,
        parsed_by_tool=by_tool,
    )  # fmt: skip


main(*sys.argv[1:])
