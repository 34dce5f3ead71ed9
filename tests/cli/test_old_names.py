"""Every former name of a setting still works, as a flag, a variable and a line of a file, and its warning names what
took its place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outrider.cli.arguments import parse
from outrider.cli.colocated import ColocatedSettings
from outrider.cli.demo import DemoSettings
from outrider.cli.serve import ServeSettings
from outrider.pairs import pair_path
from outrider.rpc.settings import ServiceSettings, former_options, load_settings, options

COMMANDS: dict[str, type[ServiceSettings]] = {
    "serve": ServeSettings, "demo": DemoSettings, "colocated": ColocatedSettings,
}  # fmt: skip
# By former name what it is given, where any text will do nothing; and what must stand beside it.
VALUES: dict[str, str] = {
    "method": "ngram",
    "draft": "small",
    "mode": "chains",
    "engine": "vllm",
    "tensor_parallel_size": "2",
    "engine_args": '{"seed": 1}',
    "draft_quantization": "int8",
    "adapter": "sql=a",
    "draft_adapter": "sql=a",
    "tool_parser": "hermes",
    "reasoning_parser": "none",
    "allowed_origins": "https://a.example",
    "listen": "127.0.0.1:7",
    "http": "127.0.0.1:8",
    "suffix_decoding_min_token_prob": "0.5",
}
BESIDE: dict[str, dict[str, str]] = {
    "tls_cert": {"tls_key": "k"},
    "tls_key": {"tls_cert": "c"},
    "tls_client_ca": {"tls_cert": "c", "tls_key": "k"},
    "tls_client_name": {"tls_cert": "c", "tls_key": "k", "tls_client_ca": "a"},
    "tensor_parallel_size": {"engine": "vllm"},
    "engine_args": {"engine": "vllm"},
}
CASES = [(command, name) for command, model in COMMANDS.items() for name in model.aliases]


def value_of(command: str, name: str) -> str:
    if name in VALUES:
        return VALUES[name]
    kind = former_options(COMMANDS[command])[name].kind
    return {bool: "true", int: "3", float: "2.5"}.get(kind, "text")


def beside(command: str, name: str) -> dict[str, str]:
    """By dotted name what else has to be given."""
    model = COMMANDS[command]
    given = {new: text for other, text in BESIDE.get(name, {}).items() for new in model.aliases[other]}
    if command != "demo":
        given |= {"target.model": "large", "draft.model": "small"}
    return {new: text for new, text in given.items() if new not in model.aliases[name]}


def read(settings: ServiceSettings, dotted: str) -> Any:
    value: Any = settings
    for part in dotted.split("."):
        value = getattr(value, part)
    return value


@pytest.mark.parametrize(("command", "name"), CASES)
def test_every_way_to_give_it(command: str, name: str, tmp_path: Path) -> None:
    model, value = COMMANDS[command], value_of(command, name)
    new = model.renamed(name, value)
    known = {option.name: option for option in options(model)}
    option = former_options(model)[name]
    rest = beside(command, name)
    anew = load_settings(model, rest | dict.fromkeys(new, [value] if option.repeats else value), environ={})
    file = tmp_path / "settings.yaml"
    file.write_text(f"{model.section}: {{{name}: {f'[{value!r}]' if option.repeats else repr(value)}}}\n")
    ways: list[dict[str, Any]] = [
        {"flags": rest | {name: [value] if option.repeats else value}, "environ": {}},
        {"flags": rest, "environ": {option.variable: value}},
        {"flags": rest, "environ": {}, "config_path": file},
    ]
    for way, shown in zip(ways, ("flag", "variable", "place"), strict=True):
        warnings: list[str] = []
        loaded = load_settings(model, **way, warn=warnings.append)
        assert [read(loaded, one) for one in new] == [read(anew, one) for one in new]
        (warning,) = warnings
        for one in new:
            assert getattr(known[one], shown) in warning.partition(" is now ")[2]


def test_a_draft_by_what_it_is() -> None:
    assert (
        ServeSettings.renamed("draft", "ngram") == ServeSettings.renamed("draft", "suffix,ngram") == ("draft.method",)
    )
    assert ServeSettings.renamed("draft", "models/small") == ("draft.model",)


def test_the_head_s_folder_comes_before_the_name_of_its_method() -> None:
    for flags in (("--head", "x", "--method", "medusa"), ("--method", "medusa", "--head", "x")):
        given = parse(ServeSettings, ["large", *flags], "outrider serve", "", bare=("target.model",))
        assert given.target.head == Path("x") and given.draft is None


def test_a_command_line_of_before_is_one_warning_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["large", "--draft", "ngram", "--threads", "2", "--no-batch-invariant", "--device", "cpu"]
    given = parse(ServeSettings, line, "outrider serve", "", bare=("target.model",))
    assert (given.target.threads, given.target.batch_invariant) == (2, False)
    assert given.draft is not None and given.draft.method == "ngram"
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "outrider serve: --threads is now --target.threads; the former name goes with the next release",
        "outrider serve: --draft is now --draft.method; the former name goes with the next release",
        "outrider serve: --batch-invariant is now --target.batch-invariant; the former name goes with the next release",
    ]


@pytest.mark.parametrize("command", COMMANDS)
def test_no_former_name_is_shown(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit):
            parse(COMMANDS[command], [flag], command, "")
        shown = capsys.readouterr().out.split()
        assert not {former.flag for former in former_options(COMMANDS[command]).values()} & {*shown} - {
            option.flag for option in options(COMMANDS[command])
        }


def test_a_target_that_drafts_for_itself_is_its_own_draft(tmp_path: Path) -> None:
    for target, folder in (("large", Path("large")), ("python", pair_path("python").target)):
        settings = ServeSettings.model_validate({"target": {"model": target}, "draft": {"model": "self:int4"}})
        assert settings.draft is not None
        assert (settings.draft.model, settings.draft.quantization) == (folder, "int4")
