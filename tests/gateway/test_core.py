"""The core where a draft or a target does what it should not: the request goes on, and nobody learns from it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from outrider.gateway.peers.untrusted import unweighted
from outrider.gateway.speculation.backends import Lost
from outrider.gateway.speculation.core import (
    MAX_PIECES,
    POSITION_BYTES,
    CloseDraft,
    Effect,
    Emit,
    EmitPrompt,
    OpenDraft,
    OpenTarget,
    SpeculationCore,
    ToDraft,
    ToTarget,
)
from outrider.gateway.speculation.journal import size_of
from outrider.kernels.sampling.reference import MAX_ENTRIES
from outrider.planner.policy import Policy, Round, SpeculationTally
from outrider.rpc.codec import PIECE, RELAYED_DRAFT_STREAM, TARGET_STREAM
from outrider.rpc.frames import ENTRY_BYTES
from outrider.rpc.messages import (
    MAX_PIECE_IDS,
    MAX_WEIGHTS,
    Commit,
    Credit,
    DraftTokens,
    Failure,
    Open,
    PromptLogprobs,
    TokenWeights,
)
from outrider.rpc.words.answer import MethodStats, TokenLogprob
from outrider.rpc.words.sampling_params import FinishReason, SamplingParams
from outrider.v1 import common_pb2 as pb
from outrider.v1 import draft_pb2

PROMPT = (11, 12, 13)
K4 = Policy(4, patience_ms=50)
TOO_MANY_BYTES = b"\0" * (4 * MAX_WEIGHTS + 4)
REFUSED = {
    "weights": DraftTokens(0, 0, 3, (7,), (TokenWeights(TOO_MANY_BYTES, TOO_MANY_BYTES),)),
    "method": DraftTokens(0, 0, 3, (7,), method="m" * 129),
    "parent": DraftTokens(0, 3, 3, (7,), parent=3),
    "ids": DraftTokens(0, 1, 3, tuple(range(MAX_PIECE_IDS + 1))),
    "chain": DraftTokens(0, 2**31, 3, (7,)),
}


@dataclass
class Watching:
    """A PolicyController that keeps its choice and notes what it is shown."""

    policy: Policy = K4
    rounds: list[Round] = field(default_factory=list)

    def inputs(self) -> Mapping[str, float]:
        return {}

    def on_piece(self, num_ids: int, draft_us: int) -> None:
        pass

    def on_round(self, closed: Round) -> bool:
        self.rounds.append(closed)
        return False


def core(controller: Watching | None = None, policy: Policy = K4, **sampling: Any) -> SpeculationCore:
    params = SamplingParams(**{"max_tokens": 50, **sampling})
    made = SpeculationCore(Open(0, PROMPT, params), policy, controller=controller)
    made.start(0.0)
    return made


def sent(effects: list[Effect]) -> list[object]:
    return [message for effect in effects if isinstance(effect, ToTarget) for message in effect.messages]


def test_plain_credit_is_renewed_when_half_of_it_is_spent() -> None:
    made = core(policy=Policy(0, plain_ahead=8))
    credits = [sent(made.on_target(Commit(0, 3 + count, (20 + count,)), 0.0)) for count in range(8)]
    assert credits == [[], [], [], [Credit(0, 15, 0)], [], [], [], [Credit(0, 19, 0)]]


def test_plain_credit_of_one_token_is_renewed_by_each() -> None:
    made = core(policy=Policy(0, plain_ahead=1))
    credits = [sent(made.on_target(Commit(0, 3 + count, (20 + count,)), 0.0)) for count in range(2)]
    assert credits == [[Credit(0, 5, 0)], [Credit(0, 6, 0)]]


def test_reading_is_looked_at_where_it_held_credit_back() -> None:
    """Credit reaches at most six tokens past what was read; the target would get four windows."""
    made = SpeculationCore(Open(0, PROMPT, SamplingParams(max_tokens=50)), Policy(4, patience_ms=50, max_unread=6))
    (opened,) = (effect for effect in made.start(0.0) if isinstance(effect, OpenTarget))
    assert opened.messages == (Credit(0, 9, 4, 50),)
    made.on_target(Commit(0, 3, (1, 2)), 0.1)
    assert sent(made.on_read(4, 0.1)) == [Credit(0, 10, 4, 50)]
    piece = DraftTokens(0, 0, 5, (7, 8, 9, 7))
    assert sent(made.on_draft(piece)) == [piece], "nothing was read meanwhile"
    made.on_target(Commit(0, 5, (7, 8, 9, 7, 1)), 0.2)
    assert made.committed[3:] == [1, 2, 7, 8, 9, 7, 1], "nothing is left to grant"
    assert sent(made.on_draft(DraftTokens(0, 1, 10, (7,)))) == [DraftTokens(0, 1, 10, (7,))]
    effects = made.on_read(7, 5.0)
    assert sent(effects) == [Credit(0, 13, 4, 50)] and to_draft(effects) == [Credit(0, 13, 4)]
    (emitted,) = (effect for effect in made.on_target(Commit(0, 10, (1, 2)), 5.1) if isinstance(effect, Emit))
    assert emitted.round.started == 5.0, "what the client took its time for is no part of the round"


def test_reading_is_not_looked_at_where_credit_reaches_as_far_as_it_would(monkeypatch: pytest.MonkeyPatch) -> None:
    made = core(policy=Policy(0))

    def fail(made: SpeculationCore) -> Credit:
        raise AssertionError("it costs what a commit does")

    for position in range(3, 30):
        made.on_target(Commit(0, position, (1,)), 0.1)
        with monkeypatch.context() as patch:
            patch.setattr(SpeculationCore, "_renewed_target_credit", fail)
            assert made.on_read(position + 1, 0.1) == []


@pytest.mark.parametrize("returns", [True, False])
def test_rounds_without_the_chosen_draft_are_not_shown_to_the_chooser(returns: bool) -> None:
    controller = Watching()
    made = core(controller)
    made.on_target(Commit(0, 3, (1,)), 0.1)
    made.stop_drafting("gone", may_return=returns)
    for position in range(4, 9):
        made.on_target(Commit(0, position, (1,)), 0.1)
    assert [closed.index for closed in controller.rounds] == [0]
    if returns:
        made.resume_drafting()
        made.on_target(Commit(0, 9, (1,)), 0.1)
        assert [closed.index for closed in controller.rounds] == [0, 6]


def test_rounds_without_a_draft_by_choice_are_shown() -> None:
    controller = Watching(policy=Policy(0))
    core(controller).on_target(Commit(0, 3, (1,)), 0.1)
    assert len(controller.rounds) == 1


LAST = FinishReason.LENGTH


def to_draft(effects: list[Effect]) -> list[object]:
    return [message for effect in effects if isinstance(effect, ToDraft | OpenDraft) for message in effect.messages]


def kinds(effects: list[Effect]) -> set[type]:
    """Of those that concern the draft's link."""
    return {type(effect) for effect in effects} & {OpenDraft, CloseDraft}


def learning(policy: Policy, controller: Watching | None = None) -> tuple[SpeculationCore, list[Effect]]:
    request = Open(0, PROMPT, SamplingParams(max_tokens=50))
    made = SpeculationCore(request, policy, controller=controller, draft_learns=True)
    return made, made.start(0.0)


def test_a_draft_that_learns_hears_of_a_sequence_that_it_has_no_credit_for() -> None:
    made, effects = learning(Policy(0))
    assert kinds(effects) == {OpenDraft} and to_draft(effects) == [] and not made.drafting
    commit = Commit(0, 3, (1, 2))
    assert to_draft(made.on_target(commit, 0.1)) == [commit]
    assert made.on_draft(DraftTokens(0, 0, 5, (7,))) == []  # none was asked for
    assert to_draft(made.on_read(5, 0.2)) == []
    last = Commit(0, 5, (3,), finish_reason=LAST)
    effects = made.on_target(last, 0.3)
    assert to_draft(effects) == [last] and kinds(effects) == {CloseDraft}
    assert effects.index(ToDraft((last,))) < effects.index(CloseDraft())


def test_a_draft_that_learns_stays_while_speculation_is_off() -> None:
    class Switching(Watching):
        def on_round(self, closed: Round) -> bool:
            self.policy = Policy(0) if self.policy == K4 else K4
            return True

    made, effects = learning(K4, Switching())
    assert to_draft(effects) == [Credit(0, 7, 4)]
    commits = [Commit(0, 3, (1,)), Commit(0, 4, (1,))]
    effects = made.on_target(commits[0], 0.1)
    assert to_draft(effects) == [commits[0], Credit(0, 7, 0)] and not kinds(effects) and not made.drafting
    effects = made.on_target(commits[1], 0.1)
    assert to_draft(effects) == [commits[1], Credit(0, 9, 4)] and not kinds(effects) and made.drafting


def test_a_draft_that_learns_and_is_lost_is_sought_again() -> None:
    made, _ = learning(Policy(0))
    effects = made.on_draft(Lost("died"))
    assert effects == [CloseDraft("died", may_return=True)]
    assert to_draft(made.on_target(Commit(0, 3, (1,)), 0.1)) == []
    (opened,) = made.resume_drafting()
    assert isinstance(opened, OpenDraft) and opened.request.output_ids == (1,) and opened.messages == ()
    assert made.resume_drafting() == []  # it is there
    closed, again = made.on_draft(Lost("moves", moved=True))
    assert isinstance(closed, CloseDraft) and isinstance(again, OpenDraft) and again.messages == ()


def test_another_draft_hears_of_no_finish() -> None:
    made = core()
    effects = made.on_target(Commit(0, 3, (1,), finish_reason=LAST), 0.1)
    assert to_draft(effects) == [] and kinds(effects) == {CloseDraft}
    assert kinds(core(policy=Policy(0)).start(0.0)) == set()


def test_a_round_says_which_methods_drafted_its_window() -> None:
    made = core(policy=Policy(4, windows_ahead=1))
    for piece in (
        DraftTokens(0, 0, 3, (1, 2), more=True, method="suffix"),
        DraftTokens(0, 0, 5, (3, 4, 5, 6), more=True, method="draft_model"),
        DraftTokens(0, 1, 5, (9,), parent=0, method="ngram"),  # another chain
    ):
        made.on_draft(piece)

    def closed(commit: Commit) -> Round:
        (effect,) = (effect for effect in made.on_target(commit, 0.1) if isinstance(effect, Emit))
        return effect.round

    first = closed(Commit(0, 3, (1, 2, 3), chain=0, num_drafted=4, num_accepted=3))
    assert first.drafted_by == (("suffix", 2, 2), ("draft_model", 2, 1))
    second = closed(Commit(0, 6, (7,), chain=0, num_drafted=3))
    assert second.drafted_by == (("draft_model", 3, 0),)
    assert closed(Commit(0, 7, (8,))).drafted_by == ()
    tally = SpeculationTally()
    tally.add(first)
    tally.add(second)
    assert tally.by_method == {"suffix": MethodStats(1, 2, 2), "draft_model": MethodStats(2, 5, 1)}


@pytest.mark.parametrize("name", REFUSED)
def test_a_piece_that_the_target_would_refuse_ends_the_drafting_alone(name: str) -> None:
    made = core()
    effects = made.on_draft(REFUSED[name])
    assert [effect.may_return for effect in effects if isinstance(effect, CloseDraft)] == [False]
    assert not any(isinstance(message, DraftTokens) for message in sent(effects)) and not made.drafting
    plain = made.on_target(Commit(0, 3, (1, 2)), 0.1)
    assert any(isinstance(effect, Emit) for effect in plain) and not made.finished
    (credit,) = sent(effects)
    assert isinstance(credit, Credit) and credit.max_window == credit.patience_ms == 0
    (again,) = made.on_target(Lost("died"), 0.2)
    assert isinstance(again, OpenTarget) and not any(isinstance(message, DraftTokens) for message in again.messages)


def test_a_draft_that_floods_is_left() -> None:
    """The journal would hold it all, and send it to the next target."""
    made = core()
    floods = [made.on_draft(DraftTokens(0, number, 3, (7, 8))) for number in range(MAX_PIECES + 1)]
    assert sent(floods[-2]) and CloseDraft in kinds(floods[-1]) and not made.drafting
    (opened,) = [effect for effect in made.on_target(Lost("gone"), 0.0) if isinstance(effect, OpenTarget)]
    assert len(opened.messages) <= 1 + MAX_PIECES


def relayed(chain: int, num_ids: int, num_weights: int, position: int = 3, unknown: bytes = b"") -> DraftTokens:
    """A piece as it comes from a draft."""
    one = TokenWeights(bytes(4 * num_weights), bytes(4 * num_weights))
    piece = PIECE.encode(DraftTokens(0, chain, position, (7,) * num_ids, (one,) * num_ids))
    entry = draft_pb2.DraftEvent(piece=pb.Piece.FromString(piece.SerializeToString() + unknown))
    found = RELAYED_DRAFT_STREAM.events.decode(entry)
    assert isinstance(found, DraftTokens)
    return found


NEWER = bytes((0xFA, 0x7F, 0x80, 0x80, 0x10)) + bytes(1 << 18)  # a field that nobody knows here, 256 KiB
LARGE = {
    "weights": (4, MAX_WEIGHTS, b""),
    "one at a time": (1, MAX_WEIGHTS, b""),
    "more than a frame": (64, MAX_WEIGHTS, b""),
    "unknown": (1, 0, NEWER),
    "empty": (0, 0, NEWER),
}


@pytest.mark.parametrize("k", [1, 4, 128])
@pytest.mark.parametrize("kind", LARGE)
def test_a_draft_that_floods_by_bytes_is_left(kind: str, k: int) -> None:
    """The journal would hold them, and the target's stream, which others share."""
    made, room = core(policy=Policy(k, patience_ms=50), max_tokens=1000), k * POSITION_BYTES
    num_ids, num_weights, unknown = LARGE[kind]
    pieces: list[DraftTokens] = []
    while made.drafting and sum(map(size_of, pieces)) <= room:
        effects = made.on_draft(relayed(len(pieces), num_ids, num_weights, unknown=unknown))
        pieces += [piece for piece in sent(effects) if isinstance(piece, DraftTokens)]
    assert not made.drafting and sum(map(size_of, pieces)) <= room
    assert all(size_of(piece) < TARGET_STREAM.commands.max_lone_bytes - ENTRY_BYTES for piece in pieces)
    assert isinstance(made.on_target(Lost("gone"), 0.0)[0], OpenTarget) and not made.finished


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_weights_that_are_not_believed_are_not_kept() -> None:
    made, before = core(policy=Policy(64, patience_ms=50)), resident_bytes()
    for chain in range(50):
        assert made.on_draft(unweighted(relayed(chain, 64, MAX_WEIGHTS)))
    assert made.drafting and resident_bytes() - before < 20 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_all_that_a_draft_has_credit_for_is_taken() -> None:
    """In the longest pieces, with as many weights as a draft sends."""
    made = core(policy=Policy(128, patience_ms=50, windows_ahead=1), max_tokens=5000)
    made.on_draft(relayed(0, 128, MAX_ENTRIES))
    for first in range(3, 3 + 30 * 128, 128):
        assert sent(made.on_draft(relayed(0, 128, MAX_ENTRIES, first + 128)))
        made.on_target(Commit(0, first, (7,) * 128), 0.1)
        made.on_read(first + 128, 0.1)
    assert made.drafting


def test_only_what_a_target_has_let_in_was_promised_its_room() -> None:
    """A client may claim that it had tokens before."""
    full = Failure(0, 8, "256 sequences are open", "BUSY", 1000)
    for output_ids in ((), (7,)):
        made = SpeculationCore(Open(0, PROMPT, SamplingParams(max_tokens=50), output_ids), K4)
        first = [effect for effect in made.start(0.0) if isinstance(effect, OpenTarget)]
        (second,) = made.on_target(full, 0.1)
        assert isinstance(second, OpenTarget)
        assert [one.request.resumed for one in (*first, second)] == [bool(output_ids)] * 2
        made.on_target(Commit(0, 3 + len(output_ids), (1,)), 0.2)
        (again,) = made.on_target(Lost("died"), 0.3)
        assert isinstance(again, OpenTarget) and again.request.was_promised


def test_a_piece_past_the_drafts_credit_is_dropped() -> None:
    made = core()  # its credit reaches to position 7
    assert made.on_draft(DraftTokens(0, 0, 8, (7,))) == [] and made.drafting
    (again,) = made.on_target(Lost("died"), 0.1)
    assert isinstance(again, OpenTarget) and not any(isinstance(message, DraftTokens) for message in again.messages)
    assert sent(made.on_draft(DraftTokens(0, 0, 3, (7,)))) == [DraftTokens(0, 0, 3, (7,))]


@pytest.mark.parametrize(
    ("failure", "waits"),
    [
        (Failure(0, 14, "the service is draining", "DRAINING"), False),
        (Failure(0, 8, "256 sequences are open", "BUSY", 1000), False),
        (Failure(0, 14, "the device is stuck", "DEVICE_DEAD"), True),
    ],
)
def test_only_a_sequence_that_a_target_has_had_may_wait_for_another(failure: Failure, waits: bool) -> None:
    made = core()
    (again,) = made.on_target(failure, 0.1)
    assert isinstance(again, OpenTarget) and made.has_run == waits
    assert (again.refusal is not None) == (failure.retry_after_ms > 0)
    made.on_target(Commit(0, 3, (1,)), 0.2)
    assert made.has_run


def test_targets_behind_a_broken_network_are_no_failed_attempts() -> None:
    made = core(policy=Policy(0))
    made.on_target(Commit(0, 3, (1,)), 0.1)
    effects = made.on_target(Lost("no frame for 3 s"), 3.0)
    for _ in range(5):
        effects += made.on_target(Lost("no frame for 3 s", unheard=True), 3.5)
    opened = [effect.request.suspect for effect in effects if isinstance(effect, OpenTarget)]
    assert opened == [False] * 6 and not made.finished
    made.on_target(Lost("died"), 4.0)
    made.on_target(Lost("died"), 4.5)
    assert made.finished  # what dies at once counts as before


def test_a_fork_that_comes_too_late_is_one_attempt_that_does_not_count() -> None:
    """And no more than one: a target that always says so is given up."""
    gone = Failure(0, 14, "the sequence to fork is gone", "PARENT_GONE")
    made = core(policy=Policy(0))
    opened = [effect for event in (gone, Lost("died"), Lost("died")) for effect in made.on_target(event, 0.1)]
    assert [effect.request.suspect for effect in opened if isinstance(effect, OpenTarget)] == [False, False, True]
    made = core(policy=Policy(0))
    for _ in range(Policy(0).max_target_opens + 1):
        assert not made.finished
        made.on_target(gone, 0.1)
    assert made.finished


def test_targets_that_are_full_are_no_failed_attempts() -> None:
    made = core(policy=Policy(0, max_target_opens=2))
    for _ in range(5):
        made.on_target(Failure(0, 8, "256 sequences are open", "BUSY", 1000), 0.1)
    (again,) = made.on_target(Lost("died"), 0.2)
    assert isinstance(again, OpenTarget) and not made.finished
    made.on_target(Lost("died"), 0.3)
    assert made.finished


def test_the_number_of_a_dropped_piece_is_not_given_again() -> None:
    made = core()
    assert made.on_draft(DraftTokens(0, 6, 8, (7,))) == []
    made.stop_drafting("gone", may_return=True)
    (opened,) = [effect for effect in made.resume_drafting() if isinstance(effect, OpenDraft)]
    assert opened.request.first_chain == 7


def test_the_prompts_logprobs_that_were_lost_between_slices_are_told_once() -> None:
    rows = [(TokenLogprob(token, -1.0, 1),) for token in PROMPT]
    made = core(policy=Policy(0), prompt_logprobs=2)
    told = made.on_target(PromptLogprobs(0, 0, (rows[0],)), 0.1)
    (again,) = made.on_target(Lost("between slices"), 0.2)
    assert isinstance(again, OpenTarget) and again.request.sampling.prompt_logprobs == 2
    for position in (0, 1, 2):  # the other target cuts them in slices of its own
        told += made.on_target(PromptLogprobs(0, position, tuple(rows[position : position + 2])), 0.3)
    heard = [effect.logprobs for effect in told if isinstance(effect, EmitPrompt)]
    assert [event.position for event in heard] == [0, 1, 2]
    assert [row for event in heard for row in event.logprobs] == rows
    (late,) = made.on_target(Lost("after the last"), 0.4)
    assert isinstance(late, OpenTarget) and late.request.sampling.prompt_logprobs is None
