"""Checkpoints of other programs' quantisers: each weight is what their own libraries make of it, and a model of them
computes what it would of those numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter
from compressed_tensors.quantization import QuantizationScheme
from safetensors.torch import load_file, save_file
from support.models import KERNELS, build_decoder, cpu_kernels, logits_of, save_tiny, tiny_config
from torch import Tensor

from outrider.engine import checkpoint
from outrider.engine.loader import Activations, load_model
from outrider.engine.models.base import UnsupportedModel, WrongCheckpoint
from outrider.engine.models.decoder_cpu import NativeDecoder
from outrider.engine.quantized.numbers import Integers, SmallFloats, unpack
from outrider.engine.quantized.rounding import RoundedTensors, Rounding
from outrider.engine.quantized.state import QuantizedTensors, layout_of
from outrider.kernels.cpu.decoder import Kind
from outrider.kernels.cpu.library import cpu_library

ACTIVATIONS: tuple[Activations, ...] = ("float32", "int16")
TOLD: dict[Rounding, str] = {"int8": "int8 in float32", "int4": "int4 in int16"}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {  # the format, and what config_groups says of weights
    "int4 by 32": ("pack-quantized", INT4),
    "int4 by 16, zero points": ("pack-quantized", {**INT4, "group_size": 16, "symmetric": False}),
    "int4 by channel": ("pack-quantized", {**INT4, "strategy": "channel", "group_size": None}),
    "int4 by channel, zero points": (
        "pack-quantized",
        {**INT4, "strategy": "channel", "group_size": None, "symmetric": False},
    ),
    "int8 packed by 32": ("pack-quantized", {**INT4, "num_bits": 8}),
    "int8 by channel": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}),
    "int8 by channel, zero points": (
        "int-quantized",
        {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": False},
    ),
    "int8 by tensor": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "tensor", "symmetric": True}),
    "float8 by channel": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "float8 by tensor": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    "float8 by block": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [16, 32]},
    ),
}


def said_of(form: str, weights: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A quantization_config of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    groups = {"config_groups": {"group_0": group}, "ignore": ["lm_head"]}
    return {"quant_method": "compressed-tensors", "format": form, **groups, **more}


def scales_for(weight: Tensor, weights: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    """Scales and zero points that fit a weight, [out, in], in the shapes of the scheme."""
    outputs, inputs = weight.shape
    strategy, bits = weights["strategy"], weights["num_bits"]
    if strategy == "block":
        rows, columns = weights["block_structure"]
        blocks = weight.view(outputs // rows, rows, inputs // columns, columns)
        return blocks.abs().amax((1, 3)) / 448, None
    if strategy == "tensor":
        grouped = weight.reshape(1, 1, -1)
    else:
        grouped = weight.view(outputs, -1, weights["group_size"] if strategy == "group" else inputs)
    if weights["type"] == "float":
        return grouped.abs().amax(-1) / 448, None
    if weights.get("symmetric", True):
        return grouped.abs().amax(-1) / (2 ** (bits - 1) - 0.5), None
    low, high = grouped.amin(-1), grouped.amax(-1)
    scales = (high - low) / (2**bits - 1)
    points = (-(2 ** (bits - 1)) - low / scales).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return scales, points.to(torch.int8)


def compressed(weight: Tensor, form: str, weights: dict[str, Any]) -> dict[str, Tensor]:
    """What the library stores for a weight, by the local names."""
    scales, points = scales_for(weight, weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    state = {"weight": weight, "weight_scale": scales.bfloat16()}
    if points is not None:
        state["weight_zero_point"] = points
    stored: dict[str, Tensor] = BaseCompressor.get_value_from_registry(form).compress(state, scheme)
    return stored


def their_numbers(stored: dict[str, Tensor], form: str, weights: dict[str, Any]) -> Tensor:
    """The library's own reading, in float32."""
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    wide = {**stored, "weight_scale": stored["weight_scale"].float()}
    numbers: Tensor = BaseCompressor.get_value_from_registry(form).decompress(wide, scheme)["weight"]
    return numbers


def random_weight(outputs: int = 48, inputs: int = 64, seed: int = 0) -> Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed))


def read(stored: dict[str, Tensor], said: dict[str, Any], is_decoded: bool = False) -> Tensor:
    """The numbers, which the packed form has as well, unless there is none for them."""
    layout = layout_of(said)
    assert layout is not None
    state = QuantizedTensors(layout, {f"layer.{name}": tensor for name, tensor in stored.items()})
    assert list(state) == ["layer.weight"] and len(state) == 1
    numbers, packed = state["layer.weight"], state.packed("layer.weight")
    assert state.meta["layer.weight"].shape == numbers.shape
    assert packed is None or torch.equal(packed.decode(), numbers)
    assert (packed is None) == is_decoded
    return numbers


@pytest.mark.parametrize("kind", KINDS)
def test_compressed_tensors_are_what_their_library_reads(kind: str) -> None:
    form, weights = KINDS[kind]
    stored, weight = compressed(random_weight(), form, weights), random_weight()
    found = read(stored, said_of(form, weights))
    assert torch.equal(found, their_numbers(stored, form, weights).float())
    assert (found - weight).abs().max() < (0.5 if weights["num_bits"] == 4 else 0.15)


def test_blocks_of_small_floats_that_fill_no_row_are_decoded() -> None:
    floats, scales = random_weight().to(torch.float8_e4m3fn), torch.rand(3, 2)
    assert SmallFloats(floats, scales, (16, 48)).matrix is None
    assert SmallFloats(floats.to(torch.float8_e5m2), scales[:, :1], (16, 64)).matrix is None
    whole = SmallFloats(floats, scales, (20, 32))  # the last block has fewer outputs
    assert whole.matrix is not None and torch.equal(whole.matrix.decode(), whole.decode())


def test_inputs_in_another_order_have_their_groups_scales() -> None:
    """weight_g_idx, of checkpoints that were written with actorder "group", which the library has dropped."""
    weights = {**INT4, "actorder": "group"}
    stored = compressed(random_weight(), "pack-quantized", INT4)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    group_of = (torch.arange(64) // 32)[order]
    codes = unpack(stored["weight_packed"], 4, 64, 1).float() - 8
    expected = torch.stack(
        [codes[:, at] * stored["weight_scale"][:, int(group_of[at])].float() for at in range(64)], dim=1
    )
    said = said_of("pack-quantized", weights)
    assert torch.equal(read({**stored, "weight_g_idx": group_of.int()}, said, is_decoded=True), expected)
    assert torch.equal(
        read({**stored, "weight_g_idx": torch.full((64,), -1, dtype=torch.int32)}, said),
        read(stored, said),
    )


@pytest.mark.parametrize("has_zeros", [False, True], ids=["around 0", "zero points"])
def test_a_last_group_that_is_not_whole(has_zeros: bool) -> None:
    """Has a scale of its own. The kernels have no form for it, and take the numbers."""
    generator = torch.Generator().manual_seed(4)
    codes = torch.randint(16, (8, 80), generator=generator).to(torch.uint8)
    scales = torch.rand(8, 3, generator=generator) + 0.5
    zeros = torch.randint(16, (8, 3), generator=generator).to(torch.uint8) if has_zeros else None
    numbers = Integers(codes, 4, scales, 32, zeros).check("layer")
    points = torch.zeros(8, 3) if zeros is None else zeros.float()
    expected = [(codes[:, at].float() - points[:, at // 32]) * scales[:, at // 32] for at in range(80)]
    assert torch.equal(numbers.decode(), torch.stack(expected, dim=1)) and numbers.matrix is None


def packed_gptq(codes: Tensor, bits: int) -> Tensor:
    """codes: [rows, columns] -> words along the rows, one number at a time."""
    per_word = 32 // bits
    words = [[0] * codes.shape[1] for _ in range(len(codes) // per_word)]
    for row, values in enumerate(codes.tolist()):
        for column, value in enumerate(values):
            words[row // per_word][column] |= value << bits * (row % per_word)
    return torch.tensor([[word - (1 << 32) if word >> 31 else word for word in line] for line in words]).int()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("form", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("group", [16, -1])
@pytest.mark.parametrize("desc_act", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
def test_gptq(bits: int, form: str, group: int, desc_act: bool, symmetric: bool) -> None:
    generator = torch.Generator().manual_seed(bits)
    inputs, outputs = 64, 48
    groups = 1 if group == -1 else inputs // group
    codes = torch.randint(1 << bits, (inputs, outputs), generator=generator)
    zeros = torch.randint(1, (1 << bits) + int(form == "gptq"), (groups, outputs), generator=generator)
    if symmetric:
        zeros = torch.full_like(zeros, 1 << bits - 1)
    scales = torch.rand(groups, outputs, generator=generator).half()
    group_of = torch.arange(inputs) // (inputs // groups)
    if desc_act:
        group_of = group_of[torch.randperm(inputs, generator=generator)]
    stored = {
        "qweight": packed_gptq(codes, bits),
        "qzeros": packed_gptq((zeros - int(form == "gptq")).t(), bits).t().contiguous(),
        "scales": scales,
        "g_idx": group_of.int(),
    }
    said = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": desc_act, "checkpoint_format": form}
    expected = (codes - zeros[group_of]).float() * scales[group_of].float()
    is_decoded = (desc_act and group > 0) or int(zeros.max()) > 255
    assert torch.equal(read(stored, said, is_decoded), expected.t())


@pytest.mark.parametrize("group", [16, -1])
def test_awq_is_what_the_converter_makes_of_it(group: int) -> None:
    generator = torch.Generator().manual_seed(2)
    inputs, outputs = 64, 48
    groups = 1 if group == -1 else inputs // group
    words = torch.iinfo(torch.int32)
    stored = {
        "qweight": torch.randint(words.min, words.max, (inputs, outputs // 8), generator=generator).int(),
        "qzeros": torch.randint(words.min, words.max, (groups, outputs // 8), generator=generator).int(),
        "scales": torch.rand(groups, outputs, generator=generator).half(),
    }
    said = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    converter = AutoAWQConverter(group_size=inputs if group == -1 else group, ignore=())
    theirs = converter.process({f"layer.{name}": tensor.clone() for name, tensor in stored.items()})
    local = {name.removeprefix("layer."): tensor for name, tensor in theirs.items()}
    weights = {**INT4, "group_size": inputs if group == -1 else group, "symmetric": False}
    assert torch.equal(read(stored, said), their_numbers(local, "pack-quantized", weights))


def quantised_folder(
    folder: Path, change: Callable[[str, Tensor], dict[str, Tensor]], said: dict[str, Any], **options: Any
) -> Path:
    """A tiny checkpoint whose products are stored otherwise."""
    save_tiny(folder, **options)
    state = load_file(folder / "model.safetensors")
    stored: dict[str, Tensor] = {}
    for name, tensor in state.items():
        is_product = name.endswith("_proj.weight")
        changed = change(name, tensor) if is_product else {"weight": tensor}
        stem = name.removesuffix(".weight")
        stored |= {f"{stem}.{part}": value.contiguous() for part, value in changed.items()}
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": said}))
    return folder


@pytest.mark.parametrize("kind", ["int4 by 16, zero points", "int8 by channel", "float8 by block"])
def test_a_model_computes_what_its_numbers_say(kind: str, tmp_path: Path) -> None:
    form, weights = KINDS[kind]
    if "block_structure" in weights:
        weights = {**weights, "block_structure": [16, 16]}
    said = said_of(form, weights)
    folder = quantised_folder(tmp_path / "model", lambda _, weight: compressed(weight, form, weights), said)
    loaded = load_model(folder, activations="float32")
    plain = load_file(folder / "model.safetensors")
    numbers = {name: tensor for name, tensor in plain.items() if ".weight_" not in name and "_proj." not in name}
    for stem in {name.rpartition(".")[0] for name in plain if "_proj." in name}:
        local = {name.rpartition(".")[2]: plain[name] for name in plain if name.startswith(f"{stem}.")}
        numbers[f"{stem}.weight"] = their_numbers(local, form, weights).float()
    expected = build_decoder(tiny_config(), numbers)
    ids = list(range(3, 40))
    torch.testing.assert_close(logits_of(loaded, ids), logits_of(expected, ids), atol=1e-4, rtol=1e-4)
    assert loaded.digest and loaded.digest != load_model(save_tiny(tmp_path / "plain")).digest


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_a_text_model_beside_a_vision_tower_stays_packed(prefix: str, tied: bool, tmp_path: Path) -> None:
    """Under either layout's names, and where a tied head is stored, too."""
    said, options = said_of("pack-quantized", INT4), {"tie_word_embeddings": tied, "intermediate_size": 128}
    folder = quantised_folder(
        tmp_path / "model", lambda _, weight: compressed(weight, "pack-quantized", INT4), said, **options
    )
    plain, file = load_model(folder), folder / "model.safetensors"
    state = load_file(file)
    if tied:
        state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    kept = {name.replace("model.", prefix, 1): tensor for name, tensor in state.items()}
    save_file({**kept, "model.vision_tower.x": torch.ones(1)}, file, {"format": "pt"})
    found = load_model(folder)
    assert torch.equal(logits_of(found, list(range(3, 40))), logits_of(plain, list(range(3, 40))))
    if cpu_library() is not None:
        assert isinstance(found.model, NativeDecoder) and found.model.kernel._layers[0].down.kind == Kind.PACKED


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"quant_method": "bitsandbytes"}, "quant_method: is 'bitsandbytes'; allowed: compressed-tensors, gptq, awq"),
    ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "bits: is 3 of GPTQ; allowed: 4, 8"),
    ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size: is 0"),
    ({"quant_method": "gptq", "bits": 4, "group_size": 8, "checkpoint_format": "marlin"}, "format: is 'marlin'"),
    ({"quant_method": "awq", "bits": 8, "group_size": 128}, "bits: is 8 of AWQ; allowed: 4"),
    ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv"}, "version: is 'gemv'"),
    (said_of("pack-quantized", {**INT4, "num_bits": 3}), "group_0: is int of 3 bits by group; allowed"),
    (said_of("nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}),
     "group_0: is float of 4 bits by tensor_group"),
    (said_of("marlin-24", INT4), "format: is 'marlin-24'; allowed: pack-quantized"),
    ({"quant_method": "compressed-tensors", "config_groups": 3}, "not one of compressed-tensors"),
    ({"quant_method": "compressed-tensors"}, "not one of compressed-tensors"),
]  # fmt: skip


@pytest.mark.parametrize(("said", "message"), WRONG)
def test_what_is_not_served_is_refused_by_name(said: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = quantised_folder(tmp_path / "model", lambda _, weight: {"weight": weight}, said)
    with pytest.raises(UnsupportedModel, match=message):
        load_model(folder)


def test_parts_that_do_not_fit_name_their_tensor(tmp_path: Path) -> None:
    said = said_of("pack-quantized", INT4)

    def without(part: str) -> Callable[[str, Tensor], dict[str, Tensor]]:
        def change(name: str, weight: Tensor) -> dict[str, Tensor]:
            stored = compressed(weight[:, :32], "pack-quantized", INT4)
            if part == "scales":
                stored["weight_scale"] = stored["weight_scale"].repeat(1, 3)
            else:
                del stored[part]
            return stored

        return change

    folder = quantised_folder(tmp_path / "absent", without("weight_shape"), said)
    with pytest.raises(WrongCheckpoint, match=r"layers\.\d\.\S+_proj: is quantised, and \S+weight_shape is not there"):
        load_model(folder)
    folder = quantised_folder(tmp_path / "misshapen", without("scales"), said)
    with pytest.raises(WrongCheckpoint, match="has shape"):
        checkpoint.read_weights(folder, checkpoint.weight_files(folder))["model.layers.0.mlp.up_proj.weight"]


@pytest.mark.parametrize("rounding", ["int8", "int4"])
@pytest.mark.parametrize("kernels", KERNELS)
def test_a_rounded_model_is_nearly_the_same(rounding: Rounding, kernels: str, tmp_path: Path) -> None:
    folder, ids = save_tiny(tmp_path / "model", "phi3", hidden_size=64, intermediate_size=128), list(range(3, 40))
    with cpu_kernels(kernels):
        rounded, plain = load_model(folder, quantization=rounding), load_model(folder)
    moved = (logits_of(rounded, ids) - logits_of(plain, ids)).abs().mean() / logits_of(plain, ids).abs().mean()
    assert 0 < moved < (0.1 if rounding == "int8" else 0.6)
    assert rounded.dtype == (TOLD[rounding] if kernels == "c" else f"{rounding} in float32")


def test_experts_of_any_name_have_four_bits_and_routers_eight() -> None:
    stem = "model.layers.0.block_sparse_moe"
    state = {f"{stem}.{name}.weight": torch.randn(32, 64) for name in ("gate", "experts.3.w1", "experts.3.w2")}
    rounded = RoundedTensors(state, state)
    levels = {name.split(".")[-2]: len(rounded.packed(name).decode()[0, :32].unique()) for name in state}  # type: ignore[union-attr]
    assert levels["gate"] > 16 >= max(levels["w1"], levels["w2"])


def test_what_is_rounded_computes_its_numbers(tmp_path: Path) -> None:
    """Packed by the C kernels, and decoded by PyTorch's."""
    folder, ids, found = save_tiny(tmp_path / "model", intermediate_size=128), list(range(3, 40)), []
    for kernels in KERNELS:
        with cpu_kernels(kernels):
            found.append(logits_of(load_model(folder, quantization="int4", activations="float32"), ids))
    torch.testing.assert_close(found[0], found[1], atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(cpu_library() is None, reason="no C kernels")
def test_rows_are_integers_unless_told_otherwise(tmp_path: Path) -> None:
    """Which is told, and moves nothing that the rounding of the weights had not moved a hundred times as far."""
    folder, ids = save_tiny(tmp_path / "model", head_dim=32, intermediate_size=128), list(range(3, 40))
    exact, found = (load_model(folder, quantization="int4", activations=name) for name in ACTIVATIONS)
    assert (exact.dtype, found.dtype) == ("int4 in float32", "int4 in int16") and exact.digest == found.digest
    rounded = (logits_of(exact, ids) - logits_of(load_model(folder), ids)).abs().mean()
    assert 0 < (logits_of(exact, ids) - logits_of(found, ids)).abs().mean() < rounded / 100
    assert load_model(folder).dtype == "float32"
