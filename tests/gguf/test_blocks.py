"""What the blocks of each kind mean: the numbers are those of gguf's own classes, to the bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from outrider.gguf.header import KINDS
from outrider.kernels.quantized.reference import decode

ROWS, BLOCKS = 5, 3


@pytest.mark.parametrize("name", [kind.name for kind in KINDS.values()])
def test_numbers_are_the_librarys(name: str) -> None:
    block, num_bytes = next((kind.block, kind.num_bytes) for kind in KINDS.values() if kind.name == name)
    raw = np.random.default_rng(len(name)).integers(0, 256, (ROWS, BLOCKS * num_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):  # infinite scales, and none
        theirs = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name])
    found = decode(name, torch.from_numpy(raw)).numpy()
    assert found.shape == (ROWS, BLOCKS * block)
    assert np.array_equal(found, theirs, equal_nan=True)
