"""Settings: precedence, near misses, bad values and help.

How many threads a process takes unless it is told."""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import ClassVar, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from outrider.rpc.settings import (
    Address,
    ModelSettings,
    ServerSettings,
    ServiceSettings,
    SettingsError,
    flags_of,
    load_settings,
    options,
    parse_settings,
    usable_cores,
    usable_threads,
)


class Dtype(Enum):
    AUTO = "auto"
    BF16 = "bfloat16"


class Cache(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    block_size: int = Field(16, ge=1, description="Tokens in a block.")
    num_blocks: int | None = Field(None, description="Blocks of the pool; absent: what fits.")


class Settings(ServiceSettings):
    section: ClassVar[str] = "target"

    model: Path = Field(description="The checkpoint's folder.")
    max_window: int = Field(8, ge=0, le=128, description="Most drafted tokens in a step; 100 % is all.")
    peers: tuple[str, ...] = Field(("a:1", "b:2"), description="Addresses.")
    patience: float = Field(0.5, description="Seconds.")
    graphs: bool = Field(True, description="Capture graphs.")
    device: Literal["cpu", "cuda"] | None = Field(None, description="Where the model runs.")
    dtype: Dtype = Field(Dtype.AUTO, description="The compute type.")
    weights: dict[str, float] = Field(default_factory=dict, description="Shares.")
    kv: Cache = Field(Cache(), description="The cache.")

    @model_validator(mode="after")
    def _check(self) -> Settings:
        if self.patience > 60 and self.graphs:
            raise ValueError("patience above 60 needs --no-graphs")
        return self


def parse(*argv: str) -> Settings:
    return parse_settings(Settings, argv, "outrider target", "Serves a target model.")


def complaint(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as raised:
        parse(*argv)
    assert raised.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("outrider target: error: ")
    assert error.endswith("See outrider target --help.\n")
    return error


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "outrider.yaml"
    path.write_text(
        "target:\n  model: from-file\n  max_window: 1\n  patience: 1e-3\n  peers: [x, y]\n"
        "  weights: {a.b: 1}\n  kv: {block_size: 32, num_blocks: 7}\ndraft:\n  whatever: 1\n"
    )
    return path


def test_precedence(file: Path) -> None:
    environ = {"OUTRIDER_TARGET__MAX_WINDOW": "2", "OUTRIDER_TARGET__KV__NUM_BLOCKS": "8", "OUTRIDER_DRAFT__X": "1"}
    assert load_settings(Settings, {"model": "m"}, environ={}).max_window == 8
    loaded = load_settings(Settings, {}, file, {})
    assert (loaded.max_window, loaded.model, loaded.patience) == (1, Path("from-file"), 0.001)
    assert loaded.peers == ("x", "y")
    assert loaded.weights == {"a.b": 1.0}
    loaded = load_settings(Settings, {}, file, environ)
    assert (loaded.max_window, loaded.kv) == (2, Cache(block_size=32, num_blocks=8))
    loaded = load_settings(Settings, {"max_window": "3", "kv.block_size": 64}, file, environ)
    assert (loaded.max_window, loaded.kv) == (3, Cache(block_size=64, num_blocks=8))


def test_building_reads_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_TARGET__MAX_WINDOW", "2")
    settings = Settings(model=Path("m"))
    assert settings.max_window == 8
    assert parse("--model", "m").max_window == 2
    with pytest.raises(ValidationError, match="frozen"):
        settings.max_window = 3  # type: ignore[misc]


def test_flags(file: Path) -> None:
    settings = parse("--config", str(file), "--peers", "c", "--peers=d,e", "--no-graphs", "--patience", "-1e-3")
    assert (settings.peers, settings.graphs, settings.patience) == (("c", "d,e"), False, -0.001)
    assert parse("--model", "m", "--graphs", "--patience", "-2").patience == -2.0
    settings = parse("--model=m", "--kv.block-size", "4", "--device", "cpu", "--dtype", "bfloat16")
    assert (settings.kv.block_size, settings.device, settings.dtype) == (4, "cpu", Dtype.BF16)


def test_variables_with_lists_and_mappings() -> None:
    def peers(text: str) -> tuple[str, ...]:
        return load_settings(Settings, {"model": "m"}, environ={"OUTRIDER_TARGET__PEERS": text}).peers

    assert peers("c:1, d:2") == ("c:1", "d:2")
    assert peers('["c,1"]') == ("c,1",)
    assert peers("") == ("a:1", "b:2")  # empty counts as absent
    environ = {"outrider_target__weights": '{"a": 0.5}', "OUTRIDER_TARGET__GRAPHS": "off"}
    settings = load_settings(Settings, {"model": "m"}, environ=environ)
    assert (settings.weights, settings.graphs) == ({"a": 0.5}, False)


@pytest.mark.parametrize(
    ("flags", "content", "environ", "problem"),
    [
        ({"max_windw": 1}, "", {}, "unknown setting max_windw: did you mean max_window?"),
        ({}, "target: {max-window: 1}", {}, "unknown setting target.max-window in {file}: did you mean max_window?"),
        ({}, "target: {kv: {blok_size: 1}}", {}, "target.kv.blok_size in {file}: did you mean kv.block_size?"),
        ({}, "target: {kv: 5}", {}, "unknown setting target.kv in {file}: there are device, dtype, graphs"),
        ({}, "targt: {max_window: 1}", {}, "unknown section targt in {file}: did you mean target?"),
        ({}, "[1, 2]", {}, "{file} must hold a mapping of sections"),
        ({}, "target: 5", {}, "{file} must hold a mapping of sections, target: a mapping of settings"),
        ({}, "target: [", {}, "cannot read --config {file}"),
        (
            {},
            "",
            {"OUTRIDER_TARGET__MAX_WINDWO": "1"},
            "unknown variable OUTRIDER_TARGET__MAX_WINDWO: did you mean OUTRIDER_TARGET__MAX_WINDOW?",
        ),
        (
            {},
            "",
            {"OUTRIDER_TARGTE__MODEL": "1"},
            "unknown variable OUTRIDER_TARGTE__MODEL: did you mean OUTRIDER_TARGET__...?",
        ),
        ({}, "", {"OUTRIDER_TARGET__WEIGHTS": "{"}, "OUTRIDER_TARGET__WEIGHTS is no JSON"),
        (
            {},
            "",
            {},
            "target.model is required: give --model, OUTRIDER_TARGET__MODEL or target.model in the file of --config",
        ),
        (
            {"max_window": "500"},
            "",
            {},
            "--max-window: input should be less than or equal to 128, not '500'",
        ),
        ({}, "target: {max_window: many}", {}, "{file}: target.max_window: input should be a valid integer"),
        (
            {},
            "",
            {"OUTRIDER_TARGET__DEVICE": "tpu"},
            "OUTRIDER_TARGET__DEVICE: input should be 'cpu' or 'cuda', not 'tpu'",
        ),
        ({"kv.block_size": 0}, "", {}, "--kv.block-size: input should be greater than or equal to 1, not 0"),
        ({"model": "m", "patience": 61}, "", {}, "target: patience above 60 needs --no-graphs"),
    ],
)
def test_problems(
    tmp_path: Path, flags: dict[str, object], content: str, environ: dict[str, str], problem: str
) -> None:
    file = tmp_path / "file.yaml"
    file.write_text(content)
    with pytest.raises(SettingsError) as raised:
        load_settings(Settings, flags, file, environ)
    assert problem.replace("{file}", str(file)) in str(raised.value)


def test_every_problem_is_told_at_once() -> None:
    with pytest.raises(SettingsError) as raised:
        load_settings(Settings, {"model": "m", "max_window": 500, "kv.block_size": 0}, environ={})
    assert len(str(raised.value).splitlines()) == 2


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot read --config"):
        load_settings(Settings, {"model": "m"}, tmp_path / "absent.yaml", {})


def test_command_line_complaints(capsys: pytest.CaptureFixture[str]) -> None:
    assert "unknown flag --max-windw: did you mean --max-window?" in complaint(capsys, "--max-windw", "5")
    assert "unknown flag --no-graph: did you mean --no-graphs?" in complaint(capsys, "--no-graph")
    assert "unknown flag --max_window: did you mean --max-window?" in complaint(capsys, "--max_window=5")
    assert "unexpected argument five" in complaint(capsys, "five", "--model", "m")
    assert "--model: expected one argument" in complaint(capsys, "--model")
    assert "--max-window: input should be a valid integer" in complaint(capsys, "--model", "m", "--max-window", "x")


def test_help(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as raised:
        parse("--help")
    assert raised.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for line in (
        "Serves a target model.",
        "--model PATH The checkpoint's folder (required)",
        "--max-window N Most drafted tokens in a step; 100 % is all (default: 8)",
        "--peers TEXT Addresses (may be repeated, default: a:1, b:2)",
        "--graphs, --no-graphs Capture graphs (default: on)",
        "--device {cpu,cuda} Where the model runs",
        "--dtype {auto,bfloat16} The compute type (default: auto)",
        "--weights JSON Shares",
        "kv: --kv.block-size N Tokens in a block (default: 16)",
        "as OUTRIDER_TARGET__MAX_SIZE",
    ):
        assert line in text


def test_what_all_services_are_told_comes_after_a_service_s_own() -> None:
    class Service(ServerSettings, ModelSettings):
        section: ClassVar[str] = "service"
        listen: Address = "127.0.0.1:1"
        own: int = 1

    found = {option.name: option.field for option in options(Service)}
    assert list(found)[:3] == ["listen", "own", "reflection"] and found.keys() == Service.model_fields.keys()
    assert found["listen"].default == "127.0.0.1:1" and "HOST:PORT" in (found["listen"].description or "")
    assert Service.model_validate({"cache_mb": 2}).cache_bytes == 2 << 20 and Service().cache_bytes is None


def test_a_container_has_the_cores_of_its_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    quota = tmp_path / "cpu.max"
    assert usable_cores(quota) == 8  # no container
    for text, cores in {"max 100000\n": 8, "250000 100000\n": 3, "20000 100000\n": 1, "9900000 100000\n": 8}.items():
        quota.write_text(text)
        assert usable_cores(quota) == cores


def test_the_environment_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, threads in {"3": 3, "3,2": 3, "": usable_cores(), "0": usable_cores(), "many": usable_cores()}.items():
        monkeypatch.setenv("OMP_NUM_THREADS", text)
        assert usable_threads() == threads


class Serving(ServerSettings):
    section: ClassVar[str] = "serving"
    listen: Address = "localhost:0"


@pytest.mark.parametrize("address", ["9090", "host", "unix:/tmp/metrics", "host:", "host:x", ":65536"])
def test_metrics_are_served_over_tcp_alone(address: str) -> None:
    with pytest.raises(SettingsError, match=f"--metrics: must be HOST:PORT or :PORT.*not '{address}'"):
        load_settings(Serving, {"metrics": address}, environ={})
    assert load_settings(Serving, {"metrics": ":9090"}, environ={}).metrics == ":9090"


class PublicSettings(Serving):
    exposed: ClassVar[tuple[str, ...]] = ("listen", "http")
    http: str = ""


@pytest.mark.parametrize("field", ["listen", "http"])
@pytest.mark.parametrize("address", [":0", "0.0.0.0:1", "[::]:1", "10.0.0.7:1", "gateway.example:1", "[fe80::1]:1"])
def test_an_address_that_others_reach_needs_tls_or_a_word(field: str, address: str) -> None:
    with pytest.raises(SettingsError, match=f"--{field}. is .*others.*give --tls-cert and --tls-key.*--insecure"):
        load_settings(PublicSettings, {field: address}, environ={})
    tls = {"tls_cert": "a", "tls_key": "b"}
    assert getattr(load_settings(PublicSettings, {field: address, "insecure": True}, environ={}), field) == address
    assert getattr(load_settings(PublicSettings, {field: address, **tls}, environ={}), field) == address
    with pytest.raises(SettingsError, match="--insecure"):
        load_settings(PublicSettings, {"insecure": True, **tls}, environ={})


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.1.2.3:1", "localhost:1", "[::1]:1", "unix:/tmp/s", "unix:s"])
def test_this_machines_own_addresses_need_nothing(address: str) -> None:
    assert load_settings(PublicSettings, {"listen": address, "http": address}, environ={}).listen == address


def test_health_and_metrics_are_open_to_others() -> None:
    given = {"health": ":1", "metrics": ":2"}
    assert load_settings(PublicSettings, given, environ={}).health == ":1"


class Service(ServiceSettings):
    section: ClassVar[str] = "inner"
    threads: int = Field(1, ge=1, description="threads; see --patience")
    patience: float = 0.5
    peers: list[str] = Field(default_factory=list)
    graphs: bool = True
    weights: dict[str, float] = Field(default_factory=dict)
    listen: str = ""

    @model_validator(mode="after")
    def _check(self) -> Service:
        if self.patience > 60 and self.graphs:
            raise ValueError("patience above 60 needs --no-graphs and --threads")
        return self


class Starter(ServiceSettings):
    section: ClassVar[str] = "outer"
    subjects: ClassVar[Mapping[str, str]] = {"plain": "all"}
    first: ClassVar[tuple[str, ...]] = ("one.threads", "plain")
    decided: ClassVar[frozenset[str]] = frozenset({"one.listen"})
    aliases: ClassVar[Mapping[str, tuple[str, ...]]] = {"threads": ("one.threads",), "graphs": ("one.graphs",)}

    plain: bool = False
    one: Service = Service()


def test_a_nested_service_keeps_its_own_section(tmp_path: Path) -> None:
    """What the outer command decides itself is left to the service in variables and files, and is no flag."""
    file = tmp_path / "file.yaml"
    file.write_text("inner: {threads: 2, patience: 3, listen: x}\nouter: {plain: true}\n")
    environ = {"OUTRIDER_INNER__PATIENCE": "4", "OUTRIDER_INNER__LISTEN": "y"}
    loaded = load_settings(Starter, {"one.graphs": False}, file, environ)
    assert (loaded.plain, loaded.one.threads, loaded.one.patience, loaded.one.graphs) == (True, 2, 4.0, False)
    assert loaded.one.listen == ""
    with pytest.raises(SettingsError, match=r"unknown setting one\.listen"):
        load_settings(Starter, {"one.listen": "x"}, environ={})
    with pytest.raises(SettingsError, match=r"OUTRIDER_INNER__THREDS: did you mean OUTRIDER_INNER__THREADS\?"):
        load_settings(Starter, {}, environ={"OUTRIDER_INNER__THREDS": "1"})
    with pytest.raises(SettingsError, match=r"inner\.thread in .*: did you mean threads\?"):
        file.write_text("inner: {thread: 2}\n")
        load_settings(Starter, {}, file, {})
    with pytest.raises(SettingsError, match=r"^outer\.one: patience .* needs --no-graphs and --one\.threads$"):
        load_settings(Starter, {"one.patience": 61}, environ={})


def test_a_former_name_works_and_warns_and_the_new_one_comes_before_it() -> None:
    said: list[str] = []
    environ = {"OUTRIDER_OUTER__THREADS": "3"}
    assert load_settings(Starter, {}, environ=environ, warn=said.append).one.threads == 3
    (line,) = said
    assert line.startswith("OUTRIDER_OUTER__THREADS is now OUTRIDER_INNER__THREADS;")
    flags = {"one.threads": "5", "threads": "4"}
    assert load_settings(Starter, flags, environ=environ, warn=said.append).one.threads == 5


def test_the_flags_of_settings_give_the_same_settings() -> None:
    given = {"threads": 3, "peers": ["a", "b"], "graphs": False, "weights": {"a": 0.5}}
    flags = flags_of(Service.model_validate(given), patience=2.0, listen=None)
    assert flags == ["--threads=3", "--patience=2.0", "--peers=a", "--peers=b", "--no-graphs", '--weights={"a": 0.5}']
    parsed = parse_settings(Service, [flag for flag in flags if "weights" not in flag], "service", "")
    assert parsed.model_dump() == {**given, "patience": 2.0, "weights": {}, "listen": ""}
    assert flags_of(Service()) == []


def test_help_shows_what_is_needed_first_and_help_all_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    shown = {}
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit):
            parse_settings(Starter, [flag], "outrider outer", "")
        shown[flag] = capsys.readouterr().out
    assert "--one.threads N" in shown["--help"] and "--one.patience" not in shown["--help"].replace("see --one", "")
    assert "--help-all" in shown["--help"] and "shows all 6" in " ".join(shown["--help"].split())
    assert "see --one.patience" in shown["--help"] and "--one.patience X" in shown["--help-all"]
    for text in shown.values():
        assert "--threads" not in text and "--one.listen" not in text


def test_help_all_is_help_where_no_flag_is_needed_first(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit, match="0"):
            parse_settings(Settings, [flag], "outrider", "")
    first, second = capsys.readouterr().out.split("usage: ")[1:]
    assert first == second and "--help-all" not in first
