"""Injected faults: the sequence that a fault is met with ends, the others' tokens are those of a run without it, and no
block is lost."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import pytest
import torch
from support.engines import COUPLED, REJECTION, VOCAB, TargetHarness, opened, tiny_model

from outrider.engine.batch import BatchEntry
from outrider.engine.loader import LoadedModel
from outrider.engine.worker import DeviceLost
from outrider.rpc.messages import Credit, DraftTokens, Open
from outrider.target_service import steps
from outrider.target_service.engine import run_isolated
from outrider.target_service.scheduler import ScheduledSequence
from outrider.target_service.sequence import TargetSequence

BAD_TOKEN = 96  # nobody may generate it
NUMBERS, CULPRIT, NUM_BLOCKS = range(1, 7), 4, 128


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return tiny_model()[1]


def request_of(number: int) -> Open:
    acceptance, temperature = (REJECTION, COUPLED)[number % 2], float(number % 3 > 0)
    return opened(
        number, [(11 * number + at) % 90 for at in range(20 + number)], max_tokens=12, temperature=temperature,
        acceptance=acceptance, seed=number, bad_words_ids=((BAD_TOKEN,),),
    )  # fmt: skip


def start(loaded: LoadedModel, culprit_draft: tuple[int, ...] = (40, 41, 42)) -> TargetHarness:
    """All of them past their first token, each with a chain held."""
    harness = TargetHarness.of(loaded, num_blocks=NUM_BLOCKS)
    for number in NUMBERS:
        request = request_of(number)
        harness.send(request, Credit(number, len(request.prompt_ids) + 1, 0))
    harness.run()
    for number in NUMBERS:
        draft = culprit_draft if number == CULPRIT else (40, 41, 42)
        position = len(request_of(number).prompt_ids) + 1
        harness.send(DraftTokens(number, 0, position, draft), Credit(number, 1 << 20, 3))
    return harness


def others(harness: TargetHarness) -> dict[int, list[int]]:
    return {number: harness.output(number) for number in NUMBERS if number != CULPRIT}


@pytest.fixture(scope="module")
def clean(loaded: LoadedModel) -> dict[int, list[int]]:
    harness = start(loaded)
    harness.run()
    outputs = others(harness)
    assert all(len(output) == 12 for output in outputs.values())
    return outputs


def model_raises(harness: TargetHarness, patch: pytest.MonkeyPatch) -> None:
    """For a token: in a captured graph or a kernel an id may be out of some range."""
    forward = harness.engine._runner.forward

    def fragile(entries: Sequence[BatchEntry]) -> torch.Tensor:
        if any(BAD_TOKEN in entry.token_ids for entry in entries):
            raise RuntimeError("injected")
        return forward(entries)

    patch.setattr(harness.engine._runner, "forward", fragile)


def verifier_raises(harness: TargetHarness, patch: pytest.MonkeyPatch) -> None:
    launch = harness.engine.steps.verifier.launch

    def fragile(logits: torch.Tensor, windows: Sequence[ScheduledSequence], *masks: Any) -> Any:
        if any(window.target.key == (1, CULPRIT) for window in windows):
            raise RuntimeError("injected")
        return launch(logits, windows, *masks)

    patch.setattr(harness.engine.steps.verifier, "launch", fragile)


def commit_raises(harness: TargetHarness, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(culprit(harness).sampler, "append", raising)


def plan_raises(harness: TargetHarness, patch: pytest.MonkeyPatch) -> None:
    enter = harness.engine.scheduler._enter

    def fragile(target: TargetSequence, *rest: Any) -> Any:
        return raising() if target.key == (1, CULPRIT) else enter(target, *rest)

    patch.setattr(harness.engine.scheduler, "_enter", fragile)


def preparing_raises(harness: TargetHarness, patch: pytest.MonkeyPatch) -> None:
    prepare = harness.engine.steps.verifier.prepare

    def fragile(target: TargetSequence) -> bool:
        return raising() if target.key == (1, CULPRIT) else prepare(target)

    patch.setattr(harness.engine.steps.verifier, "prepare", fragile)
    while harness.engine._prepare_ahead():
        pass


def logits_hold_nan(harness: TargetHarness, patch: pytest.MonkeyPatch) -> None:
    forward = harness.engine._runner.forward

    def poisoned(entries: Sequence[BatchEntry]) -> torch.Tensor:
        logits, end = forward(entries).clone(), 0
        for entry in entries:
            start, end = end, end + entry.num_logits
            if BAD_TOKEN in entry.token_ids:
                logits[start:end] = float("nan")
        return logits

    patch.setattr(harness.engine._runner, "forward", poisoned)


def culprit(harness: TargetHarness) -> TargetSequence:
    return harness.engine.scheduler.sequences[1, CULPRIT]


def raising(*_: object) -> Any:
    raise RuntimeError("injected")


FAULTS: dict[Callable[[TargetHarness, pytest.MonkeyPatch], None], str] = {
    model_raises: "STEP_FAILED",
    verifier_raises: "STEP_FAILED",
    plan_raises: "STEP_FAILED",
    commit_raises: "COMMIT_FAILED",
    preparing_raises: "COMMIT_FAILED",
    logits_hold_nan: "INVALID_LOGITS",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_ends_one_sequence(
    loaded: LoadedModel,
    clean: dict[int, list[int]],
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[TargetHarness, pytest.MonkeyPatch], None],
) -> None:
    harness = start(loaded, culprit_draft=(BAD_TOKEN, 41, 42))
    fault(harness, monkeypatch)
    for _ in range(3):  # a step in which nobody was left to run is followed by a pause
        harness.run()
    assert [failure.reason for failure in harness.failures(CULPRIT)] == [FAULTS[fault]]
    assert others(harness) == clean
    assert not any(harness.failures(number) for number in NUMBERS if number != CULPRIT)
    assert harness.engine.cache.pool.num_free == NUM_BLOCKS


NO_MEMORY = (
    MemoryError(),
    RuntimeError("err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 1"),
)


@pytest.mark.parametrize("error", NO_MEMORY, ids=["Python", "PyTorch"])
@pytest.mark.parametrize("fault", [plan_raises, commit_raises, preparing_raises])
def test_who_finds_no_memory_may_go_on_elsewhere(
    loaded: LoadedModel,
    clean: dict[int, list[int]],
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[TargetHarness, pytest.MonkeyPatch], None],
    error: Exception,
) -> None:
    """Its gateway opens it at another target, or here again a little later."""

    def refused(*_: object) -> Any:
        raise error

    harness = start(loaded)
    monkeypatch.setattr(sys.modules[__name__], "raising", refused)
    fault(harness, monkeypatch)
    for _ in range(3):
        harness.run()
    found = [(failure.code, failure.reason, failure.is_full) for failure in harness.failures(CULPRIT)]
    assert found == [(grpc.StatusCode.UNAVAILABLE.value[0], "NO_MEMORY", True)]
    assert others(harness) == clean


def test_a_fault_that_does_not_come_again_ends_nobody(
    loaded: LoadedModel, clean: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As memory that ran out for once: windows are rolled back and planned again."""
    harness = start(loaded)
    forward, calls = harness.engine._runner.forward, [0]

    def fragile(entries: Sequence[BatchEntry]) -> torch.Tensor:
        calls[0] += 1
        return raising() if calls[0] in (1, 4, 5) else forward(entries)

    monkeypatch.setattr(harness.engine._runner, "forward", fragile)
    harness.run()
    assert others(harness) == clean and not any(harness.failures(number) for number in NUMBERS)


def test_a_lost_device_ends_the_engine_and_fails_nobody(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their gateways open them elsewhere: no sequence is told of an error."""
    harness = start(loaded)

    def lost(device: torch.device) -> None:
        raise DeviceLost("injected")

    monkeypatch.setattr(steps, "require_device", lost)
    monkeypatch.setattr(harness.engine._runner, "forward", raising)
    with pytest.raises(DeviceLost):
        harness.engine.step(0.0)
    assert not any(harness.failures(number) for number in NUMBERS)


def test_a_fault_of_an_idle_target_is_told_at_once(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step says waits for its flush: no other step may come before the request's deadline."""
    told: list[int] = []
    harness, request = TargetHarness.of(loaded), request_of(CULPRIT)
    harness.send(request, Credit(CULPRIT, len(request.prompt_ids) + 1, 3))
    harness.run()
    harness.send(Credit(CULPRIT, 1 << 20, 3, 60_000))  # it waits for its draft
    monkeypatch.setattr(harness.engine, "_flush", lambda: told.append(len(harness.failures(CULPRIT))))
    monkeypatch.setattr(harness.engine.steps.verifier, "prepare", raising)
    assert harness.engine.step(harness.now) != 0.0 and harness.num_steps == 1
    assert [failure.reason for failure in harness.failures(CULPRIT)] == ["COMMIT_FAILED"] and told[-1:] == [1]


def test_what_held_nan_is_not_found_by_others(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = TargetHarness.of(loaded, max_rows=16)
    prompt, forward = [5] * 40, harness.engine._runner.forward
    monkeypatch.setattr(harness.engine._runner, "forward", lambda entries: forward(entries) * float("nan"))
    harness.send(opened(1, prompt, max_tokens=4), Credit(1, 1 << 20, 0))
    harness.run()
    monkeypatch.undo()
    assert harness.failures(1) and len(harness.decode_plain(2, opened(2, prompt, max_tokens=4))) == 4
    assert harness.commits(2)[0].num_cached_ids == 0


@pytest.mark.parametrize("kind", ["piece", "open", "parameters"])
def test_a_command_that_raises_costs_one_sequence(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    harness, expected = TargetHarness.of(loaded), TargetHarness.of(loaded).decode_plain(1, request_of(1))
    harness.send(request_of(1), request_of(2))
    if kind == "piece":
        target = harness.engine.scheduler.sequences[1, 2]
        monkeypatch.setattr(target.chains, "add", raising)
        harness.send(DraftTokens(2, 0, 5, (1, 2)))
        assert target.finished
    elif kind == "open":
        with monkeypatch.context() as patch:
            patch.setattr("outrider.target_service.engine.admit", raising)
            harness.send(request_of(3))
        assert harness.failures(3)[0].reason == "COMMAND_FAILED"
        harness.send(Credit(2, 1, 0))
    else:
        harness.send(opened(3, [1, 2], allowed_token_ids=(VOCAB + 1,)))
        assert "allowed_token_ids" in harness.failures(3)[0].message and harness.failures(3)[0].code == 3
    harness.send(Credit(1, 1 << 20, 0))
    harness.run()
    assert harness.output(1) == expected
    assert [failure.reason for failure in harness.failures(2)] == ["COMMAND_FAILED"] * (kind == "piece")


def test_halves_run_until_the_ones_that_fail_are_alone() -> None:
    ran, gone = list[int](), list[int]()

    def run(items: Sequence[int]) -> Sequence[int]:
        if {3, 12} & set(items):
            raise ValueError
        return items

    for result in run_isolated(range(16), run, lambda item, error: gone.append(item), nobody):
        ran.extend(result)
    assert gone == [3, 12] and ran == [number for number in range(16) if number not in gone]
    assert list(run_isolated([], run, nobody, nobody)) == []


@pytest.mark.parametrize("bad", [{0}, {0, 1}, {0, 1, 2, 3}, {2, 3, 15}, set(range(8))])
def test_all_that_can_run_does_though_several_fail_alone(bad: set[int]) -> None:
    ran, gone = list[int](), list[int]()

    def run(items: Sequence[int]) -> Sequence[int]:
        if bad & set(items):
            raise ValueError
        return items

    for result in run_isolated(range(16), run, lambda item, error: gone.append(item), nobody):
        ran.extend(result)
    assert sorted(gone) == sorted(bad) and sorted(ran) == sorted(set(range(16)) - bad)


def test_where_nothing_runs_all_are_handed_over_after_few_tries() -> None:
    tries, handed = [], []

    def run(items: Sequence[int]) -> None:
        tries.append(len(items))
        raise MemoryError

    assert list(run_isolated(range(256), run, nobody, lambda item, error: handed.append(item))) == []
    assert handed == list(range(256)) and len(tries) <= 20 and tries.count(1) == 2


def nobody(item: int, error: Exception) -> None:
    raise AssertionError(item)


def test_a_fault_of_the_process_is_charged_to_nobody(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """As memory that another process took: their gateways open them elsewhere."""
    harness = start(loaded)
    monkeypatch.setattr(harness.engine._runner, "forward", raising)
    harness.run()
    failures = [failure for number in NUMBERS for failure in harness.failures(number)]
    assert [failure.code for failure in failures] == [grpc.StatusCode.UNAVAILABLE.value[0]] * len(NUMBERS)
    assert not any(failure.retry_after_ms for failure in failures)  # that would say that it is full
    assert harness.engine.cache.pool.num_free == NUM_BLOCKS


def test_one_alone_whose_step_fails_is_charged(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = TargetHarness.of(loaded)
    monkeypatch.setattr(harness.engine._runner, "forward", raising)
    harness.send(request_of(1), Credit(1, 1 << 20, 0))
    harness.run()
    assert [failure.reason for failure in harness.failures(1)] == ["STEP_FAILED"]
