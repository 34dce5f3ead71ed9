"""Whether a change touches what some slow tests are about: `python tests/support/changes.py vllm` ends with 0 if it
does, or if that cannot be known, and with 1 if it does not. The change is what lies between the working tree and the
commit at which it left `origin/main`; on `main` itself, as it is there, it is the last commit."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
COMMON = ("pyproject.toml", "hatch_build.py", "Makefile", ".ci/", "tests/support/", "tests/conftest.py")
ABOUT = {  # subject: where its tests can begin to fail
    "vllm": (
        "outrider-vllm/", "protos/", "rpc/", "engine/", "kernels/", "target_service/", "draft_service/",
        "gateway/outrider/gateway/speculation/", "gateway/outrider/gateway/peers/", "tests/vllm_engine/",
    ),
    "compilers": (
        "kernels/", "engine/", "proposers/", "target_service/", "tests/kernels/", "tests/engine/",
        "tests/target_service/", "tests/proposers/",
    ),
}  # fmt: skip


def git(*arguments: str) -> list[str] | None:
    """What git says, by lines; None where it cannot."""
    done = subprocess.run(["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    return done.stdout.split("\n")[:-1] if done.returncode == 0 else None


def changed_files() -> list[str] | None:
    """From the repository's root; None if that cannot be known."""
    head, fork = git("rev-parse", "HEAD"), git("merge-base", "HEAD", "origin/main")
    if fork is None:
        return None
    base = fork if fork != head else git("rev-parse", "--verify", "--quiet", "HEAD~1")
    return git("diff", "--name-only", base[0]) if base else None


def touches(subject: str, files: Sequence[str] | None) -> bool:
    return files is None or any(name.startswith((*COMMON, *ABOUT[subject])) for name in files)


if __name__ == "__main__":
    sys.exit(0 if touches(sys.argv[1], changed_files()) else 1)
