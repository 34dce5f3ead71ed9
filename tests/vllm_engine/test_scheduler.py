"""DraftScheduler above vLLM's own scheduler, without an engine: who is in a step, with which window, and what is said
of it. The target's own tokens are a function of what stands before them."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support.models import save_tiny
from support.vllm_scheduler import BLOCK, MAX_MODEL_LEN, VOCAB, K, Steps, decoded, next_token

from outrider.rpc.messages import Commit, Credit, DraftTokens, Failure
from outrider.rpc.words.sampling_params import FinishReason, TokenOrigin
from outrider.target_service.adapters import TURN
from outrider.vllm import scheduler

ACCEPTED, RECOVERED, BONUS, PLAIN = (
    TokenOrigin.ACCEPTED,
    TokenOrigin.RECOVERED,
    TokenOrigin.BONUS,
    TokenOrigin.PLAIN,
)
PROMPT = [11, 12, 13]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"), vocab_size=VOCAB)


@pytest.fixture
def new(folder: Path) -> Callable[..., Steps]:
    def build(**options: Any) -> Steps:
        return Steps(folder, **options)

    return build


def started(steps: Steps, *numbers: int, **params: Any) -> Steps:
    """Past their prompts."""
    for number in numbers:
        steps.open(number, [*PROMPT, 10 + number], **params)
    steps.step()
    return steps


def test_unequal_and_zero_windows_share_a_step(new: Callable[..., Steps]) -> None:
    steps = started(new(), 1, 2, 3, 4)
    steps.draft(1, chain=0, count=4)
    steps.draft(2, chain=0, count=2, right=1)
    steps.draft(3, chain=0, count=3, right=0)

    windows = steps.step()

    assert [len(windows[number]) for number in (1, 2, 3, 4)] == [4, 2, 3, 0]
    last = {number: steps.source.commits(number)[-1] for number in (1, 2, 3, 4)}
    assert [(one.num_drafted, one.num_accepted) for one in last.values()] == [(4, 4), (2, 1), (3, 0), (0, 0)]
    assert [one.chain for one in last.values()] == [0, 0, 0, None]
    assert last[1].origins == (ACCEPTED,) * 4 + (BONUS,)
    assert last[2].origins == (ACCEPTED, RECOVERED)
    assert last[3].origins == (RECOVERED,)
    assert last[4].origins == (PLAIN,)
    steps.run()
    for number in (1, 2, 3, 4):
        commits, prompt = steps.source.commits(number), [*PROMPT, 10 + number]
        assert [token for one in commits for token in one.ids] == decoded(prompt, 40) == steps.output(number)
        assert [one.position for one in commits] == [
            len(prompt) + sum(len(one.ids) for one in commits[:at]) for at in range(len(commits))
        ]
        assert [one.finish_reason for one in commits] == [None] * (len(commits) - 1) + [FinishReason.LENGTH]
        assert commits[-1].stop_token_id is None
    assert steps.source.closed_rows
    assert steps.num_free == 63  # one is vLLM's own


def test_what_a_step_was_is_reported(new: Callable[..., Steps]) -> None:
    steps = started(new(), 1, 2)
    steps.draft(1, chain=0, count=3)
    before = time.time_ns()

    steps.step()

    report = steps.source.reports[-1]
    assert (report.timings.num_rows, report.timings.num_sequences) == (5, 2)
    assert before <= report.started_ns <= time.time_ns()
    assert report.timings.verify_us == round(report.seconds * 1e6)
    assert (report.load.running, report.load.waiting, report.load.free_blocks) == (2, 0, 61)
    assert all(event.load == report.load for event in report.events if isinstance(event, Commit))
    assert [len(one.waits) for one in steps.source.reports] == [2, 0], "each request waits for its first step once"


@pytest.mark.parametrize("cut", ["credit", "max_window", "max_tokens", "max_model_len", "k"])
def test_windows_are_cut(new: Callable[..., Steps], cut: str) -> None:
    steps = new()
    prompt = [*PROMPT, *range(20, 20 + MAX_MODEL_LEN - 7)] if cut == "max_model_len" else PROMPT
    steps.open(1, prompt, max_tokens=4 if cut == "max_tokens" else 40)
    steps.step()
    committed = len(prompt) + 1
    steps.draft(1, chain=0, count=12)
    row = steps.source.rows[1]
    if cut == "credit":
        row.until = committed + 3
    if cut == "max_window":
        steps.source.sent.append(Credit(1, 0, 2))

    windows = steps.step()

    assert len(windows[1]) == {"credit": 2, "max_window": 2, "max_tokens": 2, "max_model_len": 2, "k": K}[cut]
    commit = steps.source.commits(1)[-1]
    assert (commit.num_drafted, len(commit.ids)) == (len(windows[1]), len(windows[1]) + 1)
    is_last = cut in ("max_tokens", "max_model_len")
    assert commit.finish_reason is (FinishReason.LENGTH if is_last else None)
    assert steps.output(1) == decoded(prompt, 1 + len(commit.ids))


def test_without_credit_a_row_stands_and_the_others_go_on(new: Callable[..., Steps]) -> None:
    steps = started(new(credit=2), 1, 2)
    steps.source.sent.append(Credit(2, 1 << 20, K))

    assert [sorted(steps.step()) for _ in range(4)] == [[1, 2], [2], [2], [2]]
    free = steps.num_free
    assert len(steps.output(1)) == 2
    assert steps.source.waits == []  # a row may go on: nobody waits

    steps.source.sent.append(Credit(1, 1 << 20, K))
    assert sorted(steps.step()) == [1, 2]
    assert steps.num_free == free  # it kept its blocks
    steps.run()
    assert steps.output(1) == decoded([*PROMPT, 11], 40)


def test_where_nobody_may_go_on_the_step_waits_for_what_comes(new: Callable[..., Steps]) -> None:
    steps = started(new(credit=1), 1)

    assert steps.step() == {}
    assert steps.source.waits == [pytest.approx(steps.source.longest_wait_s)]

    steps.source.while_waiting = lambda: steps.source.sent.append(Credit(1, 1 << 20, K))
    assert steps.step() == {1: []}  # it came meanwhile, and counts at once
    assert len(steps.source.waits) == 2


def test_what_lets_nobody_go_on_does_not_end_the_wait(new: Callable[..., Steps]) -> None:
    steps = started(new(credit=1), 1)
    source = steps.source
    come: Iterator[Any] = iter([Credit(1, 0, K), DraftTokens(1, 0, 5, (11, 12)), Credit(1, 1 << 20, K)])
    source.longest_wait_s = 60.0
    source.while_waiting = lambda: source.sent.append(next(come))

    assert sorted(steps.step()) == [1]
    assert len(source.waits) == 3


def test_news_for_the_engine_s_own_loop_end_the_wait(new: Callable[..., Steps]) -> None:
    """A request that begins would stand behind the wait."""
    steps = started(new(credit=1), 1)
    source = steps.source
    source.longest_wait_s, source.has_news = 60.0, True
    source.while_waiting = lambda: source.sent.append(Credit(2, 1 << 20, K))

    assert steps.step() == {}
    assert len(source.waits) == 1


@pytest.mark.parametrize("end", [{"max_tokens": 3}, {"stop_token_ids": decoded([*PROMPT, 11], 3)[-1:]}])
def test_where_the_source_hands_on_commits_the_client_hears_of_ends_alone(
    new: Callable[..., Steps], end: dict[str, Any]
) -> None:
    steps = started(new(), 1, **end)
    steps.open(2, PROMPT, drafted=False)
    steps.source.is_reader = True

    steps.step()
    assert [one.request_id for one in steps.told] == ["request-2"]
    steps.step()
    assert [one.request_id for one in steps.told if one.finish_reason is not None] == ["request-1"]
    assert [one.position for one in steps.source.commits(1)] == [4, 5, 6]


def test_a_source_that_drafts_alone_leaves_the_client_its_tokens(new: Callable[..., Steps]) -> None:
    steps = started(new(), 1)
    steps.step()
    assert [list(one.new_token_ids) for one in steps.told] == [steps.output(1)[-1:]]


def test_patience_holds_a_row_while_others_go_on_and_is_spent_once(new: Callable[..., Steps]) -> None:
    steps = started(new(patience_ms=600), 1)
    steps.open(2, PROMPT, drafted=False, max_tokens=120)
    first = steps.source.rows[1].last_commit
    assert sorted(steps.step()) == [2]  # the first waits for a chain

    while 1 not in steps.step():
        assert 2 in steps.windows
        time.sleep(0.01)  # 60 of its 120 tokens at most
    assert time.monotonic() >= first + 0.6
    assert steps.windows[1] == []  # a plain token after it
    assert sorted(steps.step()) == [1, 2]  # a dead draft costs one patience
    assert sorted(steps.step()) == [1, 2]

    steps.draft(1, chain=0, count=3, right=1)
    assert len(steps.step()[1]) == 3  # it lives again, so that it is waited for
    assert sorted(steps.step()) == [2]


def test_alone_a_row_waits_no_longer_than_its_patience(new: Callable[..., Steps]) -> None:
    steps = started(new(patience_ms=1), 1)
    waited = steps.source.waits
    while not steps.step():
        time.sleep(0.0005)
    assert waited
    assert all(0 < one <= 0.001 for one in waited)


def test_a_draft_that_has_nothing_is_not_waited_for(new: Callable[..., Steps]) -> None:
    steps = started(new(patience_ms=10_000), 1)
    assert steps.step() == {}

    steps.source.sent.append(DraftTokens(1, 0, len(steps.tokens(1)), ()))

    assert steps.step() == {1: []}


def test_a_chain_goes_on_past_a_bonus_token_that_it_guessed(new: Callable[..., Steps]) -> None:
    steps = started(new(), 1)
    steps.draft(1, chain=3, count=9)

    assert len(steps.step()[1]) == K
    assert steps.source.commits(1)[-1].origins[-1] is BONUS
    assert steps.step()[1] == decoded([*PROMPT, 11], 10)[6:10]  # the fifth was the bonus; the chain lives
    assert steps.source.commits(1)[-1].chain == 3


def test_a_chain_is_dead_where_the_bonus_token_is_another(new: Callable[..., Steps]) -> None:
    steps = started(new(), 1)
    steps.draft(1, chain=0, count=9, right=K)

    assert len(steps.step()[1]) == K
    assert steps.step()[1] == []


def test_the_target_draws_its_own_token_where_a_piece_ends(new: Callable[..., Steps]) -> None:
    """And the piece with which the chain goes on starts below the committed length: it holds if it guessed it."""
    steps = started(new(), 1)
    tokens = [*PROMPT, 11, *decoded([*PROMPT, 11], 12)]
    steps.source.sent.append(DraftTokens(1, 0, 5, tuple(tokens[5:8]), more=True))
    assert len(steps.step()[1]) == 3
    steps.source.sent.append(DraftTokens(1, 0, 8, tuple(tokens[8:11])))

    assert steps.step()[1] == tokens[9:11]


def test_dropped_chains_are_named(new: Callable[..., Steps]) -> None:
    steps = started(new(), 1)
    steps.source.sent.append(DraftTokens(1, 7, 50, (11, 12)))  # far past the committed length

    steps.step()
    steps.step()

    assert [one.dropped for one in steps.source.commits(1)] == [(), (7,), ()]


def test_ids_outside_the_vocabulary_end_a_window(new: Callable[..., Steps]) -> None:
    steps = started(new(), 1)
    at = len(steps.tokens(1))
    right = next_token(steps.tokens(1))
    steps.source.sent.append(DraftTokens(1, 0, at, (right, VOCAB, 12)))

    assert steps.step()[1] == [right]
    assert steps.source.commits(1)[-1].num_accepted == 1
    steps.run()
    assert steps.output(1) == decoded([*PROMPT, 11], 40)


def test_a_stop_within_a_window_cuts_what_is_committed(new: Callable[..., Steps]) -> None:
    output = decoded([*PROMPT, 11], 10)
    steps = started(new(), 1, stop_token_ids=[output[3]])
    steps.draft(1, chain=0, count=4)

    steps.step()

    commit = steps.source.commits(1)[-1]
    assert commit.ids == tuple(output[1:4])
    assert (commit.origins, commit.num_drafted) == ((ACCEPTED,) * 3, 4)
    assert commit.num_accepted == 4  # past the stop, too
    assert (commit.finish_reason, commit.stop_token_id) == (FinishReason.STOP, output[3])
    assert not steps.scheduler.requests


def test_what_is_aborted_leaves_nothing(new: Callable[..., Steps]) -> None:
    steps = started(new(), 1, 2)

    steps.abort(1)
    steps.draft(1, chain=0, count=3)

    assert sorted(steps.step()) == [2]
    assert steps.source.closed_rows == [1]
    steps.abort(2)
    steps.step()
    assert steps.num_free == 63


def test_a_preempted_row_comes_back_with_all_it_had(new: Callable[..., Steps]) -> None:
    steps = new(num_blocks=8)
    for number in (1, 2, 3):
        steps.open(number, [*range(20, 45), number + 10], max_tokens=50)
    preempted = 0
    chain = 0
    while steps.scheduler.requests:
        chain += 1
        for number in [one for one in (1, 2, 3) if f"request-{one}" in steps.scheduler.requests]:
            if steps.output(number):
                steps.draft(number, chain, count=number + 1, right=chain % 3)
        steps.step()
        preempted += len(steps.plan.preempted_req_ids or ())
        assert chain < 300
    assert preempted
    for number in (1, 2, 3):
        commits = steps.source.commits(number)
        assert [token for one in commits for token in one.ids] == decoded([*range(20, 45), number + 10], 50)
        assert commits[-1].finish_reason is FinishReason.LENGTH
        assert sum(one.num_drafted for one in commits) > 0


def test_rows_without_credit_give_their_blocks_to_who_has_some(new: Callable[..., Steps]) -> None:
    steps = new(num_blocks=8, credit=1)
    prompt = list(range(20, 20 + 3 * BLOCK - 2))
    steps.open(1, [*prompt, 11])
    steps.open(2, [*prompt[::-1], 12])
    assert sorted(steps.step()) == [1, 2]
    assert steps.step() == {}  # no credit, but room enough: both keep their blocks
    assert steps.num_free == 1

    steps.source.credit = 1 << 20
    steps.open(3, [*prompt, 13])
    assert sorted(steps.step()) == [3]
    assert {*steps.plan.preempted_req_ids} == {"request-2"}  # the youngest of them
    steps.run(3)
    assert steps.output(3) == decoded([*prompt, 13], 40)

    assert steps.step() == {}  # who gave up blocks comes back when it may go on, not before
    steps.source.sent += [Credit(1, 1 << 20, K), Credit(2, 1 << 20, K)]
    steps.run()
    assert steps.output(1) == decoded([*prompt, 11], 40)
    assert steps.output(2) == decoded([*prompt[::-1], 12], 40)


def test_where_no_row_fits_the_engine_does_not_spin(new: Callable[..., Steps]) -> None:
    steps = new(num_blocks=4, credit=1)
    prompt = list(range(20, 20 + 3 * BLOCK - 2))
    steps.open(1, prompt)
    steps.open(2, prompt[::-1])
    steps.step()
    steps.source.waits.clear()
    steps.abort(2)
    for _ in range(3):
        steps.step()
    assert len(steps.source.waits) >= 2


def test_a_prefix_hit_is_said_and_its_padding_is_no_draft(new: Callable[..., Steps]) -> None:
    steps = new()
    prompt = list(range(20, 20 + 2 * BLOCK + 1))
    steps.open(1, prompt)
    steps.step()
    steps.open(2, prompt)  # all but its last token is known: vLLM pads such a row by -1 to the others' length

    assert steps.step()[2] == [-1] * K

    commit = steps.source.commits(2)[0]
    assert (commit.num_drafted, commit.num_accepted, commit.chain) == (0, 0, None)
    assert commit.origins == (PLAIN,)
    assert commit.num_cached_ids == 2 * BLOCK
    steps.run()
    assert steps.output(2) == decoded(prompt, 40)


def test_drafts_change_no_prefix_hit(new: Callable[..., Steps]) -> None:
    """What of a drafted sequence is found again: no block with a token that was refused."""
    hits = []
    for drafts in (False, True):
        steps = new()
        steps.open(1, PROMPT, max_tokens=60)
        chain = 0
        while steps.scheduler.requests:
            if drafts and steps.output(1):
                chain += 1
                steps.draft(1, chain, count=4, right=chain % 4)
            steps.step()
        steps.open(2, [*PROMPT, *decoded(PROMPT, 60)])
        steps.run()
        hits.append(steps.source.commits(2)[0].num_cached_ids)
        assert steps.output(2) == decoded([*PROMPT, *decoded(PROMPT, 60)], 40)
    assert hits[0] == hits[1] == 3 * BLOCK


@pytest.mark.parametrize("method", ["take", "opened", "stepping", "closed"])
def test_a_fault_of_ours_costs_drafts_alone(
    new: Callable[..., Steps], method: str, caplog: pytest.LogCaptureFixture
) -> None:
    def fault(called: str) -> None:
        if called == method:
            raise RuntimeError("of ours")

    steps = new()
    steps.source.fault = fault

    with caplog.at_level(logging.ERROR):
        started(steps, 1, 2)
        steps.draft(1, chain=0, count=3) if method != "opened" else None
        steps.run()

    for number in (1, 2):
        assert steps.output(number) == decoded([*PROMPT, 10 + number], 40)
    assert caplog.text.count("drafting failed") == 1  # said once


def test_what_a_client_puts_beside_its_parameters_is_nobodys_word(new: Callable[..., Steps]) -> None:
    """`vllm_xargs` of vLLM's HTTP server come where a service says what it knows of a request."""
    steps = new()
    steps.open(1, PROMPT, extra_args={"outrider": 5})
    steps.run()
    assert steps.output(1) == decoded(PROMPT, 40)


def test_a_step_whose_result_cannot_be_read_is_committed_by_vllm_alone(
    new: Callable[..., Steps], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(scheduler, "num_accepted", lambda *args: 1 / 0)
    steps = started(new(), 1)
    steps.draft(1, chain=0, count=3)
    steps.run()
    assert steps.output(1) == decoded([*PROMPT, 11], 40)
    assert caplog.text.count("drafting failed") == 1


def test_a_row_whose_window_fails_goes_on_plainly_and_no_other_notices(
    new: Callable[..., Steps], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = started(new(), 1, 2)
    monkeypatch.setattr(steps.source.rows[1].chains, "window", lambda limit: 1 / 0)
    steps.draft(1, chain=0, count=3)
    steps.draft(2, chain=0, count=3)

    assert {number: len(window) for number, window in steps.step().items()} == {1: 0, 2: 3}
    steps.run()
    assert steps.output(1) == decoded([*PROMPT, 11], 40)


def test_who_cannot_be_told_of_a_commit_is_told_that(new: Callable[..., Steps], monkeypatch: Any) -> None:
    steps = started(new(), 1, 2)
    monkeypatch.setattr(steps.source.rows[1].chains, "advance", lambda: 1 / 0)

    steps.step()
    steps.step()

    last = steps.source.events(1)[-1]
    assert isinstance(last, Failure)
    assert last.reason == "COMMIT_FAILED"
    assert steps.source.closed_rows == [1]
    assert len(steps.source.commits(2)) == 3


def test_suspects_run_alone_in_turn_with_the_others_until_they_have_a_token(new: Callable[..., Steps]) -> None:
    steps = started(new(), 1, 2)
    steps.source.suspects = {5, 6}
    steps.open(5, PROMPT)
    steps.open(3, PROMPT)
    steps.open(6, PROMPT, max_tokens=1)

    assert [set(steps.step()) for _ in range(4)] == [{5}, {1, 2, 3, 5}, {6}, {1, 2, 3, 5}]
    steps.run()
    assert steps.output(5) == decoded(PROMPT, 40)


def test_a_suspect_that_has_no_credit_or_ends_holds_nobody_up(new: Callable[..., Steps]) -> None:
    steps = started(new(), 1)
    steps.source.suspects, steps.source.credit = {5, 6}, 0
    steps.open(5, PROMPT)
    assert [set(steps.step()) for _ in range(3)] == [{1}] * 3
    steps.source.credit = 1 << 20
    steps.open(6, PROMPT)
    steps.abort(6)
    assert [set(steps.step()) for _ in range(3)] == [{1}] * 3
    steps.source.sent.append(Credit(5, 1 << 20, K))
    assert [set(steps.step()) for _ in range(2)] == [{5}, {1, 5}]


def test_who_nobody_drafts_for_is_left_alone(new: Callable[..., Steps]) -> None:
    steps = new(credit=0)
    steps.open(1, PROMPT, drafted=False)
    steps.run()
    assert steps.output(1) == decoded(PROMPT, 40)
    assert all(not report.events for report in steps.source.reports)


@pytest.mark.parametrize(
    ("section", "name", "value", "text"),
    [
        ("parallel_config", "pipeline_parallel_size", 2, "pipeline_parallel_size is 2; allowed: 1"),
        ("scheduler_config", "async_scheduling", True, "async_scheduling is on; allowed: off"),
        ("", "speculative_config", None, "speculative_config is missing"),
    ],
)
def test_what_would_hide_drafts_is_refused(
    new: Callable[..., Steps], monkeypatch: pytest.MonkeyPatch, section: str, name: str, value: Any, text: str
) -> None:
    config = new().scheduler.vllm_config
    monkeypatch.setattr(getattr(config, section) if section else config, name, value)
    with pytest.raises(ValueError, match=text):
        new()


def adapters_of_step(steps: Steps) -> set[int]:
    """Of the last one."""
    requests = [steps.requests[number] for number in steps.windows]
    return {request.lora_request.lora_int_id for request in requests if request.lora_request is not None}


@pytest.mark.parametrize("max_loras", [1, 2])
def test_no_step_has_more_adapters_than_fit(max_loras: int, new: Callable[..., Steps]) -> None:
    """Also where rows that were held come back, in whose place others have begun: vLLM's own scheduler ends by that.
    Who finds no place gets a turn, beside those that run, and rows without an adapter are in every step."""
    steps, credit = new(max_loras=max_loras, credit=1), dict.fromkeys(range(1, 9), 4)
    seen: Counter[int] = Counter()
    for number in credit:
        steps.open(number, [*PROMPT, 10 + number], adapter=number % 4)  # 0: none
        steps.step()
        assert len(adapters_of_step(steps)) <= max_loras
        seen.update(adapters_of_step(steps))
    for _ in range(3 * TURN * len(credit)):
        for number in [number for number in credit if f"request-{number}" in steps.scheduler.requests]:
            steps.source.sent.append(Credit(number, len(steps.tokens(number)) + 1, K))
        steps.step()
        adapters = adapters_of_step(steps)
        assert len(adapters) <= max_loras
        seen.update(adapters)
        if not steps.scheduler.requests:
            break
        if any(f"request-{number}" in steps.scheduler.requests for number in (4, 8)):
            assert steps.windows.keys() & {4, 8}
    assert not steps.scheduler.requests and not steps.scheduler._has_failed
    for number in credit:
        assert steps.output(number) == decoded([*PROMPT, 10 + number], 40)
    assert min(seen[adapter] for adapter in (1, 2, 3)) >= 40


def test_adapters_take_turns(new: Callable[..., Steps]) -> None:
    """Nobody waits for the end of another's requests."""
    steps = new(max_loras=1)
    for number in (1, 2, 3):
        steps.open(number, [*PROMPT, 10 + number], adapter=number)
    order = []
    for _ in range(3 * TURN):
        steps.step()
        order.append(adapters_of_step(steps))
    assert all(len(one) == 1 for one in order)
    assert {frozenset(one) for one in order} == {frozenset({1}), frozenset({2}), frozenset({3})}
    changes = sum(one != other for one, other in pairwise(order))
    assert changes <= 4, "turns are long enough"
    steps.run()
    assert [steps.output(number) for number in (1, 2, 3)] == [decoded([*PROMPT, 10 + n], 40) for n in (1, 2, 3)]


def test_a_request_with_an_adapter_begins_where_nothing_ran(new: Callable[..., Steps]) -> None:
    steps = new(max_loras=1)
    steps.step()  # of nobody
    steps.open(1, PROMPT, adapter=1)
    steps.run(steps=50)
    assert steps.output(1) == decoded(PROMPT, 40)
