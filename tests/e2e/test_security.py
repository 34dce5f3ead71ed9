"""Draft, target and gateway as processes that know one another by certificates, and a client that they let in; the same
three of `outrider serve`, with tokens, and every way to ask them."""

from __future__ import annotations

import asyncio
import json
import re
import ssl
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from support.certificates import Authority
from support.environment import START_S
from support.models import save_tiny, train_byte_level
from support.services import outrider, succeed

from outrider.cli.local_services import Service, Services
from outrider.client import Client
from outrider.gateway.peers.remote import RemoteTargets
from outrider.llm import LLM, SamplingParams
from outrider.rpc.errors import OutriderError
from outrider.rpc.security import ClientTls, PemFiles

VOCAB = 300
HTTP = re.compile(r"gateway http on (\S+)")
LISTEN = ("--listen", "127.0.0.1:0")


TOKEN = "3c1f0a6be2d94d7c"
PEER = ("--peer-cert", "--peer-key", "--peer-ca")


@dataclass
class Secured:
    """The services, and the authority that they trust."""

    authority: Authority
    model: Path
    target: Service
    draft: Service
    gateway: Service


def shown(files: PemFiles, flags: tuple[str, ...] = ("--tls-cert", "--tls-key", "--tls-client-ca")) -> list[str]:
    given = zip(flags, (files.cert, files.key, files.ca), strict=True)
    return [text for flag, path in given if path is not None for text in (flag, str(path))]


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("secured")
    model = save_tiny(tmp_path_factory.mktemp("target"), seed=1, vocab_size=VOCAB)
    train_byte_level(VOCAB).save(str(model / "tokenizer.json"))
    authority = Authority(folder)
    peers = shown(authority.issue("gateway", "gateway.internal", ca=authority.path), PEER)
    with Services() as services:
        only = ["--tls-client-name", "gateway.internal"]
        tls = shown(authority.issue("draft", "draft.internal", ca=authority.path))
        draft = services.start("draft", ["draft", *LISTEN, "--method", "ngram", *tls, *only])
        tls = shown(authority.issue("target", "target.internal", ca=authority.path))
        target = services.start("target", ["target", *LISTEN, "--model", str(model), "--threads", "1", *tls, *only])
        services.wait(draft, START_S)
        services.wait(target, START_S)
        flags = [
            "--target",
            target.address,
            "--draft",
            draft.address,
            "--tokenizer",
            str(model),
            "--http",
            "127.0.0.1:0",
        ]
        names = ["--target-tls-name", "target.internal", "--draft-tls-name", "draft.internal"]
        tls = shown(authority.issue("public", ca=authority.path))
        gateway = services.start("gateway", ["gateway", *LISTEN, *flags, *names, *peers, *tls])
        services.wait(gateway, START_S)
        asyncio.run(find_peers(gateway.address, ClientTls(authority.issue("probe", "probe", ca=authority.path))))
        yield Secured(authority, model, target, draft, gateway)


async def find_peers(address: str, tls: ClientTls) -> None:
    """Until the gateway knows its target and its draft."""
    async with Client(address, credentials=tls.credentials()) as client, asyncio.timeout(START_S):
        while True:
            with suppress(OutriderError):  # it has no target yet
                if (await client.info()).draft is not None:
                    return
            await asyncio.sleep(0.1)


def test_a_client_with_a_certificate_is_served(secured: Secured, tmp_path: Path) -> None:
    files = Authority(tmp_path).issue("stranger", ca=secured.authority.path)
    asked = ["generate", "--gateway", secured.gateway.address, "--temperature", "0", "--max-tokens", "4", "a b a b a"]
    own = shown(secured.authority.issue("client", "client.example", ca=secured.authority.path), PEER)
    assert succeed(*asked, *own)
    for wrong in ([], ["--peer-ca", str(secured.authority.path)], shown(files, PEER)):
        done = outrider(*asked, *wrong, "--timeout", "5")
        assert done.returncode == 1 and secured.gateway.address in done.stderr, done.stderr


async def test_http_is_https(secured: Secured) -> None:
    address = secured.gateway.find(HTTP)
    files = secured.authority.issue("browser", "browser.example")
    context = ssl.create_default_context(cafile=secured.authority.path)
    with pytest.raises(httpx.TransportError):
        async with httpx.AsyncClient(verify=context) as client:
            await client.get(f"https://{address}/v1/models")
    with pytest.raises(httpx.TransportError):
        async with httpx.AsyncClient() as client:
            await client.get(f"http://{address}/v1/models")
    assert files.cert is not None
    context.load_cert_chain(files.cert, files.key)
    async with httpx.AsyncClient(verify=context) as client:
        body = {"prompt": "a b a b a", "max_tokens": 4, "stream": True}
        answer = await client.post(f"https://{address}/v1/completions", json=body)
        assert answer.status_code == 200 and answer.text.endswith("data: [DONE]\n\n")


async def test_a_service_serves_its_gateway_alone(secured: Secured) -> None:
    """A certificate of the same authority, with another name."""
    tls = ClientTls(secured.authority.issue("other", "client.example", ca=secured.authority.path), "target.internal")
    async with RemoteTargets([secured.target.address], tls=tls) as targets:
        (replica,) = targets.replicas
        await asyncio.wait_for(replica.attempted.wait(), START_S)
        assert not replica.present and replica.info is None


def test_the_doctor_sees_a_deployment_that_lets_it_in(secured: Secured) -> None:
    files = secured.authority.issue("doctor", "gateway.internal", ca=secured.authority.path)
    own = shown(files, PEER)
    names = ["--target-tls-name", "target.internal", "--draft-tls-name", "draft.internal"]
    where = ["--gateway", secured.gateway.address, "--target", secured.target.address, "--draft", secured.draft.address]
    seen = json.loads(outrider("doctor", *where, *own, *names, "--json").stdout)
    assert "does not answer" not in json.dumps(seen), seen
    assert "does not answer" in json.dumps(json.loads(outrider("doctor", *where, "--timeout", "2", "--json").stdout))


def test_services_that_let_it_in_are_planned_with(secured: Secured) -> None:
    own = shown(secured.authority.issue("planner", "gateway.internal", ca=secured.authority.path), PEER)
    names = ["--target-tls-name", "target.internal", "--draft-tls-name", "draft.internal"]
    asked = ["plan", "--target", secured.target.address, "--draft", secured.draft.address, "--seconds", "0", "--json"]
    known = ["--acceptance", "0.5", "--draft-ms", "1", "--max-ms", "1000"]
    assert json.loads(succeed(*asked, *known, *own, *names))["pair"]["acceptance"] == 0.5
    assert "no target answers" in outrider(*asked, *known, *own).stderr  # their certificates have these names


@dataclass
class Served:
    """What `outrider serve` started, and how a client gets in."""

    gateway: str
    http: str
    target: str
    authority: Authority
    files: PemFiles  # of a client
    token_file: Path

    @property
    def flags(self) -> list[str]:
        """Of every command that asks a gateway."""
        return [*shown(self.files, PEER), "--token-file", str(self.token_file)]


@pytest.fixture(scope="module")
def served(secured: Secured, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder, authority = tmp_path_factory.mktemp("served"), secured.authority
    (folder / "tokens.yaml").write_text(f"alice: {TOKEN}\n")
    (folder / "token").write_text(f"{TOKEN}\n")
    of_gateway = ("--gateway.tls-cert", "--gateway.tls-key", "--gateway.tls-client-ca")
    tls = shown(authority.issue("served", ca=authority.path), of_gateway)
    flags = [
        "--gateway.listen",
        "127.0.0.1:0",
        "--gateway.http",
        "127.0.0.1:0",
        "--gateway.tokens",
        str(folder / "tokens.yaml"),
    ]
    flags += ["--gateway.tls-client-name", "client.example"]
    with Services() as services:
        process = services.start("serve", ["serve", str(secured.model), "--draft.method", "ngram", *tls, *flags])
        end = time.monotonic() + START_S
        while not process.find(re.compile("(Ctrl-C ends)")):
            process.check()
            assert time.monotonic() < end, process.tail()
            time.sleep(0.1)
        gateway, target = (
            process.find(re.compile(rf"^{name} listens on (\S+)", re.M)) for name in ("gateway", "target")
        )
        http = process.find(re.compile(r"OpenAI +(\S+)/v1"))
        files = authority.issue("asking", "client.example", ca=authority.path)
        yield Served(gateway, http, target, authority, files, folder / "token")


def test_serve_lets_in_who_has_a_certificate_and_a_token(served: Served) -> None:
    asked = ["generate", "--gateway", served.gateway, "--temperature", "0", "--max-tokens", "4", "a b a b a"]
    assert succeed(*asked, *served.flags)
    other = served.authority.issue("other", "other.example", ca=served.authority.path)
    for wrong, said in (
        (shown(served.files, PEER), "no token"),
        ([*shown(other, PEER), "--token-file", str(served.token_file)], "none of the names"),
        (["--token-file", str(served.token_file)], served.gateway),
    ):
        done = outrider(*asked, *wrong, "--timeout", "5")
        assert done.returncode == 1 and said in done.stderr, done.stderr


def test_no_other_user_reaches_the_services_behind_it(served: Served) -> None:
    socket = Path(served.target.removeprefix("unix:"))
    assert socket.is_socket() and socket.parent.stat().st_mode & 0o077 == 0
    seen = outrider("doctor", "--gateway", served.gateway, *served.flags, "--json").stdout
    assert "does not answer" not in seen and json.loads(seen), seen


def test_an_llm_gets_in_by_the_same(served: Served) -> None:
    credentials = ClientTls(served.files).credentials()
    greedy = SamplingParams(temperature=0.0, max_tokens=4)
    with LLM(gateway=served.gateway, credentials=credentials, token=TOKEN) as llm:
        (answer,) = llm.generate([{"prompt_token_ids": [5, 6, 5, 6]}], greedy, use_tqdm=False)
        assert len(answer.outputs[0].token_ids) == 4 and TOKEN not in repr(llm.arguments)
    with pytest.raises(OutriderError, match="no token"):
        LLM(gateway=served.gateway, credentials=credentials)
    with pytest.raises(OutriderError):
        LLM(gateway=served.gateway, token=TOKEN)
