"""How many threads a process takes unless it is told."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from outrider.rpc.settings import usable_cores, usable_threads


def test_a_container_has_the_cores_of_its_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    quota = tmp_path / "cpu.max"
    assert usable_cores(quota) == 8  # no container
    for text, cores in {"max 100000\n": 8, "250000 100000\n": 3, "20000 100000\n": 1, "9900000 100000\n": 8}.items():
        quota.write_text(text)
        assert usable_cores(quota) == cores


def test_the_environment_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, threads in {"3": 3, "3,2": 3, "": usable_cores(), "0": usable_cores(), "many": usable_cores()}.items():
        monkeypatch.setenv("OMP_NUM_THREADS", text)
        assert usable_threads() == threads
