"""What is tapped of a pass is what transformers gives as `hidden_states`: by our decoder on either kernel, by models of
the registry, in chunks, in batches, and by captured steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.devices import Replayed
from support.models import KERNELS, build_decoder, cpu_kernels, tiny_config, tiny_hf_model, tiny_state
from support.quantized import rounded_state
from torch import Tensor

from outrider.engine.batch import BatchEntry, StepLimits
from outrider.engine.model_runner import ModelRunner
from outrider.engine.models.transformers import RegistryModel
from outrider.engine.quantized.rounding import Rounding

FIRST, SECOND = list(range(3, 30)), list(range(40, 49))
TAPS = (2, 0, 1)  # in the order asked for


def expected(hf: Any, tokens: list[int], taps: tuple[int, ...]) -> Tensor:  # [tokens, taps, hidden]
    with torch.inference_mode():
        states = hf(torch.tensor([tokens]), use_cache=False, output_hidden_states=True).hidden_states
    return torch.stack([states[layer][0] for layer in taps], dim=1)


def steps_of(runner: ModelRunner) -> tuple[Tensor, Tensor]:
    """The states of the first and of the second sequence, computed in chunks beside one another."""
    first, second = [], []
    for start, end in ((0, 20), (20, 26), (26, 27)):
        other = {0: (0, 8), 20: (8, 9)}.get(start)
        entries = [BatchEntry(FIRST[start:end], start, [0, 1], 0)]
        entries += [BatchEntry(SECOND[other[0] : other[1]], other[0], [2], 1)] if other else []
        runner.forward(entries)
        assert runner.hidden_states is not None
        first.append(runner.hidden_states[: end - start].clone())
        second.append(runner.hidden_states[end - start :].clone())
    return torch.cat(first), torch.cat(second)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_our_decoder(kernels: str, family: str) -> None:
    hf = tiny_hf_model(family)
    with cpu_kernels(kernels):
        model = build_decoder(tiny_config(family), tiny_state(hf)).model
    check(hf, ModelRunner(model, 4, taps=TAPS))


@pytest.mark.parametrize("rounding", ["int8", "int4"])
@pytest.mark.parametrize("kernels", KERNELS)
def test_weights_in_few_bits(kernels: str, rounding: Rounding) -> None:
    """Those of the numbers that they stand for; the C kernels keep them packed."""
    sizes: dict[str, Any] = {"intermediate_size": 128}  # packed products have inputs by 32
    hf = tiny_hf_model(**sizes)
    state = rounded_state(tiny_state(hf), rounding)
    before = expected(hf, FIRST, TAPS)
    hf.load_state_dict(dict(state))
    assert (expected(hf, FIRST, TAPS) - before).abs().max() > 1e-2
    with cpu_kernels(kernels):
        model = build_decoder(tiny_config(**sizes), state, activations="float32").model
    check(hf, ModelRunner(model, 4, taps=TAPS))


def test_a_model_of_the_registry() -> None:
    hf = tiny_hf_model("llama")
    check(hf, ModelRunner(RegistryModel(tiny_hf_model("llama"), 128), 4, taps=TAPS))


def check(hf: Any, runner: ModelRunner) -> None:
    assert len(runner.model.layers) == 2  # so that one of the taps is the last norm's
    for states, tokens in zip(steps_of(runner), (FIRST, SECOND), strict=True):
        torch.testing.assert_close(states, expected(hf, tokens, TAPS), atol=2e-5, rtol=1e-4)


def test_captured_steps(triton_everywhere: torch.device) -> None:
    if triton_everywhere.type != "cpu":
        pytest.skip("a replay of the capture that runs here")
    hf = tiny_hf_model()
    runner = ModelRunner(build_decoder(tiny_config(), tiny_state(hf), device="cpu").model, 4, taps=TAPS)
    device = Replayed()
    runner.capture(StepLimits(4, 2, 2), device)
    runner.forward([BatchEntry(FIRST[:8], 0, [0], 0), BatchEntry(SECOND[:7], 0, [1], 0)])
    runner.forward([BatchEntry(FIRST[8:10], 8, [0], 1), BatchEntry(SECOND[7:8], 7, [1], 1)])
    assert device.replayed == 1 and runner.hidden_states is not None
    device.synchronize()
    for rows, tokens in ((slice(0, 2), FIRST[:10]), (slice(2, 3), SECOND[:8])):
        wanted = expected(hf, tokens, TAPS)[rows.start - rows.stop :]
        torch.testing.assert_close(runner.hidden_states[rows], wanted, atol=2e-5, rtol=1e-4)


def test_nothing_is_kept_where_nothing_is_tapped() -> None:
    runner = ModelRunner(build_decoder(tiny_config(), tiny_state(tiny_hf_model())).model, 4)
    runner.forward([BatchEntry(FIRST, 0, [0, 1], 1)])
    assert runner.hidden_states is None


@pytest.mark.parametrize("taps", [(3,), (-1,), (1, 1)])
def test_layers_that_there_are_not(taps: tuple[int, ...]) -> None:
    model = build_decoder(tiny_config(), tiny_state(tiny_hf_model())).model
    with pytest.raises(ValueError, match="allowed: layers from 0 to 2, each once"):
        ModelRunner(model, 4, taps=taps)
