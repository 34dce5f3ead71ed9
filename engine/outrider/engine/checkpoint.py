"""Reads a Hugging Face checkpoint folder: JSON and safetensors, never a pickle."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from outrider.engine.models.base import UnsupportedModel, WrongCheckpoint

INDEX_NAME = "model.safetensors.index.json"
SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def read_json(path: Path) -> dict[str, Any]:
    """An object, or an empty one where the file is absent."""
    if not path.is_file():
        return {}
    value = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise WrongCheckpoint(f"{path} does not hold a JSON object")
    return value


def read_config(folder: Path) -> dict[str, Any]:
    """The contents of config.json."""
    if not (folder / "config.json").is_file():
        raise UnsupportedModel(f"{folder} holds no config.json")
    return read_json(folder / "config.json")


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The safetensors files in order of name. Raises UnsupportedModel where there are none, or an index names one that
    is absent."""
    index = read_json(folder / INDEX_NAME).get("weight_map")
    names = sorted(set(index.values())) if index else sorted(path.name for path in folder.glob("*.safetensors"))
    if not names and any(folder.glob("*.bin")):
        raise UnsupportedModel(
            f"{folder} holds only .bin weights, which are pickles: run `outrider convert {folder}` first"
        )
    if not names:
        raise UnsupportedModel(f"{folder} holds no .safetensors weights")
    absent = [name for name in names if Path(name).name != name or not (folder / name).is_file()]
    if absent:
        raise WrongCheckpoint(f"{folder / INDEX_NAME} names files that are not beside it: {', '.join(absent)}")
    return tuple(folder / name for name in names)


def read_tensors(files: tuple[Path, ...]) -> dict[str, Tensor]:
    """All tensors, mapped from the files."""
    state: dict[str, Tensor] = {}
    for path in files:
        with safe_open(path, framework="pt", device="cpu") as opened:
            for name in opened.keys():  # noqa: SIM118 (not a mapping)
                if name in state:
                    raise WrongCheckpoint(f"{path} holds {name} a second time")
                state[name] = opened.get_tensor(name)
    return state


def eos_ids(config: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    """The end-of-sequence ids: those of generation_config.json before those of config.json."""
    ids = generation.get("eos_token_id", config.get("eos_token_id"))
    if ids is None:
        return ()
    return (ids,) if isinstance(ids, int) else tuple(ids)


def stored_dtype(config: Mapping[str, Any]) -> str | None:
    """What config.json says that the weights are, in the words of any version of transformers: "float16", ..."""
    parts = (config, config.get("text_config") or {})
    return next((part[key] for part in parts for key in ("dtype", "torch_dtype") if part.get(key) is not None), None)


def default_sampling(generation: Mapping[str, Any]) -> dict[str, float]:
    """The sampling parameters that the model's authors recommend."""
    return {key: generation[key] for key in SAMPLING_KEYS if generation.get(key) is not None}
