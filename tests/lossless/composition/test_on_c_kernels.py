"""Everything with everything on the C kernels: each row with the tokens of plain decoding, or its law."""

from __future__ import annotations

from pathlib import Path

import pytest
from lossless.composition.judging import check

from outrider.kernels.cpu.library import cpu_library


@pytest.mark.timeout(1800)
@pytest.mark.skipif(cpu_library() is None, reason="no C kernels")
def test_every_row_is_plain_decoding(tmp_path: Path, prove: bool) -> None:
    check("C", tmp_path, prove)
