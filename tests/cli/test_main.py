"""Help and complaints.

docs/cli.md: every command is there, and every flag that a section names is one of its command."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support.services import outrider, succeed

from outrider.bench.compare import CompareSettings
from outrider.bench.load import LoadSettings
from outrider.cli.__main__ import ALIASES, COMMANDS, SUBJECTS, unknown_command
from outrider.cli.chat import ChatSettings
from outrider.cli.serve import ServeSettings
from outrider.cli.trace import TraceSettings
from outrider.learning.learn_command import LearnSettings
from outrider.rpc.settings import ServiceSettings, options


def test_help_names_every_command_by_its_subject() -> None:
    text = succeed("--help")
    assert re.findall(r"^([a-z ]+):\n", text, re.MULTILINE) == [*SUBJECTS]
    assert re.findall(r"^  ([a-z][a-z ]*?)  ", text, re.MULTILINE) == [*COMMANDS]
    assert all(command.summary in text for command in COMMANDS.values())
    assert max(map(len, text.splitlines())) <= 100


def test_help_answers_at_once() -> None:
    """Nothing is loaded for it but the standard library."""
    script = (
        "import sys; before = {*sys.modules}; import outrider.cli.__main__ as c; c.main(['--help']); "
        "print({name.partition('.')[0] for name in {*sys.modules} - before} - sys.stdlib_module_names)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.endswith("\n{'outrider'}\n"), done.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str) -> None:
    text = succeed(*name.split(), "--help")
    assert text.startswith(f"usage: outrider {name} ")
    if name != "bench kernels":  # which has flags alone
        section = re.sub("[ -]", "_", FORMER.get(name, name)).upper()
        assert "--config PATH" in text and f"OUTRIDER_{section}__" in text


def test_no_command_shows_the_help_and_is_an_error() -> None:
    done = outrider()
    assert done.returncode == 2 and "measure:\n" in done.stdout
    assert done.stdout == succeed("--help")


@pytest.mark.parametrize("group", ["model", "admin"])
def test_a_group_shows_its_commands(group: str) -> None:
    done, text = outrider(group), succeed(group, "--help")
    assert done.returncode == 2 and done.stdout == text and text.startswith(f"usage: outrider {group} COMMAND ")
    named = re.findall(r"^  ([a-z][a-z ]*?)  ", text, re.MULTILINE)
    assert named == [name for name in COMMANDS if name.startswith(f"{group} ")]


@pytest.mark.parametrize(("former", "name"), ALIASES.items())
def test_a_former_name_goes_on_with_a_warning(former: str, name: str) -> None:
    done = outrider(former, "--help")
    assert done.returncode == 0 and done.stdout == succeed(*name.split(), "--help")
    assert done.stderr == f"outrider: warning: outrider {former} is called outrider {name} now\n"


def test_the_version() -> None:
    assert succeed("--version").split()[0] == "outrider"


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("targte", "target"),
        ("check_pair", "model check"),
        ("generat", "generate"),
        ("demos", "demo"),
        ("model convrt", "model convert"),
        ("bench servr", "bench serve"),
    ],
)
def test_an_unknown_command_names_the_near_miss(name: str, meant: str) -> None:
    assert unknown_command(name) == f"unknown command {name}: did you mean {meant}?"


def test_an_unknown_command_ends_with_status_2() -> None:
    done = outrider("genrate", "Hello")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == "outrider: error: unknown command genrate: did you mean generate?\nSee outrider --help.\n"


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (("generate", "Hi", "--temprature", "1"), "unknown flag --temprature: did you mean --temperature?"),
        (("demo", "--max-token", "1"), "unknown flag --max-token: did you mean --max-tokens?"),
        (("target", "--modle", "x"), "unknown flag --modle: did you mean --model?"),
        (("draft", "--listn", "x"), "unknown flag --listn: did you mean --listen?"),
        (("gateway", "--tokenzier", "x"), "unknown flag --tokenzier: did you mean --tokenizer?"),
        (("model", "check", "--traget", "x"), "unknown flag --traget: did you mean --target?"),
        (("model", "convert", "a", "b", "c"), "unexpected argument c"),
        (("generate",), "give one prompt"),
        (("generate", "Hi", "--token-ids", "1"), "give one prompt"),
        (("generate", "Hi", "--n", "0"), "--n: input should be greater than or equal to 1"),
        (("generate", "Hi", "--mode", "fast"), "--mode: input should be 'auto', 'sequential', 'chains' or 'branches'"),
        (("trace",), "error: give the file, as in outrider trace FILE\n"),
        (("model", "convert", "a"), "error: give the destination, as in outrider model convert SOURCE DESTINATION\n"),
        (("demo", "--prompt", ""), "--prompt: string should have at least 1 character"),
        (("generate", "--token-ids", "1,x"), "--token-ids: input should be a valid integer"),
        (("generate", "--token-ids", "1,-2"), "--token-ids: input should be greater than or equal to 0"),
        (("generate", "Hi", "--seed", "-1"), "--seed: input should be greater than or equal to 0"),
        (("generate", "Hi", "--logit-bias", "{"), "--logit-bias: must be JSON"),
        (("generate", "Hi", "--structured-output", '{"regexp": "a"}'), "structured_output has no regexp"),
    ],
)
def test_a_wrong_flag_is_one_clear_line(arguments: tuple[str, ...], meant: str) -> None:
    done = outrider(*arguments)
    assert done.returncode == 2
    assert meant in done.stderr and "Traceback" not in done.stderr
    command = " ".join(arguments[: 1 + (arguments[0] == "model")])
    assert done.stderr.endswith(f"See outrider {command} --help.\n")


def test_a_list_whose_item_is_wrong_is_told_once() -> None:
    done = outrider("bench", "--batches", "0")
    complaint = "outrider bench: error: --batches: input should be greater than or equal to 1, not '0'"
    assert done.returncode == 2 and done.stderr == f"{complaint}\nSee outrider bench --help.\n"


def test_a_broken_file_is_told_in_one_line(tmp_path: Path) -> None:
    config = tmp_path / "settings.yaml"
    for content, problem in (
        (b"a: [1\nb: 2", "line 2: expected ',' or ']', but got ':'"),
        (b"a: \xff", "'utf-8' codec can't decode byte 0xff in position 3: invalid start byte"),
    ):
        config.write_bytes(content)
        done = outrider("generate", "Hi", "--config", str(config))
        complaint = f"outrider generate: error: cannot read --config {config}: {problem}\n"
        assert done.returncode == 2 and done.stderr == f"{complaint}See outrider generate --help.\n"


@pytest.mark.parametrize("service", [("draft", "--method", "ngram"), ("target", "--model", "/nowhere")])
def test_a_service_whose_address_is_in_use_says_so_alone(service: tuple[str, ...]) -> None:
    """Before anything is loaded, and without gRPC's own lines."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = outrider(*service, "--listen", address)
    complaint = f"outrider {service[0]}: error: cannot listen on {address}: Address already in use\n"
    assert done.returncode == 2 and done.stderr == complaint


def test_a_variable_and_a_file_are_settings_too(tmp_path: Path) -> None:
    config = tmp_path / "settings.yaml"
    config.write_text("check_pair:\n  target: nowhere\n  drafft: nowhere\n")
    done = outrider("model", "check", "--config", str(config), env={"OUTRIDER_CHECK_PAIR__DRAFT": "nowhere"})
    assert done.returncode == 2 and "did you mean draft?" in done.stderr
    config.write_text("check_pair:\n  target: nowhere\n")
    done = outrider("model", "check", "--config", str(config), env={"OUTRIDER_CHECK_PAIR__DRAFT": "nowhere"})
    assert done.returncode == 1 and "nowhere" in done.stderr


FORMER = {name: former for former, name in ALIASES.items()}  # by which variables and files go on to call it
SECTIONS = {
    "serve": ServeSettings, "chat": ChatSettings, "trace": TraceSettings, "compare": CompareSettings,
    "bench serve": LoadSettings, "learn": LearnSettings,
}  # fmt: skip
ELSEWHERE = {
    "--trace-file",
    "--json",
    "--help-all",
    "--max-rows",
    "--threads",
    "--draft-cache-mb",
    "--learn-from",
    "--learned-drafts",
    "--listen",
    "--learned-rank",
    "--method",
}  # of the services, short, former


@pytest.fixture(scope="module")
def text() -> str:
    return (Path(__file__).parents[2] / "docs/cli.md").read_text(encoding="utf-8")


def test_every_command_is_in_the_table(text: str) -> None:
    named = set(re.findall(r"`outrider ([a-z -]+)`", text.partition("\n## ")[0]))
    assert named - {"--help"} == {*COMMANDS}


@pytest.mark.parametrize(("name", "model"), SECTIONS.items())
def test_every_flag_exists(text: str, name: str, model: type[ServiceSettings]) -> None:
    section = text.partition(f"\n## outrider {name}\n")[2].partition("\n## ")[0]
    section = re.sub(r" -- (?:.*\\\n)*.*", "", section)  # another tool's
    flags = {option.flag.replace("--", "--no-") for option in options(model) if option.kind is bool}
    flags |= {option.flag for option in options(model)}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z.-]*[a-z]", section))
    assert named and named - flags <= ELSEWHERE
