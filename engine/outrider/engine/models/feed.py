"""What stands between a layer's attention and the next layer: a gated feed-forward, or a mixture of such experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from outrider.engine.models.census import ExpertCensus
from outrider.engine.models.decoder_config import DecoderConfig
from outrider.engine.models.low_rank import LayerAdapters
from outrider.engine.models.mixture_config import Mixture
from outrider.engine.models.products import Product, Products
from outrider.kernels import dispatch
from outrider.kernels.layers.reference import gated_clamped, gated_gelu, gated_silu
from outrider.kernels.mixture.reference import mix, mix_stacked, route

Feed = Callable[[Tensor, LayerAdapters | None], Tensor]  # [rows, hidden], normed -> the same
DENSE = "gate_proj", "up_proj", "down_proj"


def gate_of(config: DecoderConfig) -> Callable[..., Tensor]:  # [rows, 2 * width] -> [rows, width]
    """A model's."""
    if config.mixture is not None and config.mixture.clamp is not None:
        slope, limit = config.mixture.clamp
        return partial(gated_clamped, slope=slope, limit=limit)
    return gated_silu if config.activation == "silu" else gated_gelu


class GatedFeed:
    """A gated feed-forward."""

    def __init__(self, config: DecoderConfig, gate_up: Product, down: Product, batch_invariant: bool = False) -> None:
        self._gate = gate_of(config)
        self._gate_up, self._down, self._batch_invariant = gate_up, down, batch_invariant

    def __call__(self, normed: Tensor, adapters: LayerAdapters | None = None) -> Tensor:  # [rows, hidden] -> the same
        """What it gives."""
        gate_up = self._gate_up(normed)
        if adapters is not None:
            adapters.add("gate_up", gate_up, normed)
        gated = self._gate(gate_up, batch_invariant=self._batch_invariant)
        down = self._down(gated)
        if adapters is not None:
            adapters.add("down", down, gated)
        return down


class MixedFeed:
    """Experts, which no adapter changes, one after another."""

    def __init__(
        self, mixture: Mixture, router: Product, experts: Sequence[GatedFeed], counts: Tensor
    ) -> None:  # counts: [experts] int64, written by each pass
        self._mixture, self._router, self._experts, self._counts = mixture, router, experts, counts

    def __call__(self, normed: Tensor, adapters: LayerAdapters | None = None) -> Tensor:  # [rows, hidden] -> the same
        """What a row's chosen ones give."""
        mixture = self._mixture
        scores, has_shared = self._router(normed), mixture.shared_width is not None
        chosen, weights = route(scores, mixture.num_chosen, normalised=mixture.normalised, has_shared=has_shared)
        self._counts.copy_(torch.bincount(chosen[:, : mixture.num_chosen].flatten(), minlength=len(self._counts)))
        return mix(normed, chosen, weights, self._experts)


class StackedFeed:
    """Experts on an accelerator, those of one width together; the shared one computes all rows."""

    def __init__(
        self,
        config: DecoderConfig,
        mixture: Mixture,
        router: Product,
        gate_up: tuple[Tensor, Tensor | None],  # [experts, 2 * width, hidden], [experts, 2 * width]
        down: tuple[Tensor, Tensor | None],  # [experts, hidden, width], [experts, hidden]
        shared: GatedFeed | None,
        counts: Tensor,  # [experts] int64, written by each pass
    ) -> None:
        self._gate, self._mixture, self._router, self._shared = gate_of(config), mixture, router, shared
        (self._gate_up, of_gate), (self._down, of_down), self._counts = gate_up, down, counts
        self._biases = None if of_gate is None or of_down is None else (of_gate, of_down)

    def __call__(self, normed: Tensor, adapters: LayerAdapters | None = None) -> Tensor:  # [rows, hidden] -> the same
        """What a row's chosen ones give."""
        mixture, shared = self._mixture, self._shared
        scores, count = self._router(normed), mixture.num_chosen
        chosen, weights = route(scores, count, normalised=mixture.normalised, has_shared=shared is not None)
        own = chosen[:, :count].contiguous(), weights[:, :count].contiguous()
        mixed = mix_stacked(normed, *own, self._gate_up, self._down, self._gate, self._biases, self._counts)
        if shared is None:
            return mixed
        return mixed + (weights[:, count:] * shared(normed).float()).to(mixed.dtype)


def feed_of(
    config: DecoderConfig, index: int, products: Products, census: ExpertCensus | None, batch_invariant: bool
) -> Feed:
    """A layer's, of its checkpoint."""
    prefix, mixture = f"model.layers.{index}.", config.mixture
    if mixture is None or census is None or index not in mixture.layers:
        return _gated(config, f"{prefix}mlp.", DENSE, products, batch_invariant)
    gate, up, down = names = mixture.names.projections
    counts = census.of_layer(index)
    router = products.linear(prefix, *mixture.routers)
    stems = [f"{prefix}{mixture.expert(number)}." for number in range(mixture.num_with_shared)]
    if not dispatch.runs_triton(torch.empty(0, device=products.device)):
        experts = [_gated(config, stem, names, products, batch_invariant) for stem in stems]
        return MixedFeed(mixture, router, experts, counts)
    own = stems[: mixture.num_experts]
    gate_ups, downs = products.matrices(own, gate, up), products.matrices(own, down)
    shared = [_gated(config, stem, names, products, batch_invariant) for stem in stems[mixture.num_experts :]]
    return StackedFeed(config, mixture, router, gate_ups, downs, shared[0] if shared else None, counts)


def _gated(
    config: DecoderConfig, prefix: str, names: tuple[str, str, str], products: Products, batch_invariant: bool
) -> GatedFeed:
    gate, up, down = names
    gate_up = products.linear(prefix, gate, up)
    return GatedFeed(config, gate_up, products.linear(prefix, down), batch_invariant)
