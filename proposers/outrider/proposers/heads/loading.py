"""From a folder to a head: its config.json says which one it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from outrider.engine import checkpoint
from outrider.engine.models.base import UnsupportedModel
from outrider.proposers.heads.base import Head, HeadReader, TargetWeights
from outrider.proposers.heads.medusa import MedusaConfig, MedusaHead
from outrider.proposers.heads.mlp_speculator import MlpConfig, MlpSpeculatorHead

Config = Mapping[str, Any]


def _medusa(config: Config, reader: HeadReader, target: TargetWeights) -> Head:
    return MedusaHead(MedusaConfig.parse(config, target), reader, target)


def _mlp_speculator(config: Config, reader: HeadReader, target: TargetWeights) -> Head:
    return MlpSpeculatorHead(MlpConfig.parse(config, target), reader, target)


HEADS: Mapping[str, Callable[[Config, HeadReader, TargetWeights], Head]] = {
    "medusa": _medusa,
    "mlp_speculator": _mlp_speculator,
}


def method_of_config(config: Config) -> str | None:
    """The method of a head's config.json; None for what is no head."""
    if config.get("model_type") in HEADS:
        return str(config["model_type"])
    return "medusa" if "medusa_num_heads" in config else None  # the original says no more


def load_head(folder: Path, target: TargetWeights, dtype: torch.dtype, device: torch.device) -> Head:
    """Loads a head for a target. Raises UnsupportedModel (WrongCheckpoint) with the reason."""
    config = checkpoint.read_config(folder)
    method = method_of_config(config)
    if method is None:
        raise UnsupportedModel(
            f"{folder} holds no head: model_type is {config.get('model_type')!r}; allowed: {', '.join(HEADS)}"
        )
    state = checkpoint.read_tensors(checkpoint.weight_files(folder))
    with torch.inference_mode():
        return HEADS[method](config, HeadReader(state, dtype, device), target)
