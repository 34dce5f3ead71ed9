"""Tests that run vLLM, of which `make test-vllm` has an environment of its own. Elsewhere they are left out; there,
under --prove, whatever is skipped has failed."""

from __future__ import annotations

import warnings
from collections.abc import Generator
from importlib.util import find_spec

import pytest

HOOKS_FIRST = "test_contract.py"


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    """Where vLLM is not installed."""
    left_out = find_spec("vllm") is None and not config.getoption("--prove")
    return left_out or None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What says which of vLLM's hooks is gone fails before what stands on it."""
    items.sort(key=lambda item: item.path.name != HOOKS_FIRST)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A skip is a failure."""
    report = yield
    if report.skipped and item.config.getoption("--prove"):
        report.outcome = "failed"
    return report


@pytest.fixture(scope="session")
def worker_kernels() -> None:
    """What a worker does before it loads anything: mended, the kernels that a CPU has take the place of Triton's."""
    from vllm.platforms import current_platform

    from outrider.vllm import patches

    patches.apply()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it looks into every module that was ever imported
        current_platform.register_triton_kernel_overrides()
