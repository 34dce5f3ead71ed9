"""Everything with everything across processes, while services are killed and drafts are reloaded."""

from __future__ import annotations

from pathlib import Path

import pytest
from chaos.fleet import Drafting, Fleet
from lossless.composition.processes import process_rows, run
from support.environment import SEED

GRACE_S = "20"


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_every_row_is_plain_decoding(tmp_path: Path) -> None:
    async with Fleet(GRACE_S, Drafting.of(SEED)) as fleet:
        found = await run(fleet, process_rows(2, SEED), tmp_path, print)
    failures = [f"{row}: {problem}" for row, problem in found.items() if problem]
    assert not failures, "\n".join(failures)
