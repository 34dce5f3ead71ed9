"""Every mutant of `mutants.py` is killed by its test: `make mutants [ARGS="--only kernels"]`. Each runs in a copy of
the tree in which its line stands, in a folder of its own; what is installed comes after the copy on the path, which is
asked first: else no fault would be in what a test imports."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
sys.path.insert(0, str(REPOSITORY / "tests"))

from mutation.mutants import MUTANTS, Mutant  # noqa: E402  the path is set above

LEFT_OUT = (".git", ".venv*", "results", "build", "dist", "__pycache__", ".*_cache", ".hypothesis")
FAILED = 1  # pytest's status where a test failed; others say that none ran
TIMEOUT_S = 1800  # of one run: of a mutant, or of all tests without one; a test that hangs has its own


def run_in(copy: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Python, with that copy's roots before what is installed."""
    quiet = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    path = os.pathsep.join(str(part.parent) for part in sorted(copy.glob("*/outrider")))
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=copy,
        env=os.environ | quiet | {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": path} | environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def copied(folder: Path) -> Path:
    """A copy of the tree, to put mutants in."""
    return Path(shutil.copytree(REPOSITORY, folder, ignore=shutil.ignore_patterns(*LEFT_OUT), symlinks=True))


def ask_path(copy: Path) -> None:
    """RuntimeError if what the mutants are in is not what a copy's tests import."""
    files = {mutant.file.split("/", 1)[1] for mutant in MUTANTS if mutant.is_python}
    modules = sorted(file.removesuffix(".py").replace("/", ".") for file in files)
    asked = f"import importlib; print(*(importlib.import_module(name).__file__ for name in {modules}), sep='\\n')"
    done = run_in(copy, "-c", asked)
    elsewhere = [file for file in done.stdout.splitlines() if not Path(file).is_relative_to(copy)]
    if done.returncode or elsewhere:
        raise RuntimeError(f"imported from elsewhere: {elsewhere}\n{done.stderr}")


def failing(copy: Path, *tests: str, **environment: str) -> list[str]:
    """What fails of the tests, or other arguments, in that copy of the tree, in one run. RuntimeError if none ran."""
    done = run_in(copy, "-m", "pytest", "-q", "-n0", "-rfE", "-p", "no:cacheprovider", *tests, **environment)
    if done.returncode not in (0, FAILED):
        raise RuntimeError(f"{tests}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return [line for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]


def survives(copy: Path, mutant: Mutant) -> bool:
    """Puts the mutant into the copy, and takes it out again. A fault of the C kernels, which are compiled then, stays
    out of the user's cache."""
    file, apart = copy / mutant.file, {} if mutant.is_python else {"XDG_CACHE_HOME": str(copy / ".cache")}
    text = file.read_text(encoding="utf-8")
    file.write_text(mutant.applied(text), encoding="utf-8")
    try:
        return not failing(copy, "-x", mutant.killed_by, **apart)
    finally:
        file.write_text(text, encoding="utf-8")


def run_all(mutants: Sequence[Mutant], copy: Path) -> list[str]:
    """What is wrong, a line each, in a copy that is made for it."""
    ask_path(copied(copy))
    found = [f"without a mutant: {line}" for line in failing(copy, *sorted({m.killed_by for m in mutants}))]
    for mutant in mutants:
        alive = survives(copy, mutant)
        print(f"{'SURVIVES' if alive else 'killed':8} {mutant}", flush=True)
        found += [f"survives: {mutant}"] * alive
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="mutants whose file or test has this in its name")
    parser.add_argument("--processes", type=int, default=2)
    asked = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if asked.only in f"{mutant.file} {mutant.killed_by}"]
    shares = [share for first in range(asked.processes) if (share := chosen[first :: asked.processes])]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(shares) or 1) as pool:
        copies = [Path(folder) / str(index) for index in range(len(shares))]
        wrong = [line for lines in pool.map(run_all, shares, copies) for line in lines]
    print(*wrong, sep="\n")
    print(f"{len(chosen)} mutants, {len(wrong)} problems")
    return bool(wrong) or not chosen


if __name__ == "__main__":
    raise SystemExit(main())
