"""A campaign: readers that go on reading, and one fault after another under them. Each is timed by a message, struck,
undone, and has to show that it took place; what became of the streams is counted for it. With each fault comes a
request whose JSON schema is a new one, so that it is compiled while the fault is there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from chaos.asks import Answer, Ask, expectations, fresh_ask
from chaos.faults import BLOWS, Blow, Fault, OutOfMemory, blows_of, strike
from chaos.fleet import Fleet, Member, View
from chaos.streams import Readers, Stream, judge

from outrider.cli.local_services import ServiceFailed

REACH_S = 60.0  # until the message comes by that a fault waits for
NOTICE_S = 8.0  # until a gateway has to know, on whatever machine
RESUME_S = 1.0  # from then on until a stream has its next token
WHOLE_S = 120.0  # until all services are there again, and known to be
SETTLE_S = 1.0  # between two faults
POLL_S = 0.05
LAGS_S = (0.0, 0.02, 0.05, 0.1)  # from the request with a new schema to the blow


@dataclass
class Record:
    """One fault, and what it did."""

    fault: Fault
    came_by: bool = False  # the message that it waits for
    took_place: bool = False
    whole_again: bool = False
    notices: dict[str, float | None] = field(default_factory=dict)  # until a gateway knew, by victim; None: it did not
    out_of_memory: list[bool] = field(default_factory=list)  # of each victim of that, whether it ended or said so
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
    def noticed_in_time(self) -> tuple[int, int]:
        """Of how many victims a gateway knew within the bound of their kinds, and of how many one had to know."""
        bounds = self._bounds()
        in_time = [after_s is not None and after_s <= bounds[name] for name, after_s in self.notices.items()]
        return sum(in_time), len(in_time)

    @property
    def went_on_in_time(self) -> tuple[int, int]:
        """How many of the streams that it struck waited no longer for a token than the bound of its kinds and another
        second; and of how many. Of none where no bound holds: a gateway's clients notice the end of their connection
        alone, who has lost all targets waits until one has been started, and other kinds end nothing."""
        bounds, targets = self._bounds(), [name for name in self.fault.victims if name.startswith("target")]
        if len(bounds) < len(self.fault.victims) or len(targets) > 1:
            return 0, 0
        within_s = max(bounds.values()) + RESUME_S
        struck = [stream for stream in self.streams if stream.began < self.struck_at]
        return sum(stream.pause_s(self.struck_at, self.over_at) <= within_s for stream in struck), len(struck)

    def _bounds(self) -> dict[str, float]:
        """Seconds in which the fault has to be noticed, by victim."""
        return {
            name: bound
            for kind, name in zip(self.fault.kinds, self.fault.victims, strict=True)
            if not name.startswith("gateway") and (bound := BLOWS[kind].noticed_within_s) is not None
        }

    @property
    def problems(self) -> list[str]:
        """What is wrong; none: the fault took place, and nobody got less or other than without it."""
        found = [] if self.came_by else ["the message that it waits for did not come by"]
        found += [] if self.took_place else ["it did not take place"]
        found += [
            f"no gateway noticed {name} within {NOTICE_S:g} s" for name, after in self.notices.items() if after is None
        ]
        found += [] if self.whole_again else [f"not all services were there again after {WHOLE_S:g} s"]
        found += [f"lost: {one.ask.name} ({one.reader}): {one.error}" for one in self.lost]
        return found + [f"changed: {one.ask.name} ({one.reader}): {one.change}" for one in self.changed]

    @property
    def late(self) -> list[str]:
        """Which bounds of time did not hold. They are for a machine that has nothing else to do."""
        found = []
        for what, (count, of) in (("noticed", self.noticed_in_time), ("went on", self.went_on_in_time)):
            found += [f"{what} in time: {count} of {of}"] if count < of else []
        return found


@dataclass
class Outcome:
    """Of a campaign, over as many fleets as it has had."""

    records: list[Record] = field(default_factory=list)
    streams: list[Stream] = field(default_factory=list)
    expected: dict[str, Answer] = field(default_factory=dict)
    errors_told: list[str] = field(default_factory=list)  # over HTTP, by streams that could not go on
    broken_off: int = 0  # streams over HTTP
    num_resumed: int = 0  # by a client over HTTP
    failures: list[str] = field(default_factory=list)  # services that did not start again, by which a fleet ended


async def run(
    fleet: Fleet,
    faults: Iterable[Fault],
    asks: Sequence[Ask],
    *,
    num_readers: int = 5,
    injecting: bool = True,
    told: Callable[[Record], None] = lambda record: None,
    outcome: Outcome | None = None,
) -> Outcome:
    """Adds to the `outcome` of the fleets before. With `injecting` off nothing is done to anyone, which no fault's
    check may mistake for the fault."""
    outcome = outcome or Outcome()
    outcome.expected = await expectations(asks, fleet, outcome.expected)
    readers = Readers(fleet, asks, outcome.expected, num_readers)
    try:
        for fault in faults:
            record = await _one(fleet, fault, readers, injecting)
            outcome.records.append(record)
            told(record)
            if not record.whole_again:
                break
        await readers.stop()
    except ServiceFailed as error:  # what came before counts, and what another fleet brings
        outcome.failures.append(str(error))
        await readers.give_up()
    for stream in readers.streams:
        stream.answer = None  # judged, and large
    outcome.streams += readers.streams
    outcome.errors_told += readers.http.errors_told
    outcome.broken_off += readers.http.broken_off
    outcome.num_resumed += readers.http.num_resumed
    return outcome


async def _one(fleet: Fleet, fault: Fault, readers: Readers, injecting: bool) -> Record:
    record = Record(fault)
    first = fleet.members[fault.victims[0]]
    views = await _views(fleet, fleet.gateways)
    watch = first.proxy.watch(fault.direction, fault.message)
    try:
        await asyncio.wait_for(watch.reached.wait(), REACH_S)
        record.came_by = True
    except TimeoutError:
        first.proxy.unwatch()
    addresses = fleet.addresses[:: 1 if fault.number % 2 else -1]
    fresh = asyncio.create_task(readers.read(fresh_ask(fault.number, fleet.drafting), "a new schema", addresses))
    await asyncio.sleep(LAGS_S[fault.number % len(LAGS_S)])
    record.struck_at = time.monotonic()
    record.streams = list(readers.running())
    blows = await strike(fault, fleet) if injecting else blows_of(fault, fleet)
    watch.release(fault.lost and injecting)
    noticing = asyncio.create_task(_notices(fleet, blows, views, record.struck_at))
    await asyncio.sleep(max(blow.lasts_s for blow in blows))
    record.notices = await noticing
    record.took_place = all(await asyncio.gather(*(blow.heal() for blow in blows)))
    record.out_of_memory = [blow.bit for blow in blows if isinstance(blow, OutOfMemory)]
    record.whole_again = await fleet.whole(WHOLE_S)
    await asyncio.sleep(SETTLE_S)
    record.over_at = time.monotonic()
    began = [stream for stream in readers.streams if record.struck_at < stream.began < record.over_at]
    record.streams += [stream for stream in began if stream not in record.streams]
    await _judge_fresh(fleet, await fresh, record)
    return record


async def _judge_fresh(fleet: Fleet, stream: Stream, record: Record) -> None:
    """What it had to be is asked afterwards: before, its schema would have been known."""
    if stream.answer is not None and record.whole_again:
        judge(stream, stream.answer, await expectations([stream.ask], fleet), left=False)


async def _views(fleet: Fleet, gateways: Sequence[Member]) -> dict[str, View]:
    """What each gateway says now."""
    views = {gateway.name: await fleet.view(gateway) for gateway in gateways}
    return {name: view for name, view in views.items() if view is not None}


async def _notices(
    fleet: Fleet, blows: Sequence[Blow], before: Mapping[str, View], since: float
) -> dict[str, float | None]:
    """Until the first gateway, of those that nothing befell, has noticed that a service is away; of every victim that
    one has to notice: of targets and drafts, where a gateway is left."""
    struck = [blow.member for blow in blows]
    watching = [gateway for gateway in fleet.gateways if gateway not in struck]
    noticed: dict[str, float | None] = {
        blow.member.name: None for blow in blows if blow.noticed_within_s is not None and blow.member.role != "gateway"
    }
    if not watching:
        return {}
    while None in noticed.values() and time.monotonic() < since + NOTICE_S:
        for name, view in (await _views(fleet, watching)).items():
            for victim in [victim for victim, after in noticed.items() if after is None]:
                if name in before and view.lost([fleet.members[victim].proxy.address], before[name]):
                    noticed[victim] = time.monotonic() - since
        await asyncio.sleep(POLL_S)
    return noticed
