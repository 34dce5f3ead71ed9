"""Structured output by real clients through the three services, with the embedded pair: openai's `parse()` and streams,
every kind of constraint over HTTP and gRPC, and bad grammars among streams, which they do not harm."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest
from openai import AsyncOpenAI, BadRequestError
from pydantic import BaseModel, Field
from support.services import Trio

from outrider.client import Client
from outrider.rpc.errors import InvalidArgument
from outrider.rpc.words.structured import StructuredOutput

HTTP = re.compile(r"gateway http on (\S+)")
MODEL = "python"


class Place(BaseModel, extra="forbid"):
    city: Annotated[str, Field(max_length=12)]
    country: Literal["de", "fr", "it"]


class Event(BaseModel, extra="forbid"):
    name: Annotated[str, Field(min_length=1, max_length=16)]
    day: Annotated[int, Field(ge=1, le=31)]
    places: Annotated[list[Place], Field(max_length=2)]
    note: Annotated[str, Field(max_length=8)] | None


MESSAGES: Any = [{"role": "user", "content": "def plan_event(name, day):"}]
SCHEMA = Event.model_json_schema()


@dataclass
class Addresses:
    """Where the gateway listens."""

    grpc: str
    http: str


@pytest.fixture(scope="module")
def served(trio: Trio) -> Iterator[Addresses]:
    gateway = trio.start_gateway("--mode", "sequential", "--http", "127.0.0.1:0", "--model-name", MODEL)
    yield Addresses(trio.wait(gateway), f"http://{gateway.find(HTTP)}")
    trio.services.stop(gateway)


@pytest.fixture
async def openai(served: Addresses) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{served.http}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
async def client(served: Addresses) -> AsyncIterator[Client]:
    async with Client(served.grpc) as client:
        yield client


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1, "seed": 3}], ids=["greedy", "drawn"])
async def test_parse_gives_a_model(openai: AsyncOpenAI, sampling: dict[str, Any]) -> None:
    answers = [
        await openai.chat.completions.parse(
            model=MODEL,
            messages=MESSAGES,
            response_format=Event,
            max_tokens=200,
            extra_body={"speculation": {"enabled": enabled, "acceptance": "coupled"}},
            **sampling,
        )
        for enabled in (True, False)
    ]
    drafted, plain = (answer.choices[0] for answer in answers)
    assert isinstance(drafted.message.parsed, Event) and drafted.finish_reason == "stop"
    assert drafted.message.content == plain.message.content
    said: Any = drafted
    assert said.speculation["num_accepted_tokens"] > 0


async def test_a_stream_gives_a_model_at_its_end(openai: AsyncOpenAI) -> None:
    async with openai.chat.completions.stream(
        model=MODEL, messages=MESSAGES, response_format=Event, max_tokens=200, temperature=0
    ) as stream:
        kinds = [event.type async for event in stream]
        answer = await stream.get_final_completion()
    assert isinstance(answer.choices[0].message.parsed, Event)
    assert kinds.count("content.delta") > 3


KINDS: dict[str, tuple[dict[str, Any], StructuredOutput, str]] = {
    "json": ({"json": SCHEMA}, StructuredOutput(json_schema=json.dumps(SCHEMA)), ""),
    "json_object": ({"json_object": True}, StructuredOutput(json_object=True), ""),
    "regex": ({"regex": "[a-z]{3,9}-[0-9]{2}"}, StructuredOutput(regex="[a-z]{3,9}-[0-9]{2}"), "[a-z]{3,9}-[0-9]{2}"),
    "choice": ({"choice": ["yes", "no"]}, StructuredOutput(choice=("yes", "no")), "yes|no"),
    "grammar": (
        {"grammar": 'start: "(" /[0-9]{1,3}/ ")"'},
        StructuredOutput(grammar='start: "(" /[0-9]{1,3}/ ")"'),
        r"\([0-9]{1,3}\)",
    ),
}


@pytest.mark.parametrize("kind", KINDS)
async def test_every_kind_over_http_and_grpc(openai: AsyncOpenAI, client: Client, kind: str) -> None:
    given, constraint, pattern = KINDS[kind]
    answer = await openai.completions.create(
        model=MODEL, prompt="x = ", max_tokens=200, temperature=0, extra_body={"structured_outputs": given}
    )
    text = answer.choices[0].text
    for k in (0, 4):
        parts = [
            part
            async for part in client.generate(
                "x = ", max_tokens=200, temperature=0.0, structured_output=constraint, num_draft_tokens=k
            )
        ]
        assert "".join(part.text for part in parts) == text, k
    if pattern:
        assert re.fullmatch(pattern, text)
    elif kind == "json":
        Event.model_validate_json(text)
    elif answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(text), dict)


async def test_openais_forms_of_a_response(openai: AsyncOpenAI) -> None:
    strict = {"type": "json_schema", "json_schema": {"name": "event", "strict": True, "schema": SCHEMA}}
    texts = []
    for form in (strict, {"type": "text"}):
        answer = await openai.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=200, temperature=0, response_format=form
        )  # type: ignore[call-overload]
        texts.append(answer.choices[0].message.content)
    Event.model_validate_json(texts[0])
    with pytest.raises(ValueError, match="JSON"):
        Event.model_validate_json(texts[1])


BAD: dict[str, tuple[dict[str, Any], StructuredOutput]] = {
    "no schema": ({"json": {"type": "nonsense"}}, StructuredOutput(json_schema='{"type": "nonsense"}')),
    "no regex": ({"regex": "(["}, StructuredOutput(regex="([")),
    "no grammar": ({"grammar": "start: other"}, StructuredOutput(grammar="start: other")),
    "hostile": ({"regex": "(a{1000}){1000}"}, StructuredOutput(regex="(a{1000}){1000}")),
}


async def test_bad_grammars_harm_none_of_16_streams(openai: AsyncOpenAI, client: Client) -> None:
    alone = await streams(client)
    together = asyncio.create_task(streams(client))
    await asyncio.sleep(0.3)
    for name, (given, constraint) in BAD.items():
        with pytest.raises(BadRequestError) as refused:
            answer = await openai.completions.create(
                model=MODEL, prompt="x = ", max_tokens=9, extra_body={"structured_outputs": given}
            )
            pytest.fail(f"{name} gives {answer.choices[0].text!r}")
        body: Any = refused.value.body
        assert body["param"].startswith("structured_outputs"), (name, body)
        with pytest.raises(InvalidArgument, match=r"sampling\.structured_output"):
            async for _ in client.generate("x = ", max_tokens=9, structured_output=constraint):
                pass
    assert await together == alone
    assert all(alone)


async def streams(client: Client) -> list[str]:
    """Greedy texts, every second under a constraint."""

    async def one(number: int) -> str:
        constraint = StructuredOutput(json_schema=json.dumps(SCHEMA)) if number % 2 else None
        parts = client.generate(
            f"x{number} = ", max_tokens=96, temperature=0.0, ignore_eos=constraint is None, structured_output=constraint
        )
        return "".join([part.text async for part in parts])

    return await asyncio.gather(*(one(number) for number in range(16)))
