"""lm_eval by the commands of docs/benchmarking.md, on tasks of ours: its scores, and the log probabilities that they
come from, are those which OpenAI's client gets."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tools.conftest import Run, Served

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
TASKS = Path(__file__).parent / "tasks"
ENVIRONMENT = "build/tools/lm_eval"
# No token is of both a text and its continuation.
CHOICES: list[tuple[str, list[str], int]] = [
    ("import os\nimport", [" sys\n", " fish\n"], 0),
    ("def area(self):\n    return", [" while", " self"], 1),
    ("for index in", [" range(", " not("], 0),
    ("while", [" fish:", " True:"], 1),
]
MAX_TOKENS = 24  # of python_line.yaml


def test_completions(commands: dict[str, list[str]], served: Served, run: Run, tmp_path: Path) -> None:
    with served.client() as client:

        def continued(code: str) -> str:
            asked: dict[str, Any] = {"model": served.model, "prompt": code, "max_tokens": MAX_TOKENS, "temperature": 0}
            return str(client.completions.create(**asked, stop=["\n\n"]).choices[0].text)

        def likelihood(code: str, choice: str) -> float:
            asked: dict[str, Any] = {"model": served.model, "prompt": code + choice, "max_tokens": 0, "echo": True}
            found = client.completions.create(**asked, logprobs=1).choices[0].logprobs
            places = zip(found.text_offset, found.token_logprobs, strict=True)
            return float(sum(logprob for place, logprob in places if place >= len(code)))

        write_rows(tmp_path, [continued(code) for code, _, _ in CHOICES])
        likely = [[likelihood(code, choice) for choice in choices] for code, choices, _ in CHOICES]
    (line,) = (line for line in commands["lm_eval"] if "local-completions" in line)
    print(run(ENVIRONMENT, served.command(line), tmp_path))
    scores, samples = results(tmp_path / "results/completions")
    assert scores["python_line"]["exact_match,none"] == 0.75
    right = [of.index(max(of)) == answer for of, (_, _, answer) in zip(likely, CHOICES, strict=True)]
    assert scores["python_choice"]["acc,none"] == sum(right) / len(right) > 0.5
    told = [[float(of[0][0]) for of in sample["resps"]] for sample in samples["python_choice"]]
    assert told == [pytest.approx(of, abs=1e-3) for of in likely]


def test_chat_completions(commands: dict[str, list[str]], served: Served, run: Run, tmp_path: Path) -> None:
    with served.client() as client:

        def answered(code: str) -> str:
            asked: dict[str, Any] = {"model": served.model, "max_tokens": MAX_TOKENS, "temperature": 0}
            messages: list[Any] = [{"role": "user", "content": code}]
            answer = client.chat.completions.create(**asked, messages=messages, stop=["\n\n"])
            return str(answer.choices[0].message.content)

        write_rows(tmp_path, [answered(code) for code, _, _ in CHOICES])
    (line,) = (line for line in commands["lm_eval"] if "local-chat-completions" in line)
    print(run(ENVIRONMENT, served.command(line), tmp_path))
    scores, _ = results(tmp_path / "results/chat")
    assert scores["python_line"]["exact_match,none"] == 0.75


def write_rows(folder: Path, lines: list[str]) -> None:
    """The tasks, and their rows, where they look for them; the last line is one that nobody writes."""
    shutil.copytree(TASKS, folder / "tasks")
    rows = [
        {"code": code, "choices": choices, "answer": answer, "line": line}
        for (code, choices, answer), line in zip(CHOICES, [*lines[:-1], "nothing"], strict=True)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def results(folder: Path) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """The scores, and by task the samples in their order."""
    (path,) = folder.rglob("results_*.json")
    samples = {}
    for one in folder.rglob("samples_*.jsonl"):
        found = [json.loads(line) for line in one.read_text(encoding="utf-8").splitlines()]
        samples[one.name.removeprefix("samples_").rsplit("_", 1)[0]] = sorted(
            found, key=lambda sample: sample["doc_id"]
        )
    return json.loads(path.read_text(encoding="utf-8"))["results"], samples
