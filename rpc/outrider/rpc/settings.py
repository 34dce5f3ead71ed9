"""Settings of a command: flags over environment over a YAML file over defaults, into one frozen model.

A command declares its settings as a ServiceSettings with a `section`. The field `max_window` of the section `target` is
then `--max-window`, `OUTRIDER_TARGET__MAX_WINDOW` and, in the file of `--config`, `max_window` under `target:`. Fields
of a nested model have dotted names: `--kv.block-size`, `OUTRIDER_TARGET__KV__BLOCK_SIZE`. A nested ServiceSettings has
a section of its own: `--target.max-window` of a command that starts a target is `OUTRIDER_TARGET__MAX_WINDOW`, too. A
name that no field has is an error wherever it stands, a former name (`aliases`) works and warns, and every complaint
says where its value came from. `--help` shows the flags that people need `first`, `--help-all` all, by `subjects`.

pydantic-settings is not used: it ignores unknown variables, reads the environment whenever a model is built, and names
neither variable nor flag in its errors.

From the top: the base of all settings, the types and groups of fields that several commands share, the fields of a
model as options, the command line made of them (values stay text, for the model to judge), the three sources read, and
how many threads a process may keep busy. No torch."""

from __future__ import annotations

import argparse
import difflib
import inspect
import ipaddress
import json
import logging
import math
import os
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NoReturn, Self, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo

from outrider.rpc.messages import MAX_DRAFT_TOKENS, MAX_NAME_CHARS
from outrider.rpc.words.checks import ALL_LOGPROBS

log = logging.getLogger(__name__)

ENV_PREFIX = "OUTRIDER_"
SECTION_CUTOFF = 0.8  # a file has sections of other commands: only a near miss of ours is an error
PLACEHOLDERS = {int: "N", float: "X", Path: "PATH", dict: "JSON"}
FLAG = re.compile(r"--([a-z][a-z0-9-]*)")
QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of a container, as "200000 100000": microseconds in every so many


class SettingsError(ValueError):
    """Settings that cannot be used. The message has one line per problem."""


class ServiceSettings(BaseModel):
    """The base of every command's settings. Building one reads nothing but its arguments."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)
    section: ClassVar[str]
    subjects: ClassVar[Mapping[str, str]] = {}  # headings of --help-all, by the field that each begins with
    first: ClassVar[tuple[str, ...]] = ()  # what --help shows; empty: everything
    decided: ClassVar[frozenset[str]] = frozenset()  # dotted names that the command itself gives: no flags
    aliases: ClassVar[Mapping[str, tuple[str, ...]]] = {}  # former names, and the dotted ones that took their place

    @classmethod
    def renamed(cls, name: str, value: Any) -> tuple[str, ...]:
        """The names that took the place of a former one."""
        return cls.aliases[name]


Address = Annotated[str, Field(description="address to serve on: HOST:PORT, :PORT or unix:PATH")]
Device = Annotated[str, Field(description="where the model runs, as cpu or cuda")]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    Field(description="compute type; auto: float32 on a CPU; float16 is for GPUs"),
]
MaxLogprobs = Annotated[
    int,
    Field(
        ge=ALL_LOGPROBS,
        description="most log probabilities of a position that a request may ask for; -1: the whole vocabulary's",
    ),
]
MaxModelLen = Annotated[int | None, Field(ge=2, description="longest sequence (default: the model's)")]
Mode = Annotated[
    Literal["auto", "sequential", "chains", "branches"],
    Field(
        description="how far the draft runs ahead: sequential, chains, branches, or auto: chosen for each request, and "
        "off where it does not pay"
    ),
]
NumDraftTokens = Annotated[int, Field(ge=0, le=MAX_DRAFT_TOKENS, description="tokens drafted a round")]
Threads = Annotated[int | None, Field(ge=1, le=256, description="threads of a model's passes (default: all cores)")]
VllmMetrics = Annotated[
    bool, Field(description="with metrics: what routers of vLLM's replicas read, also under vLLM's names")
]
CHECKPOINT = Field(
    description="folder of the checkpoint (Hugging Face layout, safetensors), a GGUF file, or a hub id: ORG/NAME, of "
    "GGUF files there ORG/NAME:Q4_K_M"
)


def require_loopback(addresses: Mapping[str, str], instead: str = "") -> None:
    """ValueError for an address, by its setting, that others than this machine can reach; `instead` is what may be
    given beside --insecure."""
    for name, address in addresses.items():
        if address and not is_loopback(address):
            raise ValueError(
                f"{name} (--{name}) is {address}, which others can reach in plaintext: give {instead}--insecure if "
                "the network keeps them out; allowed without: 127.0.0.1, [::1], localhost, unix:"
            )


def is_loopback(address: str) -> bool:
    """Whether this machine alone reaches "host:port" or "unix:path". True for what is no address: nothing serves it."""
    host, colon, _ = address.rpartition(":")
    if address.startswith("unix:") or not colon or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class TlsSettings(ServiceSettings):
    """How a server shows who it is, and which clients it takes (security.py)."""

    exposed: ClassVar[tuple[str, ...]] = ()  # fields with addresses that are served by TLS, where that is on
    subjects: ClassVar[Mapping[str, str]] = {"tls_cert": "TLS to clients"}

    tls_cert: Path | None = Field(
        None, description="PEM file of the server's certificate and its chain: TLS in place of plaintext"
    )
    tls_key: Path | None = Field(None, description="PEM file of the private key of tls-cert")
    tls_client_ca: Path | None = Field(
        None, description="PEM file of the authorities of clients' certificates; clients without one are refused (mTLS)"
    )
    tls_client_name: list[str] = Field(
        default_factory=list,
        description="name (SAN) of a client that may call: others' certificates are refused, too (default: any of "
        "tls-client-ca)",
    )
    insecure: bool = Field(
        False, description="serve in plaintext on an address that others than this machine can reach"
    )

    @model_validator(mode="after")
    def _check_tls(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert (--tls-cert) and tls_key (--tls-key) belong together; give both or neither")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("tls_client_ca (--tls-client-ca) is for TLS; give --tls-cert and --tls-key, too")
        if self.tls_client_name and self.tls_client_ca is None:
            raise ValueError("tls_client_name (--tls-client-name) is in clients' certificates; give --tls-client-ca")
        if self.insecure and self.tls_cert is not None:
            raise ValueError("insecure (--insecure) is for serving without TLS, and --tls-cert is given; leave one out")
        if not self.insecure and self.tls_cert is None:
            require_loopback({name: getattr(self, name) for name in self.exposed}, "--tls-cert and --tls-key, or ")
        return self


class PeerSettings(ServiceSettings):
    """How a client knows the servers that it calls, and shows who it is (security.py)."""

    subjects: ClassVar[Mapping[str, str]] = {"peer_ca": "TLS to what is called"}

    peer_ca: Path | None = Field(
        None, description="PEM file of the authorities of the certificates of what is called: TLS to it"
    )
    peer_cert: Path | None = Field(
        None, description="PEM file of the certificate to show to what is called, its chain too"
    )
    peer_key: Path | None = Field(None, description="PEM file of the private key of peer-cert")

    @model_validator(mode="after")
    def _check_peer(self) -> Self:
        if (self.peer_cert is None) != (self.peer_key is None):
            raise ValueError("peer_cert (--peer-cert) and peer_key (--peer-key) belong together; give both or neither")
        if self.peer_cert is not None and self.peer_ca is None:
            raise ValueError("peer_cert (--peer-cert) is for TLS; give --peer-ca, too")
        return self


class ServerSettings(TlsSettings):
    """What every process is told that serves over gRPC."""

    exposed: ClassVar[tuple[str, ...]] = ("listen",)
    subjects: ClassVar[Mapping[str, str]] = {"reflection": "serving", "trace_file": "traces and logs"}

    listen: Address
    reflection: bool = Field(False, description="describe the service to any caller: gRPC reflection")
    health: str = Field(
        "",
        description="address of gRPC health alone, without encryption, for probes that know none: HOST:PORT or :PORT; "
        "empty: none beside the service's own",
    )
    metrics: str = Field(
        "",
        description="address of /metrics, /livez and /readyz over HTTP: HOST:PORT or :PORT; empty: none",
    )
    grace_s: float = Field(30.0, ge=0, description="time that running streams get on SIGTERM, in seconds")
    trace_file: Path | None = Field(None, description="append traces to this file, as OTLP JSON lines")
    trace_file_mb: int = Field(
        256,
        ge=1,
        description="greatest size of trace-file, in MiB: then it begins anew, and what it held is kept as .1",
    )
    log_format: Literal["text", "json"] = Field(
        "text", description="lines of the log on standard error: for people, or an object each for a collector"
    )

    def require_known_callers(self, name: str) -> None:
        """ValueError for a setting, by its name, that lets callers name files of this machine, where others than this
        machine's may call without a certificate."""
        if self.tls_client_ca is None and not is_loopback(self.listen):
            raise ValueError(
                f"{name} (--{name.replace('_', '-')}): others reach listen (--listen), {self.listen}; allowed: with "
                "--tls-client-ca, whose clients show certificates, or 127.0.0.1, [::1], localhost, unix:"
            )

    @field_validator("metrics")
    @classmethod
    def _check_metrics(cls, address: str) -> str:
        _, colon, port = address.rpartition(":")
        if address and (address.startswith("unix:") or not colon or not port.isdecimal() or int(port) > 65535):
            raise ValueError("must be HOST:PORT or :PORT, with a port of at most 65535")
        return address


class ModelSettings(ServiceSettings):
    """What every process is told that runs a model of its own behind a key-value cache."""

    subjects: ClassVar[Mapping[str, str]] = {"name": "model and device", "cache_mb": "memory and batches"}

    name: str = Field(
        "", description="name to serve the model under (default: the folder's; without a model, the method's)"
    )
    dtype: Dtype = "auto"
    activations: Literal["int16", "float32"] = Field(
        "int16",
        description="what rows are where they meet quantised weights on a CPU: int16 (each 32 numbers are rounded to "
        "16 bits together, for products of integers) or float32 (nothing is rounded; slower); replicas must agree",
    )
    device: Device = "cpu"
    threads: Threads = None
    max_model_len: MaxModelLen = None
    cache_mb: int | None = Field(
        None,
        ge=1,
        description="memory of the key-value cache, in MiB (default: 512 for a target, 256 for a draft; on a GPU what "
        "gpu-memory-utilization leaves)",
    )
    num_blocks: int | None = Field(None, ge=1, description="blocks of 16 tokens in the cache (overrides cache-mb)")
    gpu_memory_utilization: float = Field(
        0.9, gt=0, le=1, description="share of a GPU's memory that is in use once the cache is there, by whomever"
    )
    cuda_graphs: bool = Field(True, description="on a GPU, capture steps at start and replay them")
    max_rows: int = Field(512, ge=1, le=65536, description="rows of one step, of prompts and of drafts together")
    max_sequences: int = Field(256, ge=1, description="sequences open at once")

    @property
    def cache_bytes(self) -> int | None:
        """Memory of the cache, where it is given."""
        return None if self.cache_mb is None else self.cache_mb << 20


@dataclass(frozen=True, slots=True)
class Option:
    """One field that can be set, of the settings or of a model nested in them."""

    path: tuple[str, ...]
    field: FieldInfo
    section: str = ""
    subject: str = ""  # its heading in --help-all
    outside: int = 0  # how many names of the path lead to the settings of the section

    @property
    def name(self) -> str:
        """The dotted name of the field."""
        return ".".join(self.path)

    @property
    def flag(self) -> str:
        """The name on the command line."""
        return "--" + self.name.replace("_", "-")

    @property
    def place(self) -> str:
        """The name in a file, behind its section."""
        return f"{self.section}.{'.'.join(self.path[self.outside :])}"

    @property
    def variable(self) -> str:
        """The name in the environment."""
        return f"{ENV_PREFIX}{self.place.replace('.', '__')}".upper()

    @property
    def kind(self) -> Any:
        """The field's type without None; the generic one of a list or mapping."""
        annotation = plain_type(self.field.annotation)
        return get_origin(annotation) or annotation

    @property
    def repeats(self) -> bool:
        """Whether it takes several values."""
        return self.kind in (list, tuple, set, frozenset)


def options(model: type[BaseModel]) -> Iterator[Option]:
    """Every field that can be set, a class's own before those of its bases, those of nested models in their place."""
    decided = getattr(model, "decided", ())
    return (option for option in _options(model, (), "", 0) if option.name not in decided)


def _options(model: type[BaseModel], path: tuple[str, ...], section: str, outside: int) -> Iterator[Option]:
    if own_section := getattr(model, "section", ""):
        section, outside = own_section, len(path)
    titles = {name: text for cls in reversed(model.__mro__) for name, text in vars(cls).get("subjects", {}).items()}
    subject = ""
    own_first = dict.fromkeys(name for cls in model.__mro__ for name in inspect.get_annotations(cls))
    for name in filter(model.model_fields.__contains__, own_first):
        subject = titles.get(name, subject)
        field = model.model_fields[name]
        nested = plain_type(field.annotation)
        if isinstance(nested, type) and issubclass(nested, BaseModel):
            yield from _options(nested, (*path, name), section, outside)
        else:
            title = ": ".join((*path, subject)) if subject else ".".join(path)
            yield Option((*path, name), field, section, title, outside)


def former_options(model: type[BaseModel]) -> dict[str, Option]:
    """The names of `aliases`: each as the first one that took its place."""
    known = {option.name: option for option in options(model)}
    aliases: Mapping[str, tuple[str, ...]] = getattr(model, "aliases", {})
    return {name: Option((name,), known[new[0]].field, getattr(model, "section", "")) for name, new in aliases.items()}


def plain_type(annotation: Any) -> Any:
    """A type without `| None`."""
    if get_origin(annotation) in (Union, types.UnionType):
        others = [arg for arg in get_args(annotation) if arg is not type(None)]
        if len(others) == 1:
            return others[0]
    return annotation


def near_miss(name: str, known: Iterable[str]) -> str:
    """What was probably meant, or what there is."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {close[0]}?" if close else f"there are {', '.join(sorted(names))}"


@dataclass(frozen=True, slots=True)
class ParsedFlags:
    """What a command line gives: values by dotted name, and the file that it names."""

    values: dict[str, Any]
    config_path: str | None


def parse_flags(model: type[ServiceSettings], argv: Sequence[str], prog: str, description: str) -> ParsedFlags:
    """Reads a command line. Raises SettingsError; `--help` ends the process."""
    known = list(options(model))
    parser = _build_parser(model, known, prog, description, shows_all="--help-all" in argv or not model.first)
    parsed, rest = parser.parse_known_args(_bind_numbers(argv))
    if rest:
        names = [*(option.flag for option in known), "--config", "--help", "--help-all"]
        names += [f"--no-{option.flag[2:]}" for option in known if option.kind is bool]
        raise SettingsError("\n".join(_unknown(arg, names) for arg in rest if arg.startswith("-") or arg == rest[0]))
    values = vars(parsed)
    config_path = values.pop("--config")
    return ParsedFlags(values, config_path)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingsError(message)


def _build_parser(
    model: type[ServiceSettings], known: Sequence[Option], prog: str, description: str, *, shows_all: bool
) -> argparse.ArgumentParser:
    example = f"{ENV_PREFIX}{model.section}__".upper()
    more = "" if shows_all else f"These are the flags that are needed first; --help-all shows all {len(known)}. "
    parser = _Parser(
        prog=prog,
        usage=f"{prog} [flags]",
        description=description,
        epilog=f"{more}Every setting can also be given by a variable, --max-size as {example}MAX_SIZE, or in the file "
        f"of --config, as max_size under {model.section}:. Flags win over variables, variables over the file.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("--config", dest="--config", metavar="PATH", default=None, help="a YAML file of settings")
    every = "show all flags, by subject, and exit" if model.first else argparse.SUPPRESS  # which --help does, too
    parser.add_argument("--help-all", action="help", help=every)
    groups: dict[str, Any] = {"": parser}
    for option in _by_need(known, model.first):
        title = "needed first" if option.name in model.first else option.subject
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        text = _help(option, {one.name: one for one in known})
        _add(groups[title], option, text if shows_all or option.name in model.first else argparse.SUPPRESS)
    for option in former_options(model).values():
        _add(parser, option, argparse.SUPPRESS)
    return parser


def _by_need(known: Sequence[Option], first: Sequence[str]) -> list[Option]:
    """Those that are needed first in their own order, then all others."""
    return sorted(known, key=lambda option: first.index(option.name) if option.name in first else len(first))


def _add(group: Any, option: Option, text: str) -> None:
    if option.kind is bool:
        group.add_argument(option.flag, dest=option.name, action=argparse.BooleanOptionalAction, help=text)
        return
    action = "append" if option.repeats else "store"
    group.add_argument(option.flag, dest=option.name, action=action, metavar=_metavar(option), help=text)


def _help(option: Option, known: Mapping[str, Option]) -> str:
    notes = ["required"] if option.field.is_required() and not option.outside else []
    default = None if option.field.is_required() else option.field.get_default(call_default_factory=True)
    if option.repeats:
        notes.append("may be repeated")
    if shown := _show(default):
        notes.append(f"default: {shown}")
    text = _with_full_flags((option.field.description or "").rstrip("."), option.path[: option.outside], known)
    return (f"{text} ({', '.join(notes)})" if notes else text).replace("%", "%%")


def _show(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, list | tuple | set | frozenset):
        return ", ".join(_show(item) for item in value)
    return "" if value is None or value == {} else str(value)


def _metavar(option: Option) -> str:
    kind = option.kind
    if kind is Literal:
        return "{" + ",".join(str(choice) for choice in _choices(option)) + "}"
    if isinstance(kind, type) and issubclass(kind, Enum):
        return "{" + ",".join(str(member.value) for member in kind) + "}"
    return PLACEHOLDERS.get(kind, "TEXT")


def _choices(option: Option) -> Sequence[Any]:
    args = get_args(option.field.annotation)
    return [choice for arg in args for choice in (get_args(arg) or (arg,)) if choice is not type(None)]


def _bind_numbers(argv: Sequence[str]) -> list[str]:
    """Ties a negative number to the flag before it: argparse takes some (-1e-3) for flags."""
    bound: list[str] = []
    for arg in argv:
        if bound and bound[-1].startswith("--") and "=" not in bound[-1] and _is_negative_number(arg):
            bound[-1] += f"={arg}"
        else:
            bound.append(arg)
    return bound


def _is_negative_number(arg: str) -> bool:
    try:
        float(arg)
    except ValueError:
        return False
    return arg.startswith("-")


def _unknown(arg: str, names: Sequence[str]) -> str:
    name = arg.partition("=")[0]
    return f"unknown flag {name}: {near_miss(name, names)}" if arg.startswith("-") else f"unexpected argument {arg}"


S = TypeVar("S", bound=ServiceSettings)


@dataclass(frozen=True, slots=True)
class _Given:
    """A value and where it came from."""

    value: Any
    origin: str


@dataclass(slots=True)
class _Reader:
    """The three sources, read one after the other: a later one's values take the place of an earlier one's."""

    cls: type[ServiceSettings]
    known: dict[str, Option] = field(init=False)
    former: dict[str, Option] = field(init=False)
    values: dict[str, _Given] = field(default_factory=dict)
    renames: list[str] = field(default_factory=list)  # a line for each former name that was used
    problems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.known = {option.name: option for option in options(self.cls)}
        self.former = former_options(self.cls)

    def read_flags(self, flags: Mapping[str, Any]) -> None:
        every = self.known | self.former
        found: dict[str, _Given] = {}
        for name, value in flags.items():
            if name in every:
                found[name] = _Given(value, every[name].flag)
            else:
                self.problems.append(f"unknown setting {name}: {near_miss(name, self.known)}")
        self._take(found, lambda option: option.flag)

    def read_environment(self, environ: Mapping[str, str]) -> None:
        by_variable = {option.variable: option for option in (*self.former.values(), *self.known.values())}
        variables = {option.variable for option in self.known.values()}
        elsewhere = {option.variable for option in _all_options(self.cls)}
        prefixes = {variable.partition("__")[0] + "__" for variable in by_variable}
        found: dict[str, _Given] = {}
        for variable, text in environ.items():
            start, mark, _ = variable.upper().partition("__")
            if not mark or not start.startswith(ENV_PREFIX):
                continue
            option = by_variable.get(variable.upper())
            if start + mark not in prefixes:
                if _resembles(start.removeprefix(ENV_PREFIX), self.cls.section.upper()):
                    meant = f"{ENV_PREFIX}{self.cls.section.upper()}__"
                    self.problems.append(f"unknown variable {variable}: did you mean {meant}...?")
            elif option is None:
                if variable.upper() not in elsewhere:
                    self.problems.append(f"unknown variable {variable}: {near_miss(variable.upper(), variables)}")
            elif text:  # an empty variable counts as absent
                try:
                    found[option.name] = _Given(_decode(option, text), variable)
                except json.JSONDecodeError as error:
                    self.problems.append(f"{variable} is no JSON: {error}")
        self._take(found, lambda option: option.variable)

    def read_file(self, path: Path) -> None:
        try:
            content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            self.problems.append(f"cannot read --config {path}: {_unreadable(error)}")
            return
        own = self.cls.section
        sections = dict.fromkeys((own, *(option.section for option in self.known.values())))
        found: dict[str, _Given] = {}
        for section in sections:
            values = content.get(section) or {} if isinstance(content, dict) else None
            if not isinstance(content, dict) or not isinstance(values, dict):
                self.problems.append(f"{path} must hold a mapping of sections, {section}: a mapping of settings")
                return
            self._read_section(section, values, path, found)
        if own not in content:
            others = (name for name in content if name not in sections and _resembles(name, own))
            self.problems += [f"unknown section {name} in {path}: did you mean {own}?" for name in others]
        self._take(found, lambda option: option.place)

    def _read_section(self, section: str, values: Mapping[Any, Any], path: Path, found: dict[str, _Given]) -> None:
        inside = [option for option in (*self.former.values(), *self.known.values()) if option.section == section]
        by_name = {option.place.removeprefix(f"{section}."): option for option in inside}
        elsewhere = {option.place for option in _all_options(self.cls)}
        groups = {name[:end] for name in by_name for end in range(len(name)) if name[end] == "."}
        for name, value in _flatten(values, groups):
            if name in by_name:
                found[by_name[name].name] = _Given(value, f"{path}: {section}.{name}")
            elif f"{section}.{name}" not in elsewhere:
                current = [key for key, option in by_name.items() if option.name in self.known]
                self.problems.append(f"unknown setting {section}.{name} in {path}: {near_miss(name, current)}")

    def _take(self, found: Mapping[str, _Given], shown: Callable[[Option], str]) -> None:
        """What one source gives: a setting by its own name comes before one by a former name."""
        for name in filter(found.__contains__, self.former):
            new = self.cls.renamed(name, found[name].value)
            self.values |= dict.fromkeys(new, found[name])
            meant = " and ".join(shown(self.known[one]) for one in new)
            self.renames.append(f"{found[name].origin} is now {meant}; the former name goes with the next release")
        self.values |= {name: value for name, value in found.items() if name in self.known}


def load_settings(
    cls: type[S],
    flags: Mapping[str, Any] | None = None,
    config_path: str | Path | None = None,
    environ: Mapping[str, str] | None = None,
    wanted: Mapping[str, str] | None = None,
    warn: Callable[[str], object] = log.warning,
) -> S:
    """Reads the settings from flags (by dotted field name), the environment and the file. Raises SettingsError.
    `wanted` has what to say where a required setting is absent, for those with a simpler way than their flag; `warn`
    is told of each former name."""
    reader = _Reader(cls)
    if config_path is not None:
        reader.read_file(Path(config_path))
    reader.read_environment(os.environ if environ is None else environ)
    reader.read_flags(flags or {})
    if reader.problems:
        raise SettingsError("\n".join(reader.problems))
    for line in reader.renames:
        warn(line)
    try:
        return cls.model_validate(_nest({name: item.value for name, item in reader.values.items()}))
    except ValidationError as error:
        details = [dict(detail) for detail in error.errors()]
        details = [detail for detail in details if not _follows(detail, details)]
        problems = [_explain(cls.section, reader.known, reader.values, wanted or {}, detail) for detail in details]
        raise SettingsError("\n".join(dict.fromkeys(problems))) from error


def parse_settings(
    cls: type[S], argv: Sequence[str], prog: str, description: str, wanted: Mapping[str, str] | None = None
) -> S:
    """The settings of a command line; what is wrong with them ends the process with status 2, as argparse does."""
    try:
        parsed = parse_flags(cls, argv, prog, description)
        warn = partial(print, f"{prog}:", file=sys.stderr)
        return load_settings(cls, parsed.values, parsed.config_path, wanted=wanted, warn=warn)
    except SettingsError as error:
        lines = "".join(f"{prog}: error: {line}\n" for line in str(error).splitlines())
        sys.stderr.write(f"{lines}See {prog} --help.\n")
        raise SystemExit(2) from error


def flags_of(settings: ServiceSettings, **changed: Any) -> list[str]:
    """The flags that start a command with the same settings, of which `changed` differ. What was not set is left out,
    and so to the command's own variables; None is as if it was not set. A setting of a nested model is no flag here."""
    given = {name: getattr(settings, name) for name in settings.model_fields_set} | changed
    flags: list[str] = []
    for option in options(type(settings)):
        value = given.get(option.name)
        if isinstance(value, bool):
            flags.append(option.flag if value else f"--no-{option.flag[2:]}")
        elif value is not None:
            values = value if option.repeats else [json.dumps(value) if isinstance(value, dict) else value]
            flags += [f"{option.flag}={one}" for one in values]
    return flags


def _all_options(cls: type[ServiceSettings]) -> Iterator[Option]:
    """With those that the command decides itself: in variables and files they are for the services alone."""
    return _options(cls, (), "", 0)


def _unreadable(error: Exception) -> str:
    """One line for what is wrong with a file; YAML's own message has a drawing of the place."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem and error.problem_mark:
        return f"line {error.problem_mark.line + 1}: {' '.join(error.problem.split())}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split())


def _flatten(values: Mapping[Any, Any], groups: set[str], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a section by dotted name; only nested models are opened, not mappings that are values."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        if name in groups and isinstance(value, dict):
            yield from _flatten(value, groups, f"{name}.")
        else:
            yield name, value


def _decode(option: Option, text: str) -> Any:
    """A variable's value: lists are JSON or separated by commas, mappings JSON, all else is left to the model."""
    if option.kind is dict or (option.repeats and text.lstrip().startswith("[")):
        return json.loads(text)
    return [part.strip() for part in text.split(",")] if option.repeats else text


def _nest(values: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for name, value in values.items():
        *path, last = name.split(".")
        inner = nested
        for key in path:
            inner = inner.setdefault(key, {})
        inner[last] = value
    return nested


def _follows(detail: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> bool:
    """Whether it says no more than another: a list whose items are wrong counts as too short, too."""
    place = detail["loc"]
    return detail["type"] == "too_short" and any(
        len(other["loc"]) > len(place) and other["loc"][: len(place)] == place for other in others
    )


def _explain(
    section: str,
    known: Mapping[str, Option],
    given: Mapping[str, _Given],
    wanted: Mapping[str, str],
    detail: Mapping[str, Any],
) -> str:
    """One line for one of pydantic's errors: the field, what is wrong, and where the value came from."""
    location = [str(part) for part in detail["loc"]]
    name = next((name for end in range(len(location), 0, -1) if (name := ".".join(location[:end])) in known), None)
    message = _with_full_flags(str(detail["msg"]).removeprefix("Value error, "), location, known)
    if name is None:
        return f"{'.'.join([section, *location])}: {message}"
    option = known[name]
    if name not in given:
        if detail["type"] != "missing":
            return f"{option.place}: {message}"
        return wanted.get(name) or (
            f"{option.place} is required: give {option.flag}, {option.variable} "
            f"or {option.place} in the file of --config"
        )
    return f"{given[name].origin}: {message[:1].lower()}{message[1:]}, not {detail['input']!r}"


def _with_full_flags(message: str, location: Sequence[str], known: Mapping[str, Option]) -> str:
    """A service names its flags as its own command has them; a command that starts it has them under its name."""
    if not location:
        return message

    def full(flag: re.Match[str]) -> str:
        name = f"{location[0]}.{flag[1].replace('-', '_')}"
        return known[name].flag if name in known else flag[0]

    return FLAG.sub(full, message)


def _resembles(name: object, other: str) -> bool:
    return bool(difflib.get_close_matches(str(name), [other], cutoff=SECTION_CUTOFF))


def named_folders(given: Sequence[str], field: str) -> dict[str, Path]:
    """The folders of a list of NAME=DIR, by name. ValueError for what is none, or comes twice."""
    return {name: Path(folder) for name, folder in named_values(given, field, "DIR").items()}


def named_values(given: Sequence[str], field: str, kind: str) -> dict[str, str]:
    """What a list of NAME=`kind` has, by name. ValueError for what is none, or comes twice."""
    values: dict[str, str] = {}
    for text in given:
        name, _, value = text.partition("=")
        if not (name and value and name.isprintable() and len(name) <= MAX_NAME_CHARS):
            allowed = f"NAME={kind}, with a name of 1 to {MAX_NAME_CHARS} printable characters"
            raise ValueError(f"{field}: is {text[:200]!r}; allowed: {allowed}")
        if name in values:
            raise ValueError(f"{field}: has {name!r} more than once; allowed: a name for each")
        values[name] = value
    return values


def usable_threads() -> int:
    """What `--threads` stands for unless it is given: OMP_NUM_THREADS, else the cores that this process may use."""
    given = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return int(given) if given.isdigit() and int(given) > 0 else usable_cores()


def usable_cores(quota: Path = QUOTA) -> int:
    """The cores of the affinity mask, or fewer where a container is allowed less time than they have."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on every system
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    allowed, _, period = quota.read_text().strip().partition(" ") if quota.is_file() else ("max", "", "")
    if allowed == "max":
        return cores
    return max(1, min(cores, math.ceil(int(allowed) / int(period))))
