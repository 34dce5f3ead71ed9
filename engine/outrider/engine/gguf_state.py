"""The tensors of a GGUF file under the names that transformers gave them, and as transformers holds them: decoded when
they are asked for, or as packed as they are stored, queries and keys in its order, Gemma's norms without the 1 that was
added to them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property, partial
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from outrider.gguf.config import architecture_of, config_of, hugging_face_names
from outrider.gguf.header import GgufHeader, TensorPlace, WrongGguf
from outrider.kernels.quantized.blocks import quantized_blocks
from outrider.kernels.quantized.form import QuantizedMatrix
from outrider.kernels.quantized.reference import decode

DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16}  # what is stored so is handed out so; all else as float32


class GgufState(Mapping[str, Tensor]):
    """A model's tensors (a LazyState). Each is decoded anew when it is asked for, and the file's mapping is let go.
    WrongGguf for one whose rows its heads do not share."""

    def __init__(self, header: GgufHeader) -> None:
        self._places, self._architecture = hugging_face_names(header), architecture_of(header)
        config = config_of(header)
        self._heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
        if self._architecture.turned:
            for name, place in self._places.items():
                _check_heads(place, self._heads.get(_projection(name) or "", 0))

    def __getitem__(self, name: str) -> Tensor:
        place = self._places[name]
        tensor = _decoded(place)
        if self._architecture.turned and (projection := _projection(name)) is not None:
            tensor = _turned_back(tensor, self._heads[projection])
        if self._architecture.norms_with_one and name.endswith("norm.weight"):
            tensor = tensor - 1.0
        return tensor

    def packed(self, name: str) -> QuantizedMatrix | None:
        """A matrix as it is stored, of which a few rows are read at a time; None for one of plain numbers."""
        place = self._places[name]
        if len(place.shape) != 2:
            return None
        rows, columns = place.shape
        matrix = quantized_blocks(place.kind.name, (rows, columns), partial(stored_rows, place))
        if matrix is not None and self._architecture.turned and (projection := _projection(name)) is not None:
            matrix = matrix.reordered(_turned_back(torch.arange(rows), self._heads[projection]))
        return matrix

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    @cached_property
    def meta(self) -> Mapping[str, Tensor]:
        """The shape and type of each, without its numbers."""
        return {
            name: torch.empty(place.shape, dtype=DTYPES.get(place.kind.name, torch.float32), device="meta")
            for name, place in self._places.items()
        }


def stored_bytes(place: TensorPlace) -> Tensor:
    """A tensor's bytes as they lie in the file, [rows, bytes of a row] uint8."""
    return stored_rows(place, 0, prod(place.shape[:-1]))


def stored_rows(place: TensorPlace, start: int, end: int) -> Tensor:
    """The bytes of the rows from one to before another, [rows, bytes of a row] uint8."""
    width = place.num_bytes // prod(place.shape[:-1])
    count, offset = (end - start) * width, place.start + start * width
    found = np.fromfile(Path(place.path), dtype=np.uint8, count=count, offset=offset)
    return torch.from_numpy(found).view(end - start, width)


def _decoded(place: TensorPlace) -> Tensor:
    stored = stored_bytes(place)
    dtype = DTYPES.get(place.kind.name)
    numbers = decode(place.kind.name, stored) if dtype is None else stored.view(dtype)
    return numbers.view(place.shape)


def _projection(name: str) -> str | None:
    """Whether a tensor is of the queries or of the keys."""
    return next((part for part in "qk" if f".self_attn.{part}_proj." in name), None)


def _check_heads(place: TensorPlace, num_heads: int) -> None:
    """That the rows of queries or keys are pairs of so many heads; 0: they are of neither."""
    if num_heads and place.shape[0] % (2 * num_heads):
        told = f"has {place.shape[0]} rows for {num_heads} heads"
        raise WrongGguf(f"{place.path}: {place.name}: {told}; allowed: a multiple of {2 * num_heads}")


def _turned_back(rows: Tensor, num_heads: int) -> Tensor:
    """rows: [heads * head_dim, ...], whose neighbours turn together -> those that lie half a head apart."""
    return rows.view(num_heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
