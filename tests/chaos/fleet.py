"""Two targets, two drafts and two gateways of the embedded pair, as processes on the loopback, each behind a proxy of
its own: the proxy is what others reach, so that a service that is started again may listen elsewhere."""

from __future__ import annotations

import asyncio
import math
import os
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import httpx
from chaos.proxy import FaultProxy
from prometheus_client.parser import text_string_to_metric_families
from support.environment import START_S

from outrider.cli.local_services import GRACE_S, LOOPBACK, Service, ServiceFailed, Services
from outrider.pairs import pair_path

LOOKUPS = ("prediction", "ngram", "suffix")  # methods of a draft that need no model
BY_MODEL = ("draft_model", "pard")  # of those that do a draft has one
SEEN_S = 1.0  # after which nobody meets any more what a fault has broken
POLL_S = 0.05
METRICS = re.compile(r"^\S+ metrics on (\S+)$", re.MULTILINE)
HTTP = re.compile(r"gateway http on (\S+)")


@dataclass(frozen=True)
class Drafting:
    """Who drafts in a fleet: a draft has one model, and a target one head."""

    model: str  # its method
    head: str

    @classmethod
    def of(cls, number: int) -> Drafting:
        """Each of the embedded pair's heads beside each of its models, in turn."""
        heads = sorted(pair_path().heads)
        return cls(BY_MODEL[(number + number // len(heads)) % len(BY_MODEL)], heads[number % len(heads)])

    @property
    def methods(self) -> tuple[str, ...]:
        """Of a draft, as it prefers them."""
        return (*LOOKUPS, self.model)


class Member:
    """One service, what stands before it, and the process that runs it now."""

    def __init__(self, services: Services, role: str, number: int) -> None:
        self.role, self.name = role, f"{role} {number}"
        self.proxy = FaultProxy(role)
        self.proxies = [self.proxy]
        if role == "gateway":
            self.proxies.append(FaultProxy(role, reads=False))  # before its HTTP interface
        self.arguments: list[str] = []
        self.num_starts = 0
        self.victim_until = 0.0  # of a fault by which its own clients' streams may end, on the monotonic clock
        self.before: Callable[[str], Awaitable[str]] | None = None  # what stands between it and its proxy, by address
        self._services = services
        self._service: Service | None = None

    @property
    def service(self) -> Service:
        """The process. RuntimeError before the first one."""
        if self._service is None:
            raise RuntimeError(f"{self.name} has not been started")
        return self._service

    @property
    def pid(self) -> int:
        """Of the process, and of its group."""
        return self.service.pid

    def was_victim(self, since: float) -> bool:
        """Whether such a fault was at it at that time, or has been since."""
        return self.victim_until > since

    def count(self, what: str) -> int:
        """What its proxies have done, by the name of one of their counts."""
        return sum(getattr(proxy.counts, what) for proxy in self.proxies)

    async def start(self) -> None:
        """Starts a process, and returns when it listens. ServiceFailed if it ends before, or takes too long."""
        service = self._service = self._services.start(self.role, self.arguments)
        self.num_starts += 1
        end = time.monotonic() + START_S
        while not service.poll():
            if time.monotonic() > end:
                raise ServiceFailed(f"{self.name} did not listen within {START_S:g} s:\n{service.tail()}")
            await asyncio.sleep(POLL_S)
        self.proxy.upstream = service.address if self.before is None else await self.before(service.address)

    async def ended(self, timeout_s: float) -> int | None:
        """The process's exit status, once it has ended; None if it has not in time."""
        end = time.monotonic() + timeout_s
        while (status := self.status) is None and time.monotonic() < end:  # noqa: ASYNC110 (another process's)
            await asyncio.sleep(POLL_S)
        return status

    @property
    def status(self) -> int | None:
        """Its exit status; negative: the signal that ended it. None while it runs."""
        return self.service._process.poll()

    async def restart(self) -> None:
        """Starts it again, once it has ended."""
        for proxy in self.proxies:
            proxy.upstream = ""
        self._services.stop(self.service)
        await self.start()

    def log(self) -> str:
        """All that the process has written."""
        return self.service._log()

    def state(self) -> str:
        """A letter, as `ps` has it: T is stopped."""
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]


class Fleet:
    """All six. `async with` starts them, and ends them whatever happens."""

    def __init__(self, grace_s: str = GRACE_S, drafting: Drafting | None = None) -> None:
        """`grace_s` is the time that running streams get on SIGTERM."""
        self._services, self._grace_s = Services(), grace_s
        self.drafting = drafting or Drafting.of(0)
        self.targets, self.drafts, self.gateways = (
            [Member(self._services, role, number) for number in range(2)] for role in ("target", "draft", "gateway")
        )
        self.members = {each.name: each for each in (*self.targets, *self.drafts, *self.gateways)}
        self._http = httpx.AsyncClient(timeout=2.0)

    @property
    def addresses(self) -> list[str]:
        """Where clients reach the gateways."""
        return [gateway.proxy.address for gateway in self.gateways]

    async def __aenter__(self) -> Self:
        try:
            for member in self.members.values():
                for proxy in member.proxies:
                    await proxy.start()
            self._say_how()
            await asyncio.gather(*(member.start() for member in self.members.values()))
            await self.whole(START_S)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        for member in self.members.values():
            for proxy in member.proxies:
                await proxy.stop()
        await self._http.aclose()
        self._services.__exit__(None, None, None)

    def _say_how(self) -> None:
        """The commands, once the proxies listen."""
        pair, common = pair_path(), ["--listen", LOOPBACK, "--grace-s", self._grace_s, "--metrics", LOOPBACK]
        head, model = str(pair.head_by(self.drafting.head)), str(pair.draft_by(self.drafting.model))
        for target in self.targets:
            weights = ["--model", str(pair.target), "--head", head, "--cache-mb", "96"]
            target.arguments = ["target", *common, *weights, "--batch-invariant", "--threads", "1"]
        for draft in self.drafts:
            methods = ["--method", ",".join(self.drafting.methods), "--prompt-lookup-min", "2"]
            draft.arguments = ["draft", *common, *methods, "--model", model, "--threads", "1", "--allow-reload"]
        for gateway in self.gateways:
            peers = [
                *("--target", ",".join(each.proxy.address for each in self.targets)),
                *("--draft", ",".join(each.proxy.address for each in self.drafts)),
            ]
            ports = ["--http", LOOPBACK, "--model-name", "pair"]
            gateway.arguments = ["gateway", *common, *peers, "--tokenizer", str(pair.target), *ports]

    async def whole(self, timeout_s: float) -> bool:
        """Waits until every gateway can use all targets and drafts; whether that was in time. Then no fault is at
        anybody any more."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            views = await asyncio.gather(*(self.view(gateway) for gateway in self.gateways))
            if all(view is not None and len(view.up) == 4 and all(view.up.values()) for view in views):
                for member in self.members.values():
                    if member.victim_until == math.inf:
                        member.victim_until = time.monotonic() + SEEN_S
                return True
            await asyncio.sleep(4 * POLL_S)
        return False

    async def view(self, gateway: Member) -> View | None:
        """What a gateway knows of its replicas; None if it does not say."""
        text = await self.metrics_of(gateway)
        return View(text) if text else None

    async def metrics_of(self, member: Member) -> str:
        """A service's own metrics; empty if it does not say."""
        address = member.service.find(METRICS)
        if not address:
            return ""
        try:
            return (await self._http.get(f"http://{address}/metrics")).text
        except httpx.HTTPError:
            return ""

    def http_address(self, gateway: Member) -> str:
        """Where clients reach its HTTP interface; empty before it has one."""
        proxy = gateway.proxies[-1]
        proxy.upstream = gateway.service.find(HTTP)
        return proxy.address if proxy.upstream else ""


class View:
    """A gateway's metrics of its replicas, by their addresses: whether it can use them, how often it opened a stream to
    them anew; and how many completions went on at another target."""

    def __init__(self, text: str) -> None:
        self.up: dict[str, bool] = {}
        self.reopens: dict[str, float] = {}
        self.failovers = 0.0
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == "outrider_replica_up":
                    self.up[sample.labels["address"]] = bool(sample.value)
                elif sample.name == "outrider_replica_reopens_total":
                    self.reopens[sample.labels["address"]] = sample.value
                elif sample.name == "outrider_target_failovers_total":
                    self.failovers += sample.value

    def lost(self, addresses: Sequence[str], before: View) -> bool:
        """Whether it has noticed that one of them went away since."""
        return any(
            not self.up.get(address, False) or self.reopens.get(address, 0) > before.reopens.get(address, 0)
            for address in addresses
        )


def memory_bytes(pid: int) -> int:
    """The address space of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
