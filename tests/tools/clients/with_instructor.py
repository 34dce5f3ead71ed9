"""instructor: a value of a schema as a call and as the text of an answer, streamed as it grows, and asked for once more
with what was wrong with it."""

from __future__ import annotations

import sys
from typing import Any

import instructor
from openai import OpenAI
from pydantic import field_validator
from tools.clients.scenario import LONGEST, MESSAGES, Event, report, usage

days = list[int]()


class NotAtOnce(Event):
    """Which the first answer is not good enough for."""

    @field_validator("day")
    @classmethod
    def not_the_first(cls, day: int) -> int:
        """Keeps what it has seen."""
        days.append(day)
        if len(days) == 1:
            raise ValueError("this day is taken")
        return day


def main(url: str, model: str) -> None:
    plain = OpenAI(base_url=url, api_key="none", max_retries=0)
    by_tool = instructor.from_openai(plain, mode=instructor.Mode.TOOLS)
    by_schema = instructor.from_openai(plain, mode=instructor.Mode.JSON_SCHEMA)
    asked: dict[str, Any] = {"model": model, "messages": MESSAGES, "temperature": 0, "max_tokens": LONGEST}
    call, answer = by_tool.create_with_completion(response_model=Event, **asked)
    parsed = by_schema.create(response_model=Event, **asked)
    grown = list(by_schema.create_partial(response_model=Event, **asked))
    again, second = by_tool.create_with_completion(response_model=NotAtOnce, max_retries=1, **asked)
    told = answer.usage
    report(
        "instructor", "openai",
        parsed=parsed.model_dump(),
        streamed_parsed=grown[-1].model_dump(),
        parsed_by_tool=call.model_dump(),
        usage=usage(told.prompt_tokens, told.completion_tokens, told.prompt_tokens_details.cached_tokens),
        parsed_after_result=again.model_dump(),
        answers=len(days),
        usage_after_result=usage(
            second.usage.prompt_tokens, second.usage.completion_tokens, second.usage.prompt_tokens_details.cached_tokens
        ),
    )  # fmt: skip


main(*sys.argv[1:])
