"""The wheel with built kernels, installed as README says without a clone: into an environment that has nothing else and
in which no compiler is to be found. `make nightly` and `make prove` run it: it installs torch from a package index."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import subprocess
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE
from pathlib import Path
from zipfile import ZipFile

import pytest
from test_layout import REPOSITORY

from outrider.cli.demo import PROMPT
from outrider.kernels.cpu import build
from outrider.kernels.cpu.library import cpu_library_name

HERE = Path(__file__).parent
FIRST_TOKEN_S = 60.0  # until `outrider demo`, which starts three processes before, shows a token

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(build.find_compiler() is None, reason="no C compiler"),
    pytest.mark.skipif(sys.platform != "linux", reason="manylinux is Linux'"),
]


def environment() -> dict[str, str]:
    """What a build sees: not what these tests import, and the programs beside their Python."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return kept | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHON": sys.executable}


@pytest.fixture(scope="module")
def wheelhouse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheels of `outrider`, repaired, and of the embedded pair."""
    built, repaired = tmp_path_factory.mktemp("built"), tmp_path_factory.mktemp("wheelhouse")
    for folder, out in ((REPOSITORY, built), (REPOSITORY / "outrider-pair-python", repaired)):
        command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(out), str(folder)]
        subprocess.run(command, env=environment(), check=True)
    (wheel,) = built.iterdir()
    command = [sys.executable, "-m", "auditwheel", "repair", "--exclude", "libgomp.so.1", "--wheel-dir", str(repaired)]
    subprocess.run([*command, str(wheel)], env=environment(), check=True)
    return repaired


@pytest.fixture(scope="module")
def installed(wheelhouse: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The programs of the new environment, and the kernels that were found there."""
    folder = tmp_path_factory.mktemp("installed")
    reached = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), "iniconfig"]
    if subprocess.run(reached, capture_output=True, check=False).returncode:
        pytest.skip("no package index can be reached")
    command = [str(HERE / "install.sh"), str(wheelhouse), str(folder / "env")]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "env/bin", done.stdout.strip()


def test_its_tag_and_what_it_holds(wheelhouse: Path) -> None:
    (wheel,) = wheelhouse.glob("outrider-*.whl")
    assert re.search(r"-py3-none-(manylinux\w+\.)*manylinux_2_\d+_\w+\.whl$", wheel.name)
    names = [Path(name).name for name in ZipFile(wheel).namelist()]
    assert {variant.file_name for variant in build.variants()} == {name for name in names if ".so" in name}


def test_readme_says_the_same() -> None:
    """What is run here is what users are told."""
    (said,) = re.findall(r"^pip install 'outrider\[llm\]' .*$", (REPOSITORY / "README.md").read_text(), re.MULTILINE)
    assert said.removeprefix("pip install ") in (HERE / "install.sh").read_text()


def test_it_computes_by_the_kernels_of_a_clone(installed: tuple[Path, str]) -> None:
    """The very same bytes: what a clone's compiler makes here is as fast."""
    assert installed[1] == cpu_library_name()


async def test_the_first_token_of_the_demo(installed: tuple[Path, str], tmp_path: Path) -> None:
    bare = {"PATH": str(installed[0]), "CC": "/nonexistent", "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    started, before = time.monotonic(), processor_s()
    demo = await asyncio.create_subprocess_exec(
        str(installed[0] / "outrider"), "demo", "--no-expand", cwd=tmp_path, env=bare, stdin=DEVNULL, stdout=PIPE,
        stderr=PIPE,
    )  # fmt: skip
    assert demo.stdout is not None
    said = ""
    while PROMPT not in said or said.endswith(PROMPT):
        piece = await demo.stdout.read(4096)
        assert piece, (await demo.communicate())[1].decode()
        said += piece.decode()
    took = time.monotonic() - started
    rest, complaints = await demo.communicate()
    assert demo.returncode == 0 and re.search(r"^  speed +\d", said + rest.decode(), re.MULTILINE)
    assert "no C kernels" not in complaints.decode()
    worked = processor_s() - before  # of all its processes, to its end: more than a clock shows where nothing else runs
    assert min(took, worked) < FIRST_TOKEN_S, f"{took:.0f} s, and {worked:.0f} s of a processor"


def processor_s() -> float:
    """The processor time of all children that have ended, and of theirs, in seconds."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_as_a_module(installed: tuple[Path, str], tmp_path: Path) -> None:
    command = [str(installed[0] / "python"), "-m", "outrider", "--help"]
    done = subprocess.run(command, cwd=tmp_path, env={"PATH": ""}, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("usage: outrider COMMAND")
