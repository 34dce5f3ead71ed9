"""A real model: Gemma 3 270M as the GGUF file that tests/real/install.sh makes, and llama.cpp beside it. Texts are
paragraphs of the project's own pages: English and code, which no weights were fitted to here."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.bench.harness import BenchWorker
from outrider.gateway.text.tokenizer import Tokenizer
from outrider.rpc.hub import locate

START_S = 300.0
MODEL = "gemma-3-270m-q4_k_m.gguf"
PEERS = Path("outrider-bench/outrider/bench/peers.py")
HEAD_STEPS = 40  # of a head that is there to be wrong and right; what more steps bring is in the documentation


@pytest.fixture(scope="session")
def installed(repository: Path) -> Path:
    """What the script made."""
    folder = repository / "build" / "real"
    if not (folder / MODEL).is_file():
        pytest.skip("tests/real/install.sh has not run")
    return folder


@pytest.fixture(scope="session", autouse=True)
def cache(installed: Path) -> Iterator[None]:
    """What is kept of the file between runs, beside it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(installed / "cache"))
        yield


@pytest.fixture(scope="session")
def model(installed: Path) -> Path:
    return installed / MODEL


@pytest.fixture(scope="session")
def tokenizer(model: Path, cache: None) -> Tokenizer:
    return Tokenizer.load(locate(model))


@pytest.fixture(scope="session")
def paragraphs(repository: Path) -> list[str]:
    """Of the pages, in order; the same ones as long as nobody writes."""
    pages = [repository / "README.md", *sorted((repository / "docs").glob("*.md"))]
    texts = [part.strip() for page in pages for part in re.split(r"\n\s*\n", page.read_text(encoding="utf-8"))]
    return [text for text in texts if len(text) > 300]


@pytest.fixture(scope="module")
def llama_cpp(installed: Path, model: Path, repository: Path) -> Iterator[BenchWorker]:
    """Which answers with logits."""
    python = installed / "peer" / "bin" / "python"
    if subprocess.run([python, "-c", "import llama_cpp"], capture_output=True, check=False).returncode:
        pytest.skip("tests/real/install.sh has not run: no llama.cpp")
    command = [python, repository / PEERS, "llama.cpp", "logits", model, model, os.environ["OMP_NUM_THREADS"], 0]
    with BenchWorker("llama.cpp", [str(part) for part in command]) as worker:
        worker.wait(START_S)
        yield worker


@pytest.fixture(scope="session")
def head(installed: Path, model: Path, paragraphs: list[str]) -> Path:
    """An EAGLE-3 head, trained by the command that users have; kept."""
    folder = installed / f"head-{HEAD_STEPS}"
    if not (folder / "config.json").is_file():
        corpus = installed / "corpus.txt"
        corpus.write_text("\n\n".join(paragraphs), encoding="utf-8")
        subprocess.run(
            [
                sys.executable, "-m", "outrider.cli", "model", "train", "eagle3", model, corpus, "--out", folder,
                "--draft-vocab", "2048", "--batch", "2", "--steps", str(HEAD_STEPS), "--plain",
            ],
            check=True,
        )  # fmt: skip
    return folder
