"""A whole decoder by the Triton kernels: its logits against the CPU path's, and what a row's bits depend on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.adapters import merged, save_adapter
from support.devices import PretendedDevice, Replayed, gpu
from support.models import (
    MIXTURES,
    SMALLEST,
    build_decoder,
    cpu_kernels,
    hf_logits,
    tiny_config,
    tiny_hf_model,
    tiny_state,
)
from support.quantized import SomePacked, by_groups, matrix_of, random_blocks, small_floats
from torch import Tensor

from outrider.engine.adapters.loader import load_adapter
from outrider.engine.adapters.resident import AdapterRoom, ResidentAdapters
from outrider.engine.batch import BatchEntry, StepLimits
from outrider.engine.cuda_graphs import CudaGraphs
from outrider.engine.model_runner import ModelRunner
from outrider.engine.models.decoder import Decoder
from outrider.engine.models.decoder_config import parse_config
from outrider.engine.models.feed import GatedFeed, StackedFeed
from outrider.engine.models.products import PackedLinear
from outrider.kernels.layers.reference import Linear
from outrider.kernels.quantized.form import QuantizedMatrix

__all__ = ["gpu"]

LENGTH = 40
TABLES = [[7, 2, 11], [3, 9, 0], [5, 1, 8]]
MIXED = {  # a layer with a window and one without; queries and keys are normed
    "use_sliding_window": True, "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"],
    "attention_bias": True,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-window-biases": ("qwen3", MIXED),
    "qwen2-moe": ("qwen2_moe", {"mlp_only_layers": [0]}),  # a layer of experts behind one without
    "olmoe": ("olmoe", {}),
    "gemma2": ("gemma2", {}),  # one matrix for embedding and head, both soft caps, norms behind the products, and gelu
}
STEPS = {
    "prefill": [[(0, 0, LENGTH)]],
    "windows": [[(0, 0, 30), (1, 0, 26)], [(0, 30, 35), (1, 26, 31)], [(0, 32, 37)]],
    "ragged": [[(0, 0, 20), (1, 0, 3), (2, 0, 17)], [(1, 3, 20), (2, 17, 22), (0, 20, 21)]],
}


def build(family: str, device: torch.device | str, *, batch_invariant: bool = False, **options: Any) -> ModelRunner:
    loaded = build_decoder(
        tiny_config(family, **options), tiny_state(tiny_hf_model(family, **options)),
        dtype="float32", device=device, batch_invariant=batch_invariant,
    )  # fmt: skip
    return ModelRunner(loaded.model, num_blocks=12)


def tokens(index: int, length: int = LENGTH) -> list[int]:
    return torch.randint(0, 97, (length,), generator=torch.Generator().manual_seed(index)).tolist()


def run(runner: ModelRunner, steps: list[list[tuple[int, int, int]]]) -> Tensor:
    """The logits of all rows of all steps, each of (sequence, start, end)."""
    logits = [
        runner.forward([BatchEntry(tokens(i)[start:end], start, TABLES[i], end - start) for i, start, end in step])
        for step in steps
    ]
    return torch.cat(logits).cpu()


def test_float16_is_nearer_than_bfloat16(triton_everywhere: torch.device) -> None:
    """By the kernels, whose logits are float32."""
    model, ids = tiny_hf_model("llama", **SMALLEST), tokens(0, 9)
    expected = hf_logits(model, ids)
    errors = []
    for dtype in (torch.float16, torch.bfloat16):
        config = parse_config(tiny_config("llama", **SMALLEST))
        runner = ModelRunner(Decoder(config, tiny_state(model), dtype=dtype, device=triton_everywhere), num_blocks=12)
        logits = runner.forward([BatchEntry(ids, 0, TABLES[0], len(ids))]).cpu()
        assert logits.dtype == torch.float32
        errors.append(float((logits - expected).abs().max() / expected.std()))
    assert errors[0] < 0.01 and errors[0] < errors[1] / 4, errors


@pytest.fixture
def no_tf32() -> Iterator[None]:
    """Plain products of float32 on a GPU, to be compared with a CPU's."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_cpu(
    name: str, triton_everywhere: torch.device, no_tf32: None, request: pytest.FixtureRequest, prove: bool
) -> None:
    family, options = MODELS[name]
    runner = build(family, triton_everywhere, **options)
    ours = {kind: run(runner, steps) for kind, steps in STEPS.items() if prove or kind == "ragged"}
    request.getfixturevalue("monkeypatch").undo()  # the reference: every op's PyTorch form
    with cpu_kernels("pytorch"):
        reference = build(family, "cpu", **options)
    for kind, logits in ours.items():
        torch.testing.assert_close(logits, run(reference, STEPS[kind]), atol=2e-5, rtol=2e-5)


def test_adapters_are_as_if_they_were_merged(
    triton_everywhere: torch.device, no_tf32: None, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Beside another one and none."""
    options = {**SMALLEST, "num_hidden_layers": 2}
    config, state = tiny_config("llama", **options), tiny_state(tiny_hf_model("llama", **options))
    model = build_decoder(config, state, dtype="float32", device=triton_everywhere).model
    resident = ResidentAdapters(model, AdapterRoom(2, 16))
    folders = [save_adapter(tmp_path / str(seed), state, seed=seed) for seed in (1, 2)]
    adapters = [*(resident.prepare(load_adapter(folder, model, "")) for folder in folders), None]
    runner = ModelRunner(model, num_blocks=12, adapters=resident)
    entries = [BatchEntry(tokens(i, 12), 0, TABLES[i], 12, adapter=adapters[i]) for i in range(3)]
    ours = runner.forward(entries).cpu().split(12)
    request.getfixturevalue("monkeypatch").undo()
    with cpu_kernels("pytorch"):
        for index, weights in enumerate([*(merged(state, folder) for folder in folders), state]):
            alone = ModelRunner(build_decoder(config, weights).model, num_blocks=12)
            expected = alone.forward([BatchEntry(tokens(index, 12), 0, TABLES[index], 12)])
            torch.testing.assert_close(ours[index], expected, atol=1e-4, rtol=1e-4)


SCHEDULES = {"ones": [34, 1, 5], "twos": [17, 2, 2, 17, 2], "fives": [5, 5, 30], "seventeens": [17, 17, 6]}


def in_chunks(runner: ModelRunner, schedule: list[int], *, beside: bool = False) -> Tensor:
    """All logits of sequence 0 in steps of so many rows, alone or before rows of another."""
    logits, at = [], 0
    for rows in schedule:
        entries = [BatchEntry(tokens(0)[at : at + rows], at, TABLES[0], rows)]
        if beside:
            entries.append(BatchEntry(tokens(1)[:9], 0, TABLES[1], 9))
        logits.append(runner.forward(entries)[:rows].cpu())
        at += rows
    return torch.cat(logits)


def test_batch_invariant_bits(triton_everywhere: torch.device, prove: bool) -> None:
    """Alone or among others, whole or in chunks."""
    runner = build("qwen3", triton_everywhere, batch_invariant=True, **MIXED)
    whole = in_chunks(runner, [LENGTH])
    for name, schedule in SCHEDULES.items():
        if prove or name == "ones":
            assert torch.equal(in_chunks(runner, schedule), whole), name
    assert torch.equal(in_chunks(runner, SCHEDULES["fives"], beside=True), whole)


@pytest.mark.gpu
def test_ordinary_mode_has_other_bits(triton_device: torch.device) -> None:
    """The inverse: products of the library take their order from the number of rows. The interpreter's do not."""
    if triton_device.type != "cuda":
        pytest.skip("needs a GPU")
    wide = {"hidden_size": 512, "intermediate_size": 1408, "head_dim": 128}
    for batch_invariant in (True, False):
        runner = build("llama", triton_device, batch_invariant=batch_invariant, **wide)
        whole = in_chunks(runner, [LENGTH])
        same = all(torch.equal(in_chunks(runner, schedule), whole) for schedule in SCHEDULES.values())
        assert same == batch_invariant


QUANTIZED: dict[str, tuple[str, Callable[[int, int, int], QuantizedMatrix]]] = {
    "4 bits by 32": (
        "qwen2",
        lambda outputs, inputs, seed: by_groups(4, outputs, inputs, 32, torch.float16, seed=seed),
    ),
    "as GGUF files mix": ("llama", lambda outputs, inputs, seed: of_kind(seed % 4, outputs, inputs)),
    "floats of 8 bits": ("gemma2", lambda outputs, inputs, seed: small_floats(outputs, inputs, inputs, seed=seed)),
}
WIDE = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2}


def of_kind(index: int, outputs: int, inputs: int) -> QuantizedMatrix:
    kind = ("Q8_0", "Q5_1", "MXFP4", "Q4_0")[index]
    return matrix_of(kind, random_blocks(kind, outputs, inputs, index))


def quantized(name: str, **options: Any) -> tuple[dict[str, Any], SomePacked]:
    family, make = QUANTIZED[name]
    sizes = {**WIDE, **options}
    return tiny_config(family, **sizes), SomePacked(tiny_state(tiny_hf_model(family, **sizes)), make)


@pytest.mark.parametrize("name", QUANTIZED)
def test_packed_weights_compute_their_numbers(
    name: str, triton_everywhere: torch.device, no_tf32: None, request: pytest.FixtureRequest
) -> None:
    """Beside some that are plain, with tied and with other heads."""
    config, state = quantized(name)
    model = build_decoder(config, state, dtype="float32", device=triton_everywhere).model
    ours = run(ModelRunner(model, num_blocks=12), STEPS["ragged"])
    assert isinstance(model, Decoder) and model.embeddings is None
    request.getfixturevalue("monkeypatch").undo()
    with cpu_kernels("pytorch"):
        plain = build_decoder(config, {each: state[each] for each in state})
    torch.testing.assert_close(
        ours, run(ModelRunner(plain.model, num_blocks=12), STEPS["ragged"]), atol=1e-4, rtol=1e-4
    )


def test_packed_weights_have_batch_invariant_bits(triton_everywhere: torch.device) -> None:
    config, state = quantized("as GGUF files mix")
    model = build_decoder(config, state, dtype="float32", device=triton_everywhere, batch_invariant=True).model
    runner = ModelRunner(model, num_blocks=12)
    whole = in_chunks(runner, [LENGTH])
    assert torch.equal(in_chunks(runner, SCHEDULES["fives"], beside=True), whole)
    assert torch.equal(in_chunks(runner, [34, 1, 5]), whole)


def test_packed_weights_take_the_memory_of_their_codes(triton_everywhere: torch.device) -> None:
    """And a draft that is rounded to 8 bits is rounded from the numbers."""
    config, state = quantized("4 bits by 32")
    kept: list[int] = []
    for int8 in (False, True):
        parsed = parse_config(config)
        model = Decoder(parsed, state, dtype=torch.bfloat16, device=triton_everywhere, int8=int8)
        feed = model._blocks[0]._block.feed
        assert isinstance(feed, GatedFeed)
        down = feed._down
        assert isinstance(down, Linear if int8 else PackedLinear)
        kept.append(down.matrix.num_bytes if isinstance(down, PackedLinear) else down.weight.nbytes)  # type: ignore[union-attr]
    # 192 inputs fill 256
    assert kept == [128 * 256 // 2 + 128 * 8 * 2, 128 * 192 * 2]


@torch.inference_mode()
def test_packed_weights_in_captured_steps(gpu: PretendedDevice | None, no_tf32: None) -> None:
    """Held to a device's rules: nothing is waited for, and nothing of the host is read."""
    config, state = quantized("as GGUF files mix", vocab_size=97)
    model = build_decoder(config, state, dtype="float32", device="cuda").model
    runner, plain = (
        ModelRunner(one, num_blocks=12)
        for one in (model, build_decoder(config, {name: state[name] for name in state}).model)
    )
    device = CudaGraphs(torch.device("cuda")) if gpu is None else Replayed()
    runner.capture(StepLimits(8, 2, 4), device)
    assert isinstance(model, Decoder) and model.embeddings is None is model.output
    if gpu is not None:
        gpu.graphs.append(device)  # type: ignore[arg-type]
        gpu.waits.clear()
    entries = [BatchEntry(tokens(0, 4), 0, TABLES[0], 4), BatchEntry(tokens(1, 2), 0, TABLES[1], 2)]
    logits = runner.forward(entries)
    assert gpu is None or (gpu.waits == [] and isinstance(device, Replayed) and device.replayed == 1)
    torch.testing.assert_close(logits.cpu(), plain.forward(entries), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", MIXTURES)
@torch.inference_mode()
def test_a_mixture_in_captured_steps(family: str, gpu: PretendedDevice | None, no_tf32: None) -> None:
    """Which rows go to which experts is known to the device alone; a padded step's spare rows harm nobody."""
    options: dict[str, Any] = {"num_hidden_layers": 1}
    config, state = tiny_config(family, **options), tiny_state(tiny_hf_model(family, **options))
    model = build_decoder(config, state, dtype="float32", device="cuda").model
    runner, plain = (ModelRunner(one, num_blocks=12) for one in (model, build_decoder(config, state).model))
    device = CudaGraphs(torch.device("cuda")) if gpu is None else Replayed()
    runner.capture(StepLimits(8, 2, 4), device)
    assert isinstance(model, Decoder) and isinstance(model._blocks[0]._block.feed, StackedFeed)
    if gpu is not None:
        gpu.graphs.append(device)  # type: ignore[arg-type]
    for length in (4, 1):
        if gpu is not None:
            gpu.waits.clear()
        entries = [BatchEntry(tokens(0, length), 0, TABLES[0], length), BatchEntry(tokens(1, 2), 0, TABLES[1], 2)]
        logits = runner.forward(entries)
        assert gpu is None or (gpu.waits == [] and isinstance(device, Replayed) and device.replayed)
        torch.testing.assert_close(logits.cpu(), plain.forward(entries), atol=1e-4, rtol=1e-4)
