"""docs/llm.md speaks of every keyword, field and method, and of none that does not exist; the README's script runs."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from llm.conftest import TinyPair

from outrider.llm import SamplingParams, SpeculativeConfig
from outrider.llm.config import ARGUMENTS, FIXED, NOT_THERE, OLD, SHORT, SUPPORTED, WITHOUT_EFFECT, EngineArguments
from outrider.llm.config import NOT_THERE as NO_METHODS

REPOSITORY = Path(__file__).parents[2]
TEXT = (REPOSITORY / "docs" / "llm.md").read_text(encoding="utf-8")
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


def test_the_readmes_script_runs(tiny_pair: TinyPair, capsys: pytest.CaptureFixture[str]) -> None:
    section = (REPOSITORY / "README.md").read_text(encoding="utf-8").partition("## From a script")[2]
    script = section.partition("```python\n")[2].partition("```")[0]
    assert "models/large" in script and "models/small" in script
    names: dict[str, Any] = {}
    exec(script.replace("models/large", str(tiny_pair.target)).replace("models/small", str(tiny_pair.draft)), names)
    names["llm"].close()
    assert capsys.readouterr().out.strip()
