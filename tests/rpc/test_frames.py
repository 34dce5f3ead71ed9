"""The framing without I/O: order, slices, closes, forks, bounds, and what a broken peer may not do."""

from __future__ import annotations

import itertools
import os
import random
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from support.pictures import media

from outrider.rpc import frames
from outrider.rpc.codec import DRAFT_STREAM, RELAYED_DRAFT_STREAM, TARGET_STREAM, Message
from outrider.rpc.errors import ProtocolError, ResourceExhausted
from outrider.rpc.frames import ID_WINDOW, MAX_FRAME_BYTES, FrameAssembler, FramePacker, SequenceState, SequenceTable
from outrider.rpc.media import MAX_MEDIA, Media
from outrider.rpc.messages import (
    Close,
    Closed,
    Commit,
    Credit,
    DraftTokens,
    Failure,
    FrameHeader,
    Open,
    PromptLogprobs,
    TokenWeights,
)
from outrider.rpc.words.answer import TokenLogprob
from outrider.rpc.words.sampling_params import FinishReason, SamplingParams
from outrider.v1 import common_pb2 as pb
from outrider.v1 import draft_pb2, generation_pb2, target_pb2

COMMANDS, EVENTS = TARGET_STREAM.commands, TARGET_STREAM.events


def new_open(
    sequence_id: int, num_ids: int = 4, *, num_output_ids: int = 0, num_predicted: int = 0, fork_of: int | None = None
) -> Open:
    prompt = () if fork_of is not None else tuple(range(num_ids))
    output, guess = tuple(range(num_output_ids)), tuple(range(7, 7 + num_predicted))
    return Open(sequence_id, prompt, SamplingParams(), output, fork_of=fork_of, prediction=guess)


class Pair:
    """A gateway's packer and a service's assembler; `pump` carries every frame and checks its size."""

    def __init__(self, max_media_bytes: int = 0) -> None:
        self.near, self.far = SequenceTable(), SequenceTable()
        self.packer, self.assembler = (
            FramePacker(COMMANDS, self.near),
            FrameAssembler(COMMANDS, self.far, max_media_bytes),
        )
        self.back_packer, self.back = FramePacker(EVENTS, self.far), FrameAssembler(EVENTS, self.near)
        self.number = 0
        self.replies: list[Message] = []

    def frame(self) -> list[Message] | None:
        entries = self.packer.next_frame()
        if entries is None:
            return None
        self.number += 1
        frame = COMMANDS.build(FrameHeader(self.number, 2**64 - 1, 2**64 - 1, 2**32 - 1, True, 2**32 - 1), entries)
        assert frame.ByteSize() <= MAX_FRAME_BYTES or len(entries) == 1
        received = self.assembler.accept(type(frame).FromString(frame.SerializeToString()))
        self.replies += received.replies
        return received.messages

    def pump(self) -> list[Message]:
        messages: list[Message] = []
        while (more := self.frame()) is not None:
            messages += more
        return messages

    def push(self, *messages: Message) -> None:
        for message in messages:
            self.packer.push(message)


def service_side() -> tuple[FramePacker, SequenceTable]:
    table = SequenceTable()
    return FramePacker(EVENTS, table), table


def test_short_messages_of_one_turn_share_a_frame_in_order() -> None:
    pair = Pair()
    sent: list[Message] = [new_open(1), Credit(1, 9, 4), new_open(2), DraftTokens(1, 0, 4, (7, 8)), Close(2)]
    pair.push(*sent[:4])
    assert pair.frame() == sent[:4]
    pair.push(sent[4])
    assert pair.pump() == [Close(2)]


def sent_beside_credits(pair: Pair) -> tuple[list[Message], int]:
    """What else comes, and in which frame the last of it; a short message of sequence 1 in each never waits behind."""
    received: list[Message] = []
    for turn in range(1000):
        pair.push(Credit(1, turn, 4))
        messages = pair.frame()
        assert messages is not None and messages[0] == Credit(1, turn, 4)
        received += messages[1:]
        if pair.packer.idle:
            return received, turn
    raise AssertionError("it never ends")


def test_a_long_prompt_is_sliced_beside_short_messages() -> None:
    pair = Pair()
    pair.push(new_open(1))
    pair.pump()
    long = new_open(2, 200_000, num_output_ids=5_000, num_predicted=6_000)
    pair.push(long, Credit(2, 200_100, 4))
    received, turn = sent_beside_credits(pair)
    assert received == [long, Credit(2, 200_100, 4)]
    assert 8 <= turn <= 30  # about 600 KB, two slices of a frame


def test_long_prompts_share_the_wire_round_robin() -> None:
    pair = Pair()
    pair.push(new_open(1, 400_000), new_open(2, 20_000))
    assert [message.sequence_id for message in pair.pump()] == [2, 1]


def test_a_credit_waits_behind_the_last_slice_of_its_open() -> None:
    pair = Pair()
    pair.push(new_open(1, 50_000), Credit(1, 50_010, 4), DraftTokens(1, 0, 50_000, (5,)))
    assert [type(message) for message in pair.pump()] == [Open, Credit, DraftTokens]


def test_pictures_travel_in_slices_behind_the_ids() -> None:
    pair = Pair(max_media_bytes=1 << 20)
    pair.push(new_open(1))
    pair.pump()
    pictures = media(1), media(2, size=300_000), Media.of("image/png", b"")
    seen = replace(new_open(2, 9_000, num_output_ids=5, num_predicted=6), media=pictures)
    pair.push(seen, Credit(2, 9_100, 4))
    received, turn = sent_beside_credits(pair)
    assert received == [seen, Credit(2, 9_100, 4)] and turn >= 6
    short = replace(new_open(3), media=pictures[:1])  # with ids that would fit its head
    pair.push(short)
    assert pair.pump() == [short]


def test_pictures_that_are_not_taken_fail_their_sequence_alone() -> None:
    for limit, said in ((0, "takes no pictures"), (5_000, "allowed: at most 5000")):
        pair = Pair(max_media_bytes=limit)
        seen = replace(new_open(1, 9_000), media=(media(size=6_000),))
        pair.push(seen, Credit(1, 9_100, 4), new_open(2))
        assert pair.pump() == [new_open(2)]
        (refused,) = pair.replies
        assert isinstance(refused, Failure) and refused.code == 3 and said in refused.message
        assert not pair.assembler._partial
    pair = Pair(max_media_bytes=5_000)
    pair.push(replace(new_open(1), media=(media(),) * (MAX_MEDIA + 1)))
    assert pair.pump() == [] and "65 entries" in pair.replies[0].message  # type: ignore[union-attr]


def test_pictures_on_their_way_are_bounded() -> None:
    pair = Pair(max_media_bytes=100_000)
    for number in range(1, 11):
        pair.push(replace(new_open(number), media=(media(number, size=90_000),)))
    opened = pair.pump()
    refused = [reply for reply in pair.replies if isinstance(reply, Failure)]
    assert len(opened) + len(refused) == 10 and opened and refused
    assert all(reply.is_full and "on their way" in reply.message for reply in refused)


@pytest.mark.parametrize(
    ("ids", "body", "said"),
    [
        ([1] * 8, b"", "more than the 8 ids"),
        ([1], b"x", "behind 8 ids"),
        ([1] * 4, b"x" * 11, "the 10 bytes of media announced"),
    ],
)
def test_slices_other_than_announced_end_the_stream(ids: list[int], body: bytes, said: str) -> None:
    pair = Pair(max_media_bytes=100)
    head = COMMANDS.encode(replace(new_open(1, 4), media=(Media.of("image/png", bytes(10)),)))
    head.open.num_prompt_ids = 8
    more = target_pb2.TargetCommand(open_slice=pb.OpenSlice(sequence_id=1, ids=ids, media=body))
    with pytest.raises(ProtocolError, match=said):
        pair.assembler.accept(COMMANDS.build(FrameHeader(1), [head, more]))


def test_a_close_amid_slices_discards_the_rest_and_is_answered() -> None:
    pair = Pair()
    pair.push(new_open(1, 100_000), Credit(1, 100_010, 4))
    pair.frame()
    pair.push(Close(1))
    assert pair.pump() == [] and pair.replies == [Closed(1)]
    assert pair.packer.vanished == [] and pair.packer.idle
    assert pair.far.state(1) is SequenceState.CLOSING


@pytest.mark.parametrize("size", [4, 100_000])
def test_an_open_of_which_nothing_was_sent_vanishes_with_its_close(size: int) -> None:
    pair = Pair()
    pair.push(new_open(1, size), Credit(1, size, 4), new_open(2), Close(1))
    assert pair.pump() == [new_open(2)]
    assert pair.packer.vanished == [1] and pair.near.state(1) is SequenceState.OVER
    assert pair.far.state(1) is SequenceState.UNKNOWN
    assert pair.packer.pending_bytes == 0 and pair.packer.idle


def test_nothing_follows_a_close() -> None:
    pair = Pair()
    pair.push(new_open(1))
    pair.pump()
    pair.push(Credit(1, 5, 4), Close(1), Credit(1, 6, 4), Close(1))
    assert pair.pump() == [Close(1)]  # the unsent credit is discarded, too


def test_a_fork_waits_for_its_parents_whole_open() -> None:
    pair = Pair()
    pair.push(new_open(1, 100_000), new_open(2, fork_of=1), Credit(2, 9, 4), new_open(3, fork_of=2), new_open(4))
    messages = pair.pump()
    assert [message.sequence_id for message in messages] == [4, 1, 2, 2, 3]
    assert pair.packer.idle


def test_a_parents_close_waits_for_its_forks() -> None:
    pair = Pair()
    pair.push(new_open(1, 100_000), new_open(2, fork_of=1, num_output_ids=30_000), new_open(3, fork_of=1))
    pair.push(Close(1), Close(3))
    messages = pair.pump()
    assert [(type(message), message.sequence_id) for message in messages] == [(Open, 1), (Open, 2), (Close, 1)]
    assert pair.packer.vanished == [3]


def test_a_parent_vanishes_once_its_forks_have() -> None:
    pair = Pair()
    pair.push(new_open(1, 100_000), new_open(2, fork_of=1), new_open(3, fork_of=2), Close(1), Close(2), Close(3))
    assert pair.pump() == [] and sorted(pair.packer.vanished) == [1, 2, 3]
    assert pair.packer.idle and pair.near.num_active == 0


def test_prompt_logprobs_are_sliced_and_stay_in_order() -> None:
    packer, table = service_side()
    table.open(1)
    table.open(2)
    candidates = tuple(TokenLogprob(i, -0.5, i + 1) for i in range(21))
    whole = PromptLogprobs(1, 0, ((), *[candidates] * 1000))
    packer.push(whole)
    packer.push(Commit(1, 1001, (5,)))
    packer.push(Commit(2, 9, (6,)))
    near = SequenceTable()
    near.open(1)
    near.open(2)
    assembler, received, number = FrameAssembler(EVENTS, near), [], 0
    while (entries := packer.next_frame()) is not None:
        number += 1
        frame = EVENTS.build(FrameHeader(number), entries)
        assert frame.ByteSize() <= MAX_FRAME_BYTES
        taken = assembler.accept(frame).messages
        candidates_taken = sum(len(row) for part in taken if isinstance(part, PromptLogprobs) for row in part.logprobs)
        assert candidates_taken < 2_000  # no more than an event loop has time for
        received += taken
    assert received[0] == Commit(2, 9, (6,)) and received[-1] == Commit(1, 1001, (5,))
    slices = [message for message in received if isinstance(message, PromptLogprobs)]
    assert len(slices) > 10 and [part.position for part in slices] == sorted(part.position for part in slices)
    assert tuple(entry for part in slices for entry in part.logprobs) == whole.logprobs


def test_a_message_larger_than_a_frame_travels_alone_up_to_a_limit() -> None:
    pair = Pair()
    allowed = SamplingParams(allowed_token_ids=tuple(range(100_000)))
    pair.push(new_open(1), Open(2, (1,), allowed), new_open(3))
    assert [len(pair.frame() or []) for _ in range(3)] == [1, 1, 1]
    with pytest.raises(ResourceExhausted, match="Open of sequence 4"):
        pair.push(Open(4, (1,), SamplingParams(allowed_token_ids=tuple(range(1_000_000)))))
    assert pair.near.state(4) is SequenceState.UNKNOWN


def test_a_finished_sequence_answers_its_close_itself() -> None:
    pair = Pair()
    pair.push(new_open(1), new_open(2))
    pair.pump()
    finish = Commit(1, 4, (5,), finish_reason=FinishReason.STOP)
    for message in (finish, Commit(1, 5, (6,)), Commit(2, 4, (7,), finish_reason=FinishReason.LENGTH)):
        pair.back_packer.push(message)
    pair.push(Close(2))  # crosses the finish of 2 on the wire
    entries = pair.back_packer.next_frame()
    assert entries is not None
    assert pair.back.accept(EVENTS.build(FrameHeader(1), entries)).messages == [finish, Closed(2)]
    pair.push(Close(1))
    assert pair.packer.vanished == [1]
    assert pair.pump() == [Close(2), Close(1)]  # a service that waits for it lets go


def test_late_events_are_ignored_and_a_failure_ends() -> None:
    table = SequenceTable()
    table.open(1)
    table.open(2)
    table.close(2)
    assembler = FrameAssembler(EVENTS, table)
    sent: list[Message] = [Failure(1, 14, "gone"), Commit(1, 4, (5,)), Commit(2, 4, (5,)), Closed(2), Closed(2)]
    frame = EVENTS.build(FrameHeader(1), [EVENTS.encode(message) for message in sent])
    assert assembler.accept(frame).messages == [sent[0], Closed(2)]


def test_the_draft_hears_of_finished_sequences_without_losing_them() -> None:
    packer = FramePacker(DRAFT_STREAM.commands)
    packer.push(new_open(1))
    packer.push(Commit(1, 4, (5,), finish_reason=FinishReason.STOP))
    packer.push(Credit(1, 9, 4))
    assert len(packer.next_frame() or []) == 3
    for size, passed_on in itertools.product((4, 100_000), (False, True)):  # nothing is lost, whatever was sent before
        number, finish = size + passed_on, Commit(size + passed_on, size, (5,), finish_reason=FinishReason.STOP)
        packer.push(new_open(number, size))
        if passed_on:
            packer.push_commands(number, [finish])
        else:
            packer.push(finish)
        packer.push(Close(number))
        entries = [entry for frame in iter(packer.next_frame, None) for entry in frame]
        kinds = [entry.WhichOneof(DRAFT_STREAM.commands.oneof) for entry in entries]
        assert kinds[0] == "open" and kinds[-2:] == ["commit", "close"] and not packer.vanished
    with pytest.raises(TypeError, match="DraftTokens does not travel"):
        packer.push(DraftTokens(1, 0, 4, (5,)))


UNKNOWN = b"\xf8\x07\x2a"  # field 127, a varint


def relayed(piece: pb.Piece, sequence_id: int) -> pb.Piece:
    """What a gateway makes of a draft's piece, for its sequence at the target."""
    packer = FramePacker(COMMANDS)
    packer.push(new_open(sequence_id))
    decoded = RELAYED_DRAFT_STREAM.events.decode(draft_pb2.DraftEvent(piece=piece))
    packer.push_commands(sequence_id, [decoded])  # type: ignore[list-item]
    frame = COMMANDS.build(FrameHeader(1), packer.next_frame() or [])
    passed: pb.Piece = frame.messages[1].piece
    return passed


def test_a_piece_is_passed_on_as_it_came() -> None:
    weights = [pb.TokenWeights(ids=b"\1\0\0\0", weights=b"\2\0\0\0"), pb.TokenWeights()]
    piece = pb.Piece(sequence_id=3, chain=9, parent=7, position=5, ids=[8, 6], weights=weights, more=True, draft_us=40)
    piece.MergeFromString(UNKNOWN)  # of a newer draft
    passed = relayed(piece, 4)
    assert passed.sequence_id == 4 and passed.SerializeToString().endswith(UNKNOWN)
    passed.sequence_id = 3
    assert passed == piece
    assert DRAFT_STREAM.events.decode(draft_pb2.DraftEvent(piece=piece)) == DraftTokens(
        3, 9, 5, (8, 6), (TokenWeights(b"\1\0\0\0", b"\2\0\0\0"), None), 7, True, (), 40
    )


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_piece_that_is_kept_keeps_nothing_else_of_its_frame() -> None:
    """Bytes that nobody knows, or messages of other sequences."""
    frame = draft_pb2.ProposeResponse(messages=[draft_pb2.DraftEvent(piece=pb.Piece(position=5, ids=[8]))])
    raw = frame.SerializeToString() + b"\xfa\x7f\x80\x80\x40" + bytes(1 << 20)
    kept, before = [], resident_bytes()
    for _ in range(100):
        kept.append(RELAYED_DRAFT_STREAM.events.decode(draft_pb2.ProposeResponse.FromString(raw).messages[0]))
    assert len(kept) == 100 and resident_bytes() - before < 20 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_commit_is_passed_on_as_it_came_unless_it_was_changed() -> None:
    origins = [generation_pb2.TOKEN_ORIGIN_ACCEPTED]
    logprobs = [generation_pb2.PositionLogprobs(candidates=[generation_pb2.TokenLogprob(id=5, logprob=-1.0, rank=1)])]
    commit = pb.Commit(sequence_id=3, position=4, ids=[5], origins=origins, num_drafted=1, logprobs=logprobs)
    decoded = EVENTS.decode(target_pb2.TargetEvent(commit=commit))
    assert isinstance(decoded, Commit)
    commands = DRAFT_STREAM.commands
    assert commands.encode(decoded, 8).commit.logprobs and decoded.sequence_id == 3
    slim = replace(decoded, logprobs=())
    assert commands.encode(slim, 8) == draft_pb2.DraftCommand(
        commit=pb.Commit(sequence_id=8, position=4, ids=[5], origins=origins, num_drafted=1)
    )


@pytest.mark.parametrize("num_ids", [4, 50_000])
def test_commands_of_a_round_follow_their_open_and_end_with_it(num_ids: int) -> None:
    pair, credit = Pair(), Credit(77, 9, 4)
    pair.push(new_open(1, num_ids))
    pair.packer.push_commands(1, [credit, DraftTokens(78, 0, num_ids, (5,))])
    assert pair.pump() == [new_open(1, num_ids), Credit(1, 9, 4), DraftTokens(1, 0, num_ids, (5,))]
    pair.push(Close(1))
    pair.packer.push_commands(1, [credit])
    assert pair.pump() == [Close(1)] and credit.sequence_id == 77
    with pytest.raises(ValueError, match="never opened"):
        pair.packer.push_commands(2, [credit])


def frame_of(*entries: target_pb2.TargetCommand, number: int = 1) -> target_pb2.VerifyRequest:
    return cast(target_pb2.VerifyRequest, COMMANDS.build(FrameHeader(number), entries))


def command(**fields: object) -> target_pb2.TargetCommand:
    return target_pb2.TargetCommand(**fields)  # type: ignore[arg-type]


OPEN = command(open=pb.Open(sequence_id=1, num_prompt_ids=2, prompt_ids=[1, 2]))
PART = command(open=pb.Open(sequence_id=1, num_prompt_ids=2, prompt_ids=[1]))
SLICE = command(open_slice=pb.OpenSlice(sequence_id=1, ids=[5, 6]))
CREDIT = command(credit=pb.Credit(sequence_id=1))
LARGE = command(piece=pb.Piece(sequence_id=1, ids=[1] * 40_000))
BROKEN: dict[str, Callable[[], list[target_pb2.VerifyRequest]]] = {
    "frame 3 after frame 1": lambda: [frame_of(), frame_of(number=3)],
    "frame 1 after frame 1": lambda: [frame_of(), frame_of()],
    "frame 0 after frame 0": lambda: [frame_of(number=0)],
    "sequence 1 was never opened": lambda: [frame_of(CREDIT)],
    "sequence 1 was opened before": lambda: [frame_of(OPEN, OPEN)],
    "more than the 2 ids": lambda: [frame_of(PART, SLICE)],
    "a slice after the last one": lambda: [frame_of(OPEN, SLICE)],
    "before the last slice": lambda: [frame_of(PART, CREDIT)],
    "where 0 were announced": lambda: [frame_of(command(open=pb.Open(sequence_id=1, prompt_ids=[1])))],
    "ids; allowed": lambda: [frame_of(command(open=pb.Open(sequence_id=1, num_prompt_ids=2**31)))],
    "a frame of": lambda: [frame_of(OPEN, LARGE, LARGE)],
}


@pytest.mark.parametrize("problem", BROKEN)
def test_a_broken_peer_is_a_protocol_error(problem: str) -> None:
    assembler = FrameAssembler(COMMANDS)
    with pytest.raises(ProtocolError, match=problem):
        for frame in BROKEN[problem]():
            assembler.accept(frame)


def test_what_is_open_in_part_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer may announce as much as it likes, and never send the last slice."""
    monkeypatch.setattr(frames, "MAX_PARTIAL_IDS", 4 * frames.HEAD_IDS)
    assembler = FrameAssembler(COMMANDS)
    parts = [command(open=pb.Open(sequence_id=number, num_prompt_ids=9, prompt_ids=[1])) for number in range(1, 9)]
    assert assembler.accept(frame_of(*parts[:3])).messages == []
    with pytest.raises(ProtocolError, match="4 sequences are open in part"):
        assembler.accept(frame_of(parts[3], number=2))
    assembler = FrameAssembler(COMMANDS)
    head = command(open=pb.Open(sequence_id=1, num_prompt_ids=50_000, prompt_ids=[1]))
    more = [command(open_slice=pb.OpenSlice(sequence_id=1, ids=[5] * 6_000)) for _ in range(3)]
    assert assembler.accept(frame_of(head, *more[:2])).messages == []
    with pytest.raises(ProtocolError, match="1 sequences are open in part"):
        assembler.accept(frame_of(more[2], number=2))


NEWER_ENUMS: dict[str, dict[str, Any]] = {
    "open.acceptance: is 9, which this version does not know; allowed: 0 to 3": {"acceptance": 9},
    "open.sampling.logprobs_mode: is 7, which this version does not know; allowed: 0 to 4": {
        "sampling": generation_pb2.SamplingParams(logprobs_mode=7)  # type: ignore[arg-type]
    },
}


@pytest.mark.parametrize("problem", NEWER_ENUMS)
def test_an_enum_of_a_newer_peer_fails_its_sequence_alone(problem: str) -> None:
    table = SequenceTable()
    assembler, packer = FrameAssembler(COMMANDS, table), FramePacker(EVENTS, table)
    newer = command(open=pb.Open(sequence_id=2, num_prompt_ids=9, prompt_ids=[1], **NEWER_ENUMS[problem]))
    more = command(open_slice=pb.OpenSlice(sequence_id=2, ids=[5, 6]))
    received = assembler.accept(frame_of(OPEN, newer, more, command(credit=pb.Credit(sequence_id=2)), CREDIT))
    assert [message.sequence_id for message in received.messages] == [1, 1]
    (failure,) = received.replies
    assert isinstance(failure, Failure) and (failure.sequence_id, failure.code) == (2, 3)  # INVALID_ARGUMENT
    assert problem in failure.message
    packer.push(failure)
    assert packer.next_frame() is not None and table.state(2) is SequenceState.OVER
    assert assembler.accept(frame_of(command(close=pb.Close(sequence_id=2)), CREDIT, number=2)).messages == [
        Credit(1, 0, 0)
    ]


def test_messages_of_a_newer_protocol_are_skipped() -> None:
    assert FrameAssembler(COMMANDS).accept(frame_of(target_pb2.TargetCommand())).messages == []


def test_pushing_for_a_sequence_that_never_was_is_a_value_error() -> None:
    packer = FramePacker(COMMANDS)
    for message in (Credit(1, 2, 3), Close(1)):
        with pytest.raises(ValueError, match="never opened"):
            packer.push(message)
    packer.push(new_open(1))
    with pytest.raises(ValueError, match="opened before"):
        packer.push(new_open(1))


def check_order(pushed: list[Message], received: list[Message], vanished: list[int]) -> None:
    """Per sequence what arrives is what was pushed, but for what a Close discarded."""
    for sequence_id in {message.sequence_id for message in pushed}:
        mine = [message for message in pushed if message.sequence_id == sequence_id]
        got = [message for message in received if message.sequence_id == sequence_id]
        if sequence_id in vanished:
            assert got == []
        elif not any(isinstance(message, Close) for message in mine):
            assert got == mine
        else:
            until_close = [message for message in got if not isinstance(message, Close)]
            assert until_close == mine[: len(until_close)]


@pytest.mark.parametrize("seed", range(20))
def test_random_traffic_keeps_the_rules(seed: int) -> None:
    rng, pair = random.Random(seed), Pair()
    pushed: list[Message] = []
    received: list[Message] = []
    live: list[int] = []
    for step in range(300):
        action = rng.random()
        if action < 0.25 or not live:
            parent = rng.choice(live) if live and rng.random() < 0.4 else None
            message: Message = new_open(
                step,
                rng.choice([3, 3, 9_000, 40_000]),
                num_output_ids=rng.choice([0, 0, 9_000]),
                num_predicted=rng.choice([0, 0, 5, 9_000]),
                fork_of=parent,
            )
            live.append(step)
        elif action < 0.4:
            message = Close(live.pop(rng.randrange(len(live))))
        else:
            message = Credit(rng.choice(live), step, 4)
        pushed.append(message)
        pair.push(message)
        if rng.random() < 0.2:
            received += pair.frame() or []
    received += pair.pump()
    check_order(pushed, received, pair.packer.vanished)
    closed: set[int] = set()
    opened: set[int] = set()
    for message in received:
        if isinstance(message, Open):
            opened.add(message.sequence_id)
            assert message.fork_of is None or (message.fork_of in opened and message.fork_of not in closed)
        elif isinstance(message, Close):
            closed.add(message.sequence_id)
    # Every Close is answered: by its vanishing, by the assembler, or by whoever reads the Close.
    asked = {message.sequence_id for message in pushed if isinstance(message, Close)}
    assert asked == closed | set(pair.packer.vanished) | {reply.sequence_id for reply in pair.replies}
    assert pair.packer.idle and pair.packer.pending_bytes == 0 and not pair.packer._cut


def passed(table: SequenceTable, first: int, last: int) -> None:
    """Sequences that come and go; as a gateway does, every other one is closed, the rest end by themselves."""
    for number in range(first, last):
        table.open(number)
        if number % 2:
            assert table.close(number)
        table.end(number)


def held_bytes() -> int:
    """What was allocated by a table and those who gave it numbers, and is still held: other threads allocate, too."""
    files = [tracemalloc.Filter(True, path) for path in (frames.__file__, __file__)]
    return sum(trace.size for trace in tracemalloc.take_snapshot().filter_traces(files).traces)


def test_a_stream_of_many_sequences_keeps_a_window_of_ids(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    window = ID_WINDOW if request.config.getoption("--prove") else 1 << 8
    monkeypatch.setattr(frames, "ID_WINDOW", window)
    table = SequenceTable()
    tracemalloc.start()
    try:
        passed(table, 1, window + 1)
        full = held_bytes()
        passed(table, window + 1, 40 * window)
        size = held_bytes()
    finally:
        tracemalloc.stop()
    assert size - full < 4096, "bytes that grow with the number of sequences"
    assert table.num_active == 0


def test_closes_work_for_ever() -> None:
    table = SequenceTable()
    for number in range(1, 10 * ID_WINDOW // 7):
        table.open(number)
        assert table.close(number) and not table.close(number)
        assert table.state(number) is SequenceState.CLOSING
        table.end(number)
        assert not table.close(number) and table.state(number) is SequenceState.OVER


@pytest.mark.parametrize("below, state", [(0, SequenceState.UNKNOWN), (1, SequenceState.OVER)])
def test_ids_below_the_window_are_over(below: int, state: SequenceState) -> None:
    table, highest = SequenceTable(), 5 * ID_WINDOW
    table.open(highest)
    number = highest - ID_WINDOW - below
    assert table.state(number) is state
    if state is SequenceState.OVER:
        with pytest.raises(ValueError, match=f"opened before, or is more than {ID_WINDOW} below {highest}"):
            table.open(number)
    else:
        table.open(number)


def test_ids_within_the_window_are_told_apart() -> None:
    table = SequenceTable()
    for number in (10, 30):
        table.open(number)
        table.end(number)
    table.open(ID_WINDOW)
    assert [table.state(number) for number in (10, 20, 30)] == [
        SequenceState.OVER,
        SequenceState.UNKNOWN,
        SequenceState.OVER,
    ]


def test_a_live_sequence_stays_live_however_old_it_is() -> None:
    table = SequenceTable()
    table.open(1)
    table.open(2)
    assert table.close(2)
    for number in (3 * ID_WINDOW, 9 * ID_WINDOW):
        table.open(number)
    assert table.state(1) is SequenceState.LIVE and table.state(2) is SequenceState.CLOSING
    assert table.close(1) and not table.close(1) and not table.close(2)
    for number in (1, 2):
        table.end(number)
        assert table.state(number) is SequenceState.OVER


def test_an_old_sequence_that_ended_by_itself_is_still_closed() -> None:
    table = SequenceTable()
    table.open(1)
    table.open(3 * ID_WINDOW)
    table.end(1)
    assert table.close(1)  # the peer may keep what it knows of the sequence until then
