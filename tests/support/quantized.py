"""Random quantised matrices of every kind, and models and checkpoints that have them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from outrider.engine.quantized.rounding import Rounding, quantization_config, round_to_nearest, stored_parts
from outrider.engine.quantized.state import QuantizedTensors, layout_of
from outrider.gguf.header import KINDS
from outrider.kernels.quantized.blocks import QUANTIZED_KINDS, quantized_blocks
from outrider.kernels.quantized.form import Codes, Form, QuantizedMatrix

BLOCKS = {kind.name: (kind.block, kind.num_bytes) for kind in KINDS.values() if kind.name in QUANTIZED_KINDS}
# Where the float16 numbers of a block lie, and how large they are for numbers of about 0.05.
_HALVES = {
    "Q4_0": (0.01, 0), "Q4_1": (0.01, 0, 2), "Q5_0": (0.005, 0), "Q5_1": (0.005, 0, 2), "Q8_0": (0.0007, 0),
    "Q4_K": (0.0002, 0, 2), "Q5_K": (0.0001, 0, 2), "Q6_K": (0.00004, 208), "MXFP4": (0.0,),
}  # fmt: skip


def random_blocks(kind: str, rows: int, inputs: int, seed: int = 1) -> Tensor:  # -> [rows, bytes] uint8
    """Blocks of any bits, whose scales are of a size that weights have."""
    generator = torch.Generator().manual_seed(seed)
    block, num_bytes = BLOCKS[kind]
    blocks = torch.randint(256, (rows * inputs // block, num_bytes), generator=generator).to(torch.uint8)
    size, *starts = _HALVES[kind]
    for start in map(int, starts):
        drawn = (torch.randn(len(blocks), 1, generator=generator) * size).half()
        blocks[:, start : start + 2] = drawn.view(torch.uint8)
    if kind == "MXFP4":
        blocks[:, 0] = blocks[:, 0] % 4 + 118
    return blocks.view(rows, -1)


def matrix_of(kind: str, stored: Tensor) -> QuantizedMatrix:  # [rows, bytes] uint8
    """The matrix that these blocks are."""
    block, num_bytes = BLOCKS[kind]
    shape = (len(stored), stored.shape[1] // num_bytes * block)
    matrix = quantized_blocks(kind, shape, lambda start, end: stored[start:end])
    assert matrix is not None
    return matrix


def by_groups(
    bits: int, outputs: int, inputs: int, span: int, dtype: torch.dtype, has_zeros: bool = False, seed: int = 1
) -> QuantizedMatrix:
    """What is stored as codes, a scale a group and maybe its zero point, as other formats have it."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(1 << bits, (outputs, inputs), generator=generator).to(torch.uint8)
    scales = (torch.randn(outputs, inputs // span, generator=generator) / (1 << bits) * 0.2).to(dtype)
    zeros = torch.randint(1 << bits, scales.shape, generator=generator).to(torch.uint8) if has_zeros else None
    zero = 0 if has_zeros else 1 << bits - 1
    form = Form(bits, span, dtype, zero=zero, has_zeros=has_zeros)
    whole = Codes(codes, scales, zeros=zeros)
    return QuantizedMatrix(form, (outputs, inputs), lambda start, end: whole[start:end])


def rounded_state(state: Mapping[str, Tensor], rounding: Rounding, group: int = 32) -> QuantizedTensors:
    """These tensors as `outrider model convert --quantize` stores them, and as they are read again."""
    stored: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if not name.endswith("_proj.weight"):
            stored[name] = tensor
            continue
        parts = stored_parts(round_to_nearest(tensor, rounding, group))
        stored |= {f"{name.removesuffix('.weight')}.{part}": numbers for part, numbers in parts.items()}
    layout = layout_of(quantization_config(rounding, group, ["lm_head"]))
    assert layout is not None
    return QuantizedTensors(layout, stored)


def small_floats(
    outputs: int, inputs: int, span: int, dtype: torch.dtype = torch.float32, seed: int = 1
) -> QuantizedMatrix:
    """Floats of 8 bits with a scale a span."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randn(outputs, inputs, generator=generator).to(torch.float8_e4m3fn).view(torch.uint8)
    scales = (torch.rand(outputs, inputs // span, generator=generator) * 0.1).to(dtype)
    whole = Codes(codes, scales)
    return QuantizedMatrix(Form(8, span, dtype, floats=True), (outputs, inputs), lambda start, end: whole[start:end])


class SomePacked(Mapping[str, Tensor]):
    """Tensors of a checkpoint, of which the matrices have few bits, but for every `plain`th."""

    def __init__(
        self, state: Mapping[str, Tensor], make: Callable[[int, int, int], QuantizedMatrix], plain: int = 5
    ) -> None:
        matrices = [name for name, tensor in state.items() if tensor.dim() == 2]
        self._matrices = {
            name: make(state[name].shape[0], state[name].shape[1], index)
            for index, name in enumerate(matrices)
            if index % plain != plain - 1
        }
        self._state = state

    def __getitem__(self, name: str) -> Tensor:
        return self._matrices[name].decode() if name in self._matrices else self._state[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)

    @property
    def meta(self) -> Mapping[str, Tensor]:
        return self._state

    def packed(self, name: str) -> QuantizedMatrix | None:
        return self._matrices.get(name)
