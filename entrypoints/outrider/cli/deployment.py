"""A running deployment as it is seen from here: what every gateway, target and draft says of itself and how far away it
is, and what becomes of a known prompt, asked of the gateways and of the services without one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from statistics import median
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.cli.probes import GatewayProbe, Given, PairProbe, probe_gateway, probe_pair
from outrider.client import Client, GatewayInfo
from outrider.gateway.peers.addresses import Addresses
from outrider.gateway.peers.remote import DRAFT_SERVICE, TARGET_SERVICE
from outrider.gateway.servicer import SERVICE_NAME
from outrider.rpc.errors import OutriderError
from outrider.rpc.messages import DraftInfo, TargetInfo
from outrider.rpc.security import ClientTls, open_channel
from outrider.rpc.status import from_rpc_error

PINGS = 5
CONNECT_WAITS_S = (0.1, 0.3)  # before a connection is tried again
SERVING = "SERVING"
TARGET, DRAFT = "outrider.v1.TargetService", "outrider.v1.DraftService"

GetInfo = Callable[[str, grpc.aio.Channel], Awaitable[GatewayInfo | TargetInfo | DraftInfo]]


@dataclass(frozen=True, slots=True)
class Peer:
    """One process at one address, and what it says of itself."""

    kind: str  # gateway, target or draft
    address: str
    info: Any = None  # a GatewayInfo, TargetInfo or DraftInfo, by the kind
    problem: str = ""  # why there is no info
    health: str = ""  # as grpc.health.v1 calls it; empty: not known
    round_trip_ms: float | None = None  # of a call without work, the median of a few

    def __str__(self) -> str:
        return f"{self.kind} {self.address}"


@dataclass(frozen=True, slots=True)
class Deployment:
    """All that was seen of a deployment."""

    gateways: tuple[Peer, ...] = ()
    targets: tuple[Peer, ...] = ()
    drafts: tuple[Peer, ...] = ()
    gateway_probes: tuple[GatewayProbe, ...] = ()
    pair_probes: tuple[PairProbe, ...] = ()
    is_text: bool = True  # whether the services' probes were of the prompt, not of ids taken at random

    @property
    def peers(self) -> list[Peer]:
        """Its gateways, targets and drafts."""
        return [*self.gateways, *self.targets, *self.drafts]


async def look(given: Given) -> Deployment:
    """Asks all processes at once what they are, then generates with each of them, one after the other. What does not
    answer is part of the answer: only addresses that are none raise (InvalidArgument)."""
    access, timeout_s = given.access, given.timeout_s

    async def gateway_info(address: str, channel: grpc.aio.Channel) -> GatewayInfo:
        async with Client(address, **access.client) as client:
            return await client.info()

    gateways, targets, drafts = await asyncio.gather(
        _look_at("gateway", given.gateways, SERVICE_NAME, gateway_info, access.gateway, timeout_s),
        _look_at("target", given.targets, TARGET, lambda _, to: TARGET_SERVICE.get_info(to), access.target, timeout_s),
        _look_at("draft", given.drafts, DRAFT, lambda _, to: DRAFT_SERVICE.get_info(to), access.draft, timeout_s),
    )
    asked = [await probe_gateway(peer.address, given) for peer in gateways if peer.info is not None]
    prompt_ids = given.prompt_ids or next((one.drafted.prompt_ids for one in asked if one.drafted is not None), ())
    given = replace(given, prompt_ids=prompt_ids)
    pairs = [await probe_pair(target, draft, given) for target, draft in _pairs(targets, drafts)]
    return Deployment(gateways, targets, drafts, tuple(asked), tuple(pairs), bool(prompt_ids))


async def _look_at(
    kind: str, given: Sequence[str], service: str, get_info: GetInfo, tls: ClientTls | None, timeout_s: float
) -> tuple[Peer, ...]:
    """Every address behind what is given; a name without any stands for itself."""
    addresses = Addresses(given)
    await asyncio.gather(*map(addresses.refresh, addresses.names))

    async def meet(address: str) -> Peer:
        try:
            async with asyncio.timeout(timeout_s), open_channel(address, tls) as channel:
                health: Any = health_pb2_grpc.HealthStub(channel)
                state = health_pb2.HealthCheckResponse.ServingStatus.Name((await _first_check(health, service)).status)
                round_trips = [await _round_trip_ms(health) for _ in range(PINGS)]
                return Peer(kind, address, await get_info(address, channel), "", state, median(round_trips))
        except TimeoutError:
            problem = f"does not answer within {timeout_s:g} s"
        except grpc.aio.AioRpcError as error:
            problem = f"does not answer: {from_rpc_error(error).message}"
            if error.code() in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNIMPLEMENTED):
                problem = f"is no {kind}: it does not serve {service}"
        except OutriderError as error:
            problem = f"says nothing of itself: {error.message}"
        return Peer(kind, address, problem=problem)

    problems = addresses.problems.items()
    nowhere: list[Peer] = [Peer(kind, name, problem=f"cannot be looked up: {why}") for name, why in problems]
    return (*await asyncio.gather(*map(meet, addresses.known)), *nowhere)


async def _first_check(health: Any, service: str) -> Any:
    """Tried again where there is no connection: on a busy machine it may need more than the channel's first try."""
    for wait_s in (*CONNECT_WAITS_S, None):
        try:
            return await health.Check(health_pb2.HealthCheckRequest(service=service))
        except grpc.aio.AioRpcError as error:
            if wait_s is None or error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            await asyncio.sleep(wait_s)


async def _round_trip_ms(health: Any) -> float:
    began = time.monotonic()
    await health.Check(health_pb2.HealthCheckRequest())
    return (time.monotonic() - began) * 1e3


def _pairs(targets: Sequence[Peer], drafts: Sequence[Peer]) -> list[tuple[str, str]]:
    """Each target and each draft that answers, at least once; and beside drafts each target that has a head alone."""
    there = [peer for peer in targets if peer.info is not None]
    beside = [peer.address for peer in drafts if peer.info is not None]
    pairs = zip(cycle([peer.address for peer in there]), cycle(beside or [""]), strict=False)
    alone = [(peer.address, "") for peer in there if beside and peer.info.methods]
    return [*islice(pairs, max(len(there), len(beside))), *alone]
