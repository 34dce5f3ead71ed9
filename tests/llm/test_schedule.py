"""Drafting by the number of running requests: off above a bound and on again, fewer tokens in a larger batch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from llm.conftest import TinyPair, greedy_ids

from outrider.gateway.speculation import loop
from outrider.gateway.speculation.backends import Lost
from outrider.gateway.speculation.schedule import BatchSchedule, ScheduledDrafter
from outrider.llm import LLM, SamplingParams
from outrider.rpc.messages import Commit, Credit, Open
from outrider.rpc.sampling_params import SamplingParams as WireSampling

QUIET: dict[str, Any] = {"use_tqdm": False}


def test_ranges() -> None:
    def ks(schedule: BatchSchedule, sizes: tuple[int, ...]) -> list[int]:
        return [schedule.num_draft_tokens(size) for size in sizes]

    assert BatchSchedule.of(5, None, None).constant
    assert ks(BatchSchedule.of(5, 8, None), (0, 1, 8, 9, 100)) == [5, 5, 5, 0, 0]
    by_size = BatchSchedule.of(5, None, [(1, 2, 5), (4, 8, 2), (16, 20, 0)])
    assert ks(by_size, (1, 2, 3, 4, 8, 9, 15, 16, 99)) == [5, 5, 5, 2, 2, 2, 2, 0, 0]  # gaps and the tail go on
    assert ks(BatchSchedule.of(5, 6, [(1, 2, 5), (4, 8, 2), (9, 20, 1)]), (1, 6, 7, 10)) == [5, 2, 0, 0]


class Recorded:
    """A drafter that notes what it is sent."""

    info: Any = object()
    round_trip_us = 0.0

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.num_closed = 0

    def open(self, request: Open, on_event: Callable[[Any], None]) -> Any:
        return self

    def send(self, *messages: Any) -> None:
        self.sent.extend(messages)

    def close(self) -> None:
        self.num_closed += 1


async def test_credit_is_cut_and_never_falls() -> None:
    inner, size, events = Recorded(), [1], []
    drafter = ScheduledDrafter(inner, BatchSchedule.of(4, 8, [(1, 1, 4), (2, 3, 2), (4, 8, 1)]), lambda: size[0])
    link = drafter.open(Open(0, (1, 2, 3), WireSampling()), events.append)
    assert link is not None
    link.send(Credit(0, 7, 4))
    assert inner.sent == [Credit(0, 7, 4)]
    size[0] = 2
    link.send(Commit(0, 3, (5, 5)), Credit(0, 9, 4))  # 5 tokens are committed: 2 past them
    assert inner.sent[1:] == [Commit(0, 3, (5, 5)), Credit(0, 7, 2)]
    link.send(Commit(0, 5, (5, 5, 5)), Credit(0, 12, 4))
    assert inner.sent[3:] == [Commit(0, 5, (5, 5, 5)), Credit(0, 10, 2)]
    link.send(Commit(0, 8, (5,)))  # the gateway's credit reaches the end: it is passed on by and by
    assert inner.sent[5:] == [Commit(0, 8, (5,)), Credit(0, 11, 2)]
    size[0] = 9
    assert drafter.info is None
    link.send(Commit(0, 9, (5,)))
    await asyncio.sleep(0)
    assert len(events) == 1 and isinstance(events[0], Lost) and len(inner.sent) == 7
    link.close()
    assert inner.num_closed == 1
    absent = drafter.open(Open(0, (1, 2, 3), WireSampling()), events.append)
    assert absent is not None
    absent.send(Credit(0, 7, 4))
    await asyncio.sleep(0)
    assert len(events) == 2 and len(inner.sent) == 7
    size[0] = 8
    assert drafter.info is inner.info


def metrics_of(made: LLM) -> dict[str, Any]:
    return {metric.name.removeprefix("vllm:spec_decode_"): metric for metric in made.get_metrics()}


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_no_drafts_above_the_batch_size(
    tiny_pair: TinyPair, method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config: dict[str, Any] = {"method": method, "num_speculative_tokens": 4, "disable_by_batch_size": 2}
    config |= {"prompt_lookup_min": 1} if method == "ngram" else {"model": str(tiny_pair.draft)}
    prompts = [[7, 8, 9], [20, 21, 22], [50, 60, 70]]
    greedy = SamplingParams(temperature=0, max_tokens=40)
    expected = [greedy_ids(tiny_pair, prompt, 120) for prompt in prompts]
    with LLM(tiny_pair.target, batch_invariant=True, threads=1, speculative_config=config) as made:
        outputs = made.generate(prompts, greedy, **QUIET)
        assert [output.outputs[0].token_ids for output in outputs] == [ids[:40] for ids in expected]
        assert metrics_of(made)["num_drafts"].value == 0
        assert "speculation is off" in caplog.text
        made.generate(prompts[:2], greedy, **QUIET)
        few = metrics_of(made)["num_drafts"].value
        assert few > 0
        monkeypatch.setattr(loop, "DRAFT_RETRY_S", 0.0)
        params = [SamplingParams(temperature=0, max_tokens=count) for count in (120, 120, 4)]
        outputs = made.generate(prompts, params, **QUIET)  # on again, once the short one has ended
        assert [len(output.outputs[0].token_ids) for output in outputs] == [120, 120, 4]
        assert [output.outputs[0].token_ids for output in outputs[:2]] == expected[:2]
        assert metrics_of(made)["num_drafts"].value > few


def test_fewer_tokens_by_batch_size(tiny_pair: TinyPair) -> None:
    config: dict[str, Any] = {
        "model": str(tiny_pair.draft), "num_speculative_tokens": 4,
        "num_speculative_tokens_per_batch_size": [(1, 2, 2), (3, 8, 1)],
    }  # fmt: skip
    prompts = [[7, 8, 9], [20, 21, 22], [50, 60, 70]]
    with LLM(tiny_pair.target, batch_invariant=True, threads=1, speculative_config=config) as made:
        outputs = made.generate(prompts, SamplingParams(temperature=0, max_tokens=40), **QUIET)
        found = metrics_of(made)
        assert [o.outputs[0].token_ids for o in outputs] == [greedy_ids(tiny_pair, p, 40) for p in prompts]
        assert found["num_accepted_tokens_per_pos"].values[2:] == [0, 0]
        assert 0 < found["num_drafts"].value <= found["num_draft_tokens"].value <= 2 * found["num_drafts"].value
