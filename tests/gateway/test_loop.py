"""The core and its loop with scripted peers: whatever the draft does, the output is the target's.

Random losses, delays and silence on both sides: the output stays the target's, token for token.

Prompt lookup in process: every round is answered, up to the last token."""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest
from support.fakes import EOS, ToyDraft, ToyLink, ToyTarget, arithmetic, draft_info, expected, scripted, until

from outrider.gateway.peers.local_drafts import LocalDrafter
from outrider.gateway.speculation import loop
from outrider.gateway.speculation.backends import Lost
from outrider.gateway.speculation.core import (
    CloseDraft,
    Emit,
    Fail,
    OpenDraft,
    OpenTarget,
    SpeculationCore,
    ToDraft,
    ToTarget,
)
from outrider.gateway.speculation.loop import SpeculationDriver, speculate
from outrider.planner.policy import Policy, Round, SpeculationTally
from outrider.proposers.ngram import NgramProposer
from outrider.rpc.errors import Internal, OutriderError, ResourceExhausted, Unavailable
from outrider.rpc.messages import Commit, Credit, DraftTokens, Failure, Open, PromptLogprobs
from outrider.rpc.words.sampling_params import FinishReason, SamplingParams, TokenOrigin
from outrider.rpc.words.structured import StructuredOutput

PROMPT = (11, 12, 13)
K4 = Policy(4, patience_ms=50)


def request(max_tokens: int = 30, **fields: object) -> Open:
    return Open(0, PROMPT, SamplingParams(temperature=0.0, max_tokens=max_tokens), **fields)  # type: ignore[arg-type]


async def collect(drafter: ToyDraft | None, target: ToyTarget, opened: Open, policy: Policy = K4) -> list[Round]:
    rounds = []
    async for item in speculate(drafter, target, opened, policy):
        assert isinstance(item, Round)
        rounds.append(item)
    return rounds


def ids_of(rounds: list[Round]) -> list[int]:
    return [token for closed in rounds for token in closed.commit.ids]


@pytest.mark.parametrize("wrong_every", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("k", [0, 1, 4, 8])
async def test_output_is_the_targets(wrong_every: int, k: int) -> None:
    draft, target = ToyDraft(wrong_every=wrong_every), ToyTarget()
    rounds = await collect(draft, target, request(), Policy(k, patience_ms=60_000))
    assert ids_of(rounds) == expected(PROMPT, 30)
    assert [closed.index for closed in rounds] == list(range(len(rounds)))
    assert all(closed.commit.num_drafted <= k for closed in rounds)
    if k == 8 and wrong_every == 0:
        assert len(rounds) <= 6 and target.num_patiences == 0
    assert not any(link.open and link.sequence.over is False for link in draft.links)


async def test_the_first_token_waits_for_no_draft() -> None:
    draft, target = ToyDraft(mute=True), ToyTarget()
    async with aclosing(speculate(draft, target, request(), Policy(4, patience_ms=60_000))) as rounds:
        async with asyncio.timeout(30):
            first = await anext(rounds)
    assert isinstance(first, Round) and first.commit.num_drafted == 0
    assert target.num_closed == draft.num_closed == 1


async def test_a_mute_draft_costs_one_patience() -> None:
    draft, target = ToyDraft(mute=True), ToyTarget()
    assert ids_of(await collect(draft, target, request(), Policy(4, patience_ms=5))) == expected(PROMPT, 30)
    assert target.num_patiences == 1


@pytest.mark.parametrize("available", [True, False])
async def test_an_absent_or_failing_draft_means_plain_decoding(available: bool) -> None:
    draft, target = ToyDraft(available=available, mute=True), ToyTarget(step_s=0.001)
    task = asyncio.create_task(collect(draft, target, request(), Policy(4, patience_ms=60_000)))
    if available:
        await until(lambda: len(target.links) == 1 and len(draft.links) == 1)
        draft.links[0].emit(Failure(0, 9, "longer than the draft's context", "CONTEXT"))
    rounds = await asyncio.wait_for(task, 30)
    assert ids_of(rounds) == expected(PROMPT, 30) and target.num_patiences == 0
    credits = [message for message in target.links[0].sent if isinstance(message, Credit)]
    assert credits[-1].max_window == 0 and credits[-1].patience_ms == 0


async def test_a_draft_that_dies_mid_stream_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "DRAFT_RETRY_S", 60.0)
    draft, target = ToyDraft(wrong_every=3), ToyTarget(step_s=0.001)
    rounds = []
    async for item in speculate(draft, target, request(60), K4):
        assert isinstance(item, Round)
        rounds.append(item)
        if len(rounds) == 5:
            draft.links[0].lose()
    assert ids_of(rounds) == expected(PROMPT, 60)
    assert rounds[-1].num_draft_tokens == 0


async def test_a_lost_target_is_replaced_with_prompt_output_and_journal() -> None:
    draft, target = ToyDraft(wrong_every=4), ToyTarget(step_s=0.001)
    rounds = []
    async for item in speculate(draft, target, request(40, seed=9), K4):
        assert isinstance(item, Round)
        rounds.append(item)
        if len(rounds) in (3, 6):
            target.links[-1].lose()
    assert ids_of(rounds) == expected(PROMPT, 40)
    assert len(target.opens) == 3
    for again in target.opens[1:]:
        assert again.prompt_ids == PROMPT and again.seed == 9
        assert list(again.output_ids) == expected(PROMPT, len(again.output_ids)) and again.output_ids
    assert isinstance(target.links[1].sent[0], Credit)
    assert len(draft.opens) == 1  # the draft goes on


async def test_a_target_that_returns_after_a_while() -> None:
    target = ToyTarget(step_s=0.001)
    rounds = []
    async for item in speculate(None, target, request(40), Policy(0)):
        assert isinstance(item, Round)
        rounds.append(item)
        if len(rounds) == 3:
            target.available = False
            asyncio.get_running_loop().call_later(0.25, setattr, target, "available", True)
            target.links[-1].lose()
    assert ids_of(rounds) == expected(PROMPT, 40)


async def test_no_target_ends_the_request() -> None:
    with pytest.raises(Unavailable, match="no target can take"):
        await collect(None, ToyTarget(available=False), request())
    target = ToyTarget(step_s=0.001)
    with pytest.raises(Unavailable, match="no target can take"):
        async for _ in speculate(None, target, request(200), Policy(0, reopen_s=0.15)):
            target.available = False
            if target.links[-1].open:
                target.links[-1].lose()


async def test_a_new_request_waits_for_a_target_that_is_away_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no longer: then its client may ask elsewhere."""
    monkeypatch.setattr(loop, "TARGET_RETRY_S", 0.01)
    target = ToyTarget(available=False)
    task = asyncio.create_task(collect(None, target, request(), Policy(0, away_s=60)))
    await asyncio.sleep(0.05)
    target.available = True
    assert ids_of(await asyncio.wait_for(task, 30)) == expected(PROMPT, 30)
    target.available = False
    with pytest.raises(Unavailable, match="no target can take"):
        await collect(None, target, request(), Policy(0, away_s=0.05, reopen_s=60))


async def test_a_targets_own_error_reaches_the_caller() -> None:
    target = ToyTarget(step_s=0.001)
    with pytest.raises(OutriderError, match="NaN in a row") as raised:
        async for _ in speculate(None, target, request(200), Policy(0)):
            target.links[0].emit(Failure(0, 13, "NaN in a row"))
    assert raised.value.code.value[0] == 13


def test_the_prompts_logprobs_are_asked_for_once() -> None:
    core = SpeculationCore(Open(0, PROMPT, SamplingParams(max_tokens=9, prompt_logprobs=2)), Policy(0))
    core.start(0.0)
    (before,) = core.on_target(Lost("early"), 0.5)
    assert isinstance(before, OpenTarget) and before.request.sampling.prompt_logprobs == 2
    core.on_target(PromptLogprobs(0, 0, ((), (), ())), 1.0)
    (after,) = core.on_target(Lost("late"), 2.0)
    assert isinstance(after, OpenTarget) and after.request.sampling.prompt_logprobs is None


async def test_a_target_that_is_lost_again_and_again_is_given_up() -> None:
    target = ToyTarget(step_s=60)
    task = asyncio.create_task(collect(None, target, request(), Policy(0)))
    for number in range(Policy(0).max_target_opens):
        await until(lambda number=number: len(target.links) > number)
        target.links[-1].lose()
    with pytest.raises(Internal, match="target lost"):
        await asyncio.wait_for(task, 30)
    assert [request.suspect for request in target.opens] == [False, False, True]


async def test_targets_that_are_lost_after_progress_do_not_add_up() -> None:
    target = ToyTarget(step_s=0.001)
    rounds = []
    async for item in speculate(None, target, request(40), Policy(0)):
        assert isinstance(item, Round)
        rounds.append(item)
        if target.links[-1].open and len(target.links) < 10:
            target.links[-1].lose()
    assert ids_of(rounds) == expected(PROMPT, 40) and len(target.opens) == 10 > 2 * Policy(0).max_target_opens
    assert not any(request.suspect for request in target.opens)


# Targets and drafts that are full.

BUSY = Failure(7, 8, "256 sequences are open already", "BUSY", 1000)


class Replicas(ToyTarget):
    """Several targets; a sequence goes to the first one that it may ask."""

    def __init__(self, *targets: ToyTarget) -> None:
        super().__init__()
        self.targets = targets

    def open(
        self, request: Open, on_event: Any, fork_of: Any = None, like: Any = None, refused_by: Any = ()
    ) -> ToyLink | None:
        able = (one for one in self.targets if one.available and not any(link.toy is one for link in refused_by))
        return next((one.open(request, on_event) for one in able), None)


@pytest.mark.parametrize("code", [8, 14])
async def test_a_new_request_goes_past_full_targets(code: int) -> None:
    full = replace(BUSY, code=code)
    targets = [*(ToyTarget(full=full) for _ in range(6)), ToyTarget()]
    rounds = await collect(None, Replicas(*targets), request(), Policy(0))
    assert ids_of(rounds) == expected(PROMPT, 30)
    assert [len(one.opens) for one in targets] == [1] * 7


@pytest.mark.parametrize("code", [8, 14])
async def test_a_new_request_is_refused_at_once_where_every_target_is_full(code: int) -> None:
    targets = [ToyTarget(full=replace(BUSY, code=code)) for _ in range(3)]
    async with asyncio.timeout(30):
        with pytest.raises(ResourceExhausted, match="256 sequences") as raised:
            await collect(None, Replicas(*targets), request(), Policy(0))
        assert raised.value.retry_after_ms == 1000 and [len(one.opens) for one in targets] == [1, 1, 1]
        with pytest.raises(ResourceExhausted):  # one target alone, as in process
            await collect(None, targets[0], request(), Policy(0))


async def test_a_new_request_may_wait_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has had its turn at the gateway is not sent away for others' load."""
    monkeypatch.setattr(loop, "TARGET_RETRY_S", 0.01)
    busy = replace(BUSY, retry_after_ms=10)
    one, two = ToyTarget(full=busy), ToyTarget(full=busy)
    task = asyncio.create_task(collect(None, Replicas(one, two), request(), Policy(0, room_s=60)))
    await until(lambda: len(one.opens) > 3)
    two.full = None
    rounds = await asyncio.wait_for(task, 30)
    assert ids_of(rounds) == expected(PROMPT, 30) and len(one.opens) > 1
    with pytest.raises(ResourceExhausted):
        await collect(None, one, request(), Policy(0, room_s=0.05))
    with pytest.raises(OutriderError, match="no target"):  # none at all is no matter of room
        await collect(None, Replicas(), request(), Policy(0, room_s=60))


async def test_a_sequence_that_lost_its_target_waits_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "TARGET_RETRY_S", 0.01)
    busy = replace(BUSY, retry_after_ms=10)
    one, two = ToyTarget(step_s=0.001), ToyTarget(full=busy)
    rounds: list[Round] = []
    most = Policy(0).max_target_opens

    async def read() -> None:
        async for item in speculate(None, Replicas(one, two), request(40), Policy(0, reopen_s=60)):
            assert isinstance(item, Round)
            rounds.append(item)
            if len(rounds) == 3:
                one.full = busy
                one.links[0].lose()

    task = asyncio.create_task(read())
    await until(lambda: len(one.opens) > most < len(two.opens))
    two.full = None
    await asyncio.wait_for(task, 30)
    assert ids_of(rounds) == expected(PROMPT, 40)


@pytest.mark.parametrize(("retry_after_ms", "times"), [(100, 2), (1000, 1)])
async def test_it_asks_when_it_is_told_to_and_no_longer_than_reopen_s(
    retry_after_ms: int, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "TARGET_RETRY_S", 0.01)
    one = ToyTarget(step_s=0.001)
    async with asyncio.timeout(30):
        with pytest.raises(OutriderError):
            async for _ in speculate(None, one, request(200), Policy(0, reopen_s=0.25)):
                one.full = replace(BUSY, retry_after_ms=retry_after_ms)
                if one.links[0].open:
                    one.links[0].lose()
    assert 2 + 1 <= len(one.opens) <= 2 + times + 1  # the last time at the end


async def test_a_full_draft_is_asked_again_when_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "DRAFT_RETRY_S", 60.0)  # as after one that was lost
    monkeypatch.setattr(loop, "FULL_DRAFT_RETRY_S", 0.0)
    draft, target = ToyDraft(mute=True), ToyTarget(step_s=0.001)
    task = asyncio.create_task(collect(draft, target, request(200)))
    await until(lambda: draft.links)
    draft.links[0].emit(replace(BUSY, retry_after_ms=20))
    draft.mute = False
    rounds = await asyncio.wait_for(task, 30)
    assert ids_of(rounds) == expected(PROMPT, 200)
    assert len(draft.opens) == 2 and rounds[1].num_draft_tokens == 0 and rounds[-1].num_draft_tokens == 4


@pytest.mark.parametrize(("retry_after_ms", "least"), [(20, 0.1), (3000, 3.0)])
async def test_no_draft_is_asked_again_sooner_than_it_says(retry_after_ms: int, least: float) -> None:
    """Nor in every step, whatever it says; each sequence at a time of its own."""
    drivers: list[SpeculationDriver] = []
    draft, target = ToyDraft(mute=True), ToyTarget()
    async with aclosing(speculate(draft, target, request(200), K4, driver_out=drivers)) as rounds:
        await anext(rounds)
        before = asyncio.get_running_loop().time()
        draft.links[0].emit(replace(BUSY, retry_after_ms=retry_after_ms))
        after, due = asyncio.get_running_loop().time(), drivers[0]._draft_retry_at
        assert due is not None and before + least <= due <= after + 1.5 * least


async def test_resume_continues_where_it_stopped() -> None:
    whole = expected(PROMPT, 30)
    target = ToyTarget()
    rounds = await collect(ToyDraft(wrong_every=3), target, request(output_ids=tuple(whole[:7])))
    assert ids_of(rounds) == whole[7:]
    assert rounds[0].commit.position == len(PROMPT) + 7


async def test_a_slow_client_gets_no_credit() -> None:
    target = ToyTarget()
    policy = Policy(0, plain_ahead=4, max_unread=8)
    async with aclosing(speculate(None, target, request(100), policy)) as rounds:
        await anext(rounds)
        await asyncio.sleep(0.05)
        assert len(target.links[0].sequence.tokens) <= len(PROMPT) + 8
        assert len(ids_of([item async for item in rounds if isinstance(item, Round)])) == 99


async def test_stop_strings_bound_the_credit() -> None:
    target = ToyTarget()
    policy = Policy(0, plain_ahead=4)
    async with aclosing(speculate(None, target, request(100), policy, examines_text=True)) as rounds:
        await anext(rounds)
        await asyncio.sleep(0.05)
        assert len(target.links[0].sequence.tokens) <= len(PROMPT) + 4


async def test_closing_the_iterator_closes_both_links_at_once() -> None:
    draft, target = ToyDraft(), ToyTarget()
    rounds = speculate(draft, target, request(), K4)
    await anext(rounds)
    await rounds.aclose()
    assert target.num_closed == draft.num_closed == 1


async def test_one_that_found_no_memory_may_go_on_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    target = ToyTarget(step_s=0.001)

    def none_left(*_: object) -> None:
        raise MemoryError

    with pytest.raises(Unavailable, match="out of memory"):
        async for _ in speculate(None, target, request(200), Policy(0)):
            monkeypatch.setattr(SpeculationCore, "on_target", none_left)


async def test_an_error_in_one_sequence_does_not_reach_the_stream() -> None:
    target = ToyTarget(step_s=0.001)
    with pytest.raises(OutriderError, match="unexpected TypeError"):
        async for item in speculate(None, target, request(200), Policy(0)):
            assert isinstance(item, Round)
            broken = Commit(0, item.commit.position + len(item.commit.ids), 7)  # type: ignore[arg-type]
            target.links[0].on_event(broken)


class Failing(ToyTarget):
    """Raises when a sequence is opened, from the `good`-th time on."""

    good = 0

    def open(self, *arguments: Any) -> ToyLink | None:
        if len(self.opens) >= self.good and self.available:
            raise TypeError("a bug")
        return super().open(*arguments)


async def test_a_start_that_fails_leaves_nothing_open() -> None:
    draft = ToyDraft()
    with pytest.raises(TypeError, match="a bug"):
        await collect(draft, Failing(), request())
    assert draft.num_closed == len(draft.opens) == 1


async def test_an_error_in_a_timer_ends_the_sequence() -> None:
    target = Failing(step_s=0.001)
    target.good = 1
    async with asyncio.timeout(30):
        with pytest.raises(OutriderError, match="unexpected TypeError"):
            async for _ in speculate(None, target, request(200), Policy(0)):
                if target.available:  # it comes back broken: the timer that tries again meets the error
                    target.available = False
                    asyncio.get_running_loop().call_later(0.05, setattr, target, "available", True)
                    target.links[-1].lose()


async def test_a_deadline_ends_a_sequence_whose_draft_cannot_be_closed() -> None:
    def close() -> None:
        raise TypeError("a bug")

    drivers: list[SpeculationDriver] = []
    draft, target = ToyDraft(mute=True), ToyTarget()
    async with aclosing(speculate(draft, target, request(200), K4, driver_out=drivers)) as rounds:
        await anext(rounds)
        draft.links[0].close = close  # type: ignore[method-assign]
        drivers[0].fail(Failure(0, 4, "late"))  # as a timer would
        with pytest.raises(OutriderError, match="unexpected TypeError"):
            await asyncio.wait_for(anext(rounds), 30)
    assert target.num_closed == 1


async def test_tally_counts_as_vllm_does() -> None:
    rounds = await collect(ToyDraft(wrong_every=5), ToyTarget(), request())
    tally = SpeculationTally()
    for closed in rounds:
        tally.add(closed)
    drafted = [closed.commit for closed in rounds if closed.commit.num_drafted]
    assert tally.num_rounds == len(rounds) and tally.num_drafts == len(drafted)
    assert tally.num_accepted_tokens == sum(commit.num_accepted for commit in drafted)
    assert sum(tally.num_accepted_per_position) == tally.num_accepted_tokens
    assert tally.num_tested_per_position[0] == tally.num_drafts


async def test_the_tally_keeps_forced_tokens_apart() -> None:
    """Two a window, of which the toy's second is wrong: what is known of the draft stays what it was."""
    plain = await collect(ToyDraft(wrong_every=5), ToyTarget(), request())
    constrained = replace(
        request(), sampling=replace(request().sampling, structured_output=StructuredOutput(regex="x"))
    )
    rounds = await collect(ToyDraft(wrong_every=5), ToyTarget(num_forced=2), constrained)
    assert ids_of(rounds) == ids_of(plain)
    tally = SpeculationTally()
    for closed in rounds:
        tally.add(closed)
    kept = sum(closed.commit.origins.count(TokenOrigin.ACCEPTED) for closed in rounds)
    assert tally.num_forced_tokens == 2 * len(rounds) and 0 < tally.num_accepted_forced_tokens < len(rounds)
    assert tally.num_accepted_tokens + tally.num_accepted_forced_tokens == kept
    assert sum(tally.num_accepted_per_position) == tally.num_accepted_tokens


def test_eos_in_a_window_ends_it() -> None:
    rounds = asyncio.run(collect(ToyDraft(rule=scripted([5, 6, 7])), ToyTarget(rule=scripted([5, 6, 7])), request()))
    assert ids_of(rounds) == [5, 6, 7, EOS]
    assert rounds[-1].commit.finish_reason is FinishReason.STOP


# The core alone.


def core(**fields: object) -> SpeculationCore:
    made = SpeculationCore(request(), K4, **fields)  # type: ignore[arg-type]
    made.start(0.0)
    return made


def commit(position: int, *ids: int, **fields: object) -> Commit:
    return Commit(0, position, ids, **fields)  # type: ignore[arg-type]


def test_start_credits_both_sides_at_the_same_time() -> None:
    effects = SpeculationCore(request(), K4).start(0.0)
    assert [type(effect) for effect in effects] == [OpenDraft, OpenTarget]
    assert effects[0].messages == (Credit(0, 7, 4),)  # type: ignore[union-attr]
    assert effects[1].messages == (Credit(0, 23, 4, 50),)  # type: ignore[union-attr]


def test_a_commit_and_its_credit_travel_in_one_frame_before_the_client_sees_it() -> None:
    effects = core().on_target(commit(3, 1, 2, logprobs=(((),), ((),))), 0.1)
    assert [type(effect) for effect in effects] == [ToDraft, Emit]
    sent: Any = effects[0].messages  # type: ignore[union-attr]
    assert sent[0].ids == (1, 2) and sent[0].logprobs == () and sent[1] == Credit(0, 9, 4)


def test_the_targets_credit_travels_with_the_next_piece() -> None:
    made = core()
    made.on_target(commit(3, 1, 2), 0.1)
    effects = made.on_draft(DraftTokens(0, 0, 5, (3, 4)))
    assert effects == [ToTarget((DraftTokens(0, 0, 5, (3, 4)), Credit(0, 25, 4, 50)))]


def test_a_target_without_a_whole_windows_credit_is_credited_at_once() -> None:
    made, sent = core(), []
    for position in range(3, 19):  # plain tokens: the draft is late
        sent = made.on_target(commit(position, 7), 0.1)
        assert (ToTarget in [type(effect) for effect in sent]) == (position == 18), position
    assert ToTarget((Credit(0, 39, 4, 50),)) in sent


def test_the_journal_is_append_only() -> None:
    made = core()
    made.on_target(commit(3, 1, 2), 0.1)
    effects = made.on_target(commit(4, 9), 0.2)  # out of step: the target is replaced, the journal stands
    assert isinstance(effects[0], OpenTarget) and effects[0].request.output_ids == (1, 2)
    assert made.committed == [*PROMPT, 1, 2]


def test_pieces_past_the_committed_length_follow_a_target_that_dies() -> None:
    made = core()
    made.on_draft(DraftTokens(0, 0, 3, (1, 2)))
    made.on_draft(DraftTokens(0, 0, 5, (3, 4)))
    made.on_draft(DraftTokens(0, 2, 6, (8,), parent=0))
    made.on_target(commit(3, 1, 2), 0.1)
    effects = made.on_target(Lost("x"), 0.2)
    assert isinstance(effects[0], OpenTarget)
    pieces = [message for message in effects[0].messages if isinstance(message, DraftTokens)]
    assert [(piece.chain, piece.position) for piece in pieces][-2:] == [(0, 5), (2, 6)]


@pytest.mark.parametrize("is_late", [False, True])
def test_pieces_of_a_dead_chain_do_not_follow_a_target_that_dies(is_late: bool) -> None:
    made, rest = core(), DraftTokens(0, 0, 5, (3, 4))
    made.on_draft(DraftTokens(0, 0, 3, (1, 2)))
    if not is_late:
        made.on_draft(rest)
    made.on_target(commit(3, 1), 0.1)
    made.on_target(commit(4, 9), 0.2)  # not the 2 that the rest was drafted behind
    made.on_draft(DraftTokens(0, 2, 5, (7,), parent=0))  # of the chain as it was, neither
    if is_late:
        assert made.on_draft(rest) == []
    made.on_draft(DraftTokens(0, 3, 4, (9, 5), parent=0))  # but this one is as it came
    (effect,) = made.on_target(Lost("x"), 0.3)
    assert isinstance(effect, OpenTarget)
    assert [message.chain for message in effect.messages if isinstance(message, DraftTokens)] == [3]


def test_the_journal_keeps_what_a_branch_of_a_branch_rests_on() -> None:
    made = core()
    made.on_draft(DraftTokens(0, 0, 3, (1,)))
    made.on_draft(DraftTokens(0, 1, 4, (2,), parent=0))
    made.on_draft(DraftTokens(0, 3, 4, (9,), parent=0))
    made.on_draft(DraftTokens(0, 2, 5, (8, 8), parent=1))
    made.on_target(commit(3, 1, 2), 0.1)
    (effect,) = made.on_target(Lost("x"), 0.2)
    assert isinstance(effect, OpenTarget)
    assert [message.chain for message in effect.messages if isinstance(message, DraftTokens)] == [0, 1, 2]


def test_chain_numbers_are_never_reused() -> None:
    made = core()
    made.on_draft(DraftTokens(0, 6, 3, (1, 2)))
    made.stop_drafting("gone", may_return=True)
    effects = made.resume_drafting()
    assert isinstance(effects[0], OpenDraft) and effects[0].request.first_chain == 7


def test_a_finish_without_ids_ends_the_request() -> None:
    effects = core().on_target(commit(3, finish_reason=FinishReason.ABORT), 0.1)
    assert [type(effect) for effect in effects] == [Emit, CloseDraft]


def test_what_remains_of_the_deadline_is_sent() -> None:
    made = SpeculationCore(request(timeout_ms=1000), K4)
    made.start(10.0)
    effects = made.on_target(Lost("x"), 10.4)
    assert isinstance(effects[0], OpenTarget) and effects[0].request.timeout_ms == 600


def test_nothing_follows_the_end() -> None:
    made = core()
    assert [type(effect) for effect in made.give_up(Failure(0, 4, "late"))] == [CloseDraft, Fail]
    assert not made.on_target(commit(3, 1), 0.1) and not made.on_draft(DraftTokens(0, 0, 3, (1,)))
    assert not made.on_read(9, 0.0) and not made.give_up(Failure(0, 4, "late"))


def test_toy_rule_is_the_one_expected() -> None:
    assert expected(PROMPT, 2)[0] == arithmetic(PROMPT, 3)


NUM_TOKENS = 60


def disturb(dice: random.Random, draft: ToyDraft, target: ToyTarget) -> None:
    """One thing that goes wrong, or nothing."""
    draft_link, target_link = (links[-1] if links else None for links in (draft.links, target.links))
    match dice.randrange(14):
        case 0 if draft_link is not None and draft_link.open:
            draft_link.lose()
        case 1 if draft_link is not None and draft_link.open:
            draft_link.emit(Failure(0, dice.choice((3, 14)), "out of sorts"))
        case 2 if target_link is not None and target_link.open and len(target.opens) < 8:
            target_link.lose()
        case 3:
            draft.mute = not draft.mute
        case 4:
            draft.available = not draft.available
            draft.info = draft_info() if draft.available else None
        case 5:
            draft.delay_s = dice.choice((0.0, 0.001, 0.003))
        case _:
            pass


@pytest.mark.parametrize("seed", range(60))
async def test_the_output_is_the_targets_whatever_goes_wrong(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "DRAFT_RETRY_S", 0.002)
    dice = random.Random(seed)
    draft, target = ToyDraft(wrong_every=dice.choice((0, 2, 3, 7))), ToyTarget()
    prompt = tuple(dice.randrange(400) for _ in range(dice.randrange(1, 9)))
    opened = Open(0, prompt, SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS))
    policy = Policy(dice.randrange(9), patience_ms=3, max_target_opens=10, max_unread=dice.choice((1, 8, 256)))
    tokens: list[int] = []
    indices: list[int] = []
    async with asyncio.timeout(30):
        async for item in speculate(draft, target, opened, policy, examines_text=dice.random() < 0.5):
            assert isinstance(item, Round)
            assert item.commit.position == len(prompt) + len(tokens)
            tokens.extend(item.commit.ids)
            indices.append(item.index)
            disturb(dice, draft, target)
    assert tokens == expected(prompt, NUM_TOKENS) and indices == list(range(len(indices)))
    assert not any(link.open and not link.sequence.over for link in (*draft.links, *target.links))


async def test_a_draft_that_returns_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "DRAFT_RETRY_S", 0.0)
    draft, target = ToyDraft(), ToyTarget(step_s=0.003)  # time enough on a busy machine
    rounds: list[Round] = []

    async def run() -> None:
        opened = Open(0, (1, 2), SamplingParams(temperature=0.0, max_tokens=200))
        async for item in speculate(draft, target, opened, Policy(4, patience_ms=50)):
            assert isinstance(item, Round)
            rounds.append(item)

    task = asyncio.create_task(run())
    await until(lambda: len(rounds) == 3)
    draft.available, draft.info = False, None
    draft.links[0].lose()
    await until(lambda: rounds[-1].commit.num_drafted == 0)
    draft.available, draft.info = True, draft_info()
    await task
    assert len(draft.opens) == 2 and rounds[-1].commit.num_drafted > 0
    assert draft.opens[1].first_chain > draft.opens[0].first_chain
    assert [token for closed in rounds for token in closed.commit.ids] == expected((1, 2), 200)


REPEATING_PROMPT = (5, 6, 7, 8, 5, 6, 7, 8, 5, 6)


@pytest.mark.parametrize("max_tokens", [8, 10, 11])
async def test_no_round_waits_out_its_patience_near_the_end(max_tokens: int) -> None:
    """There the draft's credit does not grow any more: a commit alone asks for the next piece."""
    # Few tokens in an order that does not repeat: lookup always finds something, and most of it is wrong.
    target = ToyTarget(rule=lambda tokens, prompt_len: 5 + len(tokens) ** 2 // 3 % 4)
    request = Open(0, REPEATING_PROMPT, SamplingParams(temperature=0.0, max_tokens=max_tokens))
    rounds: list[Round] = []
    async for item in speculate(LocalDrafter([NgramProposer(1, 3)]), target, request, Policy(4, patience_ms=5000)):
        assert isinstance(item, Round)
        rounds.append(item)
    assert target.num_patiences == 0
    assert sum(len(closed.commit.ids) for closed in rounds) == max_tokens
    assert all(closed.commit.num_drafted for closed in rounds[1:-1])  # nothing is left to draft for the last one
