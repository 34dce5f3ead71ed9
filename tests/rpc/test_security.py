"""Who gets in by TLS: by which authority, by which name, before and after files change; over gRPC and over HTTP's
contexts."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.certificates import Authority

from outrider.rpc.channel import connect
from outrider.rpc.errors import FailedPrecondition, OutriderError
from outrider.rpc.interceptors import Gate
from outrider.rpc.security import ClientTls, PeerChannel, PemFiles, ServerTls, open_channel
from outrider.rpc.server import Server, build_server
from outrider.rpc.settings import PeerSettings, SettingsError, TlsSettings, load_settings
from outrider.rpc.status import from_rpc_error

SERVICE = "outrider.v1.TargetService"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@asynccontextmanager
async def serving(tls: ServerTls | None) -> AsyncIterator[Server]:
    server = build_server("127.0.0.1:0", [SERVICE], lambda _: None, tls=tls, enable_reflection=True)
    await server.start()
    try:
        yield server
    finally:
        await server.stop(0)


async def ask(channel: grpc.aio.Channel) -> None:
    """A call that any server answers. Raises OutriderError."""
    try:
        await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60)
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error


async def refusal(address: str, tls: ClientTls | None) -> OutriderError | None:
    """Why a client that has just come is not let in; None where it is."""
    async with open_channel(address, tls) as channel:
        try:
            await ask(channel)
        except OutriderError as error:
            return error
    return None


async def is_shut(address: str, tls: ClientTls | None) -> bool:
    """Whether there is no connection."""
    error = await refusal(address, tls)
    return error is not None and error.reason == "UNAVAILABLE"


def trusting(authority: Authority, name: str = "") -> ClientTls:
    return ClientTls(PemFiles(ca=authority.path), name)


async def test_a_server_is_known_by_its_authority_and_its_name(authority: Authority, tmp_path: Path) -> None:
    stranger = Authority(tmp_path, "stranger")
    async with serving(ServerTls(authority.issue("server"))) as server:
        assert await refusal(server.address, trusting(authority)) is None
        assert await is_shut(server.address, trusting(stranger))
        assert await is_shut(server.address, None), "plaintext"
        assert await is_shut(server.address, trusting(authority, "target.example"))
    async with serving(ServerTls(authority.issue("server", "target.example"))) as server:
        assert await refusal(server.address, trusting(authority, "target.example")) is None
        assert await is_shut(server.address, trusting(authority)), "the host is not in the certificate"
    async with serving(None) as server:
        assert await is_shut(server.address, trusting(authority)), "a server without TLS"


async def test_a_client_is_known_by_its_authority(authority: Authority, tmp_path: Path) -> None:
    stranger = Authority(tmp_path, "stranger")
    own = ClientTls(authority.issue("client", "gateway.example", ca=authority.path))
    strange = ClientTls(stranger.issue("strange", "gateway.example", ca=authority.path))
    async with serving(ServerTls(authority.issue("server", ca=authority.path))) as server:
        assert await refusal(server.address, own) is None
        assert await is_shut(server.address, strange)
        assert await is_shut(server.address, trusting(authority)), "without a certificate"


async def test_only_clients_of_the_listed_names_may_call(authority: Authority) -> None:
    tls = ServerTls(authority.issue("server", ca=authority.path), ["gateway.example", "doctor.example"])
    async with serving(tls) as server:
        for names, admitted in {
            ("gateway.example",): True,
            ("other.example", "doctor.example"): True,
            ("other.example",): False,
            ("gateway.example.org",): False,
        }.items():
            error = await refusal(server.address, ClientTls(authority.issue("client", *names, ca=authority.path)))
            assert (error is None) == admitted, names
            assert error is None or (error.code, error.reason) == (grpc.StatusCode.PERMISSION_DENIED, "WRONG_NAME")


GATEWAY = "spiffe://cluster.local/ns/outrider/sa/gateway"


@pytest.mark.parametrize(
    ("uris", "admitted"),
    [
        ((GATEWAY,), True),
        (("spiffe://cluster.local/ns/other/sa/gateway",), False),
        ((f"{GATEWAY}/2",), False),
        (("spiffe://CLUSTER.local/ns/outrider/sa/gateway",), False),
    ],
)
async def test_a_workload_is_known_by_its_spiffe_id(
    authority: Authority, uris: tuple[str, ...], admitted: bool
) -> None:
    """Over gRPC and HTTP: a URI is a name like any other, and compared as a whole."""
    tls = ServerTls(authority.issue("server", ca=authority.path), [GATEWAY])
    files = authority.issue_workload("workload", *uris, ca=authority.path)
    async with serving(tls) as server:
        error = await refusal(server.address, ClientTls(files))
        assert (error.reason if error is not None else "") == ("" if admitted else "WRONG_NAME")
    async with greeting(tls.http_context(), tls) as port:
        assert await greeted(port, authority.path, files) == (b"come in" if admitted else b"stay out")


async def test_files_are_read_again_when_they_change(authority: Authority, tmp_path: Path) -> None:
    """The server's own, then those whom it trusts; what is connected stays."""
    later = Authority(tmp_path, "later")
    client = ClientTls(authority.issue("client", "gateway.example", ca=authority.path))
    tls = ServerTls(authority.issue("server", ca=authority.path))
    async with serving(tls) as server, open_channel(server.address, client) as before:
        await ask(before)
        later.issue("server")
        assert await is_shut(server.address, client), "it shows a certificate of another authority"
        changed = ClientTls(authority.issue("client", "gateway.example", ca=later.path))
        assert await refusal(server.address, changed) is None
        await ask(before)
        authority.path.write_bytes(later.path.read_bytes())
        assert await is_shut(server.address, changed), "its authority is trusted no more"
        assert await refusal(server.address, ClientTls(later.issue("client", "x.example", ca=later.path))) is None
        await ask(before)


async def test_files_that_cannot_be_used_leave_those_before(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    later = Authority(tmp_path, "later")
    files = authority.issue("server")
    assert files.cert is not None and files.key is not None
    good, others = files.cert.read_bytes(), later.issue("other").cert
    assert others is not None
    async with serving(ServerTls(files)) as server:
        for broken in (b"", good[:-100], others.read_bytes()):
            files.cert.write_bytes(broken)
            with caplog.at_level(logging.ERROR):
                assert await refusal(server.address, trusting(authority)) is None
                assert await refusal(server.address, trusting(authority)) is None
            (record,) = caplog.records
            assert str(files.cert) in record.getMessage() and "what was read before holds" in record.getMessage()
            caplog.clear()
        files.cert.unlink()
        assert await refusal(server.address, trusting(authority)) is None
        later.issue("server")
        assert await refusal(server.address, trusting(later)) is None


async def test_a_peers_channel_is_opened_anew_where_its_files_have_changed(
    authority: Authority, tmp_path: Path
) -> None:
    stranger = Authority(tmp_path, "stranger")
    tls = ClientTls(stranger.issue("client", "x.example", ca=authority.path))
    async with serving(ServerTls(authority.issue("server", ca=authority.path))) as server:
        peer = PeerChannel(server.address, tls)
        first = await peer.current()
        with pytest.raises(OutriderError):
            await ask(first)
        assert await peer.current() is first
        authority.issue("client", "x.example")
        await ask(await peer.current())
        await peer.close()


@pytest.mark.parametrize("wrong", ["absent", "no certificate", "another's key", "encrypted"])
def test_what_cannot_be_used_is_refused_at_start(authority: Authority, tmp_path: Path, wrong: str) -> None:
    files = authority.issue("server")
    assert files.cert is not None and files.key is not None
    if wrong == "absent":
        files.key.unlink()
    elif wrong == "no certificate":
        files.cert.write_text("none")
    elif wrong == "another's key":
        files.key.write_bytes((authority.issue("other").key or tmp_path).read_bytes())
    else:
        header = b"-----BEGIN RSA PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\nDEK-Info: AES-128-CBC,00112233445566778899"
        files.key.write_bytes(header + b"AABBCCDDEEFF\n\nAAAAAAAAAAAAAAAAAAAAAA==\n-----END RSA PRIVATE KEY-----\n")
    with pytest.raises(FailedPrecondition, match=r"server\.crt, .*server\.key: cannot be used"):
        ServerTls(files)


def test_settings_of_one_purpose_belong_together() -> None:
    class Served(TlsSettings):
        section = "served"

    class Calling(PeerSettings):
        section = "calling"

    for cls, given, flag in (
        (Served, {"tls_cert": "a"}, "--tls-key"),
        (Served, {"tls_key": "a"}, "--tls-cert"),
        (Served, {"tls_client_ca": "a"}, "--tls-cert"),
        (Served, {"tls_cert": "a", "tls_key": "a", "tls_client_name": ["x"]}, "--tls-client-ca"),
        (Calling, {"peer_ca": "a", "peer_cert": "a"}, "--peer-key"),
        (Calling, {"peer_cert": "a", "peer_key": "a"}, "--peer-ca"),
    ):
        with pytest.raises(SettingsError, match=flag):
            load_settings(cls, given, environ={})
    assert ServerTls.of(load_settings(Served, {}, environ={})) is None
    assert ClientTls.of(load_settings(Calling, {}, environ={})) is None


async def shut(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(ssl.SSLError, ConnectionError):
        await writer.wait_closed()


@asynccontextmanager
async def greeting(context: ssl.SSLContext, tls: ServerTls) -> AsyncIterator[int]:
    """The port of a server that says whether the certificate of who connects may call."""

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        shown = writer.get_extra_info("ssl_object").getpeercert()
        writer.write(b"come in" if tls.admits(shown) else b"stay out")
        await shut(writer)

    server = await asyncio.start_server(greet, "127.0.0.1", 0, ssl=context)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def greeted(port: int, trusted: Path, files: PemFiles | None = None) -> bytes:
    context = ssl.create_default_context(cafile=trusted)
    if files is not None and files.cert is not None:
        context.load_cert_chain(files.cert, files.key)
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    try:
        return await reader.read()
    finally:
        await shut(writer)


async def is_turned_away(port: int, trusted: Path, files: PemFiles | None) -> bool:
    """By TLS itself, which in version 1.3 tells a client only when it reads."""
    try:
        return await greeted(port, trusted, files) == b""
    except (ssl.SSLError, ConnectionError):
        return True


async def test_http_takes_the_same_files_and_names(authority: Authority, tmp_path: Path) -> None:
    later, stranger = Authority(tmp_path, "later"), Authority(tmp_path, "stranger")
    tls = ServerTls(authority.issue("server", ca=authority.path), ["client.example"])
    known, unknown = authority.issue("a", "client.example"), authority.issue("b", "other.example")
    async with greeting(tls.http_context(), tls) as port:
        assert await greeted(port, authority.path, known) == b"come in"
        assert await greeted(port, authority.path, unknown) == b"stay out"
        for refused in (None, stranger.issue("c", "client.example")):
            assert await is_turned_away(port, authority.path, refused)
        later.issue("server")
        assert await greeted(port, later.path, known) == b"come in"
        with pytest.raises(ssl.SSLCertVerificationError):
            await greeted(port, authority.path, known)
        authority.path.write_bytes(later.path.read_bytes())
        assert await is_turned_away(port, later.path, known)
        assert await greeted(port, later.path, later.issue("d", "client.example")) == b"come in"


def resumed(port: int, context: ssl.SSLContext, session: ssl.SSLSession | None) -> tuple[ssl.SSLSession | None, bytes]:
    """The session that a connection leaves to go on with, and what its server says. It blocks."""
    plain = socket.create_connection(("127.0.0.1", port), 30)
    with context.wrap_socket(plain, server_hostname="127.0.0.1", session=session) as connection:
        said = connection.recv(100)
        return connection.session, said


@asynccontextmanager
async def speaking(protocol: str, tls: ServerTls) -> AsyncIterator[int]:
    """The port of a server that says something to whom it lets in: a greeting, or gRPC's settings."""
    if protocol == "h2":
        async with serving(tls) as server:
            yield server.port
    else:
        async with greeting(tls.http_context(), tls) as port:
            yield port


@pytest.mark.parametrize("protocol", ["http/1.1", "h2"])
@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_a_session_outlives_no_authority(
    authority: Authority, tmp_path: Path, version: ssl.TLSVersion, protocol: str
) -> None:
    """Who was known once by an authority that is trusted no more cannot go on as if it were."""
    tls = ServerTls(authority.issue("server", ca=authority.path))
    known, served_by = authority.issue("a", "client.example"), tmp_path / "served-by.crt"
    served_by.write_bytes(authority.path.read_bytes())
    context = ssl.create_default_context(cafile=served_by)
    context.minimum_version = context.maximum_version = version
    context.set_alpn_protocols([protocol])
    assert known.cert is not None
    context.load_cert_chain(known.cert, known.key)
    async with speaking(protocol, tls) as port:
        session, said = await asyncio.to_thread(resumed, port, context, None)
        assert said and session is not None
        authority.path.write_bytes(Authority(tmp_path, "later").path.read_bytes())
        try:
            _, said = await asyncio.to_thread(resumed, port, context, session)
        except (ssl.SSLError, ConnectionError):
            said = b""
        assert not said


async def test_http_asks_for_no_certificate_where_none_is_wanted(authority: Authority) -> None:
    tls = ServerTls(authority.issue("server"))
    async with greeting(tls.http_context(), tls) as port:
        assert await greeted(port, authority.path) == b"come in"


async def test_a_gate_stands_before_handlers_of_every_kind() -> None:
    """Reflection is a stream in both directions, Watch one out, Check none."""
    asked: list[str] = []

    async def check(method: str, context: Any) -> None:
        asked.append(method)
        raise FailedPrecondition("shut")

    server = build_server("127.0.0.1:0", [SERVICE], lambda _: None, enable_reflection=True, interceptors=[Gate(check)])
    await server.start()
    async with connect(server.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest()
        reflected = channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
        for call in (stub.Check(request), stub.Watch(request).read(), reflected(iter([])).read()):
            with pytest.raises(grpc.aio.AioRpcError, match="shut"):
                await call
    await server.stop(0)
    assert sorted(name.rpartition("/")[2] for name in asked) == ["Check", "ServerReflectionInfo", "Watch"]


async def test_a_handler_that_cannot_be_guarded_is_not_let_through() -> None:
    async def check(method: str, context: Any) -> None:
        raise AssertionError

    async def handler(details: Any) -> Any:
        return grpc.unary_unary_rpc_method_handler(lambda request, context: request)

    details: Any = type("Details", (), {"method": "/a.B/C"})()
    with pytest.raises(TypeError, match=r"/a\.B/C"):
        await Gate(check).intercept_service(handler, details)
