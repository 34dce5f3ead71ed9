"""A target dies under many streams: those of the others go on, while its own are opened again beside them."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest
from support.fakes import expected, request, until
from support.target_process import target_process

from outrider.gateway.peers.remote import RemoteTargets
from outrider.gateway.speculation.loop import speculate
from outrider.planner.policy import Policy, Round
from outrider.rpc.stream import StreamConfig

WAIT_S = 120
PATIENT = StreamConfig(silence_s=WAIT_S)  # a kill is seen by its connection; a busy machine is no loss


class Stream:
    """One completion that somebody reads, decoded plainly."""

    def __init__(self, targets: RemoteTargets, prompt: tuple[int, ...]) -> None:
        self.prompt = prompt
        self.tokens: list[int] = []
        self.times: list[float] = []  # of its rounds
        self.num_moves = 0
        self.reading = asyncio.create_task(self._read(targets))

    async def _read(self, targets: RemoteTargets) -> None:
        opened = replace(request(1 << 15), prompt_ids=self.prompt)
        async for item in speculate(None, targets, opened, Policy(0)):
            if isinstance(item, Round):
                self.times.append(time.monotonic())
                self.tokens += item.commit.ids
                self.num_moves += item.moved

    def longest_gap_s(self, since: float = 0.0) -> float:
        """Between two rounds, of which the second came after `since`."""
        pairs = zip(self.times, self.times[1:], strict=False)
        return max(after - before for before, after in pairs if after > since)


@pytest.mark.timeout(5 * WAIT_S)
async def test_the_streams_of_the_other_targets_go_on(prove: bool) -> None:
    """100 streams, or 1,000."""
    num_streams, step_s = (1000, 0.5) if prove else (100, 0.1)
    async with (
        target_process(step_s) as (dying, address),
        target_process(step_s) as (_, other),
        RemoteTargets([address, other], stream_config=PATIENT) as targets,
    ):
        victim, survivor = targets.replicas
        await until(lambda: victim.usable and survivor.usable, WAIT_S)
        prompts = [(number // 300 + 1, number % 300 + 5, *range(5, 100)) for number in range(num_streams)]
        streams = [Stream(targets, prompt) for prompt in prompts]
        await until(lambda: all(len(stream.times) > 5 for stream in streams), WAIT_S)
        there = {link.request.prompt_ids for link in survivor.links.values()}
        healthy = [stream for stream in streams if stream.prompt in there]
        orphans = [stream for stream in streams if stream.prompt not in there]
        assert min(len(healthy), len(orphans)) > num_streams / 4
        turns = asyncio.create_task(longest_turn_s())
        killed = time.monotonic()
        dying.kill()
        await until(lambda: all(stream.num_moves for stream in orphans), WAIT_S)
        moved = time.monotonic()
        num_rounds = {stream: len(stream.times) for stream in streams}
        await until(lambda: all(len(stream.times) > num_rounds[stream] + 2 for stream in streams), WAIT_S)
        turns.cancel()
        assert survivor.num_streams == 1, "the stream to the target that lives broke"
        assert not any(stream.num_moves for stream in healthy) and {stream.num_moves for stream in orphans} == {1}
        for stream in streams:
            assert stream.tokens == expected(stream.prompt, len(stream.tokens))
            stream.reading.cancel()
        before, after = (max(one.longest_gap_s(since) for one in healthy) for since in (0.0, killed))
        print(
            f"\n{len(orphans)} of {num_streams} streams had another target after {moved - killed:.2f} s; between two "
            f"rounds of the others at most {after:.2f} s ({before:.2f} s all along, steps of {step_s} s); no turn of "
            f"the event loop took more than {1000 * (await turns):.0f} ms of processor time"
        )


async def longest_turn_s() -> float:
    """Of the event loop, in processor time and to a millisecond, until cancelled."""
    longest, before = 0.0, time.thread_time()
    try:
        while True:
            await asyncio.sleep(0.001)
            now = time.thread_time()
            longest, before = max(longest, now - before), now
    except asyncio.CancelledError:
        return longest
