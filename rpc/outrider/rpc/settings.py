"""Settings of a command: flags over environment over a YAML file over defaults, into one frozen model.

A command declares its settings as a ServiceSettings with a `section`. The field `max_window` of the section `target` is
then `--max-window`, `OUTRIDER_TARGET__MAX_WINDOW` and, in the file of `--config`, `max_window` under `target:`. Fields
of a nested model have dotted names: `--kv.block-size`, `OUTRIDER_TARGET__KV__BLOCK_SIZE`. A name that no field has is
an error wherever it stands, and every complaint says where its value came from.

pydantic-settings is not used: it ignores unknown variables, reads the environment whenever a model is built, and names
neither variable nor flag in its errors.

From the top: the fields of a model as options, the command line made of them (values stay text, for the model to
judge), what all services are told, the three sources read, and how many threads a process may keep busy. No torch."""

from __future__ import annotations

import argparse
import difflib
import inspect
import ipaddress
import json
import math
import os
import sys
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NoReturn, Self, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo

from outrider.rpc.messages import MAX_NAME_CHARS


class SettingsError(ValueError):
    """Settings that cannot be used. The message has one line per problem."""


@dataclass(frozen=True, slots=True)
class Option:
    """One field that can be set, of the settings or of a model nested in them."""

    path: tuple[str, ...]
    field: FieldInfo

    @property
    def name(self) -> str:
        """The dotted name."""
        return ".".join(self.path)

    @property
    def flag(self) -> str:
        """The command line's name."""
        return "--" + self.name.replace("_", "-")

    @property
    def kind(self) -> Any:
        """The field's type without None; the generic one of a list or mapping."""
        annotation = plain_type(self.field.annotation)
        return get_origin(annotation) or annotation

    @property
    def repeats(self) -> bool:
        """Whether it takes several values."""
        return self.kind in (list, tuple, set, frozenset)


def options(model: type[BaseModel], path: tuple[str, ...] = ()) -> Iterator[Option]:
    """Every field that can be set, a class's own before those of its bases, those of nested models in their place."""
    own_first = dict.fromkeys(name for cls in model.__mro__ for name in inspect.get_annotations(cls))
    for name in filter(model.model_fields.__contains__, own_first):
        field = model.model_fields[name]
        nested = plain_type(field.annotation)
        if isinstance(nested, type) and issubclass(nested, BaseModel):
            yield from options(nested, (*path, name))
        else:
            yield Option((*path, name), field)


def plain_type(annotation: Any) -> Any:
    """A type without `| None`."""
    if get_origin(annotation) in (Union, types.UnionType):
        others = [arg for arg in get_args(annotation) if arg is not type(None)]
        if len(others) == 1:
            return others[0]
    return annotation


def near_miss(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """What was probably meant, or what there is."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=cutoff)
    return f"did you mean {close[0]}?" if close else f"there are {', '.join(sorted(names))}"


PLACEHOLDERS = {int: "N", float: "X", Path: "PATH", dict: "JSON"}


@dataclass(frozen=True, slots=True)
class ParsedFlags:
    """What a command line gives: values by dotted name, and the file that it names."""

    values: dict[str, Any]
    config_path: str | None


def parse_flags(model: type[BaseModel], section: str, argv: Sequence[str], prog: str, description: str) -> ParsedFlags:
    """Reads a command line. Raises SettingsError; `--help` ends the process."""
    known = list(options(model))
    parser = _build_parser(known, section, prog, description)
    parsed, rest = parser.parse_known_args(_bind_numbers(argv))
    if rest:
        names = [*(option.flag for option in known), "--config", "--help"]
        names += [f"--no-{option.flag[2:]}" for option in known if option.kind is bool]
        raise SettingsError("\n".join(_unknown(arg, names) for arg in rest if arg.startswith("-") or arg == rest[0]))
    values = vars(parsed)
    config_path = values.pop("--config")
    return ParsedFlags(values, config_path)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingsError(message)


def _build_parser(known: Sequence[Option], section: str, prog: str, description: str) -> argparse.ArgumentParser:
    variable = f"OUTRIDER_{section}__".upper()
    parser = _Parser(
        prog=prog,
        description=description,
        epilog=f"Every setting can also be given by a variable, --max-size as {variable}MAX_SIZE, or in the file of "
        f"--config, as max_size under {section}:. Flags win over variables, variables over the file.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("--config", dest="--config", metavar="PATH", default=None, help="a YAML file of settings")
    groups: dict[tuple[str, ...], Any] = {(): parser}
    for option in known:
        path = option.path[:-1]
        if path not in groups:
            groups[path] = parser.add_argument_group(".".join(path))
        _add(groups[path], option)
    return parser


def _add(group: Any, option: Option) -> None:
    if option.kind is bool:
        group.add_argument(option.flag, dest=option.name, action=argparse.BooleanOptionalAction, help=_help(option))
        return
    action = "append" if option.repeats else "store"
    group.add_argument(option.flag, dest=option.name, action=action, metavar=_metavar(option), help=_help(option))


def _help(option: Option) -> str:
    notes = ["required"] if option.field.is_required() else []
    default = None if notes else option.field.get_default(call_default_factory=True)
    if option.repeats:
        notes.append("may be repeated")
    if shown := _show(default):
        notes.append(f"default: {shown}")
    text = (option.field.description or "").rstrip(".")
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


ENV_PREFIX = "OUTRIDER_"
SECTION_CUTOFF = 0.8  # a file has sections of other commands: only a near miss of ours is an error


class ServiceSettings(BaseModel):
    """The base of every command's settings. Building one reads nothing but its arguments."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)
    section: ClassVar[str]


Address = Annotated[str, Field(description="address to serve on: HOST:PORT, :PORT or unix:PATH")]
VllmMetrics = Annotated[
    bool, Field(description="with metrics: what routers of vLLM's replicas read, also under vLLM's names")
]
CHECKPOINT = Field(description="folder of the checkpoint (Hugging Face layout, safetensors), or a hub id: ORG/NAME")


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

    tls_cert: Path | None = Field(
        None, description="PEM file of the server's certificate and its chain: TLS in place of plaintext"
    )
    tls_key: Path | None = Field(None, description="PEM file of that certificate's private key")
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

    peer_ca: Path | None = Field(
        None, description="PEM file of the authorities of the certificates of what is called: TLS to it"
    )
    peer_cert: Path | None = Field(None, description="PEM file of the certificate to show there, and its chain")
    peer_key: Path | None = Field(None, description="PEM file of that certificate's private key")

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

    listen: Address
    reflection: bool = Field(False, description="describe the service to any caller: gRPC reflection")
    health: str = Field(
        "",
        description="address of gRPC health alone, without encryption, for probes that know none: HOST:PORT or :PORT; "
        "empty: none beside the service's own",
    )
    grace_s: float = Field(30.0, ge=0, description="time that running streams get on SIGTERM, in seconds")
    trace_file: Path | None = Field(None, description="append traces to this file, as OTLP JSON lines")
    trace_file_mb: int = Field(
        256, ge=1, description="greatest size of that file, in MiB: then it begins anew, and what it held is kept as .1"
    )
    log_format: Literal["text", "json"] = Field(
        "text", description="lines of the log on standard error: for people, or an object each for a collector"
    )
    metrics: str = Field(
        "",
        description="address of /metrics, /livez and /readyz over HTTP: HOST:PORT or :PORT; empty: none",
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

    name: str = Field(
        "", description="name to serve the model under (default: the folder's; without a model, the method's)"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="compute type; auto: float32 on a CPU; float16 is for GPUs"
    )
    device: str = Field("cpu", description="where the model runs")
    threads: int | None = Field(None, ge=1, le=256, description="threads of a pass (default: all cores)")
    max_model_len: int | None = Field(None, ge=2, description="longest sequence (default: the model's)")
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


S = TypeVar("S", bound=ServiceSettings)


@dataclass(frozen=True, slots=True)
class _Given:
    """A value and where it came from."""

    value: Any
    origin: str


def load_settings(
    cls: type[S],
    flags: Mapping[str, Any] | None = None,
    config_path: str | Path | None = None,
    environ: Mapping[str, str] | None = None,
    wanted: Mapping[str, str] | None = None,
) -> S:
    """Reads the settings from flags (by dotted field name), the environment and the file. Raises SettingsError.
    `wanted` has what to say where a required setting is absent, for those with a simpler way than their flag."""
    known = {option.name: option for option in options(cls)}
    given: dict[str, _Given] = {}
    problems: list[str] = []
    if config_path is not None:
        problems += _read_file(cls.section, known, Path(config_path), given)
    problems += _read_environment(cls.section, known, os.environ if environ is None else environ, given)
    problems += _read_flags(known, flags or {}, given)
    if problems:
        raise SettingsError("\n".join(problems))
    try:
        return cls.model_validate(_nest({name: item.value for name, item in given.items()}))
    except ValidationError as error:
        details = [dict(detail) for detail in error.errors()]
        details = [detail for detail in details if not _follows(detail, details)]
        problems = [_explain(cls.section, known, given, wanted or {}, detail) for detail in details]
        raise SettingsError("\n".join(dict.fromkeys(problems))) from error


def parse_settings(
    cls: type[S], argv: Sequence[str], prog: str, description: str, wanted: Mapping[str, str] | None = None
) -> S:
    """The settings of a command line; what is wrong with them ends the process with status 2, as argparse does."""
    try:
        parsed = parse_flags(cls, cls.section, argv, prog, description)
        return load_settings(cls, parsed.values, parsed.config_path, wanted=wanted)
    except SettingsError as error:
        lines = "".join(f"{prog}: error: {line}\n" for line in str(error).splitlines())
        sys.stderr.write(f"{lines}See {prog} --help.\n")
        raise SystemExit(2) from error


def _read_flags(known: Mapping[str, Option], flags: Mapping[str, Any], given: dict[str, _Given]) -> Iterator[str]:
    for name, value in flags.items():
        if name not in known:
            yield f"unknown setting {name}: {near_miss(name, known)}"
            continue
        given[name] = _Given(value, known[name].flag)


def _read_environment(
    section: str, known: Mapping[str, Option], environ: Mapping[str, str], given: dict[str, _Given]
) -> Iterator[str]:
    prefix = _variable(section, "")
    variables = {_variable(section, name): option for name, option in known.items()}
    for variable, text in environ.items():
        start, mark, _ = variable.upper().partition("__")
        if not mark or not start.startswith(ENV_PREFIX):
            continue
        if start + mark != prefix:
            if _resembles(start.removeprefix(ENV_PREFIX), section.upper()):
                yield f"unknown variable {variable}: did you mean {prefix}...?"
        elif variable.upper() not in variables:
            yield f"unknown variable {variable}: {near_miss(variable.upper(), variables)}"
        elif text:  # an empty variable counts as absent
            option = variables[variable.upper()]
            try:
                given[option.name] = _Given(_decode(option, text), variable)
            except json.JSONDecodeError as error:
                yield f"{variable} is no JSON: {error}"


def _read_file(section: str, known: Mapping[str, Option], path: Path, given: dict[str, _Given]) -> Iterator[str]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        yield f"cannot read --config {path}: {_unreadable(error)}"
        return
    values = content.get(section) or {} if isinstance(content, dict) else None
    if not isinstance(content, dict) or not isinstance(values, dict):
        yield f"{path} must hold a mapping of sections, {section}: a mapping of settings"
        return
    if section not in content:
        yield from (
            f"unknown section {name} in {path}: did you mean {section}?"
            for name in content
            if _resembles(name, section)
        )
    groups = {".".join(option.path[:end]) for option in known.values() for end in range(1, len(option.path))}
    for name, value in _flatten(values, groups):
        if name in known:
            given[name] = _Given(value, f"{path}: {section}.{name}")
        else:
            yield f"unknown setting {section}.{name} in {path}: {near_miss(name, known)}"


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
    message = str(detail["msg"]).removeprefix("Value error, ")
    if name is None:
        return f"{'.'.join([section, *location])}: {message}"
    if name not in given:
        if detail["type"] != "missing":
            return f"{section}.{name}: {message}"
        return wanted.get(name) or (
            f"{section}.{name} is required: give {known[name].flag}, {_variable(section, name)} "
            f"or {section}.{name} in the file of --config"
        )
    return f"{given[name].origin}: {message[:1].lower()}{message[1:]}, not {detail['input']!r}"


def _variable(section: str, name: str) -> str:
    return f"{ENV_PREFIX}{section}__{name.replace('.', '__')}".upper()


def _resembles(name: object, other: str) -> bool:
    return bool(difflib.get_close_matches(str(name), [other], cutoff=SECTION_CUTOFF))


QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of a container, as "200000 100000": microseconds in every so many


def named_folders(given: Sequence[str], field: str) -> dict[str, Path]:
    """Of a list of NAME=DIR: the folders, by name. ValueError for what is none, or comes twice."""
    folders: dict[str, Path] = {}
    for text in given:
        name, _, folder = text.partition("=")
        if not (name and folder and name.isprintable() and len(name) <= MAX_NAME_CHARS):
            allowed = f"NAME=DIR, with a name of 1 to {MAX_NAME_CHARS} printable characters"
            raise ValueError(f"{field}: is {text[:200]!r}; allowed: {allowed}")
        if name in folders:
            raise ValueError(f"{field}: has {name!r} more than once; allowed: a name for each")
        folders[name] = Path(folder)
    return folders


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
