"""What a draft learns from: windows of text, and what the target gives for every next token of them.

Its likeliest tokens are kept, with their probabilities: they are nearly all of the distribution, and the target is
asked once, however often a draft reads the window. A head beside the target reads its hidden states, too, so that they
are kept with the lesson. Files are written some windows at once, and of them the windows of a step are read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors import safe_open
from torch import Tensor

TOP = 32  # of the target's tokens at every place
STORED_NAMES = {torch.int32: "I32", torch.float16: "F16", torch.bfloat16: "BF16"}  # safetensors' of the types


@dataclass(frozen=True)
class Lesson:
    """Windows, and the target's likeliest next tokens after every place of them."""

    ids: Tensor  # [windows, length + 1] int64
    top_ids: Tensor  # [windows, length, TOP] int64
    top_probs: Tensor  # [windows, length, TOP] float32, of the whole distribution
    features: Tensor  # [windows, length, taps, hidden], as wide as they were computed or as they are kept: bfloat16

    def window(self, index: int) -> Lesson:
        """One of them."""
        part = slice(index, index + 1)
        return Lesson(self.ids[part], self.top_ids[part], self.top_probs[part], self.features[part])

    @classmethod
    def joined(cls, parts: Sequence[Lesson]) -> Lesson:
        """The windows of all of them."""
        return cls(
            torch.cat([part.ids for part in parts]),
            torch.cat([part.top_ids for part in parts]),
            torch.cat([part.top_probs for part in parts]),
            torch.cat([part.features for part in parts]),
        )

    @staticmethod
    def read(path: Path, index: int, taps: Sequence[int] | None = None) -> Lesson:
        """A window of a file, with some of its taps, by their places; None: all."""
        part = slice(index, index + 1)
        with safe_open(path, framework="pt") as file:
            ids, top_ids, top_probs = (file.get_slice(name)[part] for name in ("ids", "top_ids", "top_probs"))
            features = (
                file.get_slice("features")[part]
                if "features" in file.keys()  # noqa: SIM118 - it is no mapping
                else torch.empty(*top_ids.shape[:2], 0, 0)
            )
        chosen = features.clone() if taps is None else features[:, :, list(taps)]
        return Lesson(ids.long(), top_ids.long(), top_probs.float(), chosen)

    def stored(self) -> dict[str, Tensor]:
        """As files hold it."""
        tensors = {"ids": self.ids.int(), "top_ids": self.top_ids.int(), "top_probs": self.top_probs.half()}
        return tensors if not self.features.numel() else tensors | {"features": self.features.bfloat16()}


def write_lessons(path: Path, num_windows: int, parts: Iterable[Lesson]) -> None:
    """Writes a safetensors file of so many windows as they come; a crash leaves none, or a whole one."""
    partial, start, offsets = path.with_suffix(".partial"), 0, dict[str, int]()
    with partial.open("wb") as file:
        for part in parts:
            tensors = part.stored()
            offsets = offsets or _begun(file, num_windows, tensors)
            for name, tensor in tensors.items():
                file.seek(offsets[name] + start * tensor[0].nbytes)
                file.write(tensor.contiguous().view(torch.uint8).numpy().data)
            start += len(part.ids)
    os.replace(partial, path)


def num_windows(path: Path) -> int:
    """Of a file."""
    with safe_open(path, framework="pt") as file:
        return int(file.get_slice("ids").get_shape()[0])


def _begun(file: BinaryIO, num_windows: int, tensors: dict[str, Tensor]) -> dict[str, int]:
    """Writes the header of such tensors with so many windows; returns where each begins."""
    header: dict[str, object] = {}
    ends = [0]
    for tensor in tensors.values():
        ends.append(ends[-1] + num_windows * tensor[0].nbytes)
    for (name, tensor), start, end in zip(tensors.items(), ends[:-1], ends[1:], strict=True):
        shape = [num_windows, *tensor.shape[1:]]
        header[name] = {"dtype": STORED_NAMES[tensor.dtype], "shape": shape, "data_offsets": [start, end]}
    said = json.dumps(header).encode()
    said += b" " * (-len(said) % 8)
    file.write(len(said).to_bytes(8, "little") + said)
    return {name: 8 + len(said) + start for name, start in zip(tensors, ends[:-1], strict=True)}
