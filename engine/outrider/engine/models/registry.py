"""Loads a checkpoint of any architecture that transformers knows, once a small copy of it has passed the check."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from outrider.engine.models.base import CausalLM, UnsupportedModel
from outrider.engine.models.registry_attention import PAGED, register_attention
from outrider.engine.models.registry_check import check_architecture
from outrider.engine.models.registry_model import RegistryModel, refuse_by_class


def load_registry_model(
    path: str | Path,
    config: Mapping[str, Any],  # the contents of config.json
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    max_model_len: int | None,
    trust_remote_code: bool = False,
) -> CausalLM:
    """Reads safetensors only, from local files only. Without `max_model_len` the model's own limit holds. Raises
    UnsupportedModel, which names checkpoint, architecture and reason, as far as possible before any weight is read."""
    try:
        parsed = _parse(path, trust_remote_code)
        refuse_early(parsed)
        length = _max_model_len(parsed, max_model_len)
        check_architecture(parsed, length, trust_remote_code=trust_remote_code)
        return _load(path, parsed, dtype, device, length, trust_remote_code)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{path} ({config.get('model_type')}) is not served: {error}") from error


def refuse_early(config: PreTrainedConfig) -> None:
    """Raises UnsupportedModel for what configuration and class rule out; the class of remote code is judged later."""
    if type(config) in AutoModelForCausalLM._model_mapping:
        refuse_by_class(AutoModelForCausalLM._model_mapping[type(config)], config)


def _parse(path: str | Path, trust_remote_code: bool) -> PreTrainedConfig:
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=trust_remote_code)
    except ValueError as error:  # an unknown model type, or remote code that is not trusted
        raise UnsupportedModel(str(error)) from error


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
) -> RegistryModel:
    register_attention()
    model, report = AutoModelForCausalLM.from_pretrained(
        path,
        config=config,
        dtype=dtype,
        attn_implementation=PAGED,
        use_safetensors=True,
        local_files_only=True,
        trust_remote_code=trust_remote_code,
        output_loading_info=True,
    )
    if missing := sorted(report["missing_keys"]):
        raise UnsupportedModel(f"the checkpoint lacks {len(missing)} weights, {missing[0]} first")
    return RegistryModel(model.to(device), max_model_len)
