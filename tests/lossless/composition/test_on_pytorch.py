"""Everything with everything where there are no C kernels: each row with the tokens of plain decoding, or its law."""

from __future__ import annotations

from pathlib import Path

import pytest
from lossless.composition.judging import check


@pytest.mark.timeout(1800)
def test_every_row_is_plain_decoding(tmp_path: Path, prove: bool) -> None:
    check("PyTorch", tmp_path, prove)
