"""What is mended acts where drafted rows are judged, and nowhere else."""

from __future__ import annotations

import pytest
import torch
import vllm
from vllm.lora.ops import torch_ops
from vllm.lora.ops.torch_ops import lora_ops
from vllm.lora.punica_wrapper import punica_cpu
from vllm.model_executor.kernels.linear.scaled_mm import cpu as products
from vllm.platforms import current_platform
from vllm.utils import cpu_triton_utils
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.ops import topk_topp_sampler

from outrider.vllm import patches


@pytest.fixture
def unmended(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own until the end, whatever has run in this process."""
    for name in ("_expand_kernel_impl", "_rejection_random_sample_kernel_impl"):
        monkeypatch.setattr(cpu_triton_utils, name, getattr(cpu_triton_utils, name))
    monkeypatch.setattr(cpu_triton_utils, "_expand_kernel_impl", None)
    monkeypatch.setattr(topk_topp_sampler, "apply_top_k_only", topk_topp_sampler.apply_top_k_only)
    monkeypatch.setattr(products, "check_cpu_sgl_kernel", products.check_cpu_sgl_kernel)
    for module in (lora_ops, torch_ops, punica_cpu):
        monkeypatch.setattr(module, "bgmv_shrink", module.bgmv_shrink)


@pytest.mark.usefixtures("unmended")
def test_once_is_enough() -> None:
    assert patches.apply()
    judge = cpu_triton_utils._rejection_random_sample_kernel_impl
    assert not patches.apply()
    assert cpu_triton_utils._rejection_random_sample_kernel_impl is judge


@pytest.mark.usefixtures("unmended")
@pytest.mark.parametrize(("version", "is_cpu"), [("0.31.0", True), ("0.34.0", True), ("0.32.0", False)])
def test_other_versions_and_devices_stay_as_they_are(
    version: str, is_cpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm, "__version__", version)
    monkeypatch.setattr(current_platform, "is_cpu", lambda: is_cpu)
    assert not patches.apply()
    assert cpu_triton_utils._expand_kernel_impl is None


@pytest.mark.usefixtures("worker_kernels")
def test_drafted_rows_get_their_requests_values() -> None:
    ends = torch.tensor([2, 2, 5], dtype=torch.int32)
    temperatures = torch.tensor([0.7, 1.5, 0.0])
    expanded = rejection_sampler.expand_batch_to_tokens(temperatures, ends, 5, replace_from=0, replace_to=1)
    torch.testing.assert_close(expanded, torch.tensor([0.7, 0.7, 1.0, 1.0, 1.0]), rtol=0, atol=0)
    top_k = torch.tensor([5, 1, 16], dtype=torch.int32)
    assert rejection_sampler.expand_batch_to_tokens(top_k, ends, 5).tolist() == [5, 5, 16, 16, 16]


@pytest.mark.usefixtures("unmended")
def test_rows_without_an_adapter_get_none() -> None:
    """In the first place as in the last, of every kernel that asks for it."""
    assert patches.apply()
    assert punica_cpu.bgmv_shrink is torch_ops.bgmv_shrink is lora_ops.bgmv_shrink
    factors = torch.full((2, 1, 4, 3), 7.0)  # [places, 1, rank, in]
    made, lengths, places = torch.empty(3, 4), torch.tensor([2, 1]), torch.tensor([-1, 0])
    torch_ops.sgmv_shrink(torch.ones(3, 3), factors, made, lengths, lengths, places, 2, 2, 3, 1.0)
    assert made.tolist() == [[0] * 4, [0] * 4, [21] * 4]


@pytest.mark.usefixtures("unmended")
def test_a_step_without_drafts_may_cut_by_top_k() -> None:
    assert patches.apply()
    law, top_k = torch.empty(0, 8), torch.empty(0, dtype=torch.int32)
    assert topk_topp_sampler.apply_top_k_top_p(law, top_k, None).shape == (0, 8)


@pytest.mark.usefixtures("unmended")
def test_products_of_8_bits_under_float32_leave_the_kernel_of_16_bits_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "check_cpu_sgl_kernel", lambda outputs, inputs, dtype: True)  # as with AMX
    assert patches.apply()
    before = torch.get_default_dtype()
    try:
        for dtype, fits in ((torch.float32, False), (torch.bfloat16, True), (torch.float16, True)):
            torch.set_default_dtype(dtype)
            assert products.check_cpu_sgl_kernel(64, 128, torch.int8) is fits
    finally:
        torch.set_default_dtype(before)
