"""What is said on systems that are not Linux: a line, before anything fails there for want of it."""

from __future__ import annotations

import importlib
import platform

import pytest
from support.services import outrider

from outrider.rpc.systems import lacking_for_models, require_posix


def on(monkeypatch: pytest.MonkeyPatch, system: str, machine: str) -> None:
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "machine", lambda: machine)


@pytest.mark.parametrize("command", ["serve", "generate", "model convert", "bench network"])
def test_no_command_runs_on_windows(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, "Windows", "AMD64")
    done = outrider(*command.split(), "--help")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == (
        f"outrider {command}: error: Windows lacks the file locks, signals and limits of POSIX: run this in WSL 2 or "
        "on Linux; of the package outrider.client alone works on Windows\n"
    )


def test_help_and_version_do(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, "Windows", "AMD64")
    assert outrider("--help").returncode == outrider("--version").returncode == 0


def test_llm_cannot_be_imported_on_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, "Windows", "AMD64")
    with pytest.raises(ImportError, match="Windows lacks the file locks"):
        importlib.reload(importlib.import_module("outrider.llm"))


@pytest.mark.parametrize(
    ("machine", "lacking"),
    [
        ("arm64", "no kernels are built for macOS: where cc has no OpenMP, as Apple's, PyTorch computes"),
        ("x86_64", "PyTorch is built for Intel Macs no more: models run on Linux or Apple silicon"),
    ],
)
def test_a_mac_says_what_models_lack_and_goes_on(machine: str, lacking: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, "Darwin", machine)
    require_posix()
    done = outrider("target", "--help")
    assert done.returncode == 0 and done.stdout
    assert done.stderr.startswith(f"outrider target: note: {lacking}") and done.stderr.count("\n") == 1
    for command in ("gateway", "generate"):
        assert outrider(command, "--help").stderr == ""


def test_linux_lacks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, "Linux", "x86_64")
    require_posix()
    assert lacking_for_models() is None and outrider("target", "--help").stderr == ""
