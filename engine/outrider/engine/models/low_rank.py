"""What adapters add to our own decoders' products: by the names that Llama gave the projections, whatever the base's
checkpoint fuses; and of all slots together, as PyTorch and Triton compute them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from outrider.engine.models.base import LowRank
from outrider.engine.models.decoder_config import DecoderConfig, turned_first
from outrider.engine.models.weights import expected_shapes, fused_parts
from outrider.kernels.lora.reference import add_low_rank
from outrider.kernels.types import LowRankWeights

LEAST_RANK = 16  # that a slot has room for: the least side of a product of tiles

PRODUCTS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "output": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
OF_ATTENTION = ("qkv", "output")


def slot_rank(max_rank: int) -> int:
    """What a slot has room for, so that tiles fit it: a power of two."""
    return max(LEAST_RANK, 1 << (max_rank - 1).bit_length())


def decoder_linears(config: DecoderConfig) -> dict[str, tuple[int, int]]:
    """The outputs and inputs of every layer's products that adapters may change, by the checkpoint's names: not those
    of experts."""
    mixture = config.mixture
    of_experts = () if mixture is None else tuple(f".{name}.weight" for name, *_ in mixture.linears(0))
    return {
        name.removesuffix(".weight"): (shape[0], shape[1])
        for name, shape in expected_shapes(config).items()
        if len(shape) == 2 and name.startswith("model.layers.") and not name.endswith(of_experts)
    }


def projection_sizes(config: DecoderConfig, attention_inputs: int | None = None) -> dict[str, tuple[int, int]]:
    """The outputs and inputs of one layer's products, by the names of PRODUCTS, where attention reads so many numbers
    (None: the hidden state)."""
    hidden, width, dim = config.hidden_size, config.intermediate_size, config.head_dim
    inputs = attention_inputs or hidden
    heads, kv_heads = config.num_heads * dim, config.num_kv_heads * dim
    return {
        "self_attn.q_proj": (heads, inputs),
        "self_attn.k_proj": (kv_heads, inputs),
        "self_attn.v_proj": (kv_heads, inputs),
        "self_attn.o_proj": (hidden, heads),
        "mlp.gate_proj": (width, hidden),
        "mlp.up_proj": (width, hidden),
        "mlp.down_proj": (hidden, width),
    }


def by_layer(config: DecoderConfig, modules: Mapping[str, LowRank]) -> list[dict[str, LowRank]]:
    """What an adapter has for each layer, by the names of PRODUCTS. What a checkpoint fuses shares the lower factor; of
    heads of which a part turns, that part comes first."""
    parts, layers = fused_parts(config), []
    for index in range(config.num_layers):
        layer: dict[str, LowRank] = {}
        for name in projection_sizes(config):
            stem, projection = name.split(".")
            fused, rows = parts.get(projection, (projection, slice(None)))
            found = modules.get(f"model.layers.{index}.{stem}.{fused}")
            if found is None:
                continue
            up = found.up[rows]
            if projection in ("q_proj", "k_proj") and config.rotary_dim != config.head_dim:
                up = turned_first(up, config.head_dim, config.rotary_dim)
            layer[name] = LowRank(found.down, up, found.scaling)
        layers.append(layer)
    return layers


@dataclass(frozen=True, slots=True)
class LayerAdapters:
    """What one layer adds in a step."""

    products: Mapping[str, LowRankWeights]  # by the names of PRODUCTS; one that no adapter changes is absent
    slots: Tensor  # [rows] int32
    batch_invariant: bool

    def add(self, name: str, y: Tensor, x: Tensor) -> None:  # [rows, out], changed; [rows, in]
        """To the product of this name."""
        if (weights := self.products.get(name)) is not None:
            add_low_rank(y, x, weights, self.slots, batch_invariant=self.batch_invariant)


_Part = tuple[Tensor, Tensor, Tensor]  # of one slot and product: [slices, rank, in], [out, rank] and [slices] float32


class StackedAdapters:
    """An AdapterBank of a decoder by PyTorch or Triton: slots of one size."""

    def __init__(
        self,
        config: DecoderConfig,
        dtype: torch.dtype,
        device: torch.device,
        batch_invariant: bool = False,
        attention_inputs: int | None = None,
    ) -> None:
        self._config, self._dtype, self._device, self._batch_invariant = config, dtype, device, batch_invariant
        self._sizes = projection_sizes(config, attention_inputs)
        self._layers: list[dict[str, LowRankWeights]] = []  # by the names of PRODUCTS
        self._held: list[frozenset[tuple[int, str]]] = []  # of each slot, the layers and products that it changes

    @property
    def linears(self) -> Mapping[str, tuple[int, int]]:
        """The outputs and inputs of each product, by the checkpoint's names."""
        return decoder_linears(self._config)

    def make_room(self, num_slots: int, max_rank: int) -> None:
        """Makes room for all slots, on the device."""
        rank, sizes = slot_rank(max_rank), self._sizes

        def weights(*parts: str) -> LowRankWeights:
            bounds = tuple(accumulate((sizes[part][0] for part in parts), initial=0))
            down = num_slots, len(parts), rank, sizes[parts[0]][1]
            zeros = partial(torch.zeros, dtype=self._dtype, device=self._device)
            scaling = torch.zeros(num_slots, len(parts), device=self._device)
            return LowRankWeights(zeros(down), zeros((num_slots, bounds[-1], rank)), scaling, bounds)

        mixture = self._config.mixture
        of_experts = frozenset[int]() if mixture is None else mixture.layers  # which no adapter changes
        self._layers = [
            {
                name: weights(*parts)
                for name, parts in PRODUCTS.items()
                if name in OF_ATTENTION or index not in of_experts
            }
            for index in range(self._config.num_layers)
        ]
        self._held = [frozenset()] * num_slots

    def prepare(self, modules: Mapping[str, LowRank]) -> dict[tuple[int, str], _Part]:
        """Lays an adapter out by layer and product."""
        return {
            (index, name): self._part(self._layers[index][name], [layer.get(part) for part in parts])
            for index, layer in enumerate(by_layer(self._config, modules))
            for name, parts in PRODUCTS.items()
            if any(part in layer for part in parts)
        }

    def put(self, slot: int, prepared: Mapping[tuple[int, str], _Part] | None) -> None:
        """Fills a slot; what the adapter leaves alone becomes 0."""
        parts = prepared or {}
        for index, name in self._held[slot] - parts.keys():
            self._layers[index][name].scaling[slot] = 0
        for (index, name), (down, up, scaling) in parts.items():
            weights, rank = self._layers[index][name], up.shape[1]
            weights.down[slot, :, :rank].copy_(down, non_blocking=True)
            weights.down[slot, :, rank:].zero_()
            weights.up[slot, :, :rank].copy_(up, non_blocking=True)
            weights.up[slot, :, rank:].zero_()
            weights.scaling[slot].copy_(scaling, non_blocking=True)
        self._held[slot] = frozenset(parts)

    def step(self, slots: Tensor) -> Sequence[LayerAdapters]:  # [rows] int32
        """What each layer adds in a step whose rows have these adapters."""
        changed = frozenset().union(*self._held)
        return [
            LayerAdapters(
                {name: weights for name, weights in layer.items() if (index, name) in changed},
                slots,
                self._batch_invariant,
            )
            for index, layer in enumerate(self._layers)
        ]

    def _part(self, weights: LowRankWeights, slices: Sequence[LowRank | None]) -> _Part:
        """A part that is as large as the greatest rank of the slices asks for."""
        rank, (_, num_slices, _, width) = max(len(one.down) for one in slices if one), weights.down.shape
        down, up = self._host((num_slices, rank, width)), self._host((weights.bounds[-1], rank))
        scaling = torch.zeros(num_slices)
        for index, ((start, end), one) in enumerate(zip(pairwise(weights.bounds), slices, strict=True)):
            if one is not None:
                own = len(one.down)
                down[index, :own], up[start:end, :own], scaling[index] = one.down, one.up, one.scaling
        return down, up, scaling

    def _host(self, shape: Sequence[int]) -> Tensor:
        return torch.zeros(*shape, dtype=self._dtype, pin_memory=self._device.type == "cuda")
