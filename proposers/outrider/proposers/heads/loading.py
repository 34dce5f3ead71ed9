"""From a folder to a head: its config.json says which one it is."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from outrider.engine import checkpoint
from outrider.engine.models.base import UnsupportedModel
from outrider.proposers.heads.eagle import Eagle3Head, EagleHead
from outrider.proposers.heads.head import Head, HeadReader, TargetWeights
from outrider.proposers.heads.medusa import MedusaConfig, MedusaHead
from outrider.proposers.heads.mlp_speculator import MlpConfig, MlpSpeculatorHead
from outrider.proposers.heads.mtp import MtpHead

Config = Mapping[str, Any]


def _medusa(config: Config, reader: HeadReader, target: TargetWeights) -> Head:
    return MedusaHead(MedusaConfig.parse(config, target), reader, target)


def _mlp_speculator(config: Config, reader: HeadReader, target: TargetWeights) -> Head:
    return MlpSpeculatorHead(MlpConfig.parse(config, target), reader, target)


HEADS: Mapping[str, Callable[[Config, HeadReader, TargetWeights], Head]] = {
    "eagle": EagleHead,
    "eagle3": Eagle3Head,
    "medusa": _medusa,
    "mlp_speculator": _mlp_speculator,
    "mtp": MtpHead,
}


def method_of(config: Config, names: Collection[str] = ()) -> str | None:
    """The method of a head by its config.json and the names of its tensors; None for what is no head. The layouts tell
    it in many ways: by model_type, by the architecture's name, by a field or a tensor that no other has."""
    for said in (config.get("speculators_model_type"), config.get("model_type")):
        if said in HEADS:
            return str(said)
    architecture = " ".join(config.get("architectures") or ()).lower()
    for method in ("eagle3", "eagle"):
        if method in architecture:
            return method
    fields = {"medusa_num_heads": "medusa", "num_nextn_predict_layers": "mtp"}
    found = next((method for field, method in fields.items() if config.get(field)), None)
    if found is None and ("d2t" in names or any("midlayer." in name for name in names)):
        return "eagle3"
    return "eagle" if found is None and "fc.weight" in names else found


def load_head(folder: Path, target: TargetWeights, dtype: torch.dtype, device: torch.device) -> Head:
    """Loads a head for a target. Raises UnsupportedModel (WrongCheckpoint) with the reason."""
    config = checkpoint.read_config(folder)
    state = checkpoint.read_tensors(checkpoint.weight_files(folder))
    method = method_of(config, state.keys())
    if method is None:
        raise UnsupportedModel(
            f"{folder} holds no head: model_type is {config.get('model_type')!r}; allowed: {', '.join(HEADS)}"
        )
    with torch.inference_mode():
        return HEADS[method](config, HeadReader(state, dtype, device), target)
