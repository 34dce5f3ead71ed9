"""What a wheel holds of the C kernels, built with a compiler and without one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

from outrider.kernels.cpu.build import variants

pytest.importorskip("hatchling")

FOLDER = "outrider/kernels/cpu"
FAKE = """#!/bin/sh
case "$*" in *amx*) echo unknown processor >&2; exit 1;; esac
while [ "$1" != -o ]; do shift; done
echo library > "$2"
"""


@pytest.fixture
def project(tmp_path: Path, repository: Path) -> Path:
    """The files that a build reads, without the other roots, and a library that an earlier one has left."""
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(repository / name, tmp_path)
    shutil.copytree(repository / "kernels", tmp_path / "kernels", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    (tmp_path / "kernels" / FOLDER / "c-avx2-0123456789abcdef.so").write_text("stale")
    return tmp_path


def wheel_of(project: Path, path: str) -> tuple[Path, list[str], str]:
    """The wheel that is built where `path` has the programs, its libraries' names, and what was said."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", "out"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"PATH": path}
    done = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, check=True)
    (wheel,) = (project / "out").iterdir()
    names = ZipFile(wheel).namelist()
    assert {f"{FOLDER}/decoder.c", f"{FOLDER}/vectors.h"} < set(names)
    return wheel, [Path(name).name for name in names if name.endswith(".so")], done.stdout + done.stderr


def test_a_library_for_each_kind_of_processor(project: Path) -> None:
    """But for what the compiler does not know."""
    (project / "bin").mkdir()
    (project / "bin/cc").write_text(FAKE)
    (project / "bin/cc").chmod(0o755)
    wheel, libraries, said = wheel_of(project, f"{project / 'bin'}:/bin:/usr/bin")
    kinds = [name.rpartition("-")[0] for name in libraries]
    assert sorted(kinds) == (["c-avx2", "c-avx512", "c-sse2", "c-vnni"] if "x86_64" in wheel.name else kinds[:1])
    assert "c-avx2-0123456789abcdef.so" not in libraries
    assert "-py3-none-" in wheel.name and "none-any" not in wheel.name
    assert ("no kernels c-amx: unknown processor" in said) == ("x86_64" in wheel.name)


def test_a_library_of_these_sources_stays_without_a_compiler(project: Path) -> None:
    (project / "kernels" / FOLDER / (name := variants()[-1].file_name)).write_text("library")
    wheel, libraries, said = wheel_of(project, "")
    assert libraries == [name] and "none-any" not in wheel.name and "no C compiler" not in said


def test_without_a_compiler(project: Path) -> None:
    wheel, libraries, said = wheel_of(project, "")
    assert not libraries and wheel.name.endswith("-py3-none-any.whl") and "no C compiler" in said


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_the_installed_libraries_run(project: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Where there is no compiler and no folder for a cache."""
    wheel, libraries, _ = wheel_of(project, os.environ["PATH"])
    folder = tmp_path_factory.mktemp("installed")
    ZipFile(wheel).extractall(folder)
    code = "import torch; from outrider.kernels.cpu.library import cpu_library; print(cpu_library()._name)"
    environment = os.environ | {"PATH": "", "XDG_CACHE_HOME": "/dev/null/none", "PYTHONPATH": str(folder)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    used = Path(done.stdout.strip())
    assert used.name in libraries and used.is_relative_to(folder) and not done.stderr
