"""A grpc.aio server as all three services run it: bounded, with health, errors with details, optional reflection,
and a graceful end on SIGTERM or SIGINT.

Health in two senses, as orchestrators ask for it. Liveness, under the name "": the process works, and a restart
would mend nothing. Readiness, under the names of the services: calls can be served now. The event loop answers health
checks even while the device works, so a device thread has to be asked for explicitly."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import resource
import signal
import socket
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from outrider.rpc.channel import MAX_MESSAGE_BYTES, NO_COMPRESSION, listen_target, with_port
from outrider.rpc.connections import bound_hosts
from outrider.rpc.errors import NotFound, Unavailable
from outrider.rpc.interceptors import HEALTH, Crowd, ErrorInterceptor, Room, host_of
from outrider.rpc.security import ServerTls

log = logging.getLogger(__name__)

FORCED_EXIT = 130  # what a shell reports for a program ended by an interrupt
_HEALTH_SERVICE = HEALTH.strip("/")
# Peers (health watchers, reconnecting gateways) see the new state before the server goes away.
_SETTLE_S = 0.1
# Others are left to gRPC, which knows more ways: without IPv6, it falls back from [::].
_REFUSED = (errno.EADDRINUSE, errno.EACCES)
POLL_S = 0.5
GC_THRESHOLD = 20_000  # objects made until the youngest are looked through: a round of many sequences makes thousands
MAX_PROBES, MAX_WATCHES = 64, 32  # at once, of an address
MORE_CALLS = (
    ". For one that asks for many users: a token (tokens) for each of them, or a larger caller_share or max_waiting"
)
HEALTH_SHARE = 0.5  # of these, that one host may have of what others leave
HANDSHAKE_S, IDLE_S, KEEPALIVE_S, PING_S, MAX_STREAMS = 10.0, 300.0, 30.0, 20.0, 1024  # of a connection
MAX_CONNECTIONS, DESCRIPTORS = 4096, 65_536  # of a server; of a process, where the system lets it have so many
MAX_OF_HOST = MAX_CONNECTIONS // 4  # of these, soon after
_MAX_BESIDE = 1024  # calls beside those that a server takes: probes, watches, and those that are being refused
LIVENESS = ""
_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # it ships no types
    """Health, which everybody may ask for: no watch holds up another, or who says what is. (grpcio's own forgets all
    watchers of a service when one of them ends.)"""

    def __init__(self) -> None:
        self._statuses: dict[str, int] = {LIVENESS: health_pb2.HealthCheckResponse.SERVING}
        self._changed = asyncio.Event()  # another one after each change

    def set(self, service: str, status: int) -> None:
        """What is from now on."""
        self._statuses[service] = status
        self._changed.set()
        self._changed = asyncio.Event()

    async def Check(self, request: Any, context: Any) -> Any:
        """What is now. NotFound for a service that there is not."""
        if request.service not in self._statuses:
            raise NotFound("there is no such service here")
        return health_pb2.HealthCheckResponse(status=self._statuses[request.service])

    async def Watch(self, request: Any, context: Any) -> None:
        """The same, and every change; a service that there is not may come."""
        told = None
        while True:
            changed, status = self._changed, self._statuses.get(request.service, _UNKNOWN)
            if status != told:
                await context.write(health_pb2.HealthCheckResponse(status=status))
                told = status
                continue  # it may have changed meanwhile
            await changed.wait()


class HealthMonitor:
    """Keeps the health servicer's answers true. `is_alive` is asked every 500 ms, and is liveness. The services given
    are ready once `probe` has answered (weights loaded, one step run), while `is_alive` and `is_ready`, and not when
    they drain."""

    def __init__(
        self,
        services: Sequence[str],
        *,
        probe: Callable[[], Awaitable[object]] | None = None,
        is_alive: Callable[[], bool] = lambda: True,
        is_ready: Callable[[], bool] = lambda: True,
        poll_s: float = POLL_S,
    ) -> None:
        self.servicer = Health()
        self._services = tuple(services)
        self._probe, self._is_alive, self._is_ready, self._poll_s = probe, is_alive, is_ready, poll_s
        self._probed = probe is None
        self._draining = False
        self._answers: dict[str, bool] = {}  # as they were last set
        self._tasks: tuple[asyncio.Task[None], ...] = ()

    @property
    def alive(self) -> bool:
        """Whether the process answers SERVING now."""
        return self._answers.get(LIVENESS, False)

    @property
    def ready(self) -> bool:
        """Whether the services answer SERVING now."""
        return any(serving for name, serving in self._answers.items() if name != LIVENESS)

    async def start(self) -> None:
        """Answers from now on; a service SERVING after the probe alone."""
        self._publish()
        self._tasks = asyncio.create_task(self._watch()), asyncio.create_task(self._wait_for_probe())

    async def drain(self) -> None:
        """The services answer NOT_SERVING for good; who watches is told at once. The process lives on."""
        self._draining = True
        self._publish()

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._poll_s)
            self._publish()

    async def _wait_for_probe(self) -> None:
        while not self._probed and self._probe is not None:
            try:
                await self._probe()
                self._probed = True
            except Exception:  # whatever keeps the engine from answering, it is not ready
                log.exception("health: the probe failed; trying again")
                await asyncio.sleep(self._poll_s)
        self._publish()

    def _publish(self) -> None:
        """Sets what has changed."""
        alive = self._is_alive()
        ready = alive and self._probed and not self._draining and self._is_ready()
        for name in (LIVENESS, *self._services):
            self._set(name, ready if name else alive)

    def _set(self, name: str, serving: bool) -> None:
        if self._answers.get(name) == serving:
            return
        if name in self._answers or serving:
            level = logging.INFO if serving or self._draining else logging.ERROR
            log.log(level, "health: %s %s", name or "the process", "is serving" if serving else "is not serving")
        self._answers[name] = serving
        response = health_pb2.HealthCheckResponse
        self.servicer.set(name, response.SERVING if serving else response.NOT_SERVING)


def server_options(
    max_message_bytes: int = MAX_MESSAGE_BYTES, reuse_port: bool = False, max_connection_age_s: float = 0.0
) -> list[tuple[str, Any]]:
    """The options of every server; an age of 0 is none. Calls that run go on when their connection's is over."""
    aging = [("grpc.max_connection_age_ms", round(max_connection_age_s * 1000))] if max_connection_age_s else []
    return [
        *aging,
        NO_COMPRESSION,
        # What a peer may make this process allocate. The gateway's clients need far less than a gateway's target.
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        # Headers hold a trace context and a token; no caller may make us buffer more.
        ("grpc.max_metadata_size", 8 * 1024),
        ("grpc.absolute_max_metadata_size", 16 * 1024),
        # Clients ping every 20 s; gRPC's default minimum of 5 minutes would drop them as abusive.
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        # A client that vanished without a FIN frees its sequences and streams.
        ("grpc.keepalive_time_ms", round(KEEPALIVE_S * 1000)),
        ("grpc.keepalive_timeout_ms", 10_000),  # until which the kernel waits for what a machine shall acknowledge
        ("grpc.http2.ping_timeout_ms", round(PING_S * 1000)),  # a process, or what stands between; else a minute
        # One that shakes no hands, and one without a call, which the next one opens again; an open stream is a call.
        ("grpc.server_handshake_timeout_ms", round(HANDSHAKE_S * 1000)),
        ("grpc.max_connection_idle_ms", round(IDLE_S * 1000)),
        # More are closed as they come, so that descriptors are left for what else the process has and opens.
        ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
        # Per connection; the whole server is bounded by maximum_concurrent_rpcs.
        ("grpc.max_concurrent_streams", MAX_STREAMS),
        # Two servers on one port share its connections at random: unless that is meant, the second is to fail at start.
        ("grpc.so_reuseport", int(reuse_port)),
    ]


@dataclass(slots=True)
class Server:
    """A server that is bound and not yet started. `address` holds the port that was bound."""

    grpc_server: Any
    address: str
    port: int
    health: HealthMonitor
    health_server: Any | None = None  # of health alone, on an address of its own
    health_address: str = ""
    bounding: asyncio.Task[None] | None = None

    async def start(self) -> None:
        addresses = [address for address in (self.address, self.health_address) if not address.startswith("unix:")]
        ports = [int(address.rpartition(":")[2]) for address in addresses if address]
        self.bounding = asyncio.create_task(bound_hosts(ports, MAX_OF_HOST))
        if self.health_server is not None:
            await self.health_server.start()
        await self.grpc_server.start()
        await self.health.start()

    async def stop(self, grace_s: float | None = None) -> None:
        """Not ready at once, no new calls, running calls ended after the grace period (None: now). Health answers on
        its own address until they have: what drains is alive."""
        await self.health.drain()
        await self.grpc_server.stop(grace_s)
        if self.health_server is not None:
            await self.health_server.stop(None)
        await self.health.stop()
        if self.bounding is not None:
            self.bounding.cancel()


def build_server(
    address: str,
    services: Sequence[str],
    register: Callable[[Any], object],
    *,
    health: HealthMonitor | None = None,
    enable_reflection: bool = False,
    max_concurrent_rpcs: int = 1024,
    caller_share: float = 1.0,
    caller_of: Callable[[Any], str] = host_of,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    max_connection_age_s: float = 0.0,
    tls: ServerTls | None = None,
    interceptors: Sequence[Any] = (),
    health_address: str = "",
    reuse_port: bool = False,
) -> Server:
    """Binds "host:port", ":port" or "unix:path" (port 0: any free port). `register` adds the servicers; `services`
    are their full names, for health and reflection. Who `caller_of` a call's context names has `caller_share` of the
    calls that others leave (1 for peers that are trusted with all). `health_address` serves health alone, besides, and
    in plaintext even beside TLS: an orchestrator's probes know none. With `reuse_port` other processes may serve there,
    too. Unavailable if an address cannot be bound."""
    crowd = Crowd({**_rooms_of_health(), "/": Room(max_concurrent_rpcs, caller_share, MORE_CALLS)}, caller_of)
    grpc_server = grpc.aio.server(
        interceptors=[ErrorInterceptor(), *(() if tls is None else tls.interceptors()), *interceptors, crowd],
        options=server_options(max_message_bytes, reuse_port, max_connection_age_s),
        maximum_concurrent_rpcs=max_concurrent_rpcs + _MAX_BESIDE,  # above it gRPC refuses, and says nothing of when
    )
    register(grpc_server)
    health = health or HealthMonitor(services)
    health_pb2_grpc.add_HealthServicer_to_server(health.servicer, grpc_server)
    if enable_reflection:  # off by default: it tells every caller what there is
        reflection.enable_server_reflection((*services, _HEALTH_SERVICE, reflection.SERVICE_NAME), grpc_server)
    port = _bind(grpc_server, address, None if tls is None else tls.credentials())
    server = Server(grpc_server, with_port(address, port), port, health)
    if health_address:
        server.health_server, server.health_address = build_health_server(health_address, health)
    return server


def build_health_server(address: str, health: HealthMonitor) -> tuple[Any, str]:
    """Binds a server of health alone, in plaintext; it and its address."""
    interceptors = [ErrorInterceptor(), Crowd(_rooms_of_health(), host_of)]
    server = grpc.aio.server(interceptors=interceptors, options=server_options(), maximum_concurrent_rpcs=_MAX_BESIDE)
    health_pb2_grpc.add_HealthServicer_to_server(health.servicer, server)
    return server, with_port(address, _bind(server, address, None))


def _rooms_of_health() -> dict[str, Room]:
    """Of one server: watches, which last as long as their callers like, take no probe's place."""
    return {f"{HEALTH}Watch": Room(MAX_WATCHES, HEALTH_SHARE), HEALTH: Room(MAX_PROBES, HEALTH_SHARE)}


def _bind(grpc_server: Any, address: str, credentials: grpc.ServerCredentials | None) -> int:
    target = listen_target(address)
    try:
        if credentials is None:
            return int(grpc_server.add_insecure_port(target))
        return int(grpc_server.add_secure_port(target, credentials))
    except RuntimeError as error:
        raise Unavailable(f"cannot listen on {address}: {error}", reason="ADDRESS_IN_USE") from error


async def serve_until_signal(
    server: Server,
    *,
    name: str,
    grace_s: float = 30.0,
    drain_delay_s: float = 0.0,
    on_drain: Callable[[], None] | None = None,
    on_stopped: Callable[[], Awaitable[None]] | None = None,
    work: Future[None] | None = None,
) -> None:
    """Starts, prints where, and serves until SIGTERM or SIGINT. Then: not ready at once; calls are still taken for the
    drain delay, until balancers send no more; `on_drain` (streams say that they drain and refuse new sequences); wait
    for running calls up to the grace period, stop. A second signal ends the process at once. Where `work` ends before,
    the server stops at once and its error is raised."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            log.warning("%s: second signal, ending at once", name)
            os._exit(FORCED_EXIT)  # nothing may hold it up: not a step under way, not an atexit handler
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    if work is not None:
        work.add_done_callback(lambda _: loop.call_soon_threadsafe(stop.set))
    _allow_descriptors()
    gc.collect()
    gc.freeze()  # what is loaded stays: a collection that walked it would hold the loop up for tenths of a second
    gc.set_threshold(GC_THRESHOLD)
    try:
        await server.start()
        print(f"{name} listening on {server.address}", flush=True)
        await stop.wait()
        if work is not None and work.done():
            await server.stop()
            work.result()
            return
        log.info("%s: draining, for at most %g s", name, drain_delay_s + grace_s)
        await server.health.drain()
        await asyncio.sleep(drain_delay_s)
        if on_drain is not None:
            on_drain()
        await asyncio.sleep(_SETTLE_S)
        await server.stop(grace_s)
        if on_stopped is not None:
            await on_stopped()
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def _allow_descriptors() -> None:
    """Shells give a process 1,024, which is less than the connections that it is meant to take."""
    present, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if most == resource.RLIM_INFINITY else min(DESCRIPTORS, most)
    if present != resource.RLIM_INFINITY and present < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def require_free(*addresses: str | None) -> None:
    """Raises Unavailable for an address that is in use: a large model takes minutes to load before it would be bound,
    and gRPC then writes lines of its own. None and an empty text are none."""
    for address in filter(None, addresses):
        if address.startswith("unix:") or address.endswith(":0"):
            continue
        try:
            with _bound(address):
                pass
        except OSError as error:
            if error.errno in _REFUSED:
                raise _refusal(address, error) from error


def bind(address: str, backlog: int = 0, reuse_port: bool = False) -> tuple[socket.socket, str]:
    """A socket at "host:port", ":port" or "unix:path", and the address with the port that was chosen for port 0.
    Without a backlog it does not listen: with `reuse_port` it holds the address for others' sockets, and takes none of
    their connections. Unavailable where it cannot be bound."""
    is_path = address.startswith("unix:")
    try:
        bound = _bound_to_path(address) if is_path else _bound(address, reuse_port)
        if backlog:
            bound.listen(backlog)
    except OSError as error:
        raise _refusal(address, error) from error
    return bound, address if is_path else with_port(address, bound.getsockname()[1])


def _bound(address: str, reuse_port: bool = False) -> socket.socket:
    """A socket that does not listen. Unavailable for a host without an address."""
    host, _, port = listen_target(address).rpartition(":")
    host = "0.0.0.0" if host == "[::]" and not socket.has_dualstack_ipv6() else host.strip("[]")
    try:
        found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise _refusal(address, error) from error
    family, kind, protocol, _, place = found[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if host == "::":
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # both families, as servers do
        bound.bind(place)
    except OSError:
        bound.close()
        raise
    return bound


def _bound_to_path(address: str) -> socket.socket:
    path, bound = Path(address.removeprefix("unix:")), socket.socket(socket.AF_UNIX)
    path.unlink(missing_ok=True)  # what a process left that was killed
    try:
        bound.bind(str(path))
    except OSError:
        bound.close()
        raise
    return bound


def _refusal(address: str, error: OSError) -> Unavailable:
    return Unavailable(f"cannot listen on {address}: {error.strerror}", reason="ADDRESS_IN_USE")
