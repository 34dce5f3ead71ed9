"""What a row asks for, as the body of a chat completion, and what of an answer is compared, whole or streamed."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
from lossless.composition.table import TREES, Row
from support.environment import SEED

MAX_TOKENS = 32
WORDS = (
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "lazy",
    "dog",
    "def",
    "main",
    "stop",
    "words",
    "naïve",
    "café",
)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"enum": ["ada", "grace"]}, "born": {"type": "integer", "minimum": 0, "maximum": 9999}},
    "required": ["name", "born"],
    "additionalProperties": False,
}
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "of": {"enum": ["x", "y"]}},
    "required": ["a", "of"],
    "additionalProperties": False,
}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}
AS_SCHEMA = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}
CONSTRAINTS: dict[str, dict[str, Any]] = {
    "none": {},
    "json schema": AS_SCHEMA,
    "regex": {"structured_outputs": {"regex": "([ab]{2,3} )+end"}},
    "grammar": {"structured_outputs": {"grammar": 'root ::= "(" root ")" | "x" | "y" root'}},
    "tools": {"tools": [TOOL], "tool_choice": "required"},
    "reasoning": {**AS_SCHEMA, "chat_template_kwargs": {"opens": True}, "thinking_token_budget": 9},
}
PROCESSORS: dict[str, dict[str, Any]] = {
    "none": {},
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    "bias": {"logit_bias": {"71": 3.0, "72": -5.0, "101": 2.0}},
    "bad words": {"bad_words": ["7", "er", "ov"]},
    "min_p": {"min_p": 0.05},
    "top_k and top_p": {"top_k": 40, "top_p": 0.9},
    "min_tokens": {"min_tokens": 12},
}
STOPS: dict[str, dict[str, Any]] = {
    "none": {},
    "a string": {"stop": ["he", "ov", "7"]},
    "an id": {"stop_token_ids": [88, 90, 261]},
}
OF_OUTPUT: dict[str, Any] = {"logprobs": True, "top_logprobs": 3}
LOGPROBS = {"none": {}, "of the output": OF_OUTPUT, "of the prompt, too": OF_OUTPUT | {"prompt_logprobs": 2}}


def number_of(row: Row) -> int:
    """A number of its own, the same in every run with this seed."""
    return random.Random(f"{SEED} {row}").randrange(1 << 31)


def body_of(row: Row, model: str) -> dict[str, Any]:
    """Without what says how to speculate."""
    number = number_of(row)
    draw = random.Random(number)
    text = " ".join(draw.choices(WORDS, k=draw.choice(row.num_words)))
    return {
        "model": "one" if row.adapter == "one" else model,
        "messages": [{"role": "user", "content": f"{number} {text} {text[:24]}"}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0.0 if row.rule == "greedy" else 0.9,
        "seed": number,
        "n": int(row.n),
        "cache_salt": f"tenant {number}",
        "return_token_ids": True,
        **CONSTRAINTS[row.constraint],
        **PROCESSORS[row.processors],
        **LOGPROBS[row.logprobs],
        **STOPS[row.stop],
    }


def speculating(row: Row, body: dict[str, Any], guess: str) -> dict[str, Any]:
    """With it. `guess` is at the answer, for methods that draft from one."""
    said: dict[str, Any] = {"acceptance": "auto" if row.rule == "greedy" else row.rule}
    if row.method not in TREES:
        said["num_draft_tokens"] = int(row.k)
    given = body | {"speculation": said}
    if row.method in ("prediction", "in turn"):
        given["prediction"] = {"type": "content", "content": guess}
    if row.answer == "streamed":
        given |= {"stream": True, "stream_options": {"include_usage": True}}
    return given


def warming(row: Row, body: dict[str, Any]) -> dict[str, Any] | None:
    """A request that is made before: of the same prompt, by the same tenant or another one."""
    if row.cache == "cold":
        return None
    salt = body["cache_salt"] if row.cache == "warm" else "another tenant"
    prompt = {name: body[name] for name in ("model", "messages", "tools", "chat_template_kwargs") if name in body}
    return prompt | {"cache_salt": salt, "max_tokens": 1, "n": 1, "speculation": {"enabled": False}}


@dataclass(slots=True)
class Choice:
    """One completion of an answer."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    reasoning: str = ""
    calls: list[dict[str, str]] = field(default_factory=list)
    logprobs: list[tuple[str, float, list[tuple[str, float]]]] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, told: dict[str, Any], message: dict[str, Any]) -> None:
        """A piece of it, or all."""
        self.ids += told.get("token_ids") or []
        self.text += message.get("content") or ""
        self.reasoning += message.get("reasoning_content") or message.get("reasoning") or ""
        for place, call in enumerate(message.get("tool_calls") or []):
            self._add_call(call.get("index", place), call["function"])
        for token in (told.get("logprobs") or {}).get("content") or []:
            best = [(one["token"], one["logprob"]) for one in token["top_logprobs"]]
            self.logprobs.append((token["token"], token["logprob"], best))
        self.finish_reason = told.get("finish_reason") or self.finish_reason

    def _add_call(self, index: int, function: dict[str, Any]) -> None:
        while len(self.calls) <= index:
            self.calls.append({"name": "", "arguments": ""})
        for name in ("name", "arguments"):
            self.calls[index][name] += function.get(name) or ""


@dataclass(slots=True)
class Answer:
    """What a row got."""

    choices: list[Choice]
    prompt_logprobs: list[Mapping[str, float]] = field(default_factory=list)  # of each token but the first, by id
    num_prompt: int = 0
    num_output: int = 0
    num_cached: int = 0
    num_drafted: int = 0
    num_accepted: int = 0

    def count(self, usage: dict[str, Any] | None) -> None:
        if usage is not None:
            self.num_prompt, self.num_output = usage["prompt_tokens"], usage["completion_tokens"]
            self.num_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0

    def add_prompt(self, told: list[dict[str, Any] | None] | None) -> None:
        """The log probabilities of its tokens, if they were asked for."""
        self.prompt_logprobs += [{key: one["logprob"] for key, one in row.items()} for row in told or [] if row]

    def count_drafts(self, told: dict[str, Any] | None) -> None:
        if told:
            self.num_drafted += told["num_draft_tokens"]
            self.num_accepted += told["num_accepted_tokens"]


class Refused(AssertionError):
    """The gateway did not take a row's request."""


async def ask(client: httpx.AsyncClient, body: dict[str, Any]) -> Answer:
    """The answer, whichever way it came. Raises Refused."""
    answer = Answer([Choice() for _ in range(body["n"])])
    if not body.get("stream"):
        response = await client.post("/v1/chat/completions", json=body)
        if response.status_code != 200:
            raise Refused(f"{response.status_code}: {response.text}")
        told = response.json()
        for choice in told["choices"]:
            answer.choices[choice["index"]].add(choice, choice["message"])
            answer.count_drafts(choice.get("speculation"))
        answer.count(told["usage"])
        answer.add_prompt(told.get("prompt_logprobs"))
        return answer
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            raise Refused(f"{response.status_code}: {(await response.aread()).decode()}")
        async for line in response.aiter_lines():
            data = line.removeprefix("data: ")
            if not data.startswith("{"):
                continue
            told = json.loads(data)
            if "error" in told:
                raise Refused(data)
            for choice in told["choices"]:
                answer.choices[choice["index"]].add(choice, choice["delta"])
                answer.count_drafts(choice.get("speculation"))
            answer.count(told.get("usage"))
    return answer
