"""What a row of the kernel bench is: a public function of `outrider.kernels` at one shape, and the PyTorch calls that
it stands for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

K = 4  # drafted tokens of a window
ROWS = K + 1  # that the target computes for one sequence in a step
BLOCK_SIZE = 16
DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, slots=True)
class Model:
    """The sizes of a decoder's layer."""

    name: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int


@dataclass(frozen=True, slots=True)
class Place:
    """Where to measure, and which shapes. `name` is one of DEVICES, and says which comparisons are meant."""

    name: str
    device: str
    dtype: torch.dtype  # of weights, activations and cache; probabilities are float32 anywhere
    models: tuple[Model, ...]
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    vocab_sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Work:
    """Both sides on the same inputs, and what no implementation can do without."""

    kernel: Callable[[], Any]
    against: Callable[[], Any]
    num_bytes: int  # that must be read and written at least once
    flops: int = 0  # of matrix products
    compared: int = 1  # leading results that must agree; 0 where both draw at random, or in different forms


@dataclass(frozen=True, slots=True)
class Case:
    """A row. `make` allocates the inputs."""

    function: str  # module.function
    shape: str
    against: str
    make: Callable[[], Work]


SMALL = Model("1B-like", 2048, 32, 8, 64, 8192)
LARGE = Model("8B-like", 4096, 32, 8, 128, 14336)
TINY = Model("tiny", 128, 4, 2, 32, 256)

CUDA = Place("cuda", "cuda", torch.bfloat16, (SMALL, LARGE), (1, 8, 32), (1024, 8192), (32000, 151936))
CPU = Place("cpu", "cpu", torch.float32, (SMALL,), (1, 8), (1024, 8192), (32000, 151936))
QUICK = Place("cpu", "cpu", torch.float32, (TINY,), (1, 2), (64,), (1000,))

# Public functions that have no row of their own, and why.
WITHOUT_ROW = {
    "advance.advance": "a few numbers, between the passes of a draft; a part of a captured draw",
    "attention_plan.plan_attention": "made once a step for all layers; a part of paged_attention's row",
    "attention_plan.plan_on_device": "what plan_attention does on a GPU",
    "batch_invariant.by_row_tiles": "a part of the batch-invariant Linear on a CPU",
    "batch_invariant.padded_tiles": "a part of by_row_tiles",
    "coupled.first_argmax": "a part of greedy_choice",
    "cpu_build.compile_library": "once, where the package is built",
    "cpu_build.find_compiler": "once, where the package is built",
    "cpu_build.reason": "words of an error",
    "cpu_build.variants": "a list, once",
    "cpu_decoder.can_run": "a question, once at load; the pass itself is measured by `outrider bench`",
    "cpu_decoder.is_bfloat16": "once, at load",
    "cpu_decoder.kind_for": "a question, once at load",
    "cpu_decoder.pack": "once, at load",
    "cpu_library.cpu_features": "once, at load",
    "cpu_library.cpu_library": "once, at load",
    "cpu_library.cpu_library_name": "a name",
    "cpu_library.wanted_variants": "once, at load",
    "device_plan.split_keys": "a number, once a step",
    "dispatch.runs_triton": "a question",
    "draft_sample.draw_integer": "a part of draft_sample",
    "draft_sample.integer_weights": "a part of draft_sample",
    "logits_to_probs.most_probable": "a part of logits_to_probs and draft_sample on a CPU",
    "logits_to_probs.processed_logits": "plain PyTorch everywhere, for log-probabilities that were asked for",
    "logits_to_probs.unpack_mask": "a part of adjust_logits",
    "philox.as_int64": "a number, once a request",
    "philox.philox_rounds": "a part of the words and the noise",
    "rejection.accept_uniforms": "one expression of a few numbers",
    "rejection.count_accepted": "a part of accept",
    "rejection.cut_at_vocabulary": "a comparison a drafted token, on the host",
    "rotary.apply_rotary": "a part of store_kv_rotary",
    "rotary.rotary_table": "once, at load",
    "tree_mask.tree_mask_reference": "what tree_mask does on a CPU",
}


def randn(place: Place, *shape: int) -> Tensor:
    """Normal numbers in the place's type."""
    return torch.randn(*shape, device=place.device).to(place.dtype)


def zipf_logits(place: Place, rows: int, vocab_size: int) -> Tensor:  # [rows, vocab] float32
    """Like a language model's: the probability falls with the rank, and no two of a row are equal."""
    falling = -1.5 * torch.log1p(torch.randperm(vocab_size, device=place.device).float())  # [vocab]
    return torch.stack([falling.roll(97 * row) for row in range(rows)])


def random_ids(place: Place, below: int, *shape: int) -> Tensor:
    """Whole numbers, int64."""
    return torch.randint(below, shape, device=place.device)
