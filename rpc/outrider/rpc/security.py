"""Who may connect to whom: TLS with certificates of one or both ends, for gRPC and for HTTP.

A server shows its certificate and, where it names the authorities of clients, takes none without one of theirs (mTLS);
where it also lists names, only certificates that have one of these as a subject alternative name (SAN). A client knows
a server by the authorities that it trusts and by the host that it dials, or by another name that it is told: replicas
that are dialled by their IP addresses share one certificate so.

Files are looked at with every new connection and read again when they have changed, as when a certificate is renewed:
what is connected stays so. Files that cannot be used, or a key that is another certificate's, are refused at start;
later they are logged, and those before hold."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, Generic, TypeVar

import grpc
import grpc.aio

from outrider.rpc.channel import connect
from outrider.rpc.errors import FailedPrecondition, PermissionDenied
from outrider.rpc.interceptors import Gate
from outrider.rpc.private_files import warn_if_open
from outrider.rpc.settings import PeerSettings, TlsSettings

log = logging.getLogger(__name__)

Value = TypeVar("Value")

SAN_KEY = "x509_subject_alternative_name"  # gRPC's, of the names in a peer's certificate
WRONG_NAME = "WRONG_NAME"  # a reason: the certificate is good, and not of a client that may call


@dataclass(frozen=True, slots=True)
class PemFiles:
    """Where one end's certificate with its chain, its private key and the authorities of the other end's lie."""

    cert: Path | None = None
    key: Path | None = None
    ca: Path | None = None

    @property
    def given(self) -> tuple[Path, ...]:
        """Those that are set."""
        return tuple(path for path in (self.cert, self.key, self.ca) if path is not None)


@dataclass(frozen=True, slots=True)
class Pem:
    """What the files held at one time, and the same for Python's own TLS."""

    cert: bytes | None
    key: bytes | None
    ca: bytes | None
    context: ssl.SSLContext


class Watched(Generic[Value]):
    """What some files hold, read again when they change. Threads may share it. `read` raises FailedPrecondition for
    what cannot be used: at first that is raised, later logged, and what was read before holds."""

    def __init__(self, paths: Sequence[Path], read: Callable[[], Value]) -> None:
        self._paths, self._read, self._lock = paths, read, Lock()
        self._seen = self._stamps()
        self._value, self._version = read(), 0

    def current(self) -> tuple[Value, int]:
        """What holds now, and a number that grows whenever that changes."""
        with self._lock:
            stamps = self._stamps()
            if stamps != self._seen:
                self._reread(stamps)
            return self._value, self._version

    def _reread(self, stamps: Sequence[object]) -> None:
        try:
            value = self._read()
        except FailedPrecondition as error:
            self._seen = stamps
            log.error("%s; what was read before holds", error)
            return
        if self._stamps() == stamps:  # else it is being written: who comes next looks again
            self._seen, self._value, self._version = stamps, value, self._version + 1
            log.info("%s: read again", ", ".join(map(str, self._paths)))

    def _stamps(self) -> Sequence[object]:
        """What changes when a file is written or another is put in its place, by a link of a folder above, too."""

        def stamp(path: Path) -> object:
            try:
                found = path.stat()
            except OSError:
                return None
            return found.st_mtime_ns, found.st_size, found.st_ino

        return tuple(map(stamp, self._paths))


def watched_pem(files: PemFiles, protocol: int) -> Watched[Pem]:
    """`protocol` is ssl.PROTOCOL_TLS_SERVER or ssl.PROTOCOL_TLS_CLIENT."""
    return Watched(files.given, lambda: _read_pem(files, protocol))


def _read_pem(files: PemFiles, protocol: int) -> Pem:
    context = ssl.SSLContext(protocol)
    context.set_alpn_protocols(["http/1.1"])  # of our HTTP; gRPC has its own
    try:
        if files.key is not None:
            warn_if_open(files.key, "the private key")
        if files.cert is not None:
            context.load_cert_chain(files.cert, files.key, password="")  # an encrypted key is refused, not asked for
        if files.ca is not None:
            context.load_verify_locations(files.ca)
            context.verify_mode = ssl.CERT_REQUIRED
        cert, key, ca = (None if path is None else path.read_bytes() for path in (files.cert, files.key, files.ca))
    except (OSError, ValueError) as error:  # ssl's errors are OSErrors
        names = ", ".join(map(str, files.given))
        raise FailedPrecondition(f"{names}: cannot be used as certificate, key and authorities: {error}") from error
    return Pem(cert, key, ca, context)


class ServerTls:
    """What a server shows, and whom it lets in."""

    def __init__(self, files: PemFiles, client_names: Sequence[str] = ()) -> None:
        self._pem = watched_pem(files, ssl.PROTOCOL_TLS_SERVER)
        self._asks = files.ca is not None
        self._client_names = frozenset(client_names)

    @classmethod
    def of(cls, settings: TlsSettings) -> ServerTls | None:
        """As the settings say; None for plaintext. FailedPrecondition for files that cannot be used."""
        if settings.tls_cert is None:
            return None
        files = PemFiles(settings.tls_cert, settings.tls_key, settings.tls_client_ca)
        return cls(files, settings.tls_client_name)

    def credentials(self) -> grpc.ServerCredentials:
        """For a gRPC server, which asks for the files' present state before each handshake."""
        pem, seen = self._pem.current()

        def fetch() -> Any:
            nonlocal seen
            fresh, version = self._pem.current()
            if version == seen:
                return None
            seen = version
            return _grpc_configuration(fresh)

        return grpc.dynamic_ssl_server_credentials(_grpc_configuration(pem), fetch, self._asks)

    def interceptors(self) -> list[Any]:
        """What a gRPC server needs besides."""
        return [Gate(self._check_call)] if self._client_names else []

    def http_context(self) -> ssl.SSLContext:
        """For an HTTP server: each handshake takes the files as they are then."""
        return _Renewed(self._pem)

    def admits(self, certificate: dict[str, Any] | None) -> bool:
        """Whether a client may call that showed this certificate, as `getpeercert` has it."""
        names = [str(value) for _, value in (certificate or {}).get("subjectAltName", ())]
        return self._admits(names)

    def _admits(self, names: Iterable[str]) -> bool:
        return not self._client_names or not self._client_names.isdisjoint(names)

    async def _check_call(self, method: str, context: Any) -> None:
        names = [name.decode("utf-8", "replace") for name in context.auth_context().get(SAN_KEY, ())]
        if not self._admits(names):
            raise PermissionDenied("the client's certificate has none of the names that may call", reason=WRONG_NAME)


class _Renewed(ssl.SSLContext):
    """Each connection is of the files' present state, and so is the session that it leaves: who goes on with one shows
    no certificate, and none may outlive the authority by which its client was known."""

    _pem: Watched[Pem]

    def __new__(cls, pem: Watched[Pem]) -> _Renewed:
        made = super().__new__(cls, ssl.PROTOCOL_TLS_SERVER)
        made._pem = pem
        return made

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLObject:
        """As asyncio asks for a connection."""
        context = self._pem.current()[0].context
        return context.wrap_bio(incoming, outgoing, server_side, server_hostname, session)


def _grpc_configuration(pem: Pem) -> Any:
    return grpc.ssl_server_certificate_configuration([(pem.key, pem.cert)], pem.ca)


class ClientTls:
    """How a client knows servers, and what it shows them. `name` is what their certificates must have (empty: the host
    that is dialled)."""

    def __init__(self, files: PemFiles, name: str = "") -> None:
        self._pem, self.name = watched_pem(files, ssl.PROTOCOL_TLS_CLIENT), name

    @classmethod
    def of(cls, settings: PeerSettings, name: str = "") -> ClientTls | None:
        """As the settings say; None for plaintext. FailedPrecondition for files that cannot be used."""
        if settings.peer_ca is None:
            return None
        return cls(PemFiles(settings.peer_cert, settings.peer_key, settings.peer_ca), name)

    @property
    def version(self) -> int:
        """Another number when the files have changed since."""
        return self._pem.current()[1]

    def credentials(self) -> grpc.ChannelCredentials:
        """For channels that are opened now."""
        pem, _ = self._pem.current()
        return grpc.ssl_channel_credentials(pem.ca, pem.key, pem.cert)

    def http_context(self) -> ssl.SSLContext:
        """For connections of HTTP that are opened now."""
        return self._pem.current()[0].context


class PeerChannel:
    """A channel to one address, which is opened anew where its files have changed. Make it inside the running loop."""

    def __init__(self, address: str, tls: ClientTls | None = None) -> None:
        self._address, self._tls = address, tls
        self._open()

    async def current(self) -> grpc.aio.Channel:
        """For what begins now; what was begun on one before has ended."""
        if self._tls is not None and self._tls.version != self._version:
            await self._channel.close()
            self._open()
        return self._channel

    async def close(self) -> None:
        """Ends every call and the connection."""
        await self._channel.close()

    def _open(self) -> None:
        self._version = 0 if self._tls is None else self._tls.version
        self._channel = open_channel(self._address, self._tls)


def open_channel(address: str, tls: ClientTls | None) -> grpc.aio.Channel:
    """A channel by TLS, or in plaintext."""
    if tls is None:
        return connect(address)
    return connect(address, credentials=tls.credentials(), server_name=tls.name)
