"""From a folder in PEFT's layout to an adapter that a model takes: adapter_config.json and adapter_model.safetensors,
never a pickle. Every tensor has to be there, and of the shape that the base asks for; what else is there is refused.

An adapter's identity is its content, and its base's: the SHA-256 of the model's digest, of what each module's
product is multiplied with, and of the tensors' names, types, shapes and contents."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.engine.adapters.config import (
    CONFIG_NAME,
    AdapterConfig,
    ModuleRank,
    UnsupportedAdapter,
    parse_adapter_config,
)
from outrider.engine.adapters.ranks import MOST_RANK
from outrider.engine.checkpoint import checkpoint_digest, read_json, read_tensors
from outrider.engine.models.base import LowRank, TakesAdapters, UnsupportedModel, WrongCheckpoint

WEIGHTS_NAME = "adapter_model.safetensors"
PICKLE_NAME = "adapter_model.bin"
MOST_BYTES = 8 << 30
PREFIX = "base_model.model."  # of PEFT's names of tensors
OTHERS = ("model.embed_tokens", "lm_head")  # what PEFT may adapt beside the products of layers
TEXT_PREFIXES = ("model.language_model.", "language_model.model.")  # of a text model with a vision tower
SHOWN = 4  # tensors in a message


@dataclass(frozen=True, slots=True, eq=False)
class LoadedAdapter:
    """An adapter: what it adds to each product of its base."""

    digest: str
    rank: int  # the greatest of its products'
    modules: Mapping[str, LowRank]  # by the names that the base has
    file_names: Mapping[str, str] = field(default_factory=dict)  # of these in the file, before `.lora_A.weight`


def load_adapter(
    folder: str | Path,
    model: object,
    model_digest: str,
    most_rank: int = MOST_RANK,
) -> LoadedAdapter:
    """Reads a folder. Raises UnsupportedAdapter with the reason, for a base that takes none as well."""
    if not isinstance(model, TakesAdapters):
        raise UnsupportedAdapter("adapters are for our own decoder and for transformers' models of plain products")
    return read_adapter(folder, model.adapters.linears, model_digest, most_rank)


def read_adapter(
    folder: str | Path,
    linears: Mapping[str, tuple[int, int]],  # of the base, by names: outputs and inputs
    model_digest: str,
    most_rank: int = MOST_RANK,
) -> LoadedAdapter:
    """Reads an adapter of a base whose products alone are known. Raises UnsupportedAdapter with the reason."""
    folder = Path(folder)
    with _named(folder):
        given = _read_config(folder)
        config, path = parse_adapter_config(given, most_rank), _weights_file(folder)
        with checkpoint_digest(folder, (path,)) as weights_digest:
            state = read_tensors((path,))
            rename = _renaming(linears, state)
            modules = _modules(config, linears, state, rename)
            digest = _digest(model_digest, modules, weights_digest())
    names = {name: PREFIX + rename(name) for name in modules}
    return LoadedAdapter(digest, max(len(one.down) for one in modules.values()), modules, names)


@contextmanager
def _named(folder: Path) -> Iterator[None]:
    """Errors say which adapter they are of."""
    try:
        yield
    except (UnsupportedModel, OSError) as error:
        text = str(error)
        raise UnsupportedAdapter(text if str(folder) in text else f"{folder}: {text}") from error


def _read_config(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise UnsupportedAdapter("there is no such folder")
    if not (folder / CONFIG_NAME).is_file():
        raise UnsupportedAdapter(f"holds no {CONFIG_NAME}, as an adapter in PEFT's layout does")
    return read_json(folder / CONFIG_NAME)


def _weights_file(folder: Path) -> Path:
    path = folder / WEIGHTS_NAME
    if not path.is_file() and (folder / PICKLE_NAME).exists():
        raise UnsupportedAdapter(f"holds only {PICKLE_NAME}, which is a pickle; allowed: {WEIGHTS_NAME}")
    if not path.is_file():
        raise UnsupportedAdapter(f"holds no {WEIGHTS_NAME}")
    if (size := path.stat().st_size) > MOST_BYTES:
        raise UnsupportedAdapter(f"{WEIGHTS_NAME} has {size} bytes; allowed: at most {MOST_BYTES}")
    return path


def _modules(
    config: AdapterConfig,
    linears: Mapping[str, tuple[int, int]],
    state: Mapping[str, Tensor],
    rename: Callable[[str], str],  # from the base's names to the file's
) -> dict[str, LowRank]:
    """Checks every tensor against what configuration and base ask for."""
    ranks = config.modules(map(rename, linears), map(rename, OTHERS))
    own = {rename(name): name for name in linears}
    shapes = {}
    for name, module in ranks.items():
        outputs, inputs = linears[own[name]]
        shapes[f"{PREFIX}{name}.lora_A.weight"] = (module.rank, inputs)
        shapes[f"{PREFIX}{name}.lora_B.weight"] = (outputs, module.rank)
    _check_tensors(shapes, state)
    return {own[name]: _low_rank(f"{PREFIX}{name}", module, state) for name, module in ranks.items()}


def _renaming(linears: Iterable[str], state: Mapping[str, Tensor]) -> Callable[[str], str]:
    """Maps the base's names of modules to those in the file, which was trained beside a vision tower or not."""
    for prefix in TEXT_PREFIXES:
        is_there = any(name.startswith(PREFIX + prefix) for name in state)
        if is_there and not any(name.startswith(prefix) for name in linears):
            return lambda name: prefix + name.removeprefix("model.") if name.startswith("model.") else name
    return lambda name: name


def _check_tensors(shapes: Mapping[str, tuple[int, ...]], state: Mapping[str, Tensor]) -> None:
    problems = [
        *(
            f"{name} is there, which no targeted module of the base has"
            for name in sorted(state.keys() - shapes.keys())
        ),
        *(f"{name} is missing" for name in sorted(shapes.keys() - state.keys())),
        *(
            f"{name} has shape {tuple(state[name].shape)}, not {shape}"
            for name, shape in shapes.items()
            if name in state and tuple(state[name].shape) != shape
        ),
    ]
    problems += [
        f"{name} is of {str(tensor.dtype).removeprefix('torch.')}; allowed: float32, bfloat16, float16"
        for name, tensor in state.items()
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16)
    ]
    if not problems:
        problems = [f"{name} holds NaN or infinity" for name, tensor in state.items() if not _is_finite(tensor)]
    if problems:
        more = f" and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise WrongCheckpoint(f"not an adapter of this base: {'; '.join(problems[:SHOWN])}{more}")


def _is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())


def _low_rank(name: str, module: ModuleRank, state: Mapping[str, Tensor]) -> LowRank:
    """Apart from the file's mapping."""
    down, up = state[f"{name}.lora_A.weight"].clone(), state[f"{name}.lora_B.weight"].clone()
    return LowRank(down, up, module.scaling)


def _digest(model_digest: str, modules: Mapping[str, LowRank], weights: str) -> str:
    scalings = {name: one.scaling for name, one in modules.items()}
    return hashlib.sha256(json.dumps([model_digest, scalings, weights], sort_keys=True).encode()).hexdigest()
