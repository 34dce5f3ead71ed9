"""What PEFT's adapter_config.json says: which modules of the base an adapter changes, of what rank, times what.

The rules are PEFT's own, of LoRA (Hu et al., arXiv 2106.09685) and rank-stabilised LoRA (Kalajdzievski, arXiv
2312.03732). What is not understood, or changes more than products, is refused by name."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import regex

from outrider.engine.adapters.ranks import MOST_RANK
from outrider.engine.models.base import UnsupportedModel

CONFIG_NAME = "adapter_config.json"
MOST_ALPHA = 1_000_000
ALL_LINEAR = "all-linear"
MOST_PATTERN_CHARS = 2000
MATCHING_S = 2.0  # all patterns over all modules: a pattern can be made to take for ever

# What may stand there whatever its value: it says how the adapter was made, or where.
NOTES = frozenset({
    "auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "peft_version", "lora_dropout",
    "qalora_group_size", "runtime_config", "eva_config", "loftq_config", "corda_config", "lora_ga_config",
    "megatron_core",
})  # fmt: skip
# What acts.
ACTING = frozenset({
    "peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules", "exclude_modules",
    "layers_to_transform", "layers_pattern", "bias", "task_type", "init_lora_weights", "modules_to_save",
})  # fmt: skip
# Others take the base's own weights apart when they are loaded.
INITIALISATIONS = (True, False, None, "gaussian", "orthogonal", "eva")
EMPTY: tuple[Any, ...] = (None, False, [], {}, "")


class UnsupportedAdapter(UnsupportedModel):
    """This adapter is not served; the message names the file, the field or the tensor, and what is wrong with it."""


@dataclass(frozen=True, slots=True)
class ModuleRank:
    """What is said of one module."""

    rank: int
    scaling: float


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """A configuration whose values were checked. Modules are named as PEFT names them, from the base model on."""

    rank: int
    alpha: float
    rank_stabilised: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    targets: tuple[str, ...] | str  # names, or ends of names behind a dot; a text is a pattern, or ALL_LINEAR
    excluded: tuple[str, ...] | str
    layers: tuple[int, ...] | None  # None: all
    layer_patterns: tuple[str, ...]

    def modules(self, linears: Iterable[str], others: Iterable[str]) -> dict[str, ModuleRank]:
        """Those of `linears` that the adapter changes. Raises UnsupportedAdapter where it changes one of `others`
        (embeddings and head), or none."""
        find = Patterns()
        wrong = [name for name in others if self.targets != ALL_LINEAR and self._targets(name, find)]
        if wrong:
            given = f"target_modules: has {', '.join(wrong)}"
            raise UnsupportedAdapter(f"{given}; allowed: products of the layers, not embeddings or the head")
        found = {name: self._rank_of(name, find) for name in linears if self._targets(name, find)}
        if not found:
            raise UnsupportedAdapter(f"target_modules: is {self.targets!r:.200}, which no module of the base has")
        return found

    def _targets(self, name: str, find: Patterns) -> bool:
        if _names(self.excluded, name, find):
            return False
        if isinstance(self.targets, str):
            return self.targets == ALL_LINEAR or find(self.targets, name, whole=True) is not None
        if name in self.targets:  # a whole name counts in any layer
            return True
        return _names(self.targets, name, find) and (self.layers is None or self._layer_of(name, find) in self.layers)

    def _layer_of(self, name: str, find: Patterns) -> int | None:
        for pattern in self.layer_patterns or (r"[^.]*",):
            if (match := find(rf".*?\.{pattern}\.(\d+)\.", name)) is not None:
                return int(match)
        return None

    def _rank_of(self, name: str, find: Patterns) -> ModuleRank:
        rank = next((self.rank_pattern[key] for key in self.rank_pattern if _ends(key, name, find)), self.rank)
        alpha = next((self.alpha_pattern[key] for key in self.alpha_pattern if _ends(key, name, find)), self.alpha)
        return ModuleRank(rank, alpha / (math.sqrt(rank) if self.rank_stabilised else rank))


class Patterns:
    """Searches names by patterns that somebody else wrote, for so long altogether."""

    def __init__(self, seconds: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ends = clock() + (MATCHING_S if seconds is None else seconds)

    def __call__(self, pattern: str, name: str, *, whole: bool = False) -> str | None:
        """The last group where the pattern matches from the name's start (`whole`: to its end), or the match. Raises
        UnsupportedAdapter."""
        try:
            match = (regex.fullmatch if whole else regex.match)(
                pattern, name, timeout=max(1e-3, self._ends - self._clock()), concurrent=True
            )
        except TimeoutError:
            raise UnsupportedAdapter(f"the pattern {pattern!r:.200} takes too long to search for") from None
        except (regex.error, RecursionError, MemoryError, ValueError) as error:
            raise UnsupportedAdapter(f"{pattern!r:.200} is no pattern: {error}") from error
        return None if match is None else str(match[len(match.groups())] if match.groups() else match[0])


def _names(given: tuple[str, ...] | str, name: str, find: Patterns) -> bool:
    if isinstance(given, str):
        return bool(given) and find(given, name, whole=True) is not None
    return any(name == one or name.endswith(f".{one}") for one in given)


def _ends(pattern: str, name: str, find: Patterns) -> bool:
    return find(rf"(.*\.)?({pattern})$", name) is not None


def parse_adapter_config(given: Mapping[str, Any], most_rank: int = MOST_RANK) -> AdapterConfig:
    """Reads the contents of adapter_config.json. Raises UnsupportedAdapter."""
    if (kind := given.get("peft_type")) != "LORA":
        raise _wrong("peft_type", kind, "LORA")
    for name, value in given.items():
        if name not in NOTES | ACTING and value not in EMPTY:
            raise UnsupportedAdapter(f"{name}: is {value!r:.200}, which is not computed here; allowed: to leave it out")
    if given.get("bias", "none") != "none":
        raise _wrong("bias", given["bias"], "none")
    if given.get("modules_to_save") not in EMPTY:
        raise _wrong("modules_to_save", given["modules_to_save"], "none")
    if given.get("task_type", "CAUSAL_LM") not in ("CAUSAL_LM", None):
        raise _wrong("task_type", given["task_type"], "CAUSAL_LM")
    if (made := given.get("init_lora_weights", True)) not in INITIALISATIONS:
        raise _wrong("init_lora_weights", made, ", ".join(map(str, INITIALISATIONS)))
    targets = _texts(given, "target_modules")
    if not targets:
        raise _wrong("target_modules", given.get("target_modules"), "names of modules, a pattern, or all-linear")
    layers = _layers(given)
    if isinstance(targets, str):
        targets = ALL_LINEAR if targets.lower() == ALL_LINEAR else targets
        if layers is not None or given.get("layers_pattern") not in EMPTY:
            raise _wrong("layers_to_transform", given.get("layers_to_transform"), "none beside a pattern of modules")
    patterns = _texts(given, "layers_pattern")
    return AdapterConfig(
        rank=_rank("r", given.get("r", 8), most_rank),
        alpha=_number("lora_alpha", given.get("lora_alpha", 8)),
        rank_stabilised=_flag(given, "use_rslora"),
        rank_pattern={
            key: _rank(f"rank_pattern[{key[:100]}]", value, most_rank)
            for key, value in _mapping(given, "rank_pattern").items()
        },
        alpha_pattern={
            key: _number(f"alpha_pattern[{key[:100]}]", value)
            for key, value in _mapping(given, "alpha_pattern").items()
        },
        targets=targets,
        excluded=_texts(given, "exclude_modules"),
        layers=layers,
        layer_patterns=(patterns,) if isinstance(patterns, str) and patterns else tuple(patterns),
    )


def _wrong(name: str, value: object, allowed: str) -> UnsupportedAdapter:
    return UnsupportedAdapter(f"{name}: is {value!r:.200}; allowed: {allowed}")


def _rank(name: str, value: object, most: int) -> int:
    if not (type(value) is int and 1 <= value <= most):
        raise _wrong(name, value, f"1 to {most}")
    return value


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not -MOST_ALPHA <= value <= MOST_ALPHA:
        raise _wrong(name, value, f"{-MOST_ALPHA} to {MOST_ALPHA}")
    return float(value)


def _flag(given: Mapping[str, Any], name: str) -> bool:
    value = given.get(name, False)
    if value is not None and type(value) is not bool:
        raise _wrong(name, value, "true, false")
    return bool(value)


def _mapping(given: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = given.get(name)
    if not (value is None or isinstance(value, dict)):
        raise _wrong(name, value, "an object")
    for key in value or {}:
        _check_length(name, key)
    return value or {}


def _texts(given: Mapping[str, Any], name: str) -> tuple[str, ...] | str:
    """A text, or a tuple of texts; none is an empty tuple."""
    value = given.get(name)
    if value is None:
        return ()
    if isinstance(value, str):
        return _check_length(name, value)
    if not (isinstance(value, list) and all(isinstance(one, str) for one in value)):
        raise _wrong(name, value, "a text, or a list of texts")
    return tuple(_check_length(name, one) for one in value)


def _check_length(name: str, pattern: str) -> str:
    if len(pattern) > MOST_PATTERN_CHARS:
        raise UnsupportedAdapter(f"{name}: has {len(pattern)} characters; allowed: at most {MOST_PATTERN_CHARS}")
    return pattern


def _layers(given: Mapping[str, Any]) -> tuple[int, ...] | None:
    value = given.get("layers_to_transform")
    if value is None or value == []:
        return None
    layers: Sequence[object] = value if isinstance(value, list) else [value]
    if not all(type(layer) is int and layer >= 0 for layer in layers):
        raise _wrong("layers_to_transform", value, "a layer's number, or a list of them")
    return tuple(layer for layer in layers if isinstance(layer, int))
