"""The experts of a checkpoint that keeps those of a layer in one tensor, by the names that they have in others.

gpt-oss has gate and up by turns, in plain numbers, whose inputs come first, or in blocks of 32 floats of 4 bits (MXFP4,
OCP Microscaling Formats 1.0), whose outputs do. Other families are kept so where transformers saved them by its own
names: gates before ups, outputs first."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from outrider.engine.models.base import WrongCheckpoint
from outrider.engine.models.mixture_config import Mixture
from outrider.engine.models.state import meta_of
from outrider.kernels.quantized.blocks import MXFP4
from outrider.kernels.quantized.form import Codes, QuantizedMatrix

FUSED = re.compile(r"(model\.layers\.\d+\.mlp\.experts\.)(gate_up_proj|down_proj)(_bias|_blocks|_scales)?")
IN_LAYER = re.compile(r"(model\.layers\.\d+)\.mlp\.")
BLOCK = 32


@dataclass(frozen=True, slots=True)
class ExpertPlace:
    """Where a tensor of an expert lies."""

    stored: str  # without what follows it in a quantised one's names
    expert: int
    rows: slice  # of its outputs: gate and up share them
    is_bias: bool


def of_each_expert(mixture: Mixture, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The state, in which each expert has its own tensors."""
    if not any(FUSED.fullmatch(name) for name in state):
        return state
    is_packed = any(name.endswith("_proj_blocks") for name in state)
    return PackedExperts(mixture, state) if is_packed else FusedExperts(mixture, state)


class FusedExperts(Mapping[str, Tensor]):
    """A LazyState over the tensors as they are stored."""

    def __init__(self, mixture: Mixture, state: Mapping[str, Tensor]) -> None:
        names = mixture.names
        self._state, self._by_turns = state, names.fused
        own = rf"\1.{names.block}."  # transformers says mlp
        self._others = {IN_LAYER.sub(own, name): name for name in state if FUSED.fullmatch(name) is None}
        self._places: dict[str, ExpertPlace] = {}
        shapes = meta_of(state)
        for match in filter(None, map(FUSED.fullmatch, state)):
            prefix, whole, kind = match[1], match[2], match[3] or ""
            if kind == "_scales":
                continue
            _check_count(match[0], tuple(shapes[match[0]].shape), mixture.num_experts)
            gate, up = (slice(0, None, 2), slice(1, None, 2)) if names.fused else _halves(mixture.width)
            parts = {names.gate: gate, names.up: up} if whole == "gate_up_proj" else {names.down: slice(None)}
            for part, rows in parts.items():
                for expert in range(mixture.num_experts):
                    stem = IN_LAYER.sub(own, f"{prefix}{expert}.{part}")
                    name = f"{stem}.{'bias' if kind == '_bias' else 'weight'}"
                    self._places[name] = ExpertPlace(f"{prefix}{whole}", expert, rows, kind == "_bias")

    def __getitem__(self, name: str) -> Tensor:
        place = self._places.get(name)
        if place is None:
            return self._state[self._others[name]]
        return _bias(self._state, place) if place.is_bias else self._weight(place)

    def __iter__(self) -> Iterator[str]:
        yield from self._others
        yield from self._places

    def __len__(self) -> int:
        return len(self._others) + len(self._places)

    @cached_property
    def meta(self) -> Mapping[str, Tensor]:
        """The shape and type of each, without its numbers."""
        stored = {name: torch.empty_like(tensor, device="meta") for name, tensor in meta_of(self._state).items()}
        found = {name: stored[other] for name, other in self._others.items()}
        for name, place in self._places.items():
            found[name] = _bias(stored, place) if place.is_bias else self._shape(stored, place)
        return found

    def _weight(self, place: ExpertPlace) -> Tensor:  # [outputs, inputs]
        return self._plain(self._state, place)

    def _shape(self, stored: Mapping[str, Tensor], place: ExpertPlace) -> Tensor:
        return self._plain(stored, place)

    def _plain(self, state: Mapping[str, Tensor], place: ExpertPlace) -> Tensor:
        whole = _one(state, place.stored, place)
        return (whole.t() if self._by_turns else whole)[place.rows]


class PackedExperts(FusedExperts):
    """Whose matrices are floats of 4 bits (a QuantizedState)."""

    def packed(self, name: str) -> QuantizedMatrix | None:
        """A matrix as it is stored; None for one of plain numbers."""
        place = self._places.get(name)
        return None if place is None or place.is_bias else self._matrix(place)

    def _matrix(self, place: ExpertPlace) -> QuantizedMatrix:
        blocks, scales = (
            _one(self._state, f"{place.stored}_{part}", place)[place.rows] for part in ("blocks", "scales")
        )  # [outputs, blocks, 16] and [outputs, blocks] uint8
        if blocks.dim() != 3 or blocks.shape[2] != BLOCK // 2 or scales.shape != blocks.shape[:2]:
            raise WrongCheckpoint(f"{place.stored}: its _blocks and _scales have shapes that do not fit one another")

        def read(start: int, end: int) -> Codes:
            rows = blocks[start:end]
            codes = torch.stack([rows & 15, rows >> 4], dim=-1).flatten(1)  # [rows, inputs]
            exponents = scales[start:end].int() - 128  # the table's values are doubled
            powers = torch.ldexp(torch.ones(exponents.shape), exponents)
            return Codes(codes, powers.bfloat16())

        return QuantizedMatrix(MXFP4, (len(blocks), blocks.shape[1] * BLOCK), read)

    def _weight(self, place: ExpertPlace) -> Tensor:
        return self._matrix(place).decode()

    def _shape(self, stored: Mapping[str, Tensor], place: ExpertPlace) -> Tensor:
        blocks = _one(stored, f"{place.stored}_blocks", place)[place.rows]
        return torch.empty(blocks.shape[0], blocks[0].numel() * 2, device="meta")


def _halves(width: int) -> tuple[slice, slice]:
    return slice(0, width), slice(width, None)


def _check_count(name: str, shape: tuple[int, ...], num_experts: int) -> None:
    """Raises WrongCheckpoint."""
    if not 2 <= len(shape) <= 4 or shape[0] != num_experts:
        raise WrongCheckpoint(f"{name} has shape {shape}, not of {num_experts} experts")


def _bias(state: Mapping[str, Tensor], place: ExpertPlace) -> Tensor:  # [outputs]
    return _one(state, f"{place.stored}_bias", place)[place.rows]


def _one(state: Mapping[str, Tensor], name: str, place: ExpertPlace) -> Tensor:
    """An expert's part. Raises WrongCheckpoint."""
    if name not in state:
        raise WrongCheckpoint(f"missing {name}")
    tensor = state[name]
    if place.expert >= len(tensor):  # of its scales
        raise WrongCheckpoint(f"{name} has shape {tuple(tensor.shape)}, with no expert {place.expert}")
    return tensor[place.expert]
