"""What `quantization` says of a target: to how many bits its weights are rounded when they are loaded, or, as vLLM has
it, how the checkpoint keeps them already."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider.engine import checkpoint
from outrider.engine.models.base import UnsupportedModel
from outrider.engine.quantized.rounding import BITS_OF, Rounding
from outrider.engine.quantized.state import rounds_activations, said_of
from outrider.gguf.folder import gguf_name
from outrider.gguf.header import read_gguf

GGUF, NAMELESS = "gguf", "a method without a name"
# vLLM's names for the same checkpoints by other kernels.
SAME_AS = {"gptq_marlin": "gptq", "auto_gptq": "gptq", "awq_marlin": "awq", "auto_awq": "awq"}


def kept_as(folder: Path, config: Mapping[str, Any]) -> str:
    """How a checkpoint keeps its weights, by vLLM's name; empty: as plain numbers."""
    said = said_of(config)
    if said is None:
        return GGUF if gguf_name(folder) is not None else ""
    method = said.get("quant_method") if isinstance(said, Mapping) else None
    return method if isinstance(method, str) and method else NAMELESS


def told_as(folder: Path, config: Mapping[str, Any]) -> str:
    """What a service tells of a checkpoint whose weights are quantised: how, and what is left out of it; empty: it is
    none."""
    said, kept = said_of(config), kept_as(folder, config)
    leaves_out = isinstance(said, Mapping) and rounds_activations(said)
    return f"{kept} (input_activations not applied)" if leaves_out else kept


def is_known(quantization: str | None, kept: str) -> bool:
    """Whether our engine may be told so, of a checkpoint that is kept so."""
    return quantization is None or quantization in BITS_OF or SAME_AS.get(quantization, quantization) == kept != ""


def rounding_for(quantization: str | None, folder: Path) -> Rounding | None:
    """How a target's weights are rounded; None: they stay as they are. Raises UnsupportedModel (WrongCheckpoint) for
    what they are not, and for a second rounding."""
    if quantization is None:
        return None
    kept = kept_as(folder, checkpoint.read_config(folder))
    rounding = next((name for name in BITS_OF if name == quantization), None)
    if rounding is None and is_known(quantization, kept):
        return None
    if rounding is not None and (not kept or (kept == GGUF and _has_plain_numbers(folder))):
        return rounding
    allowed = kept if rounding is not None else ", ".join([*BITS_OF, *([kept] if kept else [])])
    is_kept = f"the weights are quantised already ({kept})" if kept else "the weights are plain numbers"
    given = f"is {quantization!r:.60}, and in {folder} {is_kept}"
    raise UnsupportedModel(f"quantization: {given}; allowed: none, {allowed}")


def _has_plain_numbers(folder: Path) -> bool:
    """Whether no tensor of a GGUF file is in blocks of few bits."""
    with checkpoint.told():
        header = read_gguf(folder / checkpoint.weights_entry(folder))
    return all(place.kind.block == 1 for place in header.tensors.values())
