"""The tensors of a Hugging Face checkpoint, by name and shape, and their fusion into ours."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from outrider.engine.models.base import WrongCheckpoint
from outrider.engine.models.decoder_config import DecoderConfig, turned_first
from outrider.engine.models.fused_experts import of_each_expert
from outrider.engine.models.state import QuantizedState, meta_of, renamed
from outrider.kernels.cpu.decoder import Weight, Weights, is_bfloat16
from outrider.kernels.layers.reference import through_int8
from outrider.kernels.quantized.form import QuantizedMatrix

log = logging.getLogger(__name__)

EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"
SINKS = "self_attn.sinks"
_TEXT_MODEL_PREFIXES = ("language_model.", "model.language_model.")
_BASE_PARTS = ("embed_tokens.", "layers.", "norm.")  # as a model names them that was saved without its head's class
_VISION_PARTS = ("vision_tower.", "multi_modal_projector.")
MTP_PREFIX = "model.mtp_layers."  # layers that a head drafts with
_VISION_PREFIXES = (*_VISION_PARTS, *(f"model.{part}" for part in _VISION_PARTS))


def num_parameters(config: DecoderConfig) -> int:
    """Numbers in the tensors that the checkpoint must hold."""
    return sum(map(prod, expected_shapes(config).values()))


def expected_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that the checkpoint must hold."""
    hidden, width, dim = config.hidden_size, config.intermediate_size, config.head_dim
    heads, kv_heads = config.num_heads * dim, config.num_kv_heads * dim
    shapes: dict[str, tuple[int, ...]] = {
        EMBEDDINGS: (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tied_embeddings:
        shapes[HEAD] = (config.vocab_size, hidden)
    attention = [("self_attn.o_proj", hidden, heads, config.output_bias)]
    feed = [("mlp.down_proj", hidden, width, config.mlp_bias)]
    if config.family.fused:
        attention += [("self_attn.qkv_proj", heads + 2 * kv_heads, hidden, config.attention_bias)]
        feed += [("mlp.gate_up_proj", 2 * width, hidden, config.mlp_bias)]
    else:
        attention += [
            ("self_attn.q_proj", heads, hidden, config.attention_bias),
            ("self_attn.k_proj", kv_heads, hidden, config.attention_bias),
            ("self_attn.v_proj", kv_heads, hidden, config.attention_bias),
        ]
        feed += [("mlp.gate_proj", width, hidden, config.mlp_bias), ("mlp.up_proj", width, hidden, config.mlp_bias)]
    norms = [(name, hidden) for name in _block_norms(config) if name is not None]
    norms += [(f"self_attn.{name}_norm", size) for name, size in _normed_sizes(config).items()]
    mixture = config.mixture
    experts = [] if mixture is None else mixture.linears(hidden)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        has_experts = mixture is not None and layer in mixture.layers
        for name, rows, columns, bias in attention + (experts if has_experts else feed):
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
        for name, size in norms:
            shapes[f"{prefix}{name}.weight"] = (size,)
        if config.family.sinks:
            shapes[f"{prefix}{SINKS}"] = (config.num_heads,)
    return shapes


def text_model_state(state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The text model's tensors by the names that a causal language model has: of one with a vision tower, which is
    left out, and of one that was saved without the class of its head. Others unchanged. Raises WrongCheckpoint."""
    if not any(name.startswith((*_TEXT_MODEL_PREFIXES, *_BASE_PARTS)) for name in state):
        return state
    names = [name for name in state if not name.startswith(_VISION_PREFIXES)]
    own = {_own_name(name): name for name in names}
    if len(own) < len(names):
        raise WrongCheckpoint("it holds tensors twice, under the names of two layouts")
    return renamed(state, own)


def with_its_head(config: DecoderConfig, state: Mapping[str, Tensor]) -> tuple[DecoderConfig, Mapping[str, Tensor]]:
    """`state` by its names in a causal language model, and whether its head is tied, by what it holds and not by the
    configuration alone, as transformers decides it: a head that differs from the embeddings is the model's own; one
    that is there without them is both."""
    state = text_model_state(state)
    if config.mixture is not None:
        state = of_each_expert(config.mixture, state)
    if not config.tied_embeddings or HEAD not in state:
        return config, state
    if EMBEDDINGS in state and not are_equal(state[EMBEDDINGS], state[HEAD]):
        return replace(config, tied_embeddings=False), state
    others = {name: name for name in state if name != HEAD}
    return config, renamed(state, {EMBEDDINGS: HEAD} | others)


def are_equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same numbers, in whatever types."""
    common = torch.promote_types(one.dtype, other.dtype)
    return torch.equal(one.to(common), other.to(common))


def check_state(config: DecoderConfig, state: Mapping[str, Tensor]) -> None:
    """Raises WrongCheckpoint that names missing, unexpected and misshapen tensors."""
    state = meta_of(state)
    expected = expected_shapes(config)
    names = {name for name in state if not name.endswith("rotary_emb.inv_freq") and not name.startswith(MTP_PREFIX)}
    problems = [
        *(f"missing {name}" for name in sorted(expected.keys() - names)),
        *(f"unexpected {name}" for name in sorted(names - expected.keys())),
        *(
            f"{name} has shape {tuple(state[name].shape)}, not {shape}"
            for name, shape in expected.items()
            if name in names and tuple(state[name].shape) != shape
        ),
    ]
    if problems:
        more = f" and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise WrongCheckpoint(f"not a {config.model_type} of this configuration: {'; '.join(problems[:8])}{more}")


class WeightReader:
    """Hands out the tensors of a checked checkpoint in one dtype and on one device, by the names that Llama gave them:
    one at a time, so that whoever lays them out holds little beside the result. Raises WrongCheckpoint for tensors that
    are not those of the configuration."""

    def __init__(
        self,
        config: DecoderConfig,
        state: Mapping[str, Tensor],
        dtype: torch.dtype,
        device: torch.device,
        int8: bool = False,  # matrices that rows are multiplied with are rounded to what 8 bits hold
        codes: bool = True,  # what is stored as codes of few bits may be handed out so
    ) -> None:
        given, (config, state) = config, with_its_head(config, state)
        if config.tied_embeddings != given.tied_embeddings:
            log.warning(
                "config.json has tie_word_embeddings, and %s differs from the embeddings: it is used, as transformers "
                "does; tie_word_embeddings: false would say so",
                HEAD,
            )
        check_state(config, state)
        self.config = config  # whose head is tied where the checkpoint's is
        self._state = state
        self._parts = fused_parts(config)
        self._dtype = dtype
        self._device = device
        self._int8 = int8
        self._quantized = state if codes and isinstance(state, QuantizedState) else None

    def tensor(self, name: str) -> Tensor:
        """A copy that shares no memory with the checkpoint (whose mapping may not be aligned)."""
        return self._copy(self._state[name])

    def linear(self, prefix: str, *names: str) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of the projections `prefix + name`, stacked on top of one another."""
        parts = [self._rounded(self._projection(f"{prefix}{name}.weight")) for name in names]
        return self._stacked(parts), self._bias(prefix, *names)

    def linear_as_stored(self, prefix: str, *names: str) -> tuple[Weights, Tensor | None]:
        """Reads a product as `linear` does, but its weight has the checkpoint's type, or is its codes, and may be its
        mapping."""
        parts = [self._projection_as_stored(f"{prefix}{name}.weight") for name in names]
        bias = self._bias(prefix, *names)
        if len(parts) == 1:
            return parts[0], bias
        tensors = [part for part in parts if isinstance(part, Tensor)]
        return torch.cat(tensors) if len(tensors) == len(parts) else tuple(parts), bias

    def head(self, tied: Tensor | None) -> Tensor:  # [vocab, hidden]
        """The head's weight: the embeddings themselves, where they are tied and not to be rounded."""
        return self._copy(self._rounded(self._state[HEAD])) if tied is None else self._rounded(tied)

    def packed(self, name: str) -> QuantizedMatrix | None:
        """A matrix's codes; None where it is not to be handed out so."""
        return None if self._quantized is None else self._quantized.packed(name)

    def matrix_as_stored(self, name: str) -> Weight:
        """A matrix that is no product's alone. Has the checkpoint's type, or is its codes, and may be its mapping."""
        packed = self.packed(name)
        return self._state[name] if packed is None else packed

    @property
    def is_quantized(self) -> bool:
        """Whether some matrix may be handed out as codes."""
        return self._quantized is not None

    def all_bfloat16(self) -> bool:
        """Whether the matrices that rows are multiplied with, of every layer and the head, are bfloat16 numbers."""
        unused = set() if self.config.tied_embeddings else {EMBEDDINGS}
        meta = meta_of(self._state)
        return all(
            name in unused or meta[name].dtype == torch.bfloat16 or is_bfloat16(self._state[name])
            for name, shape in expected_shapes(self.config).items()
            if len(shape) == 2
        )

    def norm(self, name: str) -> Tensor:
        """A norm's factors. Gemma's, which are one more than what the checkpoint holds, are float32 whatever the rows
        are: there they multiply before the rounding."""
        weight = self.tensor(name)
        return 1.0 + weight.float() if self.config.family.norms_from_one else weight

    def block_norms(self, prefix: str) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """The norms of a layer: before attention, before the feed-forward, after attention, after the feed-forward."""
        before, before_wide, *after = _block_norms(self.config)
        after_attention, after_wide = (None if name is None else self.norm(f"{prefix}{name}.weight") for name in after)
        return (
            self.norm(f"{prefix}{before}.weight"),
            self.norm(f"{prefix}{before_wide}.weight"),
            after_attention,
            after_wide,
        )

    def qk_norm(self, prefix: str) -> Tensor | None:  # [heads + kv_heads, head_dim]
        """The factors of the norms of a layer's queries and keys, by head."""
        if self.config.family.qk_norm == "no":
            return None
        query, key = (self.norm(f"{prefix}self_attn.{name}_norm.weight") for name in "qk")
        heads, kv_heads, dim = self.config.num_heads, self.config.num_kv_heads, self.config.head_dim
        if self.config.family.qk_norm == "of all heads":
            return torch.cat([query, key]).view(-1, dim)
        return torch.cat([query.expand(heads, -1), key.expand(kv_heads, -1)])

    def sinks(self, prefix: str) -> Tensor | None:  # [heads] float32
        """Of each head of a layer a score of no key."""
        if not self.config.family.sinks:
            return None
        return self._state[f"{prefix}{SINKS}"].to(device=self._device, dtype=torch.float32, copy=True)

    def _rounded(self, weight: Tensor) -> Tensor:
        return through_int8(weight) if self._int8 else weight

    def _bias(self, prefix: str, *names: str) -> Tensor | None:
        if f"{prefix}{names[0]}.bias" not in self._state:
            return None
        return self._stacked([self._projection(f"{prefix}{name}.bias") for name in names])

    def _projection(self, name: str) -> Tensor:
        """Cut out where the checkpoint holds several as one; of a head of which a part turns, that part first."""
        stored, rows = self._place(name)
        part = self._state[stored][rows]
        return turned_first(part, self.config.head_dim, self.config.rotary_dim) if self._is_turned(name) else part

    def _projection_as_stored(self, name: str) -> Weight:
        stored, rows = self._place(name)
        packed = self.packed(stored)
        if packed is None:
            return self._projection(name)
        start, end, _ = rows.indices(len(packed))
        part = packed if end - start == len(packed) else packed.rows(start, end)
        if not self._is_turned(name):
            return part
        return part.reordered(turned_first(torch.arange(len(part)), self.config.head_dim, self.config.rotary_dim))

    def _place(self, name: str) -> tuple[str, slice]:
        """Which tensor a projection's is part of, and the rows."""
        stem, projection, kind = name.rsplit(".", 2)
        fused, rows = self._parts.get(projection, (projection, slice(None)))
        return f"{stem}.{fused}.{kind}", rows

    def _is_turned(self, name: str) -> bool:
        """Whether its heads' parts that turn have to be put first."""
        is_head = name.rsplit(".", 2)[1] in ("q_proj", "k_proj")
        return is_head and self.config.rotary_dim != self.config.head_dim

    def _stacked(self, parts: Sequence[Tensor]) -> Tensor:
        """Converted on the way to their places: no second copy is made."""
        rows = [len(part) for part in parts]
        stacked = torch.empty(sum(rows), *parts[0].shape[1:], dtype=self._dtype, device=self._device)
        for place, part in zip(torch.split(stacked, rows), parts, strict=True):
            place.copy_(part)
        return stacked

    def _copy(self, tensor: Tensor) -> Tensor:
        return tensor.to(device=self._device, dtype=self._dtype, copy=True)


def _own_name(name: str) -> str:
    """transformers 5 writes model.language_model.layers..., those before it language_model.model.layers..., and either
    of a model without its head's class layers..., behind language_model. or not."""
    if name.startswith("model.language_model."):
        return "model." + name.removeprefix("model.language_model.")
    name = name.removeprefix("language_model.")
    return f"model.{name}" if name.startswith(_BASE_PARTS) else name


def _block_norms(config: DecoderConfig) -> tuple[str, str, str | None, str | None]:
    """Before attention, before the feed-forward, after attention, after the feed-forward."""
    if config.family.norms_after:
        return "input_layernorm", "pre_feedforward_layernorm", "post_attention_layernorm", "post_feedforward_layernorm"
    return "input_layernorm", "post_attention_layernorm", None, None


def _normed_sizes(config: DecoderConfig) -> dict[str, int]:
    """Of the norms of queries and keys."""
    dim, kind = config.head_dim, config.family.qk_norm
    if kind == "no":
        return {}
    return {"q": dim, "k": dim} if kind == "by head" else {"q": config.num_heads * dim, "k": config.num_kv_heads * dim}


def fused_parts(config: DecoderConfig) -> dict[str, tuple[str, slice]]:
    """Where each projection lies in a weight that holds several: its name and the rows."""
    if not config.family.fused:
        return {}
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return {
        "q_proj": ("qkv_proj", slice(0, heads)),
        "k_proj": ("qkv_proj", slice(heads, heads + kv_heads)),
        "v_proj": ("qkv_proj", slice(heads + kv_heads, None)),
        "gate_proj": ("gate_up_proj", slice(0, config.intermediate_size)),
        "up_proj": ("gate_up_proj", slice(config.intermediate_size, None)),
    }
