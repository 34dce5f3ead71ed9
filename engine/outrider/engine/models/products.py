"""A decoder's products, as PyTorch and Triton compute them, from the matrices of a checkpoint: plain numbers in the
rows' type, or, where Triton computes, what is stored as codes of few bits as such.

The input embeddings, which Gemma scales."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.engine.models.weights import EMBEDDINGS, HEAD, WeightReader
from outrider.kernels import dispatch
from outrider.kernels.cpu.decoder import Weight, Weights
from outrider.kernels.layers.reference import Linear
from outrider.kernels.quantized.form import Form, QuantizedMatrix, stacked
from outrider.kernels.quantized.linear import packed_linear, packed_rows
from outrider.kernels.quantized.packed import PackedMatrix, can_pack, pack

Product = Callable[[Tensor], Tensor]  # [rows, in] -> [rows, out]


def runs_packed(device: torch.device) -> bool:
    """Whether codes of few bits stay so there."""
    return dispatch.runs_triton(torch.empty(0, device=device))


class Embedding:
    """Looks up rows of a matrix, times `scale` where there is one: rounded to the type of the rows, as in training."""

    def __init__(
        self,
        matrix: Tensor | PackedMatrix,  # [vocab, hidden]
        scale: float | None,
        dtype: torch.dtype,  # of the rows
    ) -> None:
        self.matrix = matrix
        self._scale = None if scale is None else torch.tensor(scale, dtype=dtype).item()
        self._dtype = dtype

    @property
    def weight(self) -> Tensor | None:  # [vocab, hidden]
        """None where it stays packed."""
        return self.matrix if isinstance(self.matrix, Tensor) else None

    def __call__(self, token_ids: Tensor) -> Tensor:  # [rows] -> [rows, hidden]
        """The residual stream before the first layer, in memory of its own."""
        if isinstance(self.matrix, Tensor):
            hidden = F.embedding(token_ids, self.matrix).to(self._dtype)
        else:
            hidden = packed_rows(self.matrix, token_ids, self._dtype)
        return hidden if self._scale is None else hidden.mul_(self._scale)


class PackedLinear:
    """y = x W^T + b of a matrix that stays packed."""

    weight = None  # which others could compute with

    def __init__(self, matrix: PackedMatrix, bias: Tensor | None, batch_invariant: bool) -> None:
        self.matrix, self._bias, self._batch_invariant = matrix, bias, batch_invariant

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:  # [rows, in] -> [rows, out], written
        """The product."""
        return packed_linear(x, self.matrix, self._bias, out=out, batch_invariant=self._batch_invariant)


class StackedLinear:
    """Products of the same rows, side by side."""

    def __init__(self, parts: Sequence[tuple[Linear | PackedLinear, int]]) -> None:
        self.parts = tuple(parts)  # and the outputs of each
        self._outputs = sum(outputs for _, outputs in parts)

    def __call__(self, x: Tensor) -> Tensor:  # [rows, in] -> [rows, out]
        """The products."""
        out, start = x.new_empty(len(x), self._outputs), 0
        for part, outputs in self.parts:
            place = out[:, start : start + outputs]
            if isinstance(part, PackedLinear):
                part(x, place)
            else:
                place.copy_(part(x))
            start += outputs
        return out


class Products:
    """Lays them out, one after another, so that little is held beside the result."""

    def __init__(
        self,
        reader: WeightReader,
        dtype: torch.dtype,
        device: torch.device,
        batch_invariant: bool,
        keep_plain: bool,  # a second copy of plain ones, for one and two rows
    ) -> None:
        self._reader, self._dtype, self.device = reader, dtype, device
        self._batch_invariant, self._keep_plain = batch_invariant, keep_plain

    def linear(self, prefix: str, *names: str) -> Product:
        """The projections `prefix + name`, side by side."""
        if self._reader.is_quantized:
            weights, bias = self._reader.linear_as_stored(prefix, *names)
            if not isinstance(weights, Tensor):
                return self._side_by_side(weights, bias)
        return self._plain(*self._reader.linear(prefix, *names))

    def matrices(self, prefixes: Sequence[str], *names: str) -> tuple[Tensor, Tensor | None]:
        """The projections `prefix + name` of each prefix side by side, in the rows' type: what is stored as codes is
        decoded. [prefixes, out, in], and the biases, [prefixes, out]."""
        weight, bias = self._reader.linear(prefixes[0], *names)
        weights = weight.new_empty(len(prefixes), *weight.shape)
        biases = None if bias is None else bias.new_empty(len(prefixes), *bias.shape)
        for index, prefix in enumerate(prefixes):
            weight, bias = self._reader.linear(prefix, *names)
            weights[index] = weight
            if biases is not None and bias is not None:
                biases[index] = bias
        return weights, biases

    def embedding(self, scale: float | None) -> Embedding:
        """The input embeddings."""
        packed = self._packed(EMBEDDINGS)
        return Embedding(self._reader.tensor(EMBEDDINGS) if packed is None else packed, scale, self._dtype)

    def head(self, embedding: Embedding) -> Linear | PackedLinear:
        """The language-model head: the embeddings themselves, where they are tied."""
        tied = self._reader.config.tied_embeddings
        matrix = embedding.matrix if tied else self._packed(HEAD)
        if isinstance(matrix, PackedMatrix):
            return PackedLinear(matrix, None, self._batch_invariant)
        return self._plain(self._reader.head(matrix), None, self._keep_plain or tied)

    def _packed(self, name: str) -> PackedMatrix | None:
        stored = self._reader.packed(name)
        return None if stored is None or not can_pack(stored) else pack(stored, self.device)

    def _side_by_side(self, weights: Weights, bias: Tensor | None) -> Product:
        parts: list[tuple[Linear | PackedLinear, int]] = []
        start = 0
        for weight in _joined(weights if isinstance(weights, tuple) else (weights,)):
            end = start + len(weight)
            of_part = None if bias is None else bias[start:end]
            parts.append((self._part(weight, of_part), len(weight)))
            start = end
        return parts[0][0] if len(parts) == 1 else StackedLinear(parts)

    def _part(self, weight: Weight, bias: Tensor | None) -> Linear | PackedLinear:
        if isinstance(weight, QuantizedMatrix) and can_pack(weight):
            return PackedLinear(pack(weight, self.device), bias, self._batch_invariant)
        return self._plain(self._converted(weight), bias)

    def _converted(self, weight: Weight) -> Tensor:
        numbers = weight if isinstance(weight, Tensor) else weight.decode()
        return numbers.to(device=self.device, dtype=self._dtype, copy=True)

    def _plain(self, weight: Tensor, bias: Tensor | None, keep_plain: bool | None = None) -> Linear:
        keep_plain = self._keep_plain if keep_plain is None else keep_plain
        return Linear(weight, bias, batch_invariant=self._batch_invariant, keep_plain=keep_plain)


def _joined(weights: Sequence[Weight]) -> Iterator[Weight]:
    """Neighbours of one form become one matrix."""

    def form(weight: Weight) -> Form | None:
        return weight.form if isinstance(weight, QuantizedMatrix) and can_pack(weight) else None

    for found, parts in groupby(weights, form):
        if found is None:
            yield from parts
        else:
            yield stacked([part for part in parts if isinstance(part, QuantizedMatrix)])
