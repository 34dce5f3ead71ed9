"""The ways of decoding that the network bench compares, each as one run of a batch.

The processes of the network bench: target and draft on cores of their own, delay proxies in front of both, and
co-located engines on the target's cores and on all. The gateway's engine runs in the bench itself.

What the rounds of one run say.

Networks by name, and when what enters one comes out.

`5` is 5 ms each way on each link, `0.2v` a share of the time of a verification, `0v` is what stands between the
services and adds no delay, where `0` is loopback alone; `5~2` has up to 2 ms of jitter more or
less, `5!200` stands still for 200 ms every now and then. Order is kept, as TCP keeps it."""

from __future__ import annotations

import asyncio
import random
import re
import sys
from bisect import bisect_right
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any, Protocol

from outrider.bench.machine import Cores
from outrider.bench.network_draft import DraftWorker
from outrider.bench.worker import BenchWorker, on_cores
from outrider.cli.local_services import Folders, Service, Services
from outrider.gateway.engine import EngineConfig, GenerationEngine
from outrider.gateway.peers.remote import RemoteDrafts, RemoteTargets
from outrider.gateway.request import GenerationRequest, SpeculationOptions
from outrider.gateway.speculation.backends import Drafter, DrafterLink, Lost
from outrider.gateway.text.tokenizer import Tokenizer
from outrider.planner.policy import Round
from outrider.rpc.messages import DraftEvent, DraftInfo, DraftTokens, Open
from outrider.rpc.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class RoundSummary:
    """One run, without each stream's first round, which holds the prompt."""

    ms_per_token: float  # of a stream
    tokens_per_round: float
    accepted: int
    tested: int  # drafted tokens that were reached: those before them were accepted
    verify_ms: float  # median, sampling included
    pass_ms: float  # of the draft; 0 where it is not known
    hits: float | None  # share of rounds whose window had been drafted before the round began; None without drafts


def summarise_rounds(streams: Sequence[Sequence[Round]], branches: Sequence[Collection[int]] = ()) -> RoundSummary:
    """Sums up all streams; `branches` are the chains of each that began as a branch. Raises ValueError where no
    stream has two rounds."""
    later = [closed for rounds in streams for closed in rounds[1:]]
    if not later:
        raise ValueError("every completion ended with its first round: ask for more tokens")
    spans = [(rounds[-1].ended - rounds[0].ended, _num_tokens(rounds[1:])) for rounds in streams if len(rounds) > 1]
    whole = [closed for rounds in streams for closed in rounds[1:-1]] or later  # a stream's last round is cut
    drafted = [closed for closed in later if closed.commit.num_drafted]
    tested = sum(min(closed.commit.num_accepted + 1, closed.commit.num_drafted) for closed in drafted)
    timed = [closed for closed in drafted if closed.draft_us]
    passes = sum(closed.commit.num_drafted for closed in timed)
    return RoundSummary(
        ms_per_token=1e3 * sum(span for span, _ in spans) / sum(num for _, num in spans),
        tokens_per_round=_num_tokens(whole) / len(whole),
        accepted=sum(closed.commit.num_accepted for closed in drafted),
        tested=tested,
        verify_ms=median(closed.commit.timings.verify_us + closed.commit.timings.sample_us for closed in whole) / 1e3,
        pass_ms=sum(closed.draft_us for closed in timed) / passes / 1e3 if passes else 0.0,
        hits=_hits(streams, branches) if drafted and branches else None,
    )


def _hits(streams: Sequence[Sequence[Round]], branches: Sequence[Collection[int]]) -> float:
    """A hit goes on with the chain of the round before, or with one that began as a branch of it."""
    hits = [
        bool(later.commit.num_drafted) and (later.commit.chain == earlier.commit.chain or later.commit.chain in begun)
        for rounds, begun in zip(streams, branches, strict=True)
        for earlier, later in pairwise(rounds[1:])
    ]
    return sum(hits) / len(hits) if hits else 0.0


def _num_tokens(rounds: Sequence[Round]) -> int:
    return sum(len(closed.commit.ids) for closed in rounds)


PLAIN, SEQUENTIAL, CHAINS, BRANCHES, AUTO = "plain", "sequential", "chains", "branches", "auto"
COLOCATED, COLOCATED_ALL = "colocated", "colocated-all"  # on the target's cores; on the draft's too
SERVICES = (PLAIN, SEQUENTIAL, CHAINS, BRANCHES, AUTO)
OnRound = Callable[[Round], None]


@dataclass(frozen=True, slots=True)
class NetworkBatch:
    """What is decoded in one run."""

    prompts: tuple[tuple[int, ...], ...]
    seeds: tuple[int, ...]
    sampling: SamplingParams
    num_draft_tokens: int


class NetworkBackend(Protocol):
    """A way of decoding."""

    async def run(self, batch: NetworkBatch) -> RoundSummary:
        """Decodes every prompt at once."""


@dataclass(frozen=True, slots=True)
class ServicesBackend:
    """Through the gateway's engine and both services."""

    engine: GenerationEngine
    watcher: BranchWatcher
    mode: str

    async def run(self, batch: NetworkBatch) -> RoundSummary:
        """All completions at once."""
        self.watcher.begun.clear()
        streams = await asyncio.gather(*(self.stream(batch, index) for index in range(len(batch.prompts))))
        ahead = self.mode not in (PLAIN, SEQUENTIAL)
        return summarise_rounds(streams, [self.watcher.begun.get(seed, set()) for seed in batch.seeds] if ahead else ())

    async def stream(self, batch: NetworkBatch, index: int, on_round: OnRound = lambda closed: None) -> list[Round]:
        """One completion's rounds. `auto` chooses the number of drafted tokens, too."""
        k = None if self.mode == AUTO else batch.num_draft_tokens
        speculation = SpeculationOptions(num_draft_tokens=k, mode=self.mode)
        request = GenerationRequest(
            token_ids=batch.prompts[index],
            sampling=sampling_of(batch, index),
            speculation=SpeculationOptions(enabled=False) if self.mode == PLAIN else speculation,
        )
        rounds: list[Round] = []
        async with aclosing(self.engine.generate(request)) as deltas:
            async for delta in deltas:
                if delta.round is not None:
                    rounds.append(delta.round)
                    on_round(delta.round)
        return rounds


@dataclass(frozen=True, slots=True)
class ColocatedBackend:
    """In one process, in turn."""

    worker: BenchWorker
    pass_ms: float

    async def run(self, batch: NetworkBatch) -> RoundSummary:
        """One question, one answer."""
        question = {
            "prompts": batch.prompts,
            "seeds": batch.seeds,
            "sampling": {name: value for name, value in asdict(batch.sampling).items() if name in CROSSING},
            "k": batch.num_draft_tokens,
            "pass_ms": self.pass_ms,
        }
        return RoundSummary(**await asyncio.to_thread(self.worker.ask, question))


CROSSING = ("temperature", "max_tokens", "ignore_eos")  # of the sampling parameters


def sampling_of(batch: NetworkBatch, index: int) -> SamplingParams:
    """A stream's own parameters."""
    fields: dict[str, Any] = {name: getattr(batch.sampling, name) for name in CROSSING}
    return SamplingParams(**fields, seed=batch.seeds[index])


@dataclass(slots=True)
class BranchWatcher:
    """A Drafter that notes which chains began as branches, by the seeds of the requests."""

    drafter: Drafter
    begun: dict[int, set[int]] = field(default_factory=dict)

    @property
    def info(self) -> DraftInfo | None:
        """The draft's own."""
        return self.drafter.info

    @property
    def round_trip_us(self) -> float:
        """The draft's own."""
        return self.drafter.round_trip_us

    def open(self, request: Open, on_event: Callable[[DraftEvent | Lost], None]) -> DrafterLink | None:
        """Listens in."""
        begun = self.begun.setdefault(request.seed, set())

        def listen(event: DraftEvent | Lost) -> None:
            if isinstance(event, DraftTokens) and event.parent is not None:
                begun.add(event.chain)
            on_event(event)

        return self.drafter.open(request, listen)


def batch_of(
    prompts: Sequence[Sequence[int]], streams: int, temperature: float, max_tokens: int, k: int, seed: int
) -> NetworkBatch:
    """Prompts are used again where there are more streams."""
    return NetworkBatch(
        prompts=tuple(tuple(prompts[index % len(prompts)]) for index in range(streams)),
        seeds=tuple(seed * 1000 + index for index in range(streams)),
        sampling=SamplingParams(temperature=temperature, max_tokens=max_tokens, ignore_eos=True),
        num_draft_tokens=k,
    )


NOTATION = re.compile(r"(?P<delay>\d+(?:\.\d+)?)(?P<relative>v?)(?:~(?P<jitter>\d+(?:\.\d+)?))?(?:!(?P<stall>\d+))?")
STALL_EVERY_S = 2.0  # from the end of one stall to the next, on average
CROSSINGS = 4  # a round trip: target to gateway to draft, and back


@dataclass(frozen=True, slots=True)
class Network:
    """What a network does to each link, in milliseconds."""

    name: str
    delay: float  # each way
    relative: bool = False  # the delay is a share of a verification
    jitter_ms: float = 0.0
    stall_ms: float = 0.0

    @classmethod
    def parse(cls, name: str) -> Network:
        """A network by its notation. Raises ValueError."""
        found = NOTATION.fullmatch(name)
        if found is None:
            raise ValueError(f"{name} is no network: give DELAY, DELAYv, DELAY~JITTER or DELAY!STALL, as in 5~2")
        delay, jitter, stall = (float(found[part] or 0) for part in ("delay", "jitter", "stall"))
        return cls(name, delay, bool(found["relative"]), jitter, stall)

    @property
    def steady(self) -> bool:
        """Whether its delay is always the same."""
        return not (self.jitter_ms or self.stall_ms)

    @property
    def is_direct(self) -> bool:
        """Whether nothing stands between the services but loopback."""
        return not (self.delay or self.relative) and self.steady

    def delay_ms(self, verify_ms: float) -> float:
        """Each way."""
        return self.delay * verify_ms if self.relative else self.delay

    def round_trip_ms(self, verify_ms: float) -> float:
        """From a commit to the chain that follows from it, drafting apart."""
        return CROSSINGS * self.delay_ms(verify_ms)


class Stalls:
    """When a link stands still: the same times for the same seed."""

    def __init__(self, stall_s: float, began: float, seed: int) -> None:
        self._stall_s = stall_s
        self._rng = random.Random(seed)
        self._starts = [began + self._gap()]

    def after(self, when: float) -> float:
        """The end of the stall that `when` lies in, else `when`."""
        if not self._stall_s:
            return when
        while self._starts[-1] <= when:
            self._starts.append(self._starts[-1] + self._stall_s + self._gap())
        index = bisect_right(self._starts, when) - 1
        return max(when, self._starts[index] + self._stall_s) if index >= 0 else when

    def _gap(self) -> float:
        return self._rng.expovariate(1 / STALL_EVERY_S)


class LinkDirection:
    """One direction of a link, as of one change of its conditions."""

    def __init__(self, delay_s: float, jitter_s: float, stalls: Stalls, seed: int) -> None:
        self._delay_s, self._jitter_s, self._stalls = delay_s, jitter_s, stalls
        self._rng = random.Random(seed)
        self._last = 0.0

    def due(self, now: float) -> float:
        """When what enters now comes out: never before what entered earlier."""
        late = self._rng.uniform(-self._jitter_s, self._jitter_s) if self._jitter_s else 0.0
        self._last = self._stalls.after(max(self._last, now + max(0.0, self._delay_s + late)))
        return self._last


MAX_ACTIVE = 64
COLOCATED_ON = (COLOCATED, COLOCATED_ALL)


@dataclass(frozen=True, slots=True)
class Setup:
    """What the processes are started with."""

    folders: Folders
    cores: Cores
    expand: bool
    num_draft_tokens: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Gateway:
    """The gateway's engine over one pair of addresses."""

    engine: GenerationEngine
    watcher: BranchWatcher


@dataclass(frozen=True, slots=True)
class NetworkFleet:
    """Everything that runs."""

    setup: Setup
    target: Service
    draft: DraftWorker
    proxy: BenchWorker
    direct: Gateway
    proxied: dict[str, Gateway]  # one for each network, since its controller learns what it is like
    colocated: dict[str, BenchWorker]

    async def set_network(self, network: Network, verify_ms: float, seed: int) -> None:
        """From now on between the proxied services."""
        conditions = {
            "delay_ms": network.delay_ms(verify_ms),
            "jitter_ms": network.jitter_ms,
            "stall_ms": network.stall_ms,
            "seed": seed,
        }
        await asyncio.to_thread(self.proxy.ask, conditions)

    async def set_pass_ms(self, pass_ms: float) -> None:
        """How long a pass of the draft service takes at least."""
        await asyncio.to_thread(self.draft.set_pass_ms, pass_ms)

    def backend(self, mode: str, network: Network, pass_ms: float) -> NetworkBackend:
        """A mode over a network; loopback alone goes around the proxies."""
        if mode in self.colocated:
            return ColocatedBackend(self.colocated[mode], pass_ms)
        gateway = self.direct if network.is_direct else self.proxied[network.name]
        return ServicesBackend(gateway.engine, gateway.watcher, mode)


@asynccontextmanager
async def start_network_fleet(
    setup: Setup, modes: Sequence[str], networks: Iterable[Network]
) -> AsyncIterator[NetworkFleet]:
    """Starts all that the modes and networks need, and ends it. Raises ServiceFailed or BenchWorkerFailed."""
    async with AsyncExitStack() as stack:
        services = stack.enter_context(Services())
        target = _start_target(services, setup)
        draft = stack.enter_context(start_draft(setup))
        colocated = {name: stack.enter_context(_colocated(setup, name)) for name in modes if name in COLOCATED_ON}
        await asyncio.to_thread(services.wait, target, setup.timeout_s)
        for worker in colocated.values():
            await asyncio.to_thread(worker.receive, setup.timeout_s)
        await asyncio.to_thread(draft.wait, setup.timeout_s)
        proxy = stack.enter_context(_start_proxy(target.address, draft.address))
        await asyncio.to_thread(proxy.receive, setup.timeout_s)
        addresses = (await asyncio.to_thread(proxy.ask, {}))["addresses"]
        direct = await stack.enter_async_context(connect(setup, target.address, draft.address))
        proxied = {
            network.name: await stack.enter_async_context(connect(setup, *addresses))
            for network in networks
            if not network.is_direct
        }
        yield NetworkFleet(setup, target, draft, proxy, direct, proxied, colocated)


def start_draft(setup: Setup) -> DraftWorker:
    """A draft service; it does not listen yet."""
    model = str(setup.folders.draft)
    arguments = ["--model", model, "--listen", "127.0.0.1:0", "--threads", "1", "--grace-s", "0"]
    return DraftWorker(arguments, setup.cores.draft)


@asynccontextmanager
async def connect(setup: Setup, target: str, draft: str) -> AsyncIterator[Gateway]:
    """The gateway's engine over two addresses, when both have answered."""
    async with RemoteTargets([target]) as targets, RemoteDrafts([draft]) as drafts:
        async with asyncio.timeout(setup.timeout_s):
            await asyncio.gather(targets.wait_usable(), drafts.wait_usable())
        watcher = BranchWatcher(drafts)
        config = EngineConfig(num_draft_tokens=setup.num_draft_tokens, mode="auto", max_active=MAX_ACTIVE)
        tokenizer = Tokenizer.load(setup.folders.target)
        yield Gateway(GenerationEngine(tokenizer, targets, watcher, config), watcher)


def _start_target(services: Services, setup: Setup) -> Service:
    """It keeps no prompts: nobody else does between runs."""
    arguments = ["target", "--model", str(setup.folders.target), "--listen", "127.0.0.1:0", "--grace-s", "0"]
    arguments += ["--threads", str(setup.cores.target_threads), "--no-prefix-cache"]
    with on_cores(setup.cores.target):
        return services.start("target", [*arguments, *(["--expand"] if setup.expand else [])])


def _colocated(setup: Setup, name: str) -> BenchWorker:
    """On the target's cores, as where both models share the large device, or on all that the services have."""
    cores = setup.cores.target if name == COLOCATED else ()
    threads = setup.cores.target_threads if name == COLOCATED else setup.cores.num_all
    folders = [str(setup.folders.target), str(setup.folders.draft)]
    command = [sys.executable, "-m", "outrider.bench.network_colocated", *folders, str(threads)]
    return BenchWorker(name, [*command, *(["expand"] if setup.expand else [])], cores)


def _start_proxy(*upstreams: str) -> BenchWorker:
    return BenchWorker("proxy", [sys.executable, "-m", "outrider.bench.network_proxy", *upstreams])
