"""Checkpoints of compressed-tensors: integers of 4 and 8 bits, packed or not, and floats of 8. Their configuration is
read by its own library; https://github.com/vllm-project/compressed-tensors."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from outrider.engine.models.base import UnsupportedModel, WrongCheckpoint
from outrider.engine.quantized.numbers import BITS, WORD, Integers, SmallFloats, unpack

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig

log = logging.getLogger(__name__)

INSTALL = "pip install compressed-tensors"
FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
LINEAR = "Linear"  # what stands for every product
PARTS = (
    "weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx",
    "input_scale", "input_zero_point", "output_scale", "output_zero_point",
)  # fmt: skip


class CompressedTensors:
    """How such a checkpoint is read."""

    parts = PARTS

    def __init__(self, said: Mapping[str, Any]) -> None:
        """`said` is the quantization_config. Raises UnsupportedModel for what is not served, by name."""
        self._config = _parsed(said)
        for name, scheme in self._config.config_groups.items():
            _require_served(name, scheme.weights, scheme.format or self._config.format)
            if scheme.input_activations is not None:
                log.warning("quantization_config: %s: input_activations are not applied", name)
        if self._config.kv_cache_scheme is not None:
            log.warning("quantization_config: kv_cache_scheme is not applied: keys and values are not rounded")

    def module(self, name: str) -> str | None:
        """The module of which a tensor of that name is the weight; None: of none that is quantised."""
        stem, _, part = name.rpartition(".")
        return stem if part in ("weight_packed", "weight_scale") else None

    def shape(self, module: str, stored: Mapping[str, Tensor]) -> tuple[int, ...]:
        """Of the weight of a module, [out, in]. Raises WrongCheckpoint."""
        if f"{module}.weight_packed" in stored:
            return _packed_shape(module, stored)
        return tuple(stored[f"{module}.weight"].shape)

    def numbers(self, module: str, stored: Mapping[str, Tensor]) -> Integers | SmallFloats:
        """The weight of a module. Raises WrongCheckpoint."""
        scheme = self._scheme(module)
        if f"{module}.weight_packed" in stored:
            return _packed(module, stored, scheme)
        weight, scales = stored[f"{module}.weight"], stored[f"{module}.weight_scale"]
        if weight.dtype.is_floating_point:
            block = None if scheme.block_structure is None else (scheme.block_structure[0], scheme.block_structure[1])
            return SmallFloats(weight, scales, block).check(module)
        zeros = None if scheme.symmetric else stored[f"{module}.weight_zero_point"]
        return _integers(module, weight, scheme, scales, zeros, stored)

    def _scheme(self, module: str) -> QuantizationArgs:
        from compressed_tensors.utils.match import match_name

        schemes = list(self._config.config_groups.values())
        named = [scheme for scheme in schemes if any(match_name(module, target) for target in scheme.targets)]
        found = named or [scheme for scheme in schemes if LINEAR in scheme.targets]
        if not found or found[0].weights is None:
            raise WrongCheckpoint(f"{module}: is quantised, and no group of quantization_config has it")
        return found[0].weights


def _parsed(said: Mapping[str, Any]) -> QuantizationConfig:
    try:
        from compressed_tensors.quantization import QuantizationConfig
    except ModuleNotFoundError as error:
        raise UnsupportedModel(f"weights of compressed-tensors are read by its library: {INSTALL}") from error
    plain = copy.deepcopy(dict(said))
    groups = plain.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if isinstance(weights, dict):  # the order of inputs is a tensor's, and the library refuses what it has removed
            weights.pop("actorder", None)
    try:
        return QuantizationConfig.model_validate(plain)
    except (ValueError, TypeError, AttributeError, NotImplementedError, KeyError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UnsupportedModel(f"quantization_config is not one of compressed-tensors: {reason}") from error


def _require_served(group: str, weights: QuantizationArgs | None, form: str) -> None:
    if weights is None:
        return
    given = f"{weights.type} of {weights.num_bits} bits by {weights.strategy}"
    if weights.type == "int":
        served = weights.num_bits in BITS and weights.strategy in ("group", "channel", "tensor")
    else:
        served = weights.num_bits == 8 and weights.strategy in ("tensor", "channel", "block")
    if not served:
        allowed = "int of 4 or 8 bits by group, channel or tensor, float of 8 bits by tensor, channel or block"
        raise UnsupportedModel(f"quantization_config: {group}: is {given}; allowed: {allowed}")
    if form not in FORMATS:
        raise UnsupportedModel(f"quantization_config: format: is {form!r:.60}; allowed: {', '.join(FORMATS)}")


def _packed_shape(module: str, stored: Mapping[str, Tensor]) -> tuple[int, int]:
    words, shape = stored[f"{module}.weight_packed"], stored[f"{module}.weight_shape"]
    if words.dtype != torch.int32 or words.dim() != 2 or shape.shape != (2,):
        raise WrongCheckpoint(f"{module}: weight_packed or weight_shape is not of that layout")
    return int(shape[0]), int(shape[1])


def _packed(module: str, stored: Mapping[str, Tensor], scheme: QuantizationArgs) -> Integers:
    words, bits, (outputs, inputs) = stored[f"{module}.weight_packed"], scheme.num_bits, _packed_shape(module, stored)
    if not (outputs == len(words) and words.shape[1] * WORD // bits >= inputs > 0):
        raise WrongCheckpoint(f"{module}: weight_shape is {(outputs, inputs)}, and weight_packed {tuple(words.shape)}")
    codes = _signed(unpack(words, bits, inputs, 1), bits)
    zeros = None if scheme.symmetric else stored[f"{module}.weight_zero_point"]
    if zeros is not None and zeros.dtype == torch.int32:
        if zeros.dim() != 2 or len(zeros) * WORD // bits < outputs:
            raise WrongCheckpoint(f"{module}: weight_zero_point has shape {tuple(zeros.shape)}")
        zeros = _signed(unpack(zeros, bits, outputs, 0), bits)
    return _integers(module, codes, scheme, stored[f"{module}.weight_scale"], zeros, stored)


def _signed(codes: Tensor, bits: int) -> Tensor:
    """They are packed with half their range added."""
    return (codes.short() - (1 << bits - 1)).to(torch.int8)


def _integers(
    module: str, codes: Tensor, scheme: QuantizationArgs, scales: Tensor, zeros: Tensor | None,
    stored: Mapping[str, Tensor],
) -> Integers:  # fmt: skip
    outputs, inputs = codes.shape
    group = scheme.group_size if scheme.strategy == "group" and scheme.group_size else inputs
    order = stored.get(f"{module}.weight_g_idx")
    group_of = None if order is None or bool((order < 0).all()) else order.long()
    points = None if zeros is None else _by_output(zeros, outputs)
    return Integers(codes, scheme.num_bits, _by_output(scales, outputs), group, points, group_of).check(module)


def _by_output(part: Tensor, outputs: int) -> Tensor:  # [out, groups]
    """One of the whole matrix is every output's."""
    return part.reshape(1, 1).expand(outputs, 1) if part.numel() == 1 else part
