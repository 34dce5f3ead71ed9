"""A real model over HTTP by the client that people have: completions, streams, log probabilities, JSON, regular
expressions and grammars over its 262,144 tokens. It is the base model: it has no chat template of its own."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError, OpenAI
from support.environment import START_S

from outrider.cli.local_services import Services

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
HTTP = re.compile(r"^ *OpenAI +(\S+)", re.MULTILINE)
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "people": {"type": "integer", "minimum": 1, "maximum": 99_999_999},
    },
    "required": ["city", "people"],
    "additionalProperties": False,
}
GRAMMAR = 'root ::= pair ("," pair)?\npair ::= [a-z]{1,6} "=" [0-9]{1,3}\n'
CONSTRAINTS: dict[str, tuple[dict[str, Any], str]] = {
    "json": ({"json": SCHEMA}, r'\{.*"city".*"people".*\}'),
    "regex": ({"regex": r"[A-Z][a-z]{2,8}, [12][0-9]{3}"}, r"[A-Z][a-z]{2,8}, [12][0-9]{3}"),
    "ebnf": ({"grammar": GRAMMAR}, r"[a-z]{1,6}=[0-9]{1,3}(,[a-z]{1,6}=[0-9]{1,3})?"),
}


@pytest.fixture(scope="module")
def client(model: Path) -> Iterator[OpenAI]:
    """Of what `outrider serve` starts, the target drafting for itself."""
    with Services() as services:
        served = services.start(
            "serve",
            ["serve", str(model), "--draft.model", "self:int4", "--gateway.http", "127.0.0.1:0",
             "--gateway.listen", "127.0.0.1:0"],
        )  # fmt: skip
        end = time.monotonic() + START_S
        while not served.find(HTTP):
            served.check()
            assert time.monotonic() < end, served.tail()
            time.sleep(0.1)
        yield OpenAI(base_url=served.find(HTTP), api_key="none", max_retries=0, timeout=120)


@pytest.fixture(scope="module")
def name(client: OpenAI) -> str:
    """What the model is called."""
    return client.models.list().data[0].id


def test_completions_are_real_text(client: OpenAI, name: str) -> None:
    assert "gemma" in name
    asked: dict[str, Any] = {"model": name, "prompt": "The capital of France is", "max_tokens": 24, "temperature": 0}
    whole = client.completions.create(**asked)
    assert "city in France" in whole.choices[0].text
    parts = list(client.completions.create(**asked, stream=True))
    assert "".join(part.choices[0].text for part in parts if part.choices) == whole.choices[0].text
    plain = client.completions.create(**asked, extra_body={"speculation": {"enabled": False}})
    assert plain.choices[0].text == whole.choices[0].text


def test_log_probabilities_are_of_the_whole_vocabulary(client: OpenAI, name: str) -> None:
    done = client.completions.create(model=name, prompt="One, two, three,", max_tokens=4, temperature=0, logprobs=5)
    found = done.choices[0].logprobs
    assert found is not None and found.token_logprobs is not None and found.top_logprobs is not None
    for chosen, top in zip(found.token_logprobs, found.top_logprobs, strict=True):
        assert chosen is not None and chosen <= 0
        assert len(top) >= 5 and chosen == pytest.approx(max(top.values()), abs=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", CONSTRAINTS)
def test_constraints_hold(kind: str, temperature: float, client: OpenAI, name: str) -> None:
    constraint, pattern = CONSTRAINTS[kind]
    texts = [
        client.completions.create(
            model=name, prompt="A city, and how many people live there: ", max_tokens=120, temperature=temperature,
            seed=3,
            extra_body={
                "structured_outputs": constraint, "speculation": {"enabled": enabled, "acceptance": "coupled"}
            },
        ).choices[0].text
        for enabled in (True, False)
    ]  # fmt: skip
    assert texts[0] == texts[1]
    assert re.fullmatch(pattern, texts[0], re.DOTALL)
    if kind == "json":
        assert json.loads(texts[0])["people"] >= 1


def test_a_chat_wants_a_template(client: OpenAI, name: str) -> None:
    with pytest.raises(BadRequestError, match="template"):
        client.chat.completions.create(model=name, messages=[{"role": "user", "content": "Hello"}])
