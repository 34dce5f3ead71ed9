"""What is mended in vLLM's build for CPUs, in the versions named alone: drafted rows are judged there at the wrong
temperature, places without a drafted token are not refused, and a step without drafts ends the engine under top_k; so
does, on processors with AMX, the first step of weights in 8 bits under float32. And a row without an adapter gets the
one in the last place, wherever it shares a step with a row that has any.

A plugin of vLLM's (`vllm.general_plugins`), which every process of it loads before it takes its kernels into use; where
plugins were left out (VLLM_PLUGINS), the worker sees to it. That all of it is still needed is asserted by
tests/vllm_engine/test_contract.py."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

VERSIONS = ("0.32.0", "0.33.0")  # the latter as built from source: its Python is the same there


def apply() -> bool:
    """Whether something was mended now: kernels that are in use already stay what they are until they are registered
    again."""
    import vllm
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or vllm.__version__.partition("+")[0] not in VERSIONS:
        return False
    from vllm.utils import cpu_triton_utils as kernels

    if kernels._expand_kernel_impl is expand:
        return False
    from vllm.lora.ops import torch_ops
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.model_executor.kernels.linear.scaled_mm import cpu as products
    from vllm.v1.sample.ops import topk_topp_sampler as cuts

    lora_ops.bgmv_shrink = torch_ops.bgmv_shrink = of_rows_with_adapters(lora_ops.bgmv_shrink)
    if punica := sys.modules.get("vllm.lora.punica_wrapper.punica_cpu"):  # else it takes what is there
        vars(punica)["bgmv_shrink"] = lora_ops.bgmv_shrink
    products.check_cpu_sgl_kernel = of_16_bits(products.check_cpu_sgl_kernel)
    cuts.apply_top_k_only = of_any_number(cuts.apply_top_k_only)
    kernels._expand_kernel_impl = expand
    kernels._rejection_random_sample_kernel_impl = refusing_padding(kernels._rejection_random_sample_kernel_impl)
    return True


def place_adapters() -> None:
    """Where a CPU's adapters lie, told without asking the layer's weights, which is what vLLM does: a kernel that has
    packed those, as of weights in 8 bits, leaves none. Needs all of vLLM's layers, so that workers call it who have
    adapters."""
    from vllm.lora.layers import base_linear

    base_linear._get_lora_device = lambda layer: torch.device("cpu")


def expand(
    output: Tensor,  # [tokens], filled
    values: Tensor,  # [requests], of the same type
    ends: Tensor,  # [requests] int: where each request's tokens end
    replace_from: float,
    replace_to: float,
    max_num_tokens: int | None = None,
) -> None:
    """Each request's value for all of its tokens. vLLM's own fills a copy wherever the values are no int64: those of
    temperatures, top_k and top_p stay what the memory held."""
    counts = ends.diff(prepend=ends.new_zeros(1))  # [requests]
    output.copy_(torch.where(values == replace_from, replace_to, values).repeat_interleave(counts))


def of_16_bits(fits: Callable[[int, int, torch.dtype], bool]) -> Callable[[int, int, torch.dtype], bool]:
    """Whether a product with weights of 8 bits runs in vLLM's kernel for AMX. Its own looks at sizes and the weights'
    type, and the kernel takes no rows but of 16 bits; a model's type is PyTorch's default while it is loaded."""

    def check(outputs: int, inputs: int, dtype: torch.dtype) -> bool:
        return torch.get_default_dtype() in (torch.bfloat16, torch.float16) and fits(outputs, inputs, dtype)

    return check


def of_any_number(cut: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """vLLM's cut by top_k, also of no rows, as where a step has no drafts: its own raises, which ends the engine."""

    def cut_top_k(logits: Tensor, k: Tensor) -> Tensor:  # [rows, vocab], [rows] -> [rows, vocab]
        return cut(logits, k) if len(logits) else logits

    return cut_top_k


def of_rows_with_adapters(shrink: Callable[..., None]) -> Callable[..., None]:
    """vLLM's product with adapters' lower factors, [rows, in] -> [rows, rank], but that a row whose place is -1, one
    without an adapter, gets zeros. Its own takes -1 as an index, which is the last place."""

    def shrink_rows(
        inputs: Tensor,  # [rows, in]
        factors: Tensor,  # [places, 1, rank, in]
        output: Tensor,  # [rows, rank], filled
        places: Tensor,  # [rows] int64
        scaling: float = 1.0,
    ) -> None:
        shrink(inputs, factors, output, places, scaling)
        output.masked_fill_((places < 0)[:, None], 0)

    return shrink_rows


def refusing_padding(kernel: Callable[..., None]) -> Callable[..., None]:
    """vLLM's kernel that judges rows which are drawn, but that a drafted id of -1 is refused: its scheduler fills up a
    row so that joins decoding ones. Its own looks up what stands before the probabilities, and may accept."""

    def judge(
        output_ids: Tensor,
        ends: Tensor,
        draft_ids: Tensor,  # [drafted] int
        draft_probs: Tensor | None,
        target_probs: Tensor,
        bonus_ids: Tensor,
        recovered_ids: Tensor,
        uniforms: Tensor,  # [drafted] float64
        *rest: Any,
    ) -> None:
        uniforms = uniforms.masked_fill(draft_ids < 0, math.inf)  # no ratio of probabilities reaches it
        ids = draft_ids.clamp(min=0)
        kernel(output_ids, ends, ids, draft_probs, target_probs, bonus_ids, recovered_ids, uniforms, *rest)

    return judge
