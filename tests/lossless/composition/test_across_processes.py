"""Everything with everything across processes, while services are killed and drafts are reloaded."""

from __future__ import annotations

from pathlib import Path

import pytest
from lossless.composition.processes import process_rows, run
from support.environment import SEED


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_every_row_is_plain_decoding(tmp_path: Path) -> None:
    rows = process_rows(2, SEED)
    found = await run(rows, tmp_path, SEED, print)
    failures = [f"{row}: {problem}" for row, problem in found.problems.items() if problem]
    assert not failures, "\n".join(failures)
    assert found.num_replayed > len(rows)
