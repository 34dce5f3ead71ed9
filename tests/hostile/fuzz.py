"""The entry points under a fuzzer that follows what code an input reaches (atheris): make fuzz ARGS="--seconds 600"

Each runs in a process of its own, as many at a time as there are cores. An input that ends in any error but a refusal
is printed, to be put among the seeds of `entries.py`, and this ends with 1."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hostile.entries import Entry

sys.path.insert(0, str(Path(__file__).parents[1]))

STALLED_S = 10  # for one input
MOST_BYTES = 4096  # of an input; more where a seed is long


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if every input was taken or refused."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=60, help="for each entry point")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", help="one entry point, by its name")
    parser.add_argument("--inside", metavar="DIR", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.inside is not None:
        _fuzz(options.only, Path(options.inside), options.seconds, options.seed)
    from hostile.entries import entries

    names = [options.only] if options.only else list(entries())
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return max(pool.map(lambda name: _in_its_own_process(name, options.seconds, options.seed), names))


def _in_its_own_process(name: str, seconds: int, seed: int) -> int:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--inside", folder, "--only", name]
        command += ["--seconds", str(seconds), "--seed", str(seed)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        found = sorted(Path(folder).glob("found-*"))
        for path in found:
            print(f"{name}: {path.name}: {path.read_bytes()!r}")
        said = done.stderr.splitlines()
        if done.returncode or found:
            print("\n".join([*done.stdout.splitlines()[-40:], *said[-20:]]))
            return 1
        print(f"{name}: {next((line for line in reversed(said) if line.startswith('Done')), 'done')}", flush=True)
        return 0


def most_bytes(entry: Entry) -> int:
    """Of an input to this one. A seed that is longer would be cut, and what is behind its first bytes never reached."""
    return max(MOST_BYTES, 2 * max(map(len, entry.seeds)))


def _fuzz(name: str, folder: Path, seconds: int, seed: int) -> None:
    """Does not return: the library ends the process."""
    import atheris

    with atheris.instrument_imports(include=["outrider"]):
        from hostile.entries import entries

    entry, corpus = entries()[name], folder / "corpus"
    corpus.mkdir()
    for number, raw in enumerate(entry.seeds):
        (corpus / str(number)).write_bytes(raw)
    flags = [f"-max_total_time={seconds}", f"-max_len={most_bytes(entry)}", f"-timeout={STALLED_S}", f"-seed={seed}"]
    atheris.Setup([sys.argv[0], str(corpus), *flags, f"-artifact_prefix={folder}/found-"], entry.tried)
    atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
