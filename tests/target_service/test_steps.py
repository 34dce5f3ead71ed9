"""Steps that are launched before those are read which they follow, on a GPU that is not here: what is committed is what
the host commits, one step after the other, whatever ends, comes or fails meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.devices import checkpoint, device_of, on_host
from support.engines import BLOCK, COUPLED, REJECTION, TargetHarness, opened
from support.kernels import interpreter
from support.models import build_decoder

from outrider.engine.batch import StepLimits
from outrider.engine.loader import LoadedModel
from outrider.rpc.messages import Close, Credit, DraftTokens, Open
from outrider.rpc.words.sampling_params import FinishReason
from outrider.target_service.goodput import Goodput

__all__ = ["checkpoint", "interpreter", "on_host"]

pytestmark = pytest.mark.compilers

LIMITS = StepLimits(max_rows=2, max_sequences=2, max_query_len=1)
MAX_TOKENS = 13  # past the end of a block
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "acceptance": COUPLED, "seed": (1 << 64) - 3, "top_p": 0.9},
    {"temperature": 1.3, "acceptance": REJECTION, "seed": 11, "min_p": 0.01},
    {"temperature": 0.8, "acceptance": BLOCK, "seed": 12, "top_k": 40},
)


def requests(max_tokens: int = MAX_TOKENS, **sampling: Any) -> list[Open]:
    return [
        opened(number, [number, *range(10, 10 + 2 * number)], max_tokens=max_tokens, **kind, **sampling)
        for number, kind in enumerate(KINDS, start=1)
    ]


@pytest.fixture(scope="module")
def plain(on_host: LoadedModel) -> dict[int, list[int]]:
    """What each says alone, without an end."""
    return {one.sequence_id: TargetHarness.of(on_host).decode_plain(one.sequence_id, one) for one in requests()}


class OnDevice:
    """A target whose steps are captured, and what it followed and read."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.harness = TargetHarness.of(loaded)
        self.engine = self.harness.engine
        runner, steps = self.engine._runner, self.engine.steps
        self.harness.capture(LIMITS)
        self.told: list[str] = []
        self._tell(runner, "follow")
        self._tell(steps, "finish")

    def _tell(self, owner: Any, name: str) -> None:
        call = getattr(owner, name)

        def told(*arguments: Any) -> Any:
            self.told.append(name)
            return call(*arguments)

        setattr(owner, name, told)

    def open(self, *messages: Open) -> None:
        for message in messages:
            self.harness.send(message, Credit(message.sequence_id, 1 << 20, 0))

    def step(self) -> None:
        assert self.engine.step(self.harness.now) == 0.0

    def until_ahead(self) -> None:
        """Until a step was launched behind one that was not read."""
        told = len(self.told)
        while "follow" not in self.told[told:] or self.engine._ahead is None:
            self.step()

    def check(self, plain: dict[int, list[int]], *numbers: int) -> None:
        """Those end with what they say alone."""
        self.harness.run()
        assert {n: self.harness.output(n) for n in numbers} == {n: plain[n] for n in numbers}
        assert self.engine._ahead is None and not self.engine.scheduler.sequences
        self.engine.cache.pool.check_integrity([])


@pytest.fixture(scope="module", params=["pretended", pytest.param("cuda", marks=pytest.mark.gpu)])
def captured(request: pytest.FixtureRequest, checkpoint: Any) -> Iterator[OnDevice]:
    """One for all tests: to capture takes long where kernels are interpreted."""
    with device_of(request):
        yield OnDevice(build_decoder(*checkpoint, dtype="float32", device="cuda"))


@pytest.fixture
def device(captured: OnDevice) -> Iterator[OnDevice]:
    yield captured
    captured.harness.send(*[Close(number) for _, number in captured.engine.scheduler.sequences])
    captured.harness.run()
    captured.engine.cache.pool.clear_cache()
    captured.harness.events.clear()
    captured.told.clear()


@pytest.mark.parametrize("numbers", [(2, 3), pytest.param((1, 4), marks=pytest.mark.slow)])
def test_plain_steps_follow_what_nobody_has_read(
    numbers: tuple[int, int], device: OnDevice, plain: dict[int, list[int]]
) -> None:
    device.open(*[one for one in requests() if one.sequence_id in numbers])
    device.check(plain, *numbers)
    assert device.told.count("follow") >= MAX_TOKENS - 3
    first = device.told.index("follow")
    assert device.told[first : first + 5] == ["follow", "finish", "follow", "finish", "follow"]
    assert device.told[-1] == "finish"


def test_what_was_computed_past_an_end_is_never_committed(device: OnDevice, plain: dict[int, list[int]]) -> None:
    """And not found in the cache, in which the whole of it comes again."""
    ends = {}
    for one, place in zip(requests()[:2], (3, 11), strict=True):
        number, stop = one.sequence_id, plain[one.sequence_id][place]
        ends[number] = plain[number][: plain[number].index(stop) + 1]
        device.open(opened(number, one.prompt_ids, max_tokens=MAX_TOKENS, stop_token_ids=(stop,), **KINDS[number - 1]))
    device.check(ends, *ends)
    assert all(device.harness.commits(number)[-1].finish_reason is FinishReason.STOP for number in ends)
    device.harness.events.clear()
    device.open(requests()[1])
    device.check(plain, 2)


def test_who_leaves_or_comes_meanwhile_changes_nobody(device: OnDevice, plain: dict[int, list[int]]) -> None:
    first, second, third, _ = requests()
    device.open(first, second)
    device.until_ahead()
    device.harness.send(Close(1))
    device.open(third)
    device.step()
    assert device.engine._ahead is None, "a prompt waits: nothing is launched before it"
    device.until_ahead()
    device.check(plain, 2, 3)
    assert len(device.harness.output(1)) < MAX_TOKENS


def test_who_goes_on_is_fed_its_own_token(device: OnDevice, plain: dict[int, list[int]]) -> None:
    """Of two the first ends, by its length or by being closed."""
    first, second, third, _ = requests()
    device.open(opened(1, first.prompt_ids, max_tokens=4), second)
    device.check(plain | {1: plain[1][:4]}, 1, 2)
    device.harness.events.clear()
    device.open(first, third)
    device.until_ahead()
    device.harness.send(Close(1))
    device.check(plain, 3)
    assert device.told.count("follow") >= 2 * MAX_TOKENS - 6


def test_credit_is_kept(device: OnDevice, plain: dict[int, list[int]]) -> None:
    request = requests()[1]
    number, length = request.sequence_id, len(request.prompt_ids)
    for upto in (1, 2, 6, 1 << 20):
        device.harness.send(*([request] if upto == 1 else []), Credit(number, length + upto, 0))
        device.harness.run()
        assert device.harness.output(number) == plain[number][:upto]
    device.check(plain, number)


def test_a_draft_that_begins_is_verified(device: OnDevice, plain: dict[int, list[int]]) -> None:
    request = requests()[0]
    device.open(request)
    device.until_ahead()
    done = device.harness.output(1)
    position = len(request.prompt_ids) + len(done)
    right = plain[1][len(done) : len(done) + 2]  # of which the step under way gives the first
    device.harness.send(DraftTokens(1, 1, position, tuple(right)), Credit(1, 1 << 20, 1, 60_000))
    for _ in ("finished", "launched", "finished"):
        device.step()
    commit = device.harness.commits(1)[-1]
    assert (commit.num_drafted, commit.num_accepted, list(commit.ids[:1])) == (1, 1, right[1:])
    assert device.engine._ahead is None


@pytest.mark.parametrize("fails", [False, True])
def test_commands_are_taken_while_windows_are_judged(
    fails: bool, device: OnDevice, plain: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two windows are launched; before they are read one sequence ends, another comes, a piece for the next window and
    one that rests on nothing arrive. If what was launched fails then, it runs again."""
    first, second, third, _ = requests()
    for one in (first, second):
        device.harness.send(one, Credit(one.sequence_id, 1 << 20, 2, 60_000))
    while not all(device.harness.output(one.sequence_id) for one in (first, second)):
        device.step()
    length, done = len(first.prompt_ids), len(device.harness.output(1))
    right = plain[1][done:]
    device.harness.send(DraftTokens(1, 1, length + done, tuple(right[:2]), more=True))
    device.harness.send(DraftTokens(2, 1, len(second.prompt_ids) + len(device.harness.output(2)), (7, 7)))
    device.told.clear()
    device.step()
    assert device.engine._ahead is not None and not device.told
    if fails:
        finish, failed = device.engine.steps.finish, list[Any]()

        def fragile(launched: Any) -> Any:
            if not failed:
                failed.append(launched)
                raise RuntimeError("injected")
            return finish(launched)

        monkeypatch.setattr(device.engine.steps, "finish", fragile)
    device.harness.send(DraftTokens(1, 1, length + done + 2, tuple(right[2:3])), DraftTokens(1, 5, length + 99, (3,)))
    told = device.harness.commits(1)[-1]
    assert (told.position, told.ids, told.dropped) == (length + done, (), (5,))
    device.harness.send(Close(2))
    device.open(third)
    device.step()
    if fails:
        assert failed and device.harness.commits(1)[-1] is told
        device.step()
    commit = next(one for one in device.harness.commits(1) if one.num_drafted)
    assert (commit.position, list(commit.ids), commit.num_accepted) == (length + done, right[:3], 2)
    device.harness.send(Credit(1, 1 << 20, 0))
    device.check(plain, 1, 3)
    assert len(device.harness.output(2)) < MAX_TOKENS


def test_what_is_read_late_enough(
    device: OnDevice, plain: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commands are waited for while a step of windows should take, of 10 ms four fifths; a plain one is followed."""
    request = requests()[0]
    device.harness.send(request, Credit(1, 1 << 20, 2, 60_000))
    while not device.harness.output(1):
        device.step()
    done = len(device.harness.output(1))
    device.harness.send(DraftTokens(1, 1, len(request.prompt_ids) + done, tuple(plain[1][done : done + 2])))
    device.told.clear()
    with monkeypatch.context() as patch:
        patch.setattr(device.engine.scheduler, "goodput", Goodput([(1, 10_000), (64, 10_000)]))
        device.step()
        assert device.engine._ahead is not None
        started = device.engine._ahead.step.started
        assert device.engine.step(started + 0.007) == pytest.approx(0.001) and not device.told
        assert device.engine.step(started + 0.0081) == 0.0 and device.told == ["finish"]
        device.harness.send(Credit(1, 1 << 20, 0))
        device.step()
        assert device.engine._ahead is not None
        assert device.engine.step(device.engine._ahead.step.started) == 0.0 and device.told[1:] == ["follow", "finish"]
    device.check(plain, 1)


@pytest.mark.parametrize("what", ["finish", "launch"])
def test_what_fails_runs_again(
    what: str, device: OnDevice, plain: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    device.open(*requests()[:2])
    device.until_ahead()
    call, failed = getattr(device.engine.steps, what), [False]

    def fragile(*arguments: Any) -> Any:
        if not failed[0]:
            failed[0] = True
            raise RuntimeError("injected")
        return call(*arguments)

    monkeypatch.setattr(device.engine.steps, what, fragile)
    device.step()
    assert failed == [True]
    device.check(plain, 1, 2)


@pytest.mark.parametrize(
    "asked",
    [
        {"repetition_penalty": 1.2},
        {"logprobs": 1},
        {"min_tokens": 4, "stop_token_ids": (5,)},
        {"logit_bias": {3: 1.0}},
    ],
)
def test_what_looks_at_earlier_tokens_is_read_first(asked: dict[str, Any], device: OnDevice) -> None:
    device.open(*requests(4)[:1], opened(9, [5, 6], max_tokens=4, **asked))
    device.harness.run()
    assert len(device.harness.output(9)) == 4 and "follow" not in device.told
