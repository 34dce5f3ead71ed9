"""Any causal language model of transformers over the paged cache, through transformers' attention registry.

`load_registry_model` refuses what cannot be served before it reads weights: a small random copy of the architecture
(every kind of layer once, narrow, few ids, short windows) must give the logits of eager attention. Nothing is read from
the configuration that can be asked of the model: one pass of one row shows what each layer stores and which keys it may
see.

Two functions are added to the registry. `outrider_paged` computes a step over the paged cache; it has no mask function
on purpose: transformers then builds no mask at all. `outrider_inspect` runs once at load, and gets the mask that eager
attention would, so that a window that exists only in the mask is found too. Both are stateless: what they need reaches
them as the keyword argument `outrider_step` of the model's forward.

Rotary tables are made a function of absolute position and configuration alone. transformers picks the factors of
long-RoPE and dynamic NTK from the longest sequence of the batch, so that a row would change with its neighbours, and
with its own later tokens."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from outrider.engine.batch import Batch, BatchEntry, build_batch
from outrider.engine.hidden_states import Taps
from outrider.engine.kv_cache import KVCache, LayerShape
from outrider.engine.kv_cache_manager import BLOCK_SIZE
from outrider.engine.models.base import CausalLM, UnsupportedModel
from outrider.engine.models.hooked_adapters import HookedAdapters, hooked_linears
from outrider.kernels.attention.plan import AttentionPlan, plan_attention
from outrider.kernels.attention.reference import planned_attention
from outrider.kernels.kv_store.reference import store_kv

PAGED = "outrider_paged"
INSPECT = "outrider_inspect"

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # (batch, head, query, key) indices -> visible
MAX_WINDOW = 24  # of the copy
MAX_LAYERS = 4
MAX_PARAMETERS = 400_000_000
_MOST = {  # upper bounds that change no mechanism, or make it show in short texts and small scores
    "vocab_size": 512,
    "vocab_size_per_layer_input": 512,
    "intermediate_size": 128,
    "ffn_dim": 128,
    "n_inner": 128,
    "shared_expert_intermediate_size": 64,
    "shared_intermediate_size": 64,
    "moe_intermediate_size": 64,
    "sliding_window": MAX_WINDOW,
    "attention_chunk_size": MAX_WINDOW,
    "first_k_dense_replace": 1,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 2.0,
}
PINNED = "outrider_pinned"  # a type that transformers' update leaves alone
TOLERANCE = 1e-3  # of the standard deviation of the logits
LENGTHS = (2 * MAX_WINDOW + 9, MAX_WINDOW + 5)  # of the two sequences: past twice and once the window
STEPS = ((13, 1), (1, 19), (29, 1), (14, 8))  # rows of each sequence per step
WRONG_ROWS = 3  # computed beyond each step, with wrong ids throughout, and rolled back
# What the code of an architecture raises for a configuration or an attention function that it was not written for.
FAILURES = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
# Where transformers looks for an adapter, and finds none: one that lies beside the weights would be applied to them.
NO_ADAPTER = {"subfolder": "no-adapter"}


@dataclass(slots=True)
class PagedStep:
    """What `outrider_paged` needs to compute one forward pass; the first layer of a kind makes the plan of all."""

    batch: Batch
    cache: KVCache
    windows: tuple[int | None, ...]  # per layer: how many keys a row sees, itself included; None sees all
    plans: dict[tuple[int | None, int], AttentionPlan] = field(default_factory=dict)

    def plan(self, layer: int, heads_per_kv_head: int, dtype: torch.dtype) -> AttentionPlan:
        """The plan, which is the same for all layers of one window and one number of query heads per key-value head."""
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


def small_copy(config: PreTrainedConfig, *, narrow: bool, trust_remote_code: bool) -> PreTrainedModel:
    """Builds the copy in float32 on the CPU with eager attention and weights drawn from a fixed seed. Without `narrow`
    only layers, ids, feed-forward sizes and windows are cut. Raises ValueError if it is still too large, and whatever
    the class raises for a configuration that it does not like."""
    small = _small_config(config, narrow)
    options = {"attn_implementation": "eager", "dtype": torch.float32, "trust_remote_code": trust_remote_code}
    with torch.device("meta"):
        size = sum(weight.numel() for weight in AutoModelForCausalLM.from_config(small, **options).parameters())
    if size > MAX_PARAMETERS:
        raise ValueError(f"it would still have {size} parameters")
    with torch.random.fork_rng(devices=[]):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(small, **options)
    _randomise(model)
    return model.eval()


def _small_config(config: PreTrainedConfig, narrow: bool) -> PreTrainedConfig:
    small = copy.deepcopy(config)
    if hasattr(small, "quantization_config"):
        del small.quantization_config
    for part in _parts(small):
        _cut_layers(part)
        for name, most in _MOST.items():
            value = getattr(part, name, None)
            if isinstance(value, int | float) and value > most:
                setattr(part, name, most)
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            if getattr(part, name, None) is not None:
                setattr(part, name, 0)
        if narrow:
            _cut_heads(part)
    return small


def _parts(config: PreTrainedConfig) -> list[Any]:
    """The configuration and those inside it (text, vision)."""
    inner = [getattr(config, name, None) for name in config.sub_configs]
    return [config, *(part for found in inner if isinstance(found, PreTrainedConfig) for part in _parts(found))]


def _cut_layers(part: Any) -> None:
    """Keeps the first layer of each kind, at least two layers; a kind is what the lists by layer say of it."""
    count = getattr(part, "num_hidden_layers", None)
    if not isinstance(count, int) or count <= 2:
        return
    lists = {name: v for name, v in vars(part).items() if isinstance(v, list | tuple) and len(v) == count}
    kinds = [repr([values[layer] for values in lists.values()]) for layer in range(count)]
    keep = sorted({kinds.index(kind) for kind in kinds})[:MAX_LAYERS]
    keep = sorted({*keep, *[layer for layer in range(count) if layer not in keep][: max(0, 2 - len(keep))]})
    part.num_hidden_layers = len(keep)
    for name, values in lists.items():
        setattr(part, name, type(values)(values[layer] for layer in keep))


def _cut_heads(part: Any) -> None:
    """Two key-value heads with two query heads each, of the same head_dim, and a hidden size in proportion."""
    heads, hidden = getattr(part, "num_attention_heads", None), getattr(part, "hidden_size", None)
    if not isinstance(heads, int) or not isinstance(hidden, int):
        return
    kv_heads = getattr(part, "num_key_value_heads", None) or heads
    new_kv = min(kv_heads, 2)
    new_heads = new_kv * min(heads // kv_heads, 2)
    # Where heads do not divide it, the hidden size is free, and stays even enough for anything that halves it.
    new_hidden = hidden * new_heads // heads if hidden % heads == 0 else -(-hidden * new_heads // heads // 16) * 16
    for name in ("word_embed_proj_dim", "hidden_size"):  # OPT's embeddings are as wide, except in one size
        if getattr(part, name, None) == hidden:
            setattr(part, name, new_hidden)
    part.num_attention_heads = new_heads
    if getattr(part, "num_key_value_heads", None) is not None:
        part.num_key_value_heads = new_kv


@torch.no_grad()
def _randomise(model: nn.Module) -> None:
    """Weights large enough that every mechanism shows in the logits: initial biases and sinks are often zero."""
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if weight.dim() >= 2:
            weight.copy_(noise * weight.shape[-1] ** -0.5)
        else:
            weight.add_(noise * 0.2)


def pin_rotary(model: nn.Module, max_model_len: int) -> None:
    """Chooses the factors of every long-RoPE table once, for sequences of up to `max_model_len` tokens. Dynamic NTK
    stays at the frequencies that it has up to the original length. Raises UnsupportedModel for longer sequences, for
    which no frequencies of it hold at every length."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, str):
            module.rope_type = _pin(module, kinds, None, max_model_len)  # type: ignore[assignment]
        elif isinstance(kinds, dict):  # one table per layer type
            pinned: Any = {name: _pin(module, kind, name, max_model_len) for name, kind in kinds.items()}
            module.rope_type = pinned


def _pin(module: nn.Module, kind: str, layer_type: str | None, max_model_len: int) -> str:
    if "dynamic" in kind:
        if max_model_len > (original := getattr(module, "original_max_seq_len", 0)):
            beyond = f"max_model_len: is {max_model_len}; allowed: at most the original length, {original}"
            raise UnsupportedModel(f"dynamic NTK rotary frequencies change with the length of the batch; {beyond}")
        return PINNED
    if kind != "longrope":
        return kind
    table = getattr(module, "inv_freq" if layer_type is None else f"{layer_type}_inv_freq")  # [rotary_dim / 2]
    factors = ROPE_INIT_FUNCTIONS[kind]
    frequencies, _ = factors(module.config, table.device, seq_len=max_model_len, layer_type=layer_type)
    table.copy_(frequencies)
    return PINNED


class RegistryModel:
    """A transformers model behind the `CausalLM` protocol. Raises UnsupportedModel for one that is not sound here."""

    def __init__(self, model: PreTrainedModel, max_model_len: int) -> None:
        register_attention()
        refuse_by_class(type(model), model.config)
        text: Any = model.config.get_text_config()
        pin_rotary(model, max_model_len)
        self._model: Any = model.eval().requires_grad_(False)
        self._takes_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.max_model_len = max_model_len
        self.hidden_size = int(text.hidden_size)
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        self.batch_invariant = False
        self.takes_trees = False  # masks are made by position alone
        self.vocab_size, seen = self._inspect()
        self.layers: tuple[LayerShape, ...] = tuple(seen.shapes[layer] for layer in range(text.num_hidden_layers))
        self._windows = tuple(seen.windows[layer] for layer in range(text.num_hidden_layers))
        self._model.set_attn_implementation(PAGED)
        self.adapters = HookedAdapters(hooked_linears(self._model, self._model.get_output_embeddings()))

    @property
    def embeddings(self) -> Tensor:  # [vocab, hidden]
        """The embeddings of the ids, not scaled."""
        weight: Tensor = self._model.get_input_embeddings().weight
        return weight.detach()

    @property
    def output(self) -> Tensor | None:  # [vocab, hidden]
        """The weight of the language-model head."""
        head = self._model.get_output_embeddings()
        return None if head is None else head.weight.detach()

    @torch.inference_mode()
    def forward(
        self, batch: Batch, cache: KVCache, *, taps: Taps | None = None
    ) -> Tensor:  # [logit rows, vocab_size] float32
        """Stores the keys and values of all rows in `cache`, and the hidden states that are asked for in `taps`;
        returns the logits of `batch.logit_rows` alone."""
        step = PagedStep(batch, cache, self._windows)
        keep = {"logits_to_keep": batch.logit_rows} if self._takes_rows else {}
        slots = batch.adapter_slots
        with nullcontext() if slots is None else self.adapters.hooked(slots):
            output = self._call(batch.token_ids, batch.positions, step, output_hidden_states=taps is not None, **keep)
        if taps is not None:
            for layer in taps.layers:
                taps.put(layer, output.hidden_states[layer][0])
        logits: Tensor = output.logits[0]  # [logit rows or rows, vocab_size]
        return (logits if self._takes_rows else logits[batch.logit_rows]).float()

    def _call(self, token_ids: Tensor, positions: Tensor, step: PagedStep | Inspection, **options: Any) -> Any:
        """One sequence of all rows, as far as transformers is concerned."""
        return self._model(
            input_ids=token_ids[None],  # [1, rows]
            position_ids=positions[None],  # [1, rows]
            use_cache=False,
            outrider_step=step,
            **options,
        )

    @torch.inference_mode()
    def _inspect(self) -> tuple[int, Inspection]:
        """Runs one row and returns the width of the logits and what every layer was seen to do."""
        seen = Inspection(self.max_model_len, self.dtype)
        row = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._model.set_attn_implementation(INSPECT)
        try:
            vocab_size = self._call(row, row, seen).logits.shape[-1]
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise UnsupportedModel(f"its attention cannot be replaced: {type(error).__name__}: {error}") from error
        if seen.problems:
            raise UnsupportedModel(seen.problems[0])
        layers = set(range(self._model.config.get_text_config().num_hidden_layers))
        if missing := sorted(layers - seen.shapes.keys()):
            raise UnsupportedModel(f"layers {missing} do not attend through the registry (recurrent or other)")
        if unknown := sorted(seen.shapes.keys() - layers):
            raise UnsupportedModel(f"it has attention layers {unknown} beyond those of its configuration")
        return vocab_size, seen


def refuse_by_class(model_class: type[Any], config: PreTrainedConfig) -> None:
    """Raises UnsupportedModel for what class and configuration alone rule out."""
    if not getattr(model_class, "_supports_attention_backend", False):
        raise UnsupportedModel(f"{model_class.__name__} does not use the attention registry of transformers")
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel("it is an encoder-decoder")
    text = config.get_text_config()
    if kinds := sorted(set(getattr(text, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}):
        raise UnsupportedModel(f"it has layers of kind {', '.join(kinds)}")
    if getattr(text, "num_kv_shared_layers", 0):
        raise UnsupportedModel(f"{text.num_kv_shared_layers} layers share the keys and values of others")


def check_architecture(config: PreTrainedConfig, max_model_len: int, *, trust_remote_code: bool) -> None:
    """Raises UnsupportedModel, with what differs, unless a small random copy agrees with eager attention."""
    model, prompts, expected = _first_that_runs(config, max_model_len, trust_remote_code)
    try:
        check_model(model, max_model_len, prompts, expected)
    except FAILURES as error:
        raise UnsupportedModel(f"a small random copy fails over the paged cache: {_line(error)}") from error


def _first_that_runs(
    config: PreTrainedConfig, max_model_len: int, trust_remote_code: bool
) -> tuple[PreTrainedModel, list[list[int]], list[Tensor]]:
    """A small copy with eager attention, prompts and their logits. Not every configuration can be narrowed."""
    reasons = []
    for narrow in (True, False):
        try:
            model = small_copy(config, narrow=narrow, trust_remote_code=trust_remote_code)
            pin_rotary(model, max_model_len)
            prompts = _prompts(int(model.config.get_text_config().vocab_size), max_model_len)
            return model, prompts, [_eager_logits(model, prompt) for prompt in prompts]
        except FAILURES as error:
            reasons.append(_line(error))
    raise UnsupportedModel(f"no small copy of it runs, to be checked: {'; '.join(dict.fromkeys(reasons))}")


def check_model(
    model: PreTrainedModel, max_model_len: int, prompts: Sequence[list[int]], expected: Sequence[Tensor]
) -> None:
    """Raises UnsupportedModel unless the model gives the `expected` logits (of each prompt [length, vocab], float32)
    over the paged cache: in ragged chunks, with rollbacks, and beside a neighbour at the last position."""
    run = _PagedRun(RegistryModel(model, max_model_len), prompts)
    for logits, reference in zip(run.all_logits(), expected, strict=True):
        _compare("it", logits, reference)
    far = max_model_len - 1
    _compare(f"a row beside another at position {far}", run.tail_logits(far), expected[0][-WRONG_ROWS:])


def _eager_logits(model: PreTrainedModel, prompt: Sequence[int]) -> Tensor:  # [length, vocab]
    ids = torch.tensor([list(prompt)])  # [1, length]
    with torch.inference_mode():
        logits: Tensor = model(input_ids=ids, position_ids=torch.arange(len(prompt))[None], use_cache=False).logits[0]
    return logits.float()


def _prompts(vocab_size: int, max_model_len: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    lengths = [min(length, max_model_len) for length in LENGTHS]
    return [torch.randint(1, vocab_size, (length,), generator=generator).tolist() for length in lengths]


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


class _PagedRun:
    """Computes prompts in ragged steps, each of them first with wrong ids and too far, as a refused window would."""

    def __init__(self, model: RegistryModel, prompts: Sequence[list[int]]) -> None:
        self._model = model
        self._prompts = prompts
        most = max(len(prompt) for prompt in prompts) // BLOCK_SIZE + 1
        self._tables = [list(range(1 + index, 1 + most * len(prompts), len(prompts))) for index in range(len(prompts))]
        self._cache = KVCache.allocate(model.layers, 1 + most * len(prompts), torch.float32, "cpu")

    def all_logits(self) -> list[Tensor]:  # of each sequence [length, vocab]
        """Every row of every prompt."""
        starts = [0] * len(self._prompts)
        parts: list[list[Tensor]] = [[] for _ in self._prompts]
        for step in STEPS:
            self._forward([self._wrong(i, starts[i], rows + WRONG_ROWS) for i, rows in enumerate(step)])
            entries = [self._entry(i, starts[i], rows) for i, rows in enumerate(step)]
            logits = self._forward(entries)  # [rows of both, vocab]
            for index, part in enumerate(torch.split(logits, [entry.num_logits for entry in entries])):
                starts[index] += len(part)
                parts[index].append(part)
        return [torch.cat(found) for found in parts]

    def tail_logits(self, far: int) -> Tensor:  # [WRONG_ROWS, vocab]
        """The last rows of the first prompt once more, beside a row that has only its position from a long sequence."""
        tail = self._entry(0, len(self._prompts[0]) - WRONG_ROWS, WRONG_ROWS)
        batch = build_batch([tail, BatchEntry([1], 0, [0], 1)], BLOCK_SIZE)
        batch.positions[-1] = far
        return self._model.forward(batch, self._cache)[:WRONG_ROWS]

    def _entry(self, index: int, start: int, rows: int) -> BatchEntry:
        ids = self._prompts[index][start : start + rows]
        return BatchEntry(ids, start, self._tables[index], len(ids))

    def _wrong(self, index: int, start: int, rows: int) -> BatchEntry:
        entry = self._entry(index, start, rows)
        return BatchEntry([token // 2 for token in entry.token_ids], start, entry.block_table, 1)

    def _forward(self, entries: list[BatchEntry]) -> Tensor:  # [logit rows, vocab]
        return self._model.forward(build_batch([e for e in entries if e.token_ids], BLOCK_SIZE), self._cache)


def _compare(name: str, logits: Tensor, expected: Tensor) -> None:  # both [rows, vocab]
    """Raises UnsupportedModel unless the logits agree in every row."""
    spread = float(expected.std())
    difference = (logits - expected).abs().amax(-1)  # [rows]
    wrong = ~(difference <= TOLERANCE * spread)  # [rows]; a NaN is wrong
    if bool(wrong.any()):
        raise UnsupportedModel(
            f"a small random copy differs from its eager attention: {name} by {float(difference.max()):.2g} at a "
            f"spread of {spread:.2g}, first in row {int(wrong.nonzero()[0])} of {len(wrong)}"
        )


def load_registry_model(
    path: str | Path,
    config: Mapping[str, Any],  # the contents of config.json
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    max_model_len: int | None,
    trust_remote_code: bool = False,
    weights: str = "model.safetensors",  # the file in the folder, or the index of several
) -> CausalLM:
    """Reads safetensors only, from local files only. Without `max_model_len` the model's own limit holds. Raises
    UnsupportedModel, which names checkpoint, architecture and reason, as far as possible before any weight is read."""
    try:
        parsed = _parse(path, trust_remote_code)
        refuse_early(parsed)
        length = _max_model_len(parsed, max_model_len)
        check_architecture(parsed, length, trust_remote_code=trust_remote_code)
        return _load(path, parsed, dtype, device, length, trust_remote_code, weights)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{path} ({config.get('model_type')}) is not served: {error}") from error


def registry_linears(path: str | Path, trust_remote_code: bool = False) -> dict[str, tuple[int, int]]:
    """The products that an adapter may change, by their modules' names: outputs and inputs. Of the configuration alone,
    for which no memory is taken. Raises UnsupportedModel."""
    parsed = _parse(path, trust_remote_code)
    if hasattr(parsed, "quantization_config"):
        del parsed.quantization_config
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(parsed, trust_remote_code=trust_remote_code)
    except FAILURES as error:
        raise UnsupportedModel(f"no model is made of its configuration: {_line(error)}") from error
    return dict(HookedAdapters(hooked_linears(model, model.get_output_embeddings())).linears)


def refuse_early(config: PreTrainedConfig) -> None:
    """Raises UnsupportedModel for what configuration and class rule out; the class of remote code is judged later."""
    if type(config) in AutoModelForCausalLM._model_mapping:
        refuse_by_class(AutoModelForCausalLM._model_mapping[type(config)], config)


def _parse(path: str | Path, trust_remote_code: bool) -> PreTrainedConfig:
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=trust_remote_code)
    except ValueError as error:  # an unknown model type, or remote code that is not trusted
        raise UnsupportedModel(str(error)) from error
    except Exception as error:  # transformers takes values as they are, and fails where it computes with them
        raise UnsupportedModel(f"its configuration is not valid: {type(error).__name__}: {error}") from error


def _max_model_len(config: PreTrainedConfig, wanted: int | None) -> int:
    limit: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    length = limit if wanted is None else wanted
    if length is None:
        raise UnsupportedModel("its configuration states no longest text, so max_model_len must be given")
    if limit is not None and length > limit:
        raise UnsupportedModel(f"max_model_len is {length}, the model's own limit {limit}")
    return length


def _load(
    path: str | Path,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    device: torch.device | str,
    max_model_len: int,
    trust_remote_code: bool,
    weights: str,
) -> RegistryModel:
    register_attention()
    config.transformers_weights = weights  # what transformers reads is what was chosen, and hashed
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            attn_implementation=PAGED,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=trust_remote_code,
            adapter_kwargs=dict(NO_ADAPTER),
            output_loading_info=True,
        )
    except (SafetensorError, RuntimeError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise UnsupportedModel(f"its weights are not those of its configuration: {error}") from error
    if missing := sorted(report["missing_keys"]):
        raise UnsupportedModel(f"the checkpoint lacks {len(missing)} weights, {missing[0]} first")
    return RegistryModel(model.to(device), max_model_len)
