"""A campaign: readers that go on reading, and one fault after another under them. Each is timed by a message, struck,
undone, and has to show that it took place; what became of the streams is counted for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from chaos.faults import Blow, Fault, blows_of, strike
from chaos.fleet import Fleet, View
from chaos.streams import Ask, Readers, Stream, expectations

REACH_S = 60.0  # until the message comes by that a fault waits for
NOTICE_S = 8.0
WHOLE_S = 120.0  # until all services are there again, and known to be
SETTLE_S = 1.0  # between two faults
POLL_S = 0.05


@dataclass
class Record:
    """One fault, and what it did."""

    fault: Fault
    came_by: bool = False  # the message that it waits for
    took_place: bool = False
    whole_again: bool = False
    notice_s: float | None = None  # until a gateway knew; None where none has to, or none did
    noticed: bool = True  # false: gateways should have, and did not
    struck_at: float = 0.0
    over_at: float = 0.0
    streams: list[Stream] = field(default_factory=list)  # that ran when it struck, or began before it was over

    @property
    def lost(self) -> list[Stream]:
        """Streams that came to no end."""
        return [stream for stream in self.streams if stream.error]

    @property
    def changed(self) -> list[Stream]:
        """Streams that came out otherwise than undisturbed."""
        return [stream for stream in self.streams if stream.change]

    @property
    def pause_s(self) -> float:
        """The longest that any of its streams had to wait for a token."""
        return max((stream.pause_s(self.struck_at, self.over_at) for stream in self.streams), default=0.0)

    @property
    def problems(self) -> list[str]:
        """What is wrong; none: the fault took place, and nobody got less or other than without it."""
        found = [] if self.came_by else ["the message that it waits for did not come by"]
        found += [] if self.took_place else ["it did not take place"]
        found += [] if self.noticed else [f"no gateway noticed it within {NOTICE_S:g} s"]
        found += [] if self.whole_again else [f"not all services were there again after {WHOLE_S:g} s"]
        found += [f"lost: {one.ask.name} ({one.reader}): {one.error}" for one in self.lost]
        return found + [f"changed: {one.ask.name} ({one.reader}): {one.change}" for one in self.changed]


async def run(
    fleet: Fleet,
    faults: Sequence[Fault],
    asks: Sequence[Ask],
    *,
    num_readers: int = 5,
    injecting: bool = True,
    told: Callable[[Record], None] = lambda record: None,
) -> tuple[list[Record], list[Stream]]:
    """The faults' records and every stream. With `injecting` off nothing is done to anyone, which no fault's check may
    mistake for the fault."""
    readers = Readers(fleet, asks, await expectations(asks, fleet), num_readers)
    records = []
    for fault in faults:
        record = await _one(fleet, fault, readers, injecting)
        records.append(record)
        told(record)
        if not record.whole_again:
            break
    await readers.stop()
    return records, readers.streams


async def _one(fleet: Fleet, fault: Fault, readers: Readers, injecting: bool) -> Record:
    record = Record(fault)
    first = fleet.members[fault.victims[0]]
    views = await _views(fleet)
    watch = first.proxy.watch(fault.direction, fault.message)
    try:
        await asyncio.wait_for(watch.reached.wait(), REACH_S)
        record.came_by = True
    except TimeoutError:
        first.proxy.unwatch()
    record.struck_at = time.monotonic()
    record.streams = list(readers.running())
    blows = await strike(fault, fleet) if injecting else blows_of(fault, fleet)
    watch.release(fault.lost and injecting)
    noticing = asyncio.create_task(_notice_s(fleet, blows, views, record.struck_at))
    await asyncio.sleep(max(blow.lasts_s for blow in blows))
    record.notice_s = await noticing
    record.noticed = record.notice_s is not None or not _is_noticed(blows)
    record.took_place = all(await asyncio.gather(*(blow.heal() for blow in blows)))
    record.whole_again = await fleet.whole(WHOLE_S)
    await asyncio.sleep(SETTLE_S)
    record.over_at = time.monotonic()
    began = [stream for stream in readers.streams if record.struck_at < stream.began < record.over_at]
    record.streams += [stream for stream in began if stream not in record.streams]
    return record


async def _views(fleet: Fleet) -> dict[str, View]:
    """What each gateway says now."""
    views = {gateway.name: await fleet.view(gateway) for gateway in fleet.gateways}
    return {name: view for name, view in views.items() if view is not None}


def _is_noticed(blows: Sequence[Blow]) -> bool:
    """Whether gateways have to notice it: a target or a draft goes away, and no gateway does."""
    return any(blow.is_noticed for blow in blows) and not any(blow.member.role == "gateway" for blow in blows)


async def _notice_s(fleet: Fleet, blows: Sequence[Blow], before: dict[str, View], since: float) -> float | None:
    """Until the first gateway has noticed that one of the services is away."""
    if not _is_noticed(blows):
        return None
    away = [blow.member.proxy.address for blow in blows if blow.is_noticed]
    while time.monotonic() < since + NOTICE_S:
        for name, view in (await _views(fleet)).items():
            if name in before and view.lost(away, before[name]):
                return time.monotonic() - since
        await asyncio.sleep(POLL_S)
    return None
