"""The two functions that Outrider adds to transformers' attention registry, and the mask function of the second.

`outrider_paged` computes a step over the paged cache. It has no mask function on purpose: transformers then builds no
mask at all. `outrider_inspect` runs once at load: it notes what every attention layer stores and which mask eager
attention would get there, so that a window that exists only in the mask is found too. Both are stateless: what they
need reaches them as the keyword argument `outrider_step` of the model's forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from outrider.engine.batch import Batch
from outrider.engine.kv_cache import KVCache, LayerShape
from outrider.engine.models.base import UnsupportedModel
from outrider.kernels.attention_plan import AttentionPlan, plan_attention
from outrider.kernels.kv_store import store_kv
from outrider.kernels.paged_attention import planned_attention

PAGED = "outrider_paged"
INSPECT = "outrider_inspect"

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # (batch, head, query, key) indices -> visible


@dataclass(slots=True)
class PagedStep:
    """What `outrider_paged` needs to compute one forward pass; the first layer of a kind makes the plan of all."""

    batch: Batch
    cache: KVCache
    windows: tuple[int | None, ...]  # per layer: how many keys a row sees, itself included; None sees all
    plans: dict[tuple[int | None, int], AttentionPlan] = field(default_factory=dict)

    def plan(self, layer: int, heads_per_kv_head: int, dtype: torch.dtype) -> AttentionPlan:
        """The same for all layers of one window and one number of query heads per key-value head."""
        kind = self.windows[layer], heads_per_kv_head
        if kind not in self.plans:
            self.plans[kind] = plan_attention(
                self.batch.block_tables,
                self.batch.query_starts,
                self.batch.context_lens,
                block_size=self.cache.block_size,
                heads_per_kv_head=heads_per_kv_head,
                dtype=dtype,
                sliding_window=self.windows[layer],
            )
        return self.plans[kind]


@dataclass(frozen=True, slots=True)
class MaskRule:
    """What `outrider_inspect` gets in place of a mask: the function that would have filled it."""

    visible: MaskFunction
    device: torch.device | str

    def window(self, max_model_len: int) -> int | None:
        """How many keys a row sees, itself included, or None if it sees all at every position below `max_model_len`.
        Evaluates a few rows, of which the last two tell a chunk from a window. Raises ValueError for any other mask."""
        length = max(max_model_len, 8)
        rows = sorted({0, 1, length // 3, length // 2, length - 2, length - 1})
        queries = torch.tensor(rows, device=self.device)[:, None]  # [rows, 1]
        keys = torch.arange(length, device=self.device)[None, :]  # [1, length]
        zero = torch.zeros((), dtype=torch.int64, device=self.device)
        visible = self.visible(zero, zero, queries, keys).expand(len(rows), length)  # [rows, length]
        seen = int(visible[-1].sum())  # of the last row, which sees a whole window
        if not torch.equal(visible, (keys <= queries) & (keys > queries - seen)):
            raise ValueError("neither causal nor a causal window")
        return seen if seen < length else None


@dataclass(slots=True)
class Inspection:
    """What the attention layers of one forward pass were seen to do, by layer."""

    max_model_len: int
    dtype: torch.dtype  # of the model, and so of its cache
    shapes: dict[int, LayerShape] = field(default_factory=dict)
    windows: dict[int, int | None] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def register_attention() -> None:
    """Makes both functions known to transformers; any number of calls, the same result."""
    AttentionInterface.register(PAGED, _paged_forward)
    AttentionInterface.register(INSPECT, _inspect_forward)
    AttentionMaskInterface.register(INSPECT, _mask_rule)


def _paged_forward(
    module: nn.Module,
    query: Tensor,  # [1, heads, rows, head_dim]
    key: Tensor,  # [1, kv_heads, rows, head_dim]
    value: Tensor,  # [1, kv_heads, rows, value_dim]
    attention_mask: None,
    *,
    outrider_step: PagedStep,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,  # [heads], the sinks
    **_: Any,
) -> tuple[Tensor, None]:  # [1, rows, heads, value_dim]
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    keys, values = outrider_step.cache.keys[layer], outrider_step.cache.values[layer]
    store_kv(key[0].transpose(0, 1), value[0].transpose(0, 1), keys, values, outrider_step.batch.slot_mapping)
    out = planned_attention(
        outrider_step.plan(layer, query.shape[1] // key.shape[1], query.dtype),
        query[0].transpose(0, 1),  # [rows, heads, head_dim]
        keys,
        values,
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        softcap=softcap,
        sinks=s_aux,
    )
    return out.unsqueeze(0), None


def _inspect_forward(
    module: nn.Module,
    query: Tensor,  # [1, heads, rows, head_dim]
    key: Tensor,  # [1, kv_heads, rows, head_dim]
    value: Tensor,  # [1, kv_heads, rows, value_dim]
    attention_mask: object,
    *,
    outrider_step: Inspection | None = None,
    **_: Any,
) -> tuple[Tensor, None]:  # [1, rows, heads, value_dim]: zeros
    if outrider_step is None:
        raise UnsupportedModel(f"the keyword arguments of its forward pass do not reach {type(module).__name__}")
    layer = getattr(module, "layer_idx", None)
    problem = None
    if not isinstance(layer, int):
        problem = "does not know its layer"
    elif layer in outrider_step.shapes:
        problem = "attends more than once"
    elif key.shape[2] != query.shape[2]:
        problem = "has other keys than those of its own rows"
    elif not query.dtype == key.dtype == value.dtype == outrider_step.dtype:
        problem = f"attends in {query.dtype}, {key.dtype} and {value.dtype}, the model being in {outrider_step.dtype}"
    elif not isinstance(attention_mask, MaskRule):
        problem = "does not take its mask from the mask registry"
    else:
        outrider_step.shapes[layer] = LayerShape(key.shape[1], key.shape[3], value.shape[3])
        problem = _note_window(outrider_step, layer, attention_mask)
    if problem is not None:
        outrider_step.problems.append(f"layer {layer} ({type(module).__name__}) {problem}")
    return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


def _note_window(inspection: Inspection, layer: int, rule: MaskRule) -> str | None:
    """Adds the layer's window; returns what is wrong with its mask, if anything."""
    try:
        inspection.windows[layer] = rule.window(inspection.max_model_len)
    except (IndexError, RuntimeError, TypeError, ValueError) as error:
        return f"has a mask of an unknown kind: {error}"
    return None


def _mask_rule(*, mask_function: MaskFunction, device: torch.device | str = "cpu", **_: Any) -> MaskRule:
    return MaskRule(mask_function, device)
