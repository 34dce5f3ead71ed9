"""What a row of the kernel bench is: a public function of `outrider.kernels` at one shape, and the PyTorch calls that
it stands for: a decoder's layer (attention, the cache's writes, norms, gates, products), what goes over the vocabulary
(from logits to probabilities, random numbers, draws), and acceptance (which drafted tokens of a window stay, on a chain
and on a tree). CASES, at the end, is the table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from outrider.kernels.attention.plan import plan_attention
from outrider.kernels.attention.reference import paged_attention, planned_attention
from outrider.kernels.attention.tree_mask import tree_mask
from outrider.kernels.kv_store.reference import store_kv, store_kv_rotary
from outrider.kernels.layers.reference import Linear, add_rms_norm, gated_gelu, gated_silu, rms_norm, rotary_table
from outrider.kernels.lora.reference import add_low_rank
from outrider.kernels.mixture.reference import mix_stacked, route
from outrider.kernels.quantized.form import Codes, Form, QuantizedMatrix
from outrider.kernels.quantized.linear import packed_linear, packed_rows
from outrider.kernels.quantized.packed import PackedMatrix, pack, unpack
from outrider.kernels.random.reference import Purpose, exponential_noise, vocabulary_words, words
from outrider.kernels.sampling.reference import (
    DEFAULT_MASS,
    MAX_ENTRIES,
    adjust_logits,
    best_ids,
    draft_sample,
    greedy_choice,
    logits_to_probs,
)
from outrider.kernels.types import ROOT, DraftWeights, LowRankWeights, Penalties, RowSampling, Truncation, Windows
from outrider.kernels.verify.reference import (
    accept,
    coupled_accept,
    coupled_accept_tree,
    coupled_choice,
    coupled_draw,
    draw,
)

K = 4  # drafted tokens of a window
ROWS = K + 1  # that the target computes for one sequence in a step
BLOCK_SIZE = 16
RANK, ADAPTERS = 16, 4  # of low-rank products: of each, and different ones in a step
EPS = 1e-6
CACHE_BLOCKS = 1024
TEMPERATURE, TOP_K, TOP_P = 0.8, 50, 0.9
REPETITION, PRESENCE, FREQUENCY = 1.1, 0.2, 0.1
BEST = 5  # a drafted token and four alternatives
SEEN = 512  # ids of each row that penalties concern
WORD = 1 << 32
TREE = 16  # rows of a window that holds a tree: the root, and a drafted token for each other
LEVELS = 4  # below the root, two children each
ALIKE = 0.5  # standard deviation of the draft's logits around the target's


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
    """Where to measure, and which shapes. `name` is cpu or cuda, and says which comparisons are meant."""

    name: str
    device: str
    dtype: torch.dtype  # of weights, activations and cache; probabilities are float32 anywhere
    models: tuple[Model, ...]
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    vocab_sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KernelWork:
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
    make: Callable[[], KernelWork]


Activation = Callable[[Tensor], Tensor]
SMALL = Model("1B-like", 2048, 32, 8, 64, 8192)
LARGE = Model("8B-like", 4096, 32, 8, 128, 14336)
TINY = Model("tiny", 128, 4, 2, 32, 256)

FOUR_BITS, SMALL_FLOATS = Form(4, 32, zero=8), Form(8, 128, torch.bfloat16, floats=True)

CUDA = Place("cuda", "cuda", torch.bfloat16, (SMALL, LARGE), (1, 8, 32), (1024, 8192), (32000, 151936))
CPU = Place("cpu", "cpu", torch.float32, (SMALL,), (1, 8), (1024, 8192), (32000, 151936))
QUICK = Place("cpu", "cpu", torch.float32, (TINY,), (1, 2), (64,), (1000,))

# Why public functions have no row of their own, and which.
_REASONS = {
    "once, where the package is built": ("cpu.compile_library", "cpu.find_compiler"),
    "once, at load": (
        "cpu.is_bfloat16", "cpu.pack", "cpu.row_scales", "cpu.cpu_features", "cpu.cpu_library", "cpu.variants",
        "cpu.wanted_variants", "layers.rotary_table", "layers.int8_scales", "layers.to_int8", "cpu.in_huge_pages",
        "cpu.matrix_of", "cpu.pack_quantized", "cpu.packing_of", "quantized.bits", "quantized.decode",
        "quantized.decode_codes", "quantized.k_scales", "quantized.nibbles", "quantized.pack",
        "quantized.quantized_blocks", "quantized.stacked",
    ),
    "once, at load, where there are no C kernels": ("layers.through_int8",),
    "a question": (
        "cpu.can_multiply", "cpu.can_pack", "cpu.can_round", "cpu.kind_for", "cpu.may_round", "cpu.narrowest",
        "dispatch.runs_triton", "quantized.can_pack",
    ),
    "what is compared with, where weights are packed": ("quantized.unpack",),
    "a question; the pass itself is measured by `outrider bench`": ("cpu.can_run",),
    "a name, or words of an error": ("cpu.cpu_library_name", "cpu.reason"),
    "a product of the C pass alone, for heads: `outrider compare` has their time a round": ("cpu.CpuLinear",),
    "a few numbers, once a step or a request": (
        "attention.split_keys", "random.as_int64", "sampling.advance", "verify.accept_uniforms",
    ),
    "once a step for all layers; a part of paged_attention's row": (
        "attention.plan_attention", "attention.plan_on_device",
    ),
    "what tree_mask does on a CPU": ("attention.tree_mask_reference",),
    "once a block for all layers of a kind": ("attention.block_mask",),
    "a part of the batch-invariant Linear on a CPU": ("batch_invariant.by_row_tiles", "batch_invariant.padded_tiles"),
    "elementwise, of one family": ("layers.gated_clamped",),
    "a part of store_kv_rotary": ("layers.apply_rotary",),
    "a part of the words and the noise": ("random.philox_rounds",),
    "a part of draft_sample": ("sampling.draw_integer", "sampling.integer_weights"),
    "a part of logits_to_probs and draft_sample on a CPU": ("sampling.most_probable",),
    "the products of its experts, which are Linear's": ("mixture.mix",),
    "a part of greedy_choice": ("verify.first_argmax",),
    "a part of accept": ("verify.check_weights", "verify.count_accepted"),
    "plain PyTorch everywhere, for log-probabilities that were asked for": ("sampling.processed_logits",),
}  # fmt: skip
WITHOUT_ROW = {name: reason for reason, names in _REASONS.items() for name in names}


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


def _attention(place: Place, model: Model, batch: int, context: int, *, planned: bool = True) -> KernelWork:
    """Against one call over keys and values that lie in a row, which no paged cache has: nothing to gather."""
    rows, heads, kv_heads, dim = batch * ROWS, model.heads, model.kv_heads, model.head_dim
    num_blocks = batch * -(-context // BLOCK_SIZE)
    tables = torch.randperm(num_blocks, device=place.device).view(batch, -1)  # [batch, blocks]
    key_cache, value_cache = randn(place, 2, num_blocks, BLOCK_SIZE, kv_heads, dim)
    query = randn(place, rows, heads, dim)
    starts, lens = tuple(range(0, rows + 1, ROWS)), (context,) * batch
    plan = plan_attention(
        tables, starts, lens, block_size=BLOCK_SIZE, heads_per_kv_head=heads // kv_heads, dtype=place.dtype,
        max_model_len=max(place.contexts),
    )  # fmt: skip
    keys, values = (_in_a_row(cache, tables, context) for cache in (key_cache, value_cache))
    queries = query.view(batch, ROWS, heads, dim).transpose(1, 2)  # [batch, heads, ROWS, dim]
    mask: Tensor = causal_lower_right(ROWS, context)  # takes the flash kernel
    if place.device == "cpu":  # where it would be written out at every call
        mask = torch.ones(ROWS, context, dtype=torch.bool).tril(context - ROWS)

    def kernel() -> Tensor:
        if planned:
            return planned_attention(plan, query, key_cache, value_cache, scale=dim**-0.5)
        return paged_attention(query, key_cache, value_cache, tables, starts, lens, scale=dim**-0.5)

    def against() -> Tensor:
        attended = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)
        return attended.transpose(1, 2).flatten(0, 1)

    elements = 2 * batch * context * kv_heads * dim + 2 * query.numel()
    return KernelWork(kernel, against, elements * place.dtype.itemsize, flops=4 * query.numel() * context)


def _store(place: Place, model: Model, batch: int) -> KernelWork:
    rows, kv_heads, dim = batch * ROWS, model.kv_heads, model.head_dim
    new = randn(place, 2, rows, kv_heads, dim)
    mine, theirs, slots = _caches(place, model, rows)

    def kernel() -> Tensor:
        store_kv(new[0], new[1], mine[0], mine[1], slots)
        return mine

    def against() -> Tensor:
        theirs[0].flatten(0, 1)[slots] = new[0]
        theirs[1].flatten(0, 1)[slots] = new[1]
        return theirs

    return KernelWork(kernel, against, 2 * new.numel() * place.dtype.itemsize)


def _store_rotary(place: Place, model: Model, batch: int) -> KernelWork:
    rows, heads, kv_heads, dim = batch * ROWS, model.heads, model.kv_heads, model.head_dim
    qkv = randn(place, rows, heads + 2 * kv_heads, dim)
    mine, theirs, slots = _caches(place, model, rows)
    inv_freq = 10000.0 ** -(torch.arange(0, dim, 2) / dim)  # [dim / 2]
    cos, signed_sin = (part[:, None].to(place.device) for part in rotary_table(inv_freq, 1.0, rows, place.dtype))
    sin = torch.cat((-signed_sin[..., : dim // 2], signed_sin[..., dim // 2 :]), -1)  # [rows, 1, dim]

    def kernel() -> tuple[Tensor, Tensor]:
        return store_kv_rotary(qkv, (cos, signed_sin), mine[0], mine[1], slots), mine

    def against() -> tuple[Tensor, Tensor]:
        query, key, value = torch.split(qkv, [heads, kv_heads, kv_heads], dim=1)
        query, key = (part * cos + _rotate_half(part) * sin for part in (query, key))
        theirs[0].flatten(0, 1)[slots] = key
        theirs[1].flatten(0, 1)[slots] = value
        return query, theirs

    elements = 2 * qkv.numel() + cos.numel() + sin.numel()
    return KernelWork(kernel, against, elements * place.dtype.itemsize, compared=2)


def _norm(place: Place, model: Model, batch: int) -> KernelWork:
    x, weight = randn(place, batch * ROWS, model.hidden), randn(place, model.hidden)
    work = partial(_formula if place.name == "cpu" else _fused, x, weight)
    return KernelWork(lambda: rms_norm(x, weight, EPS), work, (2 * x.numel() + model.hidden) * place.dtype.itemsize)


def _add_norm(place: Place, model: Model, batch: int) -> KernelWork:
    x, residual = randn(place, 2, batch * ROWS, model.hidden)
    weight = randn(place, model.hidden)
    norm = _formula if place.name == "cpu" else _fused

    def against() -> tuple[Tensor, Tensor]:
        total = residual + x
        return norm(total, weight), total

    num_bytes = (4 * x.numel() + model.hidden) * place.dtype.itemsize
    return KernelWork(lambda: add_rms_norm(x, residual, weight, EPS), against, num_bytes, compared=2)


def _gated(place: Place, model: Model, batch: int, *, kernel: Activation, activation: Activation) -> KernelWork:
    both = randn(place, batch * ROWS, 2 * model.intermediate)
    gate, up = both.chunk(2, dim=-1)
    num_bytes = 3 * gate.numel() * place.dtype.itemsize
    return KernelWork(lambda: kernel(both), lambda: activation(gate) * up, num_bytes)


def _linear(place: Place, model: Model, batch: int, *, batch_invariant: bool = False) -> KernelWork:
    """The largest product of a layer: gate and up."""
    rows, inputs, outputs = batch * ROWS, model.hidden, 2 * model.intermediate
    x, weight = randn(place, rows, inputs), randn(place, outputs, inputs) * inputs**-0.5
    linear = Linear(weight, batch_invariant=batch_invariant)
    num_bytes = (weight.numel() + x.numel() + rows * outputs) * place.dtype.itemsize
    flops = 2 * rows * weight.numel()
    return KernelWork(lambda: linear(x), lambda: F.linear(x, weight), num_bytes, flops)


def random_codes(form: Form, outputs: int, inputs: int) -> QuantizedMatrix:
    """Numbers of a size that weights have; every 64 outputs are the same."""
    spans, size = inputs // form.span, inputs**-0.5 / (1.0 if form.floats else 1 << form.bits - 1)
    codes = torch.randint(1 << form.bits, (64, inputs)).to(torch.uint8)
    scales = (torch.rand(64, spans) * size / (64 if form.part else 1)).to(form.dtype)
    of_parts = torch.randint(64, (64, inputs // form.part)).to(torch.int8) if form.part else None
    whole = Codes(
        codes & 0xBF if form.floats else codes,  # finite
        scales, scales if form.has_minima else None, of_parts, of_parts if form.has_minima else None,
    )  # fmt: skip
    return QuantizedMatrix(form, (outputs, inputs), lambda start, end: whole[torch.arange(start, end) % 64])


def packed_product(place: Place, weight: PackedMatrix, rows: int) -> KernelWork:
    """Against the same numbers in the place's type."""
    x, numbers = randn(place, rows, weight.shape[1]), unpack(weight).to(place.dtype)
    num_bytes = weight.num_bytes + (x.numel() + rows * len(weight)) * place.dtype.itemsize
    flops = 2 * rows * numbers.numel()
    return KernelWork(lambda: packed_linear(x, weight), lambda: F.linear(x, numbers), num_bytes, flops)


def _packed(place: Place, model: Model, batch: int, *, form: Form) -> KernelWork:
    """The largest product of a layer: gate and up."""
    matrix = random_codes(form, 2 * model.intermediate, model.hidden)
    return packed_product(place, pack(matrix, torch.device(place.device)), batch * ROWS)


def _packed_rows(place: Place, model: Model, batch: int) -> KernelWork:
    matrix = random_codes(FOUR_BITS, 2 * model.intermediate, model.hidden)
    weight, ids = pack(matrix, torch.device(place.device)), random_ids(place, len(matrix), batch * ROWS)
    numbers = unpack(weight).to(place.dtype)
    num_bytes = len(ids) * (weight.num_bytes // len(weight) + model.hidden * place.dtype.itemsize)
    return KernelWork(lambda: packed_rows(weight, ids, place.dtype), lambda: F.embedding(ids, numbers), num_bytes)


EXPERTS, CHOSEN = 16, 4  # of a row


def _route(place: Place, model: Model, batch: int) -> KernelWork:
    scores = randn(place, batch * ROWS, EXPERTS)

    def against() -> tuple[Tensor, Tensor]:
        values, chosen = torch.topk(scores.float().softmax(-1), CHOSEN)
        order = chosen.argsort(-1)
        return chosen.gather(1, order), (values / values.sum(-1, keepdim=True)).gather(1, order)

    num_bytes = scores.nbytes + batch * ROWS * CHOSEN * 12
    return KernelWork(lambda: route(scores, CHOSEN, normalised=True), against, num_bytes, compared=2)


def _mix(place: Place, model: Model, batch: int) -> KernelWork:
    """Experts a quarter as wide, against all of them for all rows."""
    rows, width = batch * ROWS, model.intermediate // 4
    x, gate_up = randn(place, rows, model.hidden), randn(place, EXPERTS, 2 * width, model.hidden) * model.hidden**-0.5
    down, scores = randn(place, EXPERTS, model.hidden, width) * width**-0.5, randn(place, rows, EXPERTS)
    chosen, weights = route(scores, CHOSEN, normalised=True)
    dense = torch.zeros(rows, EXPERTS, device=place.device).scatter(1, chosen, weights)

    def against() -> Tensor:
        gate, up = (x @ gate_up.transpose(1, 2)).chunk(2, dim=-1)  # [experts, rows, width] each
        given = (F.silu(gate) * up) @ down.transpose(1, 2)  # [experts, rows, hidden]
        return torch.einsum("erh,re->rh", given.float(), dense).to(x.dtype)

    woken = len(chosen.unique())
    num_bytes = woken * (gate_up[0].nbytes + down[0].nbytes) + 2 * x.nbytes
    flops = 2 * rows * CHOSEN * (gate_up[0].numel() + down[0].numel())
    return KernelWork(lambda: mix_stacked(x, chosen, weights, gate_up, down, gated_silu), against, num_bytes, flops)


def _low_rank(place: Place, model: Model, batch: int) -> KernelWork:
    """What adapters add to query, key and value; the sequences have them in turn."""
    heads, kept = model.heads * model.head_dim, model.kv_heads * model.head_dim
    bounds = (0, heads, heads + kept, heads + 2 * kept)
    held = min(batch, ADAPTERS)
    down, up = randn(place, held, 3, RANK, model.hidden), randn(place, held, bounds[-1], RANK)
    weights = LowRankWeights(down, up, torch.full((held, 3), 0.01, device=place.device), bounds)
    slots = torch.arange(batch, dtype=torch.int32, device=place.device).remainder(held).repeat_interleave(ROWS)
    x, before = randn(place, batch * ROWS, model.hidden), randn(place, batch * ROWS, bounds[-1])
    y, slice_of = before.clone(), torch.arange(3, device=place.device).repeat_interleave(_sizes(bounds, place))

    def kernel() -> Tensor:
        add_low_rank(y.copy_(before), x, weights, slots)
        return y

    def against() -> Tensor:
        inner = 0.01 * torch.einsum("rsdi,ri->rsd", down[slots], x)  # [rows, 3, RANK]
        return before + torch.einsum("rod,rod->ro", up[slots], inner[:, slice_of])

    num_bytes = (down.numel() + up.numel() + x.numel() + 2 * y.numel()) * place.dtype.itemsize
    return KernelWork(kernel, against, num_bytes, 2 * batch * ROWS * RANK * (3 * model.hidden + bounds[-1]))


def _sizes(bounds: tuple[int, ...], place: Place) -> Tensor:
    return torch.tensor(bounds, device=place.device).diff()


def _caches(place: Place, model: Model, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Two of keys and values, [2, blocks, block_size, kv_heads, head_dim] each, and slots for the rows."""
    shape = 2, CACHE_BLOCKS, BLOCK_SIZE, model.kv_heads, model.head_dim
    mine, theirs = (torch.zeros(shape, dtype=place.dtype, device=place.device) for _ in range(2))
    return mine, theirs, torch.randperm(CACHE_BLOCKS * BLOCK_SIZE, device=place.device)[:rows]


def _in_a_row(cache: Tensor, tables: Tensor, context: int) -> Tensor:
    """cache: [blocks, block_size, kv_heads, dim] -> [batch, kv_heads, context, dim], a copy."""
    return cache[tables].flatten(1, 2)[:, :context].transpose(1, 2).contiguous()


def _rotate_half(x: Tensor) -> Tensor:  # [rows, heads, dim]
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


def _formula(x: Tensor, weight: Tensor) -> Tensor:
    """As transformers' models write it."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).to(x.dtype)


def _fused(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, EPS)


def _temperature(place: Place, batch: int, vocab_size: int) -> KernelWork:
    logits, temperature = _target_rows(place, batch, vocab_size)
    sampling = RowSampling(temperature=temperature)

    def against() -> Tensor:
        return torch.softmax(logits / temperature[:, None], -1)

    return KernelWork(lambda: logits_to_probs(logits, sampling), against, 2 * logits.nbytes)


def _truncated(place: Place, batch: int, vocab_size: int) -> KernelWork:
    """Against what transformers' warpers do."""
    logits, temperature = _target_rows(place, batch, vocab_size)
    rows = torch.arange(len(logits), device=place.device)
    cut = Truncation(rows, torch.full_like(rows, TOP_K), torch.full_like(rows, TOP_P, dtype=torch.float64))
    sampling = RowSampling(temperature=temperature, truncation=cut)

    def against() -> Tensor:
        scores = logits / temperature[:, None]
        scores = scores.masked_fill(scores < scores.topk(TOP_K).values[:, -1:], -torch.inf)
        ascending, order = scores.sort(dim=-1)
        removed = ascending.softmax(-1).cumsum(-1) <= 1 - TOP_P
        removed[:, -1] = False
        return scores.masked_fill(removed.scatter(1, order, removed), -torch.inf).softmax(-1)

    return KernelWork(lambda: logits_to_probs(logits, sampling), against, 2 * logits.nbytes)


def _adjusted(place: Place, batch: int, vocab_size: int) -> KernelWork:
    """Penalties and a packed mask, against gather, scatter and a mask of booleans that is at hand."""
    logits, _ = _target_rows(place, batch, vocab_size)
    num_rows, device = len(logits), place.device
    spread = torch.arange(SEEN, device=device) * (vocab_size // SEEN)  # [SEEN] different ids
    ids = (spread + torch.arange(num_rows, device=device)[:, None]) % vocab_size  # [rows, SEEN]
    counts = random_ids(place, 3, num_rows, SEEN).float()
    flat = [torch.full((ids.numel(),), value, device=device) for value in (REPETITION, PRESENCE, FREQUENCY)]
    rows = torch.arange(num_rows, device=device).repeat_interleave(SEEN)
    mask = torch.randint(-WORD // 2, WORD // 2, (num_rows, -(-vocab_size // 32)), device=device).int()
    bits = torch.arange(32, dtype=torch.int32, device=mask.device)
    hidden = ((mask[:, :, None] >> bits) & 1).flatten(1)[:, :vocab_size] == 0  # [rows, vocab]
    sampling = RowSampling(penalties=Penalties(rows, ids.flatten(), counts.flatten(), *flat), token_mask=mask)

    def against() -> Tensor:
        seen = logits.gather(1, ids)
        seen = torch.where(seen > 0, seen / REPETITION, seen * REPETITION)
        seen = seen - FREQUENCY * counts - PRESENCE * (counts > 0)
        return logits.scatter(1, ids, seen).masked_fill_(hidden, -torch.inf)

    return KernelWork(lambda: adjust_logits(logits, sampling), against, 2 * logits.nbytes + mask.nbytes)


def _greedy(place: Place, batch: int, vocab_size: int) -> KernelWork:
    logits, _ = _target_rows(place, batch, vocab_size)
    sampling = RowSampling()
    return KernelWork(lambda: greedy_choice(logits, sampling), lambda: logits.argmax(-1), logits.nbytes)


def _best(place: Place, batch: int, vocab_size: int) -> KernelWork:
    logits, _ = _target_rows(place, batch, vocab_size)
    return KernelWork(lambda: best_ids(logits, BEST), lambda: logits.topk(BEST, dim=-1).indices, logits.nbytes)


def _choice(place: Place, batch: int, vocab_size: int) -> KernelWork:
    probs = _target_rows(place, batch, vocab_size)[0].softmax(-1)
    noise = exponential_noise(*_counters(place, len(probs)), vocab_size)  # [rows, vocab]
    return KernelWork(lambda: coupled_choice(probs, noise), lambda: (noise / probs).argmin(-1), 2 * probs.nbytes)


def _draw(place: Place, batch: int, vocab_size: int) -> KernelWork:
    probs = _target_rows(place, batch, vocab_size)[0].softmax(-1)
    counters = _counters(place, len(probs))

    def against() -> Tensor:
        return (probs / torch.empty_like(probs).exponential_()).argmax(-1)

    return KernelWork(lambda: coupled_draw(probs, *counters), against, probs.nbytes, compared=0)


def _noise(place: Place, batch: int, vocab_size: int) -> KernelWork:
    rows = batch * ROWS
    counters = _counters(place, rows)

    def against() -> Tensor:
        return torch.empty(rows, vocab_size, device=place.device).exponential_()

    return KernelWork(lambda: exponential_noise(*counters, vocab_size), against, rows * vocab_size * 4, compared=0)


def _vocabulary_words(place: Place, batch: int, vocab_size: int) -> KernelWork:
    rows = batch * ROWS
    seeds, positions, completions = _counters(place, rows)
    return KernelWork(
        lambda: vocabulary_words(seeds, positions, Purpose.BONUS, completions, vocab_size),
        lambda: random_ids(place, WORD, rows, vocab_size),
        rows * vocab_size * 8,
        compared=0,
    )


def _drafted(place: Place, batch: int, vocab_size: int) -> KernelWork:
    """Against a draw from the same ids, without the integers that the wire needs."""
    probs = zipf_logits(place, batch, vocab_size).softmax(-1)
    seeds, positions, completions = _counters(place, batch)
    drawn = words(seeds, positions, Purpose.DRAFT, completions)
    count = min(MAX_ENTRIES, vocab_size)

    def against() -> Tensor:
        top, ids = probs.topk(count)
        kept = torch.where(top.cumsum(-1) - top < DEFAULT_MASS, top, 0)
        return ids.gather(1, torch.multinomial(kept, 1))

    return KernelWork(lambda: draft_sample(probs, drawn), against, probs.nbytes, compared=0)


def _words(place: Place, batch: int) -> KernelWork:
    seeds, positions, completions = _counters(place, batch * ROWS)
    return KernelWork(
        lambda: words(seeds, positions, Purpose.ACCEPT, completions),
        lambda: random_ids(place, WORD, len(seeds), 4),
        len(seeds) * 7 * 8,
        compared=0,
    )


def _target_rows(place: Place, batch: int, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Logits [rows, vocab] and temperatures [rows] of the batch's windows."""
    logits = zipf_logits(place, batch * ROWS, vocab_size)
    return logits, torch.full((len(logits),), TEMPERATURE, device=place.device)


def _counters(place: Place, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Seeds, positions, completions: [rows] int64 each."""
    return random_ids(place, WORD, rows), torch.arange(rows, device=place.device), random_ids(place, 4, rows)


def _accept(place: Place, batch: int, vocab_size: int, by_block: bool = False) -> KernelWork:
    """Against token by token over dense vectors, which a draft beside the target would have at hand."""
    logits = zipf_logits(place, batch * ROWS, vocab_size)
    target_probs = logits.softmax(-1)
    windows = Windows.of([K] * batch, device=place.device)
    draft_logits = logits[windows.row_of_draft] + ALIKE * torch.randn(batch * K, vocab_size, device=place.device)
    samples = draft_sample(draft_logits.softmax(-1), _some_words(place, batch * K))
    owners = torch.arange(batch * K, device=place.device).repeat_interleave(samples.entry_starts.diff())
    weights = DraftWeights(samples.entry_ids, samples.entry_weights, owners)
    ids, uniforms = samples.token_ids, torch.rand(batch * K, dtype=torch.float64, device=place.device)
    dense = torch.zeros(batch * K, vocab_size, device=place.device)  # of the same law
    dense[owners, weights.ids] = weights.weights.float()
    dense = dense / dense.sum(-1, keepdim=True)
    dense = torch.cat((dense.view(batch, K, -1), dense.new_zeros(batch, 1, vocab_size)), 1)  # [batch, ROWS, vocab]
    every = torch.arange(batch, device=place.device)
    blocks = torch.ones_like(every, dtype=torch.bool) if by_block else None

    def against() -> tuple[Tensor, Tensor]:
        target, drafted = target_probs.view(batch, ROWS, -1), ids.view(batch, K, 1)
        target_prob, draft_prob = (probs[:, :K].gather(2, drafted).squeeze(2) for probs in (target, dense))
        accepted = uniforms.view(batch, K) * draft_prob < target_prob
        num_accepted = accepted.cumprod(1).sum(1)
        left = (target[every, num_accepted] - dense[every, num_accepted]).clamp_(min=0)
        return num_accepted, left / left.sum(-1, keepdim=True)

    num_bytes = batch * vocab_size * (4 + 8)  # a row of the target is read, and its rest written in float64
    run = partial(accept, target_probs, windows, ids, weights, uniforms, blocks)
    return KernelWork(run, against, num_bytes, compared=0 if by_block else 1)


def _draw_windows(place: Place, batch: int, vocab_size: int) -> KernelWork:
    weights = zipf_logits(place, batch, vocab_size).double().softmax(-1)
    drawn = _some_words(place, batch)
    return KernelWork(lambda: draw(weights, drawn), lambda: torch.multinomial(weights, 1), weights.nbytes, compared=0)


def _chain(place: Place, batch: int) -> KernelWork:
    choices = random_ids(place, 1000, batch * ROWS)
    windows = Windows.of([K] * batch, device=place.device)
    differs = random_ids(place, 4, batch * K) == 0
    ids = choices[windows.row_of_draft] + differs

    def against() -> tuple[Tensor, Tensor]:
        own = choices.view(batch, ROWS)
        num_accepted = (own[:, :K] == ids.view(batch, K)).cumprod(1).sum(1)
        return num_accepted, own.gather(1, num_accepted[:, None]).squeeze(1)

    num_bytes = 8 * (choices.numel() + ids.numel() + 2 * batch)
    return KernelWork(lambda: coupled_accept(choices, windows, ids), against, num_bytes, compared=2)


def _tree(place: Place, batch: int) -> KernelWork:
    drafted_of_tree = TREE - 1
    choices, ids = random_ids(place, 3, batch * TREE), random_ids(place, 3, batch * drafted_of_tree)
    windows = Windows.of([drafted_of_tree] * batch, device=place.device)
    parents = windows.offset_of_draft // 2  # the row that judges it; drafted token i is row i + 1

    def against() -> tuple[Tensor, Tensor]:
        own, drafted, above = choices.view(batch, TREE), ids.view(batch, -1), parents.view(batch, -1)
        node = num_accepted = torch.zeros(batch, dtype=torch.int64, device=place.device)
        for _ in range(LEVELS):
            hit = (above == node[:, None]) & (drafted == own.gather(1, node[:, None]))  # [batch, drafted]
            found = hit.any(1)
            node = torch.where(found, hit.int().argmax(1) + 1, node)
            num_accepted = num_accepted + found
        return num_accepted, own.gather(1, node[:, None]).squeeze(1)

    num_bytes = 8 * (choices.numel() + 2 * ids.numel() + 2 * batch) + ids.numel()
    return KernelWork(lambda: coupled_accept_tree(choices, windows, ids, parents), against, num_bytes, compared=2)


def _tree_mask(place: Place, batch: int) -> KernelWork:
    one = torch.tensor([ROOT, *((row - 1) // 2 for row in range(1, TREE))], dtype=torch.int32)
    parents = one.repeat(batch).to(place.device)  # [batch * TREE]
    starts = (torch.arange(batch + 1, dtype=torch.int32) * TREE).to(place.device)
    above, every = parents.view(batch, TREE).long(), torch.arange(batch, device=place.device)

    def against() -> Tensor:
        sees = torch.zeros(batch, TREE + 1, TREE, dtype=torch.bool, device=place.device)  # ROOT is the last, empty row
        for row in range(TREE):
            sees[:, row] = sees[every, above[:, row]]
            sees[:, row, row] = True
        return sees[:, :TREE]

    num_bytes = parents.numel() * (4 + 8 + 4)  # parents, bits, depths
    return KernelWork(lambda: tree_mask(parents, starts), against, num_bytes, compared=0)


def _some_words(place: Place, rows: int) -> Tensor:  # [rows, 4] int64
    counters = torch.arange(rows, device=place.device)
    return words(counters, counters, Purpose.DRAFT, torch.zeros_like(counters))


def cases(place: Place) -> Iterator[Case]:
    """Every row of a place."""
    for over, function, form, against, make in CASES[place.name]:
        for shape, sizes in _shapes(place, over):
            yield Case(function, shape + form, against, partial(make, place, *sizes))


def _shapes(place: Place, over: str) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """The sizes that a kind of function depends on, in words and as `make` takes them. A step has the rows of a window
    for each sequence of the batch; a draft draws one row of each."""
    for batch in place.batches:
        if over == "batch":
            yield f"batch {batch}", (batch,)
        elif over == "vocabulary":
            yield from ((f"vocabulary {size}, batch {batch}", (batch, size)) for size in place.vocab_sizes)
        for model in place.models if over in ("layer", "context") else ():
            shape = f"{model.name}, batch {batch}"
            if over == "layer":
                yield shape, (model, batch)
            else:
                yield from ((f"{shape}, context {length}", (model, batch, length)) for length in place.contexts)


_silu = partial(_gated, kernel=gated_silu, activation=F.silu)
_gelu = partial(_gated, kernel=gated_gelu, activation=partial(F.gelu, approximate="tanh"))
_trees = f", trees of {TREE} rows"
NORMS: dict[str, tuple[str, str]] = {  # on a CPU rms_norm is F.rms_norm: a comparison with it says nothing
    "cpu": ("x / sqrt(mean(x^2) + eps) in float32", "x + residual, and the formula"),
    "cuda": ("F.rms_norm", "x + residual, F.rms_norm"),
}
# What its sizes are, the function, what its shape adds, what it is compared with, what makes both; for each device.
CASES = {
    device: (
        ("context", "attention.planned_attention", "", "SDPA, keys in a row", _attention),
        ("context", "attention.paged_attention", "", "SDPA, keys in a row", partial(_attention, planned=False)),
        ("layer", "kv_store.store_kv", "", "cache[slots] = new, twice", _store),
        ("layer", "kv_store.store_kv_rotary", "", "x cos + rotate_half(x) sin, then cache[slots] = new", _store_rotary),
        ("layer", "layers.rms_norm", "", norm, _norm),
        ("layer", "layers.add_rms_norm", "", add_norm, _add_norm),
        ("layer", "layers.gated_silu", "", "F.silu(gate) * up", _silu),
        ("layer", "layers.gated_gelu", "", "F.gelu(gate) * up", _gelu),
        ("layer", "layers.Linear", "", "F.linear", _linear),
        ("layer", "layers.Linear", ", batch-invariant", "F.linear", partial(_linear, batch_invariant=True)),
        (
            "layer",
            "quantized.packed_linear",
            ", 4 bits by 32",
            "F.linear of the numbers",
            partial(_packed, form=FOUR_BITS),
        ),
        (
            "layer",
            "quantized.packed_linear",
            ", floats of 8 bits by 128",
            "F.linear of the numbers",
            partial(_packed, form=SMALL_FLOATS),
        ),
        ("layer", "quantized.packed_rows", ", 4 bits by 32", "F.embedding of the numbers", _packed_rows),
        ("layer", "mixture.route", f", {CHOSEN} of {EXPERTS} experts", "softmax, topk, sort", _route),
        ("layer", "mixture.mix_stacked", f", {CHOSEN} of {EXPERTS} experts", "all experts of all rows", _mix),
        ("layer", "lora.add_low_rank", f", rank {RANK}", "factors gathered by row, einsum twice", _low_rank),
        ("vocabulary", "sampling.logits_to_probs", ", temperature", "softmax(logits / temperature)", _temperature),
        (
            "vocabulary",
            "sampling.logits_to_probs",
            ", top_k and top_p",
            "top-k, sort, cumsum, scatter, softmax",
            _truncated,
        ),
        ("vocabulary", "sampling.adjust_logits", ", penalties and mask", "gather, scatter, masked_fill", _adjusted),
        ("vocabulary", "sampling.greedy_choice", "", "argmax", _greedy),
        ("vocabulary", "sampling.best_ids", f", the best {BEST}", "topk", _best),
        ("vocabulary", "verify.coupled_choice", "", "(noise / probs).argmin", _choice),
        ("vocabulary", "verify.coupled_draw", "", "(probs / exponential_()).argmax", _draw),
        ("vocabulary", "random.exponential_noise", "", "exponential_()", _noise),
        ("vocabulary", "random.vocabulary_words", "", "torch.randint", _vocabulary_words),
        ("vocabulary", "sampling.draft_sample", "", "top-k, cumsum, multinomial", _drafted),
        ("batch", "random.words", "", "torch.randint", _words),
        ("vocabulary", "verify.accept", "", "gather, cumprod, clamp(target - draft), dense", _accept),
        ("vocabulary", "verify.accept", ", by blocks", "the same, token by token", partial(_accept, by_block=True)),
        ("vocabulary", "verify.draw", "", "torch.multinomial", _draw_windows),
        ("batch", "verify.coupled_accept", "", "==, cumprod, sum, gather", _chain),
        ("batch", "verify.coupled_accept_tree", _trees, "level by level, dense", _tree),
        ("batch", "attention.tree_mask", _trees, "row by row, booleans", _tree_mask),
    )
    for device, (norm, add_norm) in NORMS.items()
}
