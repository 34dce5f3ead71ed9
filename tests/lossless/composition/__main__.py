"""Runs the long arrays and writes docs/composition.md: python -m lossless.composition [--strength 3] [--seed 1]"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from lossless.composition import driver, processes
from lossless.composition.page import PAGE, written
from lossless.composition.processes import process_rows
from lossless.composition.table import rows


def main() -> int:
    parser = argparse.ArgumentParser(description="Everything with everything.")
    parser.add_argument("--strength", type=int, choices=(2, 3), default=3, help="how many values meet in one process")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with TemporaryDirectory() as name:
        found = driver.run(rows(given.strength, given.seed), Path(name))
        print(
            "\n".join(found.failures) or f"{len(found.outcomes)} rows in one process, all as plain decoding", flush=True
        )
        across = asyncio.run(processes.run(process_rows(2, given.seed), Path(name), given.seed, print))
    PAGE.write_text(written(found, across, given.strength, given.seed), encoding="utf-8")
    print(f"{PAGE} is written")
    return bool(found.failures or any(across.problems.values()))


if __name__ == "__main__":
    sys.exit(main())
