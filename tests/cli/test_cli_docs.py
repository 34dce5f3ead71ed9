"""docs/cli.md: every command is there, and every flag that a section names is one of its command."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from outrider.cli import COMMANDS, SUBCOMMANDS
from outrider.commands.bench_serve_settings import BenchServeSettings
from outrider.commands.chat_settings import ChatSettings
from outrider.commands.serve_settings import ServeSettings
from outrider.commands.trace import TraceSettings
from outrider.wire.config import ServiceSettings
from outrider.wire.options import options

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
