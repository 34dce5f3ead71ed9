"""docs/llm.md speaks of every keyword, field and method, and of none that does not exist."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from outrider.llm import SamplingParams, SpeculativeConfig
from outrider.llm.arguments import FIXED, OLD, SHORT, WITHOUT_EFFECT, EngineArguments
from outrider.llm.config import NOT_THERE, SUPPORTED
from outrider.llm.refusals import ARGUMENTS
from outrider.llm.refusals import NOT_THERE as NO_METHODS

TEXT = (Path(__file__).parents[2] / "docs" / "llm.md").read_text(encoding="utf-8")
SECTIONS = {part.split("\n", 1)[0]: part for part in re.split(r"^## ", TEXT, flags=re.MULTILINE)}
LLM_KEYWORDS = {f.name for f in fields(EngineArguments)} | FIXED.keys() | OLD.keys() | SHORT.keys() | {*WITHOUT_EFFECT}
NAMES = {
    "LLM": LLM_KEYWORDS | NO_METHODS.keys() | ARGUMENTS.keys() | {"speculative_config"},
    "speculative_config": {f.name for f in fields(SpeculativeConfig) if f.init} | {*NOT_THERE, *SUPPORTED},
    "SamplingParams": {f.name for f in fields(SamplingParams)},
}


@pytest.mark.parametrize("section", NAMES)
def test_every_name_is_there(section: str) -> None:
    named = set(re.findall(r"`(\w+)`", SECTIONS[section]))
    assert NAMES[section] - named == set()
    rows = re.findall(r"^\| (.*?) \|", SECTIONS[section], flags=re.MULTILINE)
    in_tables = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert in_tables - NAMES[section] == set()
