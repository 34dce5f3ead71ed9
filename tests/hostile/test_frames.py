"""Peers that break the rules of the draft and target streams, at live services: gaps and repeats, slices out of order,
ids that were never opened, frames that are too large, floods, streams that are dropped. A broken rule ends its own
stream, a bad message its own sequence; what runs on another stream, or beside it on the same one, gets the tokens that
it would have got."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from support.deployment import PROMPT, Deployment
from support.hostile import PROPOSE, VERIFY, HandStream, HandWriter

from outrider.rpc.errors import ProtocolError
from outrider.v1 import common_pb2, generation_pb2

Command = Callable[..., Any]  # an entry of this kind of stream, by the name of its message
Play = Callable[[HandWriter, Command], Awaitable[None]]
NUM_TOKENS = 48
WITNESS, BAD = 1, 3
COUPLED = generation_pb2.ACCEPTANCE_RULE_COUPLED
LARGE = 9000  # ids; a frame holds 64 KiB


def opened(number: int, num_ids: int = 3, **fields: Any) -> Any:
    sampling = generation_pb2.SamplingParams(temperature=0, max_tokens=NUM_TOKENS, seed=3, ignore_eos=True)
    ids = {"num_prompt_ids": num_ids, "prompt_ids": [PROMPT[place % 3] for place in range(num_ids)]}
    return common_pb2.Open(sequence_id=number, sampling=sampling, acceptance=COUPLED, **{**ids, **fields})


def credit(number: int, until: int = 3 + NUM_TOKENS) -> Any:
    return common_pb2.Credit(sequence_id=number, until=until, max_window=4)


def tokens_of(heard: list[Any], number: int) -> list[int]:
    """What was committed, or drafted, for one sequence."""
    found: list[int] = []
    for event in heard:
        kind = event.WhichOneof("event")
        if kind in ("commit", "piece") and getattr(event, kind).sequence_id == number:
            found += getattr(event, kind).ids
    return found


def is_closed(number: int) -> Callable[[list[Any]], bool]:
    return lambda heard: any(event.closed.sequence_id == number for event in heard if event.HasField("closed"))


async def gap(peer: HandWriter, command: Command) -> None:
    await peer.send(number=9)


async def repeat(peer: HandWriter, command: Command) -> None:
    await peer.send(number=peer.number)


async def no_number(peer: HandWriter, command: Command) -> None:
    await peer.send(number=0)


async def no_frame(peer: HandWriter, command: Command) -> None:
    await peer.write(b"\xff\xff")


async def never_opened(peer: HandWriter, command: Command) -> None:
    await peer.send(command(credit=credit(77)))


async def close_of_nothing(peer: HandWriter, command: Command) -> None:
    await peer.send(command(close={"sequence_id": 77}))


async def opened_twice(peer: HandWriter, command: Command) -> None:
    await peer.send(command(open=opened(BAD)), command(open=opened(BAD)))


async def opened_again(peer: HandWriter, command: Command) -> None:
    await peer.send(command(open=opened(BAD)), command(close={"sequence_id": BAD}))
    await peer.listen(is_closed(BAD))
    await peer.send(command(open=opened(BAD)))


async def slice_without_open(peer: HandWriter, command: Command) -> None:
    await peer.send(command(open_slice={"sequence_id": 77, "ids": [1]}))


async def slice_behind_the_last(peer: HandWriter, command: Command) -> None:
    await peer.send(command(open=opened(BAD)), command(open_slice={"sequence_id": BAD, "ids": [1]}))


async def slices_of_too_much(peer: HandWriter, command: Command) -> None:
    await peer.send(command(open=opened(BAD, num_prompt_ids=5)))
    await peer.send(command(open_slice={"sequence_id": BAD, "ids": [1] * 3}))


async def credit_before_the_last_slice(peer: HandWriter, command: Command) -> None:
    await peer.send(command(open=opened(BAD, num_prompt_ids=5)), command(credit=credit(BAD)))


async def announced_without_end(peer: HandWriter, command: Command) -> None:
    await peer.send(command(open=opened(BAD, num_prompt_ids=2**32 - 1)))


async def too_large(peer: HandWriter, command: Command) -> None:
    await peer.send(*(command(open=opened(number, LARGE)) for number in range(BAD, BAD + 9)))


async def too_large_alone(peer: HandWriter, command: Command) -> None:
    await peer.send(command(open=opened(BAD, 2_400_000)))


BREAKS: dict[str, Play] = {
    play.__name__: play
    for play in (
        gap, repeat, no_number, no_frame, never_opened, close_of_nothing, opened_twice, opened_again,
        slice_without_open, slice_behind_the_last, slices_of_too_much, credit_before_the_last_slice,
        announced_without_end, too_large, too_large_alone,
    )
}  # fmt: skip


async def used_after_its_close(peer: HandWriter, command: Command) -> None:
    close = command(close={"sequence_id": BAD})
    await peer.send(command(open=opened(BAD)), close, command(credit=credit(BAD)), close)
    await peer.listen(is_closed(BAD))
    await peer.send(command(credit=credit(BAD)), close, command(open_slice={"sequence_id": BAD, "ids": [1]}))


async def closed_in_its_slices(peer: HandWriter, command: Command) -> None:
    await peer.send(command(open=opened(BAD, num_prompt_ids=5)), command(close={"sequence_id": BAD}))
    await peer.listen(is_closed(BAD))


async def a_fork_of_nothing(peer: HandWriter, command: Command) -> None:
    await peer.send(command(open=opened(BAD, 0, fork_of=77)), command(credit=credit(BAD)))


async def a_fork_of_itself(peer: HandWriter, command: Command) -> None:
    await peer.send(command(open=opened(BAD, 0, fork_of=BAD)), command(credit=credit(BAD)))


async def ids_of_no_token(peer: HandWriter, command: Command) -> None:
    await peer.send(command(open=opened(BAD, prompt_ids=[2**32 - 1] * 3)), command(credit=credit(BAD)))


async def longer_than_the_context(peer: HandWriter, command: Command) -> None:
    await peer.send(command(open=opened(BAD, LARGE)))


async def credit_that_falls(peer: HandWriter, command: Command) -> None:
    await peer.send(command(open=opened(BAD)), *(command(credit=credit(BAD, until)) for until in (9, 0, 2**32 - 1, 4)))


async def a_flood_of_credit(peer: HandWriter, command: Command) -> None:
    await peer.send(command(open=opened(BAD)), *(command(credit=credit(BAD, 4)) for _ in range(2500)))


async def a_flood_of_opens(peer: HandWriter, command: Command) -> None:
    """More than the service has room for: those are refused."""
    for first in range(BAD, BAD + 900, 300):
        await peer.send(*(command(open=opened(number)) for number in range(first, first + 300)))
    await peer.listen(lambda heard: sum(event.HasField("failure") for event in heard) >= 600)


async def the_largest_id(peer: HandWriter, command: Command) -> None:
    await peer.send(command(open=opened(BAD, first_chain=2**31 - 1)), command(credit=credit(BAD)))


GOES_ON: dict[str, Play] = {
    play.__name__: play
    for play in (
        used_after_its_close, closed_in_its_slices, a_fork_of_nothing, a_fork_of_itself, ids_of_no_token,
        longer_than_the_context, credit_that_falls, a_flood_of_credit, a_flood_of_opens, the_largest_id,
    )
}  # fmt: skip


async def whole(peer: HandWriter, kind: HandStream, number: int, first_half: bool = False) -> list[int]:
    """The tokens of a sequence that is drafted or decoded plainly, in two halves of credit."""
    half = 3 + NUM_TOKENS // 2
    if first_half:
        await peer.send(kind.entry(open=opened(number)), kind.entry(credit=credit(number, half)))
    else:
        await peer.send(kind.entry(credit=credit(number)))
    most = NUM_TOKENS // 2 if first_half else NUM_TOKENS
    await peer.listen(lambda heard: len(tokens_of(heard, number)) >= most)
    return tokens_of(peer.heard, number)


@pytest.fixture(params=[VERIFY, PROPOSE], ids=["verify", "propose"])
def kind(request: pytest.FixtureRequest) -> HandStream:
    found: HandStream = request.param
    return found


async def test_a_broken_rule_ends_its_own_stream(unharmed: Deployment, kind: HandStream) -> None:
    expected: list[int] = []
    for name, play in {"": None, **BREAKS}.items():
        witness, bad = kind.peer(unharmed), kind.peer(unharmed)
        await whole(witness, kind, WITNESS, first_half=True)
        if play is not None:
            await whole(bad, kind, WITNESS, first_half=True)
            await play(bad, kind.entry)
            await bad.listen(lambda heard: False)
            assert type(bad.error) is ProtocolError, (name, bad.error)
            bad.close()
        found = await whole(witness, kind, WITNESS)
        expected = expected or found
        assert found == expected and len(expected) == NUM_TOKENS, name
        witness.close()


@pytest.mark.parametrize("name", GOES_ON)
async def test_a_bad_message_harms_its_own_sequence(unharmed: Deployment, kind: HandStream, name: str) -> None:
    alone, peer = kind.peer(unharmed), kind.peer(unharmed)
    await whole(alone, kind, WITNESS, first_half=True)
    expected = await whole(alone, kind, WITNESS)
    alone.close()
    await whole(peer, kind, WITNESS, first_half=True)
    await GOES_ON[name](peer, kind.entry)
    assert await whole(peer, kind, WITNESS) == expected and not peer.ended
    assert not any(event.failure.status.code == 13 for event in peer.heard if event.HasField("failure"))
    peer.close()


async def test_streams_that_are_dropped_leave_nothing_behind(unharmed: Deployment, kind: HandStream) -> None:
    """In mid-Open, in mid-step, with everything unread."""
    for _ in range(40):
        peers = [kind.peer(unharmed) for _ in range(4)]
        await peers[0].send(kind.entry(open=opened(BAD, num_prompt_ids=5000)))
        await peers[1].send(kind.entry(open=opened(BAD)), kind.entry(credit=credit(BAD)))
        await peers[2].send(*(kind.entry(open=opened(number)) for number in range(1, 9)))
        await asyncio.sleep(0)
        for peer in peers:
            peer.close()
