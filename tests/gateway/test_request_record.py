"""A request's record is kept once, and every observer reads the same."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import pytest
from support.fakes import ToyDraft, ToyTarget
from support.gateways import toy_tokenizer

from outrider.gateway.engine import EngineConfig, GenerationEngine
from outrider.gateway.request_record import RequestObserver, RequestRecord
from outrider.rpc.errors import NotFound, OutriderError, Unavailable
from outrider.rpc.messages import DraftTokens
from outrider.rpc.token_times import TokenTimes
from outrider.rpc.words.answer import GenerationDelta, Usage
from outrider.rpc.words.request import GenerationRequest
from outrider.rpc.words.sampling_params import SamplingParams

REQUEST = GenerationRequest(token_ids=(11, 12, 13), sampling=SamplingParams(temperature=0.0, max_tokens=20), n=2)


class Noted(RequestObserver):
    """What an observer is told, in order, and the record that it is told of."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.record: RequestRecord | None = None
        self.error: BaseException | None = None

    def began(self, record: RequestRecord) -> None:
        self.told.append("began")

    def drafted(self, record: RequestRecord, completion: int, piece: DraftTokens) -> None:
        self.told.append("drafted")

    def add(self, record: RequestRecord, delta: GenerationDelta) -> None:
        self.told.append("delta")

    def ended(self, record: RequestRecord, error: BaseException | None) -> None:
        self.told.append("ended")
        self.record, self.error = record, error


async def observed(
    request: GenerationRequest, target: ToyTarget | None = None, take: int | None = None, **config: Any
) -> tuple[Noted, Noted, list[GenerationDelta]]:
    """An observer of all requests and one of this, which takes so many deltas (None: all)."""
    every, own, deltas = Noted(), Noted(), list[GenerationDelta]()
    engine = GenerationEngine(
        toy_tokenizer(), target or ToyTarget(num_cached=2), ToyDraft(wrong_every=4), EngineConfig(**config)
    )
    engine.watch_with(lambda: every)
    try:
        async with aclosing(engine.generate(request, observers=[own])) as answer:
            async for delta in answer:
                deltas.append(delta)
                if len(deltas) == take:
                    break
    except OutriderError:
        pass
    assert engine.num_running == engine.admission.num_active == 0
    return every, own, deltas


def test_what_was_cached_of_a_prompt_is_what_the_completion_found_that_computed_it() -> None:
    record = RequestRecord(REQUEST)
    for index, cached in ((1, 32), (0, 0), (2, 32)):
        record.add(GenerationDelta("x", index, usage=Usage(40, 5, cached)))
    assert record.num_cached == 0


async def test_every_observer_reads_one_record() -> None:
    every, own, deltas = await observed(REQUEST)
    record = own.record
    assert record is not None and record is every.record and own.told == every.told and own.error is None
    assert own.told[0] == "began" and own.told[-1] == "ended" and own.told.count("ended") == 1
    assert own.told.count("delta") == len(deltas) and "drafted" in own.told
    assert record.num_tokens == sum(len(delta.token_ids) for delta in deltas) == 40
    assert record.finish_reasons == ["length", "length"] and record.num_cached == 2
    assert record.arrived <= record.started <= record.scheduled <= record.first_token <= record.last_token
    tallies = [delta.speculation for delta in deltas if delta.speculation is not None]
    assert record.tally.num_rounds == sum(tally.num_rounds for tally in tallies) > 0
    assert record.tally.num_accepted_tokens == sum(tally.num_accepted_tokens for tally in tallies) > 0
    assert [times.num_tokens for times in record.completions.values()] == [20, 20]
    assert record.first_token == min(times.first for times in record.completions.values())


async def test_what_is_refused_ends_without_a_beginning() -> None:
    _, own, deltas = await observed(GenerationRequest(text="x", model="another"))
    assert own.told == ["ended"] and isinstance(own.error, NotFound) and not deltas
    assert own.record is not None and own.record.prepared is None and not own.record.delivered


async def test_who_goes_away_and_what_fails_is_told() -> None:
    _, own, _ = await observed(REQUEST, take=2)
    assert own.told[-1] == "ended" and isinstance(own.error, GeneratorExit | asyncio.CancelledError)
    _, own, _ = await observed(REQUEST, ToyTarget(available=False))
    assert own.told == ["began", "ended"] and isinstance(own.error, Unavailable)


def test_the_times_of_tokens() -> None:
    times = TokenTimes()
    assert times.seconds_per_token is None
    times.add(10.0, 2)
    assert times.is_first and times.seconds_per_token is None
    times.add(11.0, 3)
    times.add(20.0, 1, gap_s=2.0)  # its reader took nine seconds, and decoding two
    assert not times.is_first and times.gap_s == 2.0
    assert (times.first, times.last, times.num_first, times.num_tokens) == (10.0, 20.0, 2, 6)
    assert times.seconds_per_token == pytest.approx(3.0 / 4)
