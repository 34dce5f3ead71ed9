"""What the config.json of a block drafter says, in any of its public layouts: z-lab's, DeepSpec's and speculators'.

They differ in where a field stands and in how they count: z-lab and DeepSpec name the layers whose output is read from
0 on, speculators numbers hidden states, of which 0 is the embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from outrider.engine.models.base import UnsupportedModel, WrongCheckpoint
from outrider.engine.models.decoder_config import DecoderConfig
from outrider.kernels.types import TREE_ROWS
from outrider.proposers.heads.head import TargetWeights
from outrider.proposers.heads.layer import layer_config, layer_fields
from outrider.proposers.registry import block_size, samples_anchor

MOST_LAYERS = 64
MOST_ROWS = TREE_ROWS - 1
ROTARY_BASE = 1_000_000.0  # of Qwen3, where nothing is said
SLIDING, FULL = "sliding_attention", "full_attention"
# Of `dflash_config`, those that are read; a field that is not could change what is computed.
FIELDS = frozenset((
    "target_layer_ids", "mask_token_id", "block_size", "sample_from_anchor", "causal", "use_swa", "swa_window_size",
    "use_aux_hidden_state", "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k",
    "input_embedding_scale", "output_multiplier", "final_logit_softcapping",
))  # fmt: skip
# Fields of what is not computed, with the value that is.
FIXED: Mapping[str, Any] = {
    "use_aux_hidden_state": True, "attention_sink_bias": False, "add_swa_attention_sink_bias": False,
    "attention_value_scale": 1.0, "is_neox_style": True,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sight:
    """What the rows of a block see in a layer: all of the block, or what lies before; and how far back of its first
    row, the row itself not counted."""

    whole: bool
    window: int | None


@dataclass(frozen=True, slots=True)
class BlockConfig:
    """The shape and the conventions of a block drafter."""

    layer: DecoderConfig  # of all layers
    sights: tuple[Sight, ...]  # of each
    rows: int  # of a block: the last token, and masks
    samples_anchor: bool  # the last token's row gives the first token; else the first mask's does
    taps: tuple[int, ...]  # as hidden_states.py numbers layers
    mask_token_id: int | None
    num_outputs: int  # of the head's own vocabulary
    embedding_scale: float
    logit_scale: float
    logit_softcap: float | None

    @classmethod
    def parse(cls, config: Mapping[str, Any], target: TargetWeights, anchor_first: bool = False) -> Self:
        """Of any layout; `anchor_first` where it is not said. Raises UnsupportedModel (WrongCheckpoint)."""
        said = _Said(config)
        said.check(target)
        layer, hidden = layer_config(_layer_fields(said), target, MOST_LAYERS), target.output.shape[1]
        if layer.hidden_size != hidden:
            raise WrongCheckpoint(f"hidden_size: is {layer.hidden_size}; allowed: the target's, {hidden}")
        softcap = float(said.own.get("final_logit_softcapping") or 0.0)
        return cls(
            layer=layer,
            sights=said.sights(layer.num_layers),
            rows=_rows(config),
            samples_anchor=samples_anchor(config, anchor_first),
            taps=target.taps(said.taps(target.num_layers)),
            mask_token_id=said.first("mask_token_id", "dspark_noise_token_id"),
            num_outputs=int(config.get("draft_vocab_size") or layer.vocab_size),
            embedding_scale=float(said.own.get("input_embedding_scale", 1.0)),
            logit_scale=float(said.own.get("output_multiplier", config.get("logit_scale", 1.0))),
            logit_softcap=softcap if softcap > 0 else None,
        )

    @property
    def most_tokens(self) -> int:
        """That a block gives."""
        return self.rows if self.samples_anchor else self.rows - 1

    @property
    def first_row(self) -> int:
        """The row that gives the first token."""
        return self.rows - self.most_tokens


def _rows(config: Mapping[str, Any]) -> int:
    rows = block_size(config)
    if type(rows) is not int or not 2 <= rows <= MOST_ROWS:
        raise UnsupportedModel(f"block_size: is {rows!r:.100}; allowed: 2 to {MOST_ROWS}")
    return rows


def _layer_fields(said: _Said) -> Mapping[str, Any]:
    """As a Qwen3's, which the layers are, whatever the target is. How far a layer sees is read apart."""
    fields = {name: value for name, value in said.layer.items() if name not in ("layer_types", "use_sliding_window")}
    fields |= {"model_type": "qwen3", "use_sliding_window": False, "sliding_window": None}
    if not fields.get("rope_parameters"):
        fields["rope_theta"] = fields.get("rope_theta") or ROTARY_BASE
    return fields


class _Said:
    """A config.json by what is asked of it."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.own: Mapping[str, Any] = config.get("dflash_config") or {}
        self.layer = layer_fields(config)
        self.type = config.get("speculators_model_type")

    def first(self, *names: str) -> Any:
        """What the first of the names says that is there."""
        return next((found[name] for found in (self.own, self.config) for name in names if name in found), None)

    def check(self, target: TargetWeights) -> None:
        """That nothing is asked for that is not computed. Raises UnsupportedModel (WrongCheckpoint)."""
        for name, value in FIXED.items():
            if (found := self.first(name)) not in (None, value):
                raise UnsupportedModel(f"{name}: is {found!r:.100}; allowed: {value}")
        if unknown := sorted(set(self.own) - FIELDS - set(FIXED)):
            raise UnsupportedModel(f"dflash_config: has {', '.join(unknown):.200}, which is not known here")
        for name, own in (("num_target_layers", target.num_layers), ("target_hidden_size", target.output.shape[1])):
            if self.config.get(name) not in (None, own):
                raise WrongCheckpoint(f"{name}: is {self.config[name]!r:.100}; allowed: the target's, {own}")

    def taps(self, num_layers: int) -> tuple[int, ...]:
        """Numbers of hidden states."""
        numbered = self.first("aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids")
        named = self.first("target_layer_ids", "dspark_target_layer_ids")
        found = numbered if named is None else [layer + 1 for layer in named if type(layer) is int]
        if not isinstance(found, list) or len(found) != len(numbered if named is None else named) or not found:
            raise UnsupportedModel("target_layer_ids: names no layers; allowed: the layers whose states are read")
        wrong = [layer for layer in found if type(layer) is not int or not 0 <= layer <= num_layers]
        if wrong or len(set(found)) < len(found):
            allowed = f"states 0 to {num_layers} of the target, each once"
            raise WrongCheckpoint(f"target_layer_ids: states {found}; allowed: {allowed}")
        return tuple(found)

    def sights(self, num_layers: int) -> tuple[Sight, ...]:
        """Of each layer. All of a block is seen where all of the text is; in a layer that slides, what is said."""
        kinds, slides = self.layer.get("layer_types"), bool(self.own.get("use_swa", False))
        if kinds is not None and (len(kinds) != num_layers or set(kinds) - {SLIDING, FULL}):
            raise UnsupportedModel(f"layer_types: {kinds!r:.200}; allowed: {num_layers} of {SLIDING}, {FULL}")
        if kinds is None or (slides and SLIDING not in kinds):
            sliding, whole = [slides] * num_layers, True
        else:
            sliding, whole = [kind == SLIDING for kind in kinds], self._whole_where_sliding()
        causal = self.first("is_causal", "causal")
        window = self.own.get("swa_window_size") or self.layer.get("sliding_window")
        if any(sliding) and (type(window) is not int or window < 1):
            raise UnsupportedModel(f"sliding_window: is {window!r:.100}; allowed: a number of tokens")
        return tuple(
            Sight(whole=not causal if causal is not None else whole or not slid, window=window if slid else None)
            for slid in sliding
        )

    def _whole_where_sliding(self) -> bool:
        """speculators says it; elsewhere such a layer looks back alone."""
        if self.type is None:
            return False
        return bool(self.config.get("sliding_window_non_causal", self.type == "dflash2"))
