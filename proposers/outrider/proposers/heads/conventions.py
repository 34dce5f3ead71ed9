"""How else a head's weights might be meant. A checkpoint is tensors and a config.json, and what that leaves out or says
wrongly is a convention of its trainer's: which layers are numbered how, whether a block's first row gives a token, what
the residual stream begins with. Tensors fit either way, so that only what the target keeps can tell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.proposers.registry import BLOCKS, head_of, samples_anchor

NUMBERED = "aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids"  # of hidden states, 0: the embeddings
NAMED = "target_layer_ids", "dspark_target_layer_ids"  # of layers, from 0 on
ANCHOR = "sample_from_anchor", "dspark_bonus_anchor"
CAUSAL = "is_causal", "causal"


@dataclass(frozen=True, slots=True)
class Convention:
    """Another reading of the same weights."""

    name: str  # in words
    changes: Mapping[str, Any]  # of config.json
    is_open: bool  # its files do not say which one is meant


def other_conventions(config: Mapping[str, Any], taps: Sequence[int]) -> Iterator[Convention]:
    """Those that a head's config.json does not name; by it the head reads these states."""
    method = head_of(config)
    if method in BLOCKS:
        yield from _of_block(config, anchor_first=method == "dspark")
    elif method == "eagle3":
        yield from _of_eagle3(config, taps)


def _of_block(config: Mapping[str, Any], anchor_first: bool) -> Iterator[Convention]:
    own = config.get("dflash_config") or {}
    fields = {**config, **own}
    anchor = not samples_anchor(config, anchor_first)
    row = "last token's" if anchor else "first mask's"
    changes = _within(config, {ANCHOR[0]: anchor}, without=ANCHOR)
    yield Convention(f"the {row} row gives the first token", changes, is_open=not fields.keys() & set(ANCHOR))
    if (named := next((fields[name] for name in NAMED if name in fields), None)) is not None:
        yield _of_taps(config, NAMED[0], named, -1, without=NAMED)
    elif (numbered := next((fields[name] for name in NUMBERED if name in fields), None)) is not None:
        yield _of_taps(config, NUMBERED[0], numbered, 1, without=NUMBERED)
    causal = bool(next((fields[name] for name in CAUSAL if fields.get(name) is not None), False))
    seen = "all of a block" if causal else "what lies before them in a block"
    changes = _within(config, {CAUSAL[0]: not causal}, without=CAUSAL)
    told = fields.keys() & {*CAUSAL, "sliding_window_non_causal"}
    yield Convention(f"rows see {seen}", changes, is_open=_slides(config, fields) and not told)


def _of_eagle3(config: Mapping[str, Any], taps: Sequence[int]) -> Iterator[Convention]:
    fields = dict(config.get("eagle_config") or {}) | dict(config)
    name = NUMBERED[1]
    for by in (-1, 1):
        shifted = [layer + by for layer in fields.get(name) or taps]
        yield Convention(f"it reads layers {', '.join(map(str, shifted))}", {name: shifted}, not fields.get(name))
    before = bool(fields.get("norm_before_residual", fields.get("speculators_model_type") == "eagle3"))
    begins = "the state before its norm" if before else "the normed state"
    changes = {"norm_before_residual": not before}
    yield Convention(f"the residual stream begins with {begins}", changes, "norm_before_residual" not in fields)


def _of_taps(config: Mapping[str, Any], name: str, told: Any, by: int, without: Sequence[str]) -> Convention:
    layers = [layer + by for layer in told if type(layer) is int] if isinstance(told, list) else []
    changes = _within(config, {name: layers}, without=without)
    return Convention(f"{name} is meant as {', '.join(map(str, layers))}", changes, is_open=False)


def _within(config: Mapping[str, Any], changes: Mapping[str, Any], without: Sequence[str]) -> Mapping[str, Any]:
    """What takes the place of a block drafter's fields, wherever they stand."""
    own = {name: value for name, value in (config.get("dflash_config") or {}).items() if name not in without}
    return {**dict.fromkeys(without), **changes, "dflash_config": own}


def _slides(config: Mapping[str, Any], fields: Mapping[str, Any]) -> bool:
    layer = config.get("transformer_layer_config") or config
    return bool(fields.get("use_swa")) or "sliding_attention" in (layer.get("layer_types") or ())
