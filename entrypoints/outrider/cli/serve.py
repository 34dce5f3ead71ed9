"""`outrider serve`: draft (or a head), target and gateway on this machine, until it is ended. What its settings leave
open is left to the services, and so to their own variables: OUTRIDER_TARGET__MAX_ROWS works here, too."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from outrider.cli.arguments import fail, load_tokenizer, parse
from outrider.cli.local_services import (
    GRACE_S,
    LOOPBACK,
    LocalSettings,
    Service,
    ServiceFailed,
    Services,
    leave_on_signals,
)
from outrider.cli.terminal import Advance, Painter, make_painter, steps
from outrider.engine.token_tree import TokenTree
from outrider.gateway.auth import Tokens
from outrider.pairs import pair_path
from outrider.proposers.registry import (
    HEADS,
    TOKEN_METHODS,
    MethodNames,
    MethodSettings,
    check_methods,
    method_of,
    needs_model,
)
from outrider.rpc.errors import OutriderError
from outrider.rpc.hub import embedded, locate
from outrider.rpc.security import ServerTls
from outrider.rpc.server import require_free
from outrider.rpc.settings import TlsSettings, is_loopback, named_folders
from outrider.rpc.vocabulary import has_tokenizer
from outrider.rpc.words.request import split_methods
from outrider.target_service.settings import EngineSettings

MTP = "mtp"  # its layers may be in the target's own checkpoint
CACHE_BESIDE_TARGET = 256  # MiB of a draft on the target's GPU


class ServeSettings(LocalSettings, MethodSettings, EngineSettings, TlsSettings):
    """Which models, where they run, and where clients come in, and which of them."""

    section: ClassVar[str] = "serve"
    exposed: ClassVar[tuple[str, ...]] = ("listen", "http")

    target: Path | None = Field(
        None, description="folder or hub id of the target's checkpoint; also the bare argument (the embedded pair's)"
    )
    draft: str = Field(
        "",
        description="folder or hub id of the draft's checkpoint, or the --method, where it needs no model: "
        + ", ".join(TOKEN_METHODS),
    )
    method: MethodNames = "draft_model"
    head: Path | None = Field(
        None,
        description="folder or hub id of a head's checkpoint: the target itself drafts by it, and without --draft "
        "there is no draft service (a --method of these alone: the embedded pair's; mtp: the target's own): "
        + ", ".join(HEADS),
    )
    speculative_token_tree: Annotated[str, AfterValidator(TokenTree.checked)] | None = Field(
        None,
        description="what the head, or else the draft's model, drafts for greedy and coupled requests in place of "
        'chains: paths as "[(0,), (1,), (0, 0)]", whose numbers are ranks among the likeliest tokens',
    )
    pair: str = Field("python", description="the embedded pair, where no target is given")
    listen: str = Field("127.0.0.1:50050", description="address of the gateway, for gRPC clients")
    http: str = Field("", description="address of the HTTP interface and the live page, as 127.0.0.1:8000 (none)")
    allowed_origins: list[str] = Field(
        default_factory=list,
        description="sites whose pages may ask over HTTP, as https://app.example.com; *: all",
    )
    metrics: str = Field(
        "", description="address of the gateway's /metrics; the target's and the draft's have the next two ports (none)"
    )
    tokens: Path | None = Field(
        None, description="YAML file of callers and their bearer tokens: without one nobody is served"
    )
    model_name: str = Field("", description="name to serve the model under (default: the folder's)")
    num_draft_tokens: int | None = Field(None, ge=1, le=128, description="tokens drafted a round (the gateway's: 4)")
    mode: Literal["auto", "sequential", "chains", "branches"] | None = Field(
        None, description="how far the draft runs ahead (the gateway's: auto)"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] | None = Field(
        None, description="compute type of both models (auto: float32 on a CPU; float16 is for GPUs)"
    )
    device: str | None = Field(None, description="where both models run, as cpu or cuda (the services': cpu)")
    draft_device: str | None = Field(None, description="where the draft runs, if elsewhere")
    adapter: list[str] = Field(
        default_factory=list, description="NAME=DIR: a low-rank adapter of the target, in PEFT's layout"
    )
    draft_adapter: list[str] = Field(
        default_factory=list,
        description="NAME=DIR: one of the draft's model, by which it drafts for the target's adapter of that name",
    )
    allow_adapter_changes: bool = Field(
        False, description="adapters may be loaded and unloaded while it serves: outrider admin adapter"
    )
    draft_quantization: Literal["int8"] | None = Field(
        None, description="round the draft's weights to 8 bits, on a CPU (as they are)"
    )
    draft_threads: int | None = Field(None, ge=1, le=256, description="threads of the draft (default: all cores)")
    max_model_len: int | None = Field(None, ge=2, description="longest sequence (default: the models')")
    cache_mb: int | None = Field(None, ge=1, description="memory of the target's cache, in MiB (its own choice)")
    draft_cache_mb: int | None = Field(None, ge=1, description="memory of the draft's cache, in MiB (its own choice)")
    max_logprobs: int | None = Field(
        None, ge=-1, description="most log probabilities of a position that a request may ask for (20; -1: all)"
    )
    tool_parser: str | None = Field(
        None, description="how the model writes calls of tools: auto, or a format's name (auto)"
    )
    reasoning_parser: str | None = Field(
        None, description="how the model's reasoning is told apart: auto, none, or a parser's name (auto)"
    )
    batch_invariant: bool = Field(False, description="one reduction order for any number of rows: bit-identical rows")
    trust_remote_code: bool = Field(False, description="run code that comes with the target's checkpoint")
    trace_file: Path | None = Field(None, description="file to append traces to, for outrider trace")
    log_format: Literal["text", "json"] | None = Field(
        None, description="show the services' logs on standard error, for people or as JSON (default: not at all)"
    )
    start_timeout: float = Field(600.0, gt=0, description="seconds that a service may take to start")

    @model_validator(mode="before")
    @classmethod
    def _name_pair(cls, given: dict[str, object]) -> dict[str, object]:
        """The embedded pair's name as the target, by itself, brings what drafts for it, too."""
        target = given.get("target")
        folder = embedded(target) if isinstance(target, str | Path) else None
        if folder is None or folder.name != "target" or given.get("draft") or given.get("head"):
            return given
        return {name: value for name, value in given.items() if name != "target"} | {"pair": folder.parent.name}

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = check_methods(self.drafts_by, self.allow_code) if self.has_draft else ()
        without_model = not needs_model(names)
        if self.method in HEADS and self.method != MTP and self.target is not None and self.head is None:
            raise ValueError(f"give --head DIR, the folder of the {self.method} head")
        if self.target is None and self.draft and not self._draft_is_methods:
            raise ValueError("give a target with this draft, as in `outrider serve TARGET --draft DRAFT`")
        if self.speculative_token_tree is not None and self.head_folder is None and self.drafts_by != "draft_model":
            raise ValueError("speculative_token_tree is drafted by a head or by draft_model alone; leave it out")
        if self.target is not None and not self.draft and not without_model:
            raise ValueError("give --draft DIR, or --draft ngram, which needs no model, or --head DIR")
        named_folders(self.adapter, "adapter (--adapter)")
        if named_folders(self.draft_adapter, "draft_adapter (--draft-adapter)") and self.draft_folder is None:
            raise ValueError("draft_adapter (--draft-adapter) is for a draft with a model; leave it out")
        return self

    @property
    def has_draft(self) -> bool:
        """Whether a draft is served: beside a head only one that was asked for."""
        if self.draft:
            return True
        return self.method not in HEADS and (self.head is None or self.method != "draft_model")

    @property
    def drafts_by(self) -> str:
        """The method, or several, by either flag."""
        return self.draft if self._draft_is_methods else self.method

    @property
    def _draft_is_methods(self) -> bool:
        names = split_methods(self.draft)
        return bool(names) and set(names) <= set(TOKEN_METHODS)

    @property
    def target_folder(self) -> Path:
        """The target's checkpoint."""
        return pair_path(self.pair).target if self.target is None else self.target

    @property
    def draft_folder(self) -> Path | None:
        """The draft's checkpoint, if there is one."""
        if self._draft_is_methods or not self.has_draft:
            return None
        if self.target is None:
            by_model = [name for name in split_methods(self.method) if method_of(name).needs_model]
            return pair_path(self.pair).draft_by(by_model[0]) if by_model else None
        return Path(self.draft) if self.draft else None

    @property
    def head_folder(self) -> Path | None:
        """The head's checkpoint, if there is one."""
        if self.head is not None or self.method not in HEADS:
            return self.head
        return pair_path(self.pair).head_by(self.method) if self.target is None else self.target

    def located(self) -> Self:
        """With folders in place of hub ids: what is downloaded shows its progress here. Refuses what no service could
        load, before any is started."""
        found: dict[str, object] = {}
        if self.target is not None:
            found["target"] = locate(self.target, trust_remote_code=self.trust_remote_code)
        if self.draft:
            found["draft"] = str(locate(self.draft, drafts_by=self.method))
        if self.head is not None:
            found["head"] = locate(self.head)
        settings = self.model_copy(update=found)
        settings._check_folders()
        return settings

    def _check_folders(self) -> None:
        for folder in (self.target_folder, self.draft_folder, self.head_folder):
            if folder is not None and not (folder / "config.json").is_file():
                raise ValueError(f"{folder} is no folder of a checkpoint: it has no config.json")
        load_tokenizer(self.target_folder, "--target")

    @property
    def is_closed(self) -> bool:
        """Whether not everybody who reaches the gateway is served: then no other user reaches the other two either."""
        return self.tls_cert is not None or self.tokens is not None

    def check_access(self) -> None:
        """OutriderError for files that cannot be used."""
        ServerTls.of(self)
        if self.tokens is not None:
            Tokens(self.tokens)

    def target_arguments(self, listen: str = LOOPBACK) -> list[str]:
        """`outrider target ...`"""
        flags = {
            "model": self.target_folder,
            "head": self.head_folder,
            "speculative-token-tree": self.speculative_token_tree if self.head_folder is not None else None,
            "name": self.model_name or None,
            "dtype": self.dtype,
            "device": self.device,
            "threads": self.threads,
            "max-model-len": self.max_model_len,
            "cache-mb": self.cache_mb,
            "max-logprobs": self.max_logprobs,
            "batch-invariant": self.batch_invariant,
            "trust-remote-code": self.trust_remote_code,
            "allow-adapter-changes": self.allow_adapter_changes,
            **self.of_engine(),
        }
        adapters = [f"--adapter={given}" for given in self.adapter]
        return ["target", *self._common(listen, 1), *_flags(flags), *adapters]

    def draft_arguments(self, listen: str = LOOPBACK) -> list[str]:
        """`outrider draft ...`"""
        flags = {
            "method": None if self.drafts_by == "draft_model" else self.drafts_by,
            **self.of_methods(),
            "speculative-token-tree": self.speculative_token_tree if self.head_folder is None else None,
            "model": self.draft_folder,
            "target-tokenizer": self._mapped_target,
            "dtype": self.dtype,
            "quantization": self.draft_quantization,
            "device": self.draft_device or self.device,
            "threads": self.draft_threads,
            "max-model-len": self.max_model_len,
            "cache-mb": self.draft_cache_mb or self._cache_beside_target,
        }
        adapters = [f"--draft-adapter={given}" for given in self.draft_adapter]
        return ["draft", *self._common(listen, 2), *_flags(flags), *adapters]

    def gateway_arguments(self, target: str, draft: str) -> list[str]:
        """`outrider gateway ...`, in front of the target and, if it has an address, the draft."""
        flags = {
            "target": target,
            "draft": draft or None,
            "tokenizer": self.target_folder,
            "http": self.http or None,
            "insecure": self.insecure,
            "tls-cert": self.tls_cert,
            "tls-key": self.tls_key,
            "tls-client-ca": self.tls_client_ca,
            "tokens": self.tokens,
            "num-draft-tokens": self.num_draft_tokens,
            "mode": self.mode,
            "max-logprobs": self.max_logprobs,
            "tool-parser": self.tool_parser,
            "reasoning-parser": self.reasoning_parser,
            "model-name": self.model_name or None,
        }
        names = [f"--tls-client-name={name}" for name in self.tls_client_name]
        names += [f"--allowed-origins={origin}" for origin in self.allowed_origins]
        return ["gateway", *self._common(self.listen, 0), *_flags(flags), *names]

    @property
    def _cache_beside_target(self) -> int | None:
        """On a GPU with the target the draft takes little: what the device has left is the target's."""
        on_cpu = (self.device or "cpu") == "cpu"
        return None if on_cpu or (self.draft_device or self.device) != self.device else CACHE_BESIDE_TARGET

    @property
    def _mapped_target(self) -> Path | None:
        """The target, whose vocabulary may be another one; some folders have no tokenizer to compare."""
        target, draft = self.target_folder, self.draft_folder
        return target if draft is not None and has_tokenizer(target, draft) else None

    def metrics_address(self, place: int) -> str | None:
        """Of the gateway (0), the target (1) or the draft (2); port 0 leaves all three to the system."""
        host, colon, port = self.metrics.rpartition(":")
        return f"{host}:{int(port) + place if int(port) else 0}" if colon and port.isdecimal() else self.metrics or None

    def _common(self, listen: str, place: int) -> list[str]:
        common = {"listen": listen, "grace-s": GRACE_S, "trace-file": self.trace_file, "log-format": self.log_format}
        return list(_flags(common | {"metrics": self.metrics_address(place)}))


def _flags(values: Mapping[str, object]) -> Iterator[str]:
    """Flags with their values; what is None or off is left to the service."""
    for name, value in values.items():
        if value is True:
            yield f"--{name.replace('_', '-')}"
        elif value is not None and value is not False:
            yield f"--{name.replace('_', '-')}={value}"


DESCRIPTION = (
    "Serve a target (the bare argument) with a draft or a head on this machine: start the draft, if there is one, the "
    "target and a gateway, and end them with this process, on Ctrl-C, SIGTERM, or when the target or the gateway ends. "
    "Without any model the embedded pair is served."
)
HTTP = re.compile(r"^gateway http on (\S+)$", re.MULTILINE)
METRICS = re.compile(r"^\S+ metrics on (\S+)$", re.MULTILINE)
WATCH_S = 0.2


@dataclass(frozen=True, slots=True)
class Running:
    """The services, and where clients come in."""

    draft: Service | None
    target: Service
    gateway: Service

    @property
    def http(self) -> str:
        """The address of the HTTP interface; empty without one."""
        return self.gateway.find(HTTP)

    @property
    def metrics(self) -> list[str]:
        """Where the gateway, the target and the draft have /metrics; empty without."""
        services = (self.gateway, self.target, self.draft)
        found = [service.find(METRICS) for service in services if service is not None]
        return [address for address in found if address]


def main(argv: Sequence[str] | None = None, prog: str = "outrider serve") -> int:
    """Serves until a signal, which ends it with 0; 1 if a service does not start, or the target or gateway dies."""
    settings = parse(ServeSettings, sys.argv[1:] if argv is None else argv, prog, DESCRIPTION, bare=("target",))
    leave_on_signals()
    painter = make_painter(settings.plain)
    try:
        settings.check_access()
        settings = settings.located()
        require_free(settings.listen, settings.http, *(settings.metrics_address(place) for place in range(3)))
        with Services(shows_logs=settings.log_format is not None) as services:
            with starting(painter, settings) as advance:
                running = start(services, settings, advance)
            painter.lines(welcome(settings, running))
            return watch(running, painter)
    except (ServiceFailed, OutriderError, OSError, ValueError) as error:
        return fail(prog, error)


def starting(painter: Painter, settings: ServeSettings) -> AbstractContextManager[Advance]:
    """Shows the progress of `start`."""
    names = [*(["draft"] if settings.has_draft else []), "target", "gateway"]
    return steps(painter, f"starting {', '.join(names[:-1])} and {names[-1]}", total=len(names))


def start(services: Services, settings: ServeSettings, advance: Advance) -> Running:
    """Starts all and returns when the gateway has found the others."""
    at = {name: services.private_address(name) if settings.is_closed else LOOPBACK for name in ("draft", "target")}
    draft = services.start("draft", settings.draft_arguments(at["draft"])) if settings.has_draft else None
    target = services.start("target", settings.target_arguments(at["target"]))  # both load at the same time
    if draft is not None:
        advance(f"draft listens on {services.wait(draft, settings.start_timeout)}")
    return connect(services, settings, draft, target, advance)


def connect(
    services: Services, settings: ServeSettings, draft: Service | None, target: Service, advance: Advance
) -> Running:
    """Waits for the target, starts a gateway in front of the two, and returns when it has found them."""
    timeout = settings.start_timeout
    advance(f"target listens on {services.wait(target, timeout)}")
    gateway = services.start(
        "gateway", settings.gateway_arguments(target.address, "" if draft is None else draft.address)
    )
    address = services.wait(gateway, timeout)
    services.wait_ready(gateway, timeout)
    advance(f"gateway listens on {address}")
    return Running(draft, target, gateway)


def watch(running: Running, painter: Painter) -> int:
    """Waits for the end. A draft that dies costs speed and no request, so the others go on."""
    draft = running.draft
    try:
        while True:
            for service in (running.target, running.gateway):
                service.check()
            if draft is not None and not _lives(draft, painter):
                draft = None
            time.sleep(WATCH_S)
    except (KeyboardInterrupt, SystemExit):
        painter.note("\nending the services")
        return 0


def welcome(settings: ServeSettings, running: Running) -> list[str]:
    """What to do next."""
    address = running.gateway.address
    scheme, access = ("http", "") if settings.tls_cert is None else ("https", " --peer-ca CA")
    access += " --peer-cert CERT --peer-key KEY" if settings.tls_client_ca is not None else ""
    access += " --token-file FILE" if settings.tokens is not None else ""
    lines = [
        f"serving {settings.target_folder}, {'; '.join(_drafts(settings))}",
        f"  chat      outrider chat --gateway {address}{access}",
        f'  complete  outrider generate --gateway {address}{access} "Once upon a time" --max-tokens 64',
    ]
    if http := running.http:
        lines.append(f"  OpenAI    {scheme}://{http}/v1")
        lines += [f"  live page {scheme}://{http}/"] if is_loopback(http) and settings.tokens is None else []
    lines += [f"  metrics   http://{address}/metrics" for address in running.metrics]
    services = "" if settings.is_closed else _addresses(running)  # else they are where this user alone comes
    lines.append(f"  check     outrider doctor --gateway {address}{access}{services}")
    if settings.trace_file is not None:
        lines.append(f"  traces    outrider trace {settings.trace_file}")
    return [*lines, f"Ctrl-C ends {'both' if running.draft is None else 'all three'}."]


def _addresses(running: Running) -> str:
    """Of the target and the draft, as flags."""
    draft = "" if running.draft is None else f" --draft {running.draft.address}"
    return f" --target {running.target.address}{draft}"


def _drafts(settings: ServeSettings) -> Iterator[str]:
    """What drafts."""
    folder, names = settings.draft_folder, split_methods(settings.drafts_by)
    if folder and names == ("draft_model",):
        yield f"drafts from {folder}"
    elif settings.has_draft:
        yield f"drafts by {'; else '.join(method_of(name).summary for name in names)}"
    if (head := settings.head_folder) is not None:
        yield f"drafts beside the target by the head in {head}"


def _lives(draft: Service, painter: Painter) -> bool:
    try:
        draft.check()
    except ServiceFailed as error:
        painter.note(f"{error}\ngoing on without a draft: plain decoding, no request fails")
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
