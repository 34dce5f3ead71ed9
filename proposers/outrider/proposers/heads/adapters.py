"""Low-rank weights of a head's layer, which some sequences are drafted for with.

They change neither keys nor values: what a head keeps of a text, and finds again in a block of the cache, is the same
whoever drafts, and no weights that were learned reach a sequence that is not theirs."""

from __future__ import annotations

from collections.abc import Mapping

from outrider.engine.batch import Batch, StaticBatch
from outrider.engine.models.low_rank import LayerAdapters, StackedAdapters

LAYER = "model.layers.0"
LEARNING = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


class HeadAdapters(StackedAdapters):
    """An AdapterBank of a head with one layer."""

    @property
    def linears(self) -> Mapping[str, tuple[int, int]]:
        """The outputs and inputs of each product."""
        return {f"{LAYER}.{name}": self._sizes[name] for name in LEARNING}

    def of(self, batch: Batch | StaticBatch) -> LayerAdapters | None:
        """What the layer adds in a pass; None where no row has any."""
        return None if batch.adapter_slots is None else self.step(batch.adapter_slots)[0]
