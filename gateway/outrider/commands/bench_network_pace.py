"""A slow draft: every pass of a draft model stretched to a length by sleeping, which leaves the cores to others."""

from __future__ import annotations

import time
from collections.abc import Sequence

from outrider.proposers.draft_model import DraftModelProposer
from outrider.proposers.draft_rows import Drafted, DraftRows


class Pace:
    """How long a pass takes at least. Set from any thread."""

    def __init__(self) -> None:
        self.pass_s = 0.0

    def stretch_passes(self) -> None:
        """Makes every draft model of this process take its time: a pass, its sampling included, with any number of
        rows, as on a device whose memory is the limit."""
        run = DraftModelProposer.run

        def paced(proposer: DraftModelProposer, rows: Sequence[DraftRows], num_passes: int) -> list[list[Drafted]]:
            end = time.perf_counter() + self.pass_s * num_passes
            drafted = run(proposer, rows, num_passes)
            time.sleep(max(0.0, end - time.perf_counter()))
            return drafted

        setattr(DraftModelProposer, "run", paced)  # noqa: B010  # for this process, on purpose
