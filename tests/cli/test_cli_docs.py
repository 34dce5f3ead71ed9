"""docs/cli.md: every command is there, and every flag that a section names is one of its command."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from outrider.bench.load_report import BenchServeSettings
from outrider.cli.__main__ import COMMANDS, SUBCOMMANDS
from outrider.cli.chat import ChatSettings
from outrider.cli.serve import ServeSettings
from outrider.cli.trace import TraceSettings
from outrider.rpc.settings import ServiceSettings, options

SECTIONS = {"serve": ServeSettings, "chat": ChatSettings, "trace": TraceSettings, "bench serve": BenchServeSettings}
ELSEWHERE = {"--trace-file", "--json"}  # of the services, and short for --json-file


@pytest.fixture(scope="module")
def text() -> str:
    return (Path(__file__).parents[2] / "docs/cli.md").read_text(encoding="utf-8")


def test_every_command_is_in_the_table(text: str) -> None:
    named = set(re.findall(r"`outrider ([a-z -]+)`", text.partition("\n## ")[0]))
    assert named - {"--help"} == {*COMMANDS, *SUBCOMMANDS}


@pytest.mark.parametrize(("name", "model"), SECTIONS.items())
def test_every_flag_exists(text: str, name: str, model: type[ServiceSettings]) -> None:
    section = text.partition(f"\n## outrider {name}\n")[2].partition("\n## ")[0]
    flags = {option.flag.replace("--", "--no-") for option in options(model) if option.kind is bool}
    flags |= {option.flag for option in options(model)}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", section))
    assert named and named - flags <= ELSEWHERE
