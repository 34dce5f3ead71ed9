"""Output under bounded JSON schemas, in three modes of acceptance: what ended by itself is valid under its schema, and
greedy and coupled output is plain decoding's. Short: some schemas; with --prove 1,000 of a printed seed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import jsonschema
import pytest
from support.schemas import SEED, Schema, make_schemas

from outrider.llm import LLM
from outrider.pairs import pair_path
from outrider.rpc.words.request import GenerationRequest, SpeculationOptions
from outrider.rpc.words.sampling_params import AcceptanceRule, FinishReason, SamplingParams
from outrider.rpc.words.structured import StructuredOutput

K = 4
PROMPT = "value = "
MAX_TOKENS = 320
MOST_CUT = 0.1  # of the outputs, by max_tokens
AT_ONCE = 32


@dataclass(frozen=True)
class Mode:
    """How drafted tokens are accepted."""

    name: str
    temperature: float
    acceptance: AcceptanceRule
    repeats: bool  # plain decoding of the same seed gives the same bytes


MODES = (
    Mode("greedy", 0.0, AcceptanceRule.AUTO, repeats=True),
    Mode("coupled", 1.0, AcceptanceRule.COUPLED, repeats=True),
    Mode("rejection", 1.0, AcceptanceRule.REJECTION, repeats=False),
)


@dataclass(frozen=True)
class Written:
    """One output."""

    text: str
    ids: tuple[int, ...]
    ended: bool  # by itself
    num_rounds: int
    num_accepted: int


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    pair = pair_path()
    drafts = {"model": str(pair.draft), "num_speculative_tokens": K}
    with LLM(pair.target, speculative_config=drafts, max_num_seqs=AT_ONCE, max_model_len=512) as running:
        yield running


@pytest.fixture(scope="module")
def schemas(prove: bool) -> list[Schema]:
    print(f"schemas of seed {SEED}")
    return make_schemas(1000 if prove else 16)


def test_the_script_makes_schemas(schemas: list[Schema]) -> None:
    for schema in schemas:
        jsonschema.Draft202012Validator.check_schema(schema)
    assert make_schemas(5) == schemas[:5] and make_schemas(5, SEED + 1) != schemas[:5]


@pytest.mark.timeout(3600)  # 2,000 outputs a mode
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_what_ends_is_valid(llm: LLM, schemas: list[Schema], mode: Mode) -> None:
    drafted = write(llm, schemas, mode, speculates=True)

    ended = [(one, schema) for one, schema in zip(drafted, schemas, strict=True) if one.ended]
    print(f"{mode.name}: {len(ended)} of {len(drafted)} ended, {sum(len(one.ids) for one in drafted)} tokens in "
          f"{sum(one.num_rounds for one in drafted)} rounds")  # fmt: skip
    for one, schema in ended:
        require_valid(one.text, schema)
    assert len(ended) >= (1 - MOST_CUT) * len(drafted)
    assert sum(one.num_accepted for one in drafted) > 0.1 * sum(len(one.ids) for one in drafted)
    if mode.repeats:
        plain = write(llm, schemas, mode, speculates=False)
        assert [one.ids for one in plain] == [one.ids for one in drafted]


def require_valid(text: str, schema: Schema) -> None:
    try:
        value = json.loads(text)
        jsonschema.validate(value, schema, format_checker=jsonschema.FormatChecker())
    except (ValueError, jsonschema.ValidationError) as error:
        pytest.fail(f"{text!r} under {json.dumps(schema)}: {error}")


def write(llm: LLM, schemas: Sequence[Schema], mode: Mode, speculates: bool) -> list[Written]:
    """Under each schema one output, many at once."""
    backend = llm._backend
    options = SpeculationOptions(speculates, K, acceptance=mode.acceptance, mode="sequential")  # auto goes by the clock

    async def all_of_them() -> list[Written]:
        requests = [
            GenerationRequest(
                text=PROMPT,
                sampling=SamplingParams(
                    temperature=mode.temperature,
                    seed=number,
                    max_tokens=MAX_TOKENS,
                    structured_output=StructuredOutput(json_schema=json.dumps(schema)),
                ),
                speculation=options,
            )
            for number, schema in enumerate(schemas)
        ]
        return await asyncio.gather(*(read(backend, request) for request in requests))

    return llm._runtime.run(all_of_them())


async def read(backend: Any, request: GenerationRequest) -> Written:
    async with aclosing(backend.generate(request)) as deltas:
        parts = [delta async for delta in deltas]
    last = parts[-1]
    return Written(
        text="".join(part.text for part in parts),
        ids=tuple(token for part in parts for token in part.token_ids),
        ended=last.finish_reason is FinishReason.STOP,
        num_rounds=last.speculation.num_rounds,
        num_accepted=last.speculation.num_accepted_tokens,
    )
