"""What every test runs under: few threads, no network, and a seed that a failure shows."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

from support.environment import SEED  # before anything imports torch

# isort: split
import numpy
import pytest
import torch
from hypothesis import settings
from support.layers import SERVICES, is_heavy

# Triton kernels are interpreted where there is no GPU. Triton reads this when it is first imported, which transformers
# does; set it to 1 on a machine with a GPU to run the interpreted tests instead of the compiled ones.
os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")

# Every run tries the same cases, but one with a seed of its own (make nightly); none has a deadline, since machines are
# shared. A case that was found elsewhere becomes an @example.
settings.register_profile("ours", derandomize=SEED == 0, deadline=None, print_blob=True)
settings.load_profile("ours")

pytest_plugins = [
    "support.services",  # its three services are started once for all folders
    "support.strictness",
]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--prove", action="store_true", help="the long forms: more draws, prompts and cells")
    parser.addoption("--quick", action="store_true", help="without what starts services, compiles or decodes for long")
    parser.addoption("--only-long", action="store_true", help="with --prove: what is not the same without it")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return True if config.getoption("--quick") and is_heavy(collection_path) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What is marked slow belongs to the long proof alone; what has no long form need not run again for it."""
    if not config.getoption("--prove"):
        unwanted = SERVICES if config.getoption("--quick") else set[str]()
        left_out = [item for item in items if item.get_closest_marker("slow") or unwanted & fixtures_of(item)]
    elif config.getoption("--only-long"):
        left_out = [item for item in items if not has_long_form(item)]
    else:
        return
    config.hook.pytest_deselected(items=left_out)
    gone = set(left_out)
    items[:] = [item for item in items if item not in gone]


def has_long_form(item: pytest.Item) -> bool:
    """Whether `--prove` changes what a test does, or whether it runs."""
    return item.get_closest_marker("slow") is not None or "prove" in fixtures_of(item)


def fixtures_of(item: pytest.Item) -> set[str]:
    return set(getattr(item, "fixturenames", ()))


@pytest.fixture(scope="session")
def prove(pytestconfig: pytest.Config) -> bool:
    """Whether the long form of a proof is asked for (make prove)."""
    return bool(pytestconfig.getoption("--prove"))


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def pytest_report_header(config: pytest.Config) -> str:
    return f"torch {torch.__version__} with {torch.get_num_threads()} threads, TEST_SEED={SEED}"


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Every test starts from the same state of the global generators; none should need it."""
    random.seed(SEED)
    numpy.random.seed(SEED)
    torch.manual_seed(SEED)


@pytest.fixture(scope="session")
def repository() -> Path:
    return Path(__file__).parents[1]


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Small tensors gain nothing from threads, and lose much when the processor is shared."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
