"""docs/llm.md speaks of every keyword, field and method, and of none that does not exist; the README's script runs.

Every example runs as it stands and prints what it promises; one of them in a process of its own, to its end."""

from __future__ import annotations

import asyncio
import re
import runpy
import subprocess
import sys
import warnings
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from llm.test_backends import gateway
from support.fakes import ToyTarget

from outrider.llm import LLM, SamplingParams, SpeculativeConfig
from outrider.llm.arguments import ARGUMENTS, FIXED, NOT_THERE, OLD, SHORT, EngineArguments
from outrider.llm.config import KNOWN

REPOSITORY = Path(__file__).parents[2]
TEXT = (REPOSITORY / "docs" / "llm.md").read_text(encoding="utf-8")
SECTIONS = {part.split("\n", 1)[0]: part for part in re.split(r"^## ", TEXT, flags=re.MULTILINE)}
LLM_KEYWORDS = {f.name for f in fields(EngineArguments)} | FIXED.keys() | OLD.keys() | SHORT.keys()
NAMES = {
    "LLM": LLM_KEYWORDS | NOT_THERE.keys() | ARGUMENTS.keys() | {"speculative_config"},
    "speculative_config": {f.name for f in fields(SpeculativeConfig) if f.init} | set(KNOWN),
    "SamplingParams": {f.name for f in fields(SamplingParams)},
}


@pytest.mark.parametrize("section", NAMES)
def test_every_name_is_there(section: str) -> None:
    named = set(re.findall(r"`(\w+)`", SECTIONS[section]))
    assert NAMES[section] - named == set()
    rows = re.findall(r"^\| (.*?) \|", SECTIONS[section], flags=re.MULTILINE)
    in_tables = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert in_tables - NAMES[section] == set()


@pytest.mark.parametrize("page", ["README.md", "docs/llm.md"])
def test_the_first_script_of_each_runs_as_it_stands(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    script = next(each for each in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "outrider.llm" in each)
    assert 'LLM("python"' in script
    names: dict[str, Any] = {}
    exec(script, names)
    names["llm"].close()
    assert capsys.readouterr().out.strip()


FOLDER = Path(__file__).parents[2] / "examples" / "offline_inference"
PRINTED = {
    "basic_ngram.py": r"Generated: .*\n[\s\S]*Finish reason: length",
    "conditional_speculation.py": r"batch of 10: 0\nDrafts in a batch of 4: [1-9]",
    "mixed_lengths.py": r"tokens: 10\n[\s\S]*tokens: 300\n[\s\S]*tokens: 100\n",
    "tokens_prompt.py": r"Generated: [\s\S]*Generated: ",
    "logprobs_and_metrics.py": r"Token 49: [\s\S]*num_drafts: [1-9][\s\S]*per_pos: \[\d+, \d+, \d+\]",
    "progress_bar.py": r"Generated 20 outputs\nTotal tokens: [12]\d\d\d",
    "old_keywords.py": r"Draft model: 'The future of', Generated text: '.+'\nN-grams: .+",
    "eagle3.py": r"Generated: [\s\S]*Generated: [\s\S]*Mean acceptance length: [1-4]\.\d\d\n",
    "suffix_decoding.py": r"Generated: [\s\S]*Generated: [\s\S]*accepted_tokens: [1-9]",
    "chat.py": r"# user: a function that adds two numbers\n",
}
ALONE = "draft_model.py"
BAR = r"Processed prompts: 100%"


def run(name: str) -> list[str]:
    """Runs it here and closes what it leaves open; its warnings by their messages."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        left = runpy.run_path(str(FOLDER / name), run_name="__main__")
    for value in left.values():
        if isinstance(value, LLM):
            value.close()
    return [str(entry.message) for entry in caught if entry.category is DeprecationWarning]


def test_none_is_forgotten() -> None:
    assert {path.name for path in FOLDER.glob("*.py")} == PRINTED.keys() | {ALONE, "attached.py"}


@pytest.mark.parametrize("name", PRINTED)
def test_runs_as_it_stands(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    deprecated = run(name)
    out, err = capsys.readouterr()
    assert re.search(PRINTED[name], out), out
    assert BAR in err
    expected = ["speculative_model"] * 2 if name == "old_keywords.py" else []
    assert [message.split(",")[0] for message in deprecated] == expected


@pytest.mark.timeout(120)
def test_a_process_of_its_own_ends_by_itself() -> None:
    """Nobody closes the LLM: both engines' threads and the loop's end with the process, and say nothing."""
    command = [sys.executable, str(FOLDER / ALONE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(r"Accepted tokens: [1-9]\d*\nMean acceptance length: [1-4]\.\d\d\n$", done.stdout), done.stdout
    assert BAR in done.stderr and done.stderr.rstrip().endswith("toks/s]"), done.stderr


async def test_the_attached_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with gateway(tmp_path, ToyTarget()) as address:
        monkeypatch.setattr(sys, "argv", ["attached.py", address])
        await asyncio.to_thread(run, "attached.py")
    assert re.search(r"num_accepted_tokens: [1-9]", capsys.readouterr().out)
