"""The images of k8s/images. Nothing here builds one: the script that installs an image's layers installs them into a
folder, and each service runs there under a read-only root, without a compiler, a shell or privileges."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from support.manifests import KUBERNETES, Overlay
from test_layout import REPOSITORY, ROOTS, WHEELS, imports_of, package_of, sources

from outrider.client import Client

IMAGES = KUBERNETES / "images"
MODELS = REPOSITORY / "outrider-pair-python/outrider_pair_python"
MODULES = {"target": "target_service", "draft": "draft_service", "gateway": "gateway"}
PARTS = {  # that others have and this one must not
    "target": {"gateway", "draft_service", "cli", "bench", "training"},
    "draft": {"gateway", "target_service", "cli", "bench", "training"},
    "gateway": {"kernels", "engine", "target_service", "draft_service", "cli", "bench", "training"},
}
LOOK = """
import errno, os, shutil, sys
found = [name for name in ("gcc", "cc", "clang", "sh", "bash") if shutil.which(name)]
assert not found, found
for folder in ("/", "/app", "/models", "/usr/lib", "/python"):
    try:
        open(f"{folder}/x", "w")
        raise SystemExit(f"{folder} can be written")
    except OSError as error:
        assert error.errno in (errno.EROFS, errno.EACCES), error
open("/tmp/x", "w").close()
print(os.getuid())
"""


@pytest.mark.parametrize("service", MODULES)
def test_an_image_fits_its_manifest(service: str) -> None:
    text = (IMAGES / f"{service}.Dockerfile").read_text(encoding="utf-8")
    (workload,) = [found for found in Overlay("prod").workloads if found.role == service]
    assert f"/layers.sh {service} /wheelhouse /app" in text and f"-t outrider-{service} " in text
    assert f'ENTRYPOINT ["python", "-m", "outrider.{MODULES[service]}"]' in text
    context = workload.pod["securityContext"]
    assert f"USER {context['runAsUser']}:{context['runAsGroup']}" in text
    exposed = re.search(r"^EXPOSE (.+)$", text, re.MULTILINE)
    assert exposed is not None
    assert {port["containerPort"] for port in workload.container["ports"]} <= set(map(int, exposed[1].split()))


def test_vllms_image_is_the_targets_with_a_compiler() -> None:
    plain, other = ((IMAGES / f"{name}.Dockerfile").read_text(encoding="utf-8") for name in ("target", "target-vllm"))
    (workload,) = [found for found in Overlay("vllm-tp").workloads if found.role == "target"]
    assert workload.container["image"].startswith("outrider-target-vllm:") and "-t outrider-target-vllm " in other
    assert "/layers.sh target-vllm /wheelhouse /app" in other and "slim" not in "".join(
        re.findall("^ARG.*", other, re.M)
    )
    last = plain[plain.index("COPY --from=layers") :]
    assert other[other.index("COPY --from=layers") :] == last


def loaded_by(module: str) -> set[str]:
    """The parts of the project that are imported where a module is run, without what a function imports."""
    files = {".".join(path.with_suffix("").parts[-depth:]): path for path in sources() if (depth := depth_of(path))}
    files |= {name.removesuffix(".__init__"): path for name, path in files.items()}
    found, ahead = set(), [module]
    while ahead:
        path = files.get(ahead.pop())
        if path is not None and path not in found:
            found.add(path)
            ahead += [imported.name for imported in imports_of(path, lazy=False)]
    return {{"words": "rpc", "vllm.target": "vllm"}.get(part, part) for part in map(package_of, found)}


def depth_of(path: Path) -> int:
    """How many of a file's parts its module's name has: from the namespace on."""
    return len(path.parts) - path.parts.index("outrider", len(REPOSITORY.parts))


@pytest.mark.parametrize("service", MODULES)
def test_layers_have_what_a_service_loads(service: str) -> None:
    (text,) = re.findall(rf"^ +{service}\) parts=\"(.+?)\"", (IMAGES / "layers.sh").read_text(encoding="utf-8"), re.M)
    loaded = loaded_by(f"outrider.{MODULES[service]}.__main__")
    assert loaded and loaded <= set(text.split())


LOCKED = re.compile(r"(?P<name>[\w.-]+)==(?P<version>\S+) --hash=sha256:[0-9a-f]{64}")


@pytest.mark.parametrize("path", sorted((IMAGES / "locks").iterdir()), ids=lambda path: path.name)
def test_a_lock_has_what_its_extras_ask_for(path: Path) -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    first, *lines = path.read_text(encoding="utf-8").splitlines()
    made = re.fullmatch(r"# Made by k8s/images/lock.py (\S+), for (linux_(\w+)-cp3(\d+))\.", first)
    assert made is not None and path.name == f"{made[1].replace(',', '-')}.{made[2]}.txt"
    matches = [LOCKED.fullmatch(line) for line in lines]
    versions = {canonicalize_name(match["name"]): match["version"] for match in matches if match is not None}
    assert len(versions) == len(lines) and "outrider" not in versions
    where = {"platform_machine": made[3], "python_version": f"3.{made[4]}", "extra": ""}
    asked = [Requirement(text) for text in project["dependencies"]]
    extras = made[1].split(",")
    for extra in extras:  # grows by those of our own that an extra asks for
        for requirement in map(Requirement, project["optional-dependencies"][extra]):
            if requirement.name == "outrider":
                extras += sorted(requirement.extras - set(extras))
            elif requirement.name == "outrider-vllm":
                vllm = tomllib.loads((REPOSITORY / "outrider-vllm/pyproject.toml").read_text(encoding="utf-8"))
                asked += map(Requirement, vllm["project"]["optional-dependencies"]["vllm"])
            elif requirement.marker is None or requirement.marker.evaluate(where):
                asked.append(requirement)
    assert [str(one) for one in asked if not one.specifier.contains(versions[canonicalize_name(one.name)])] == []


def test_a_wheel_of_another_content_is_refused(tmp_path: Path) -> None:
    shutil.copytree(IMAGES, tmp_path / "k8s/images", ignore=shutil.ignore_patterns("locks"))
    (tmp_path / "k8s/images/locks").mkdir()
    with zipfile.ZipFile(tmp_path / "nothing-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("nothing-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: nothing\nVersion: 1.0\n")
        wheel.writestr("nothing-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("nothing-1.0.dist-info/RECORD", "")
    own = {"PYTHON": sys.executable, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}

    def fill() -> subprocess.CompletedProcess[str]:
        command = [str(tmp_path / "k8s/images/wheelhouse.sh"), "gateway", "house"]
        return subprocess.run(command, env=os.environ | own, capture_output=True, text=True, check=False)

    without = fill()
    (lock,) = re.findall(r"there is no (\S+): make it with \S+ k8s/images/lock.py gateway", without.stderr)
    (tmp_path / lock).write_text(f"nothing==1.0 --hash=sha256:{'0' * 64}\n", encoding="utf-8")
    other = fill()
    assert without.returncode and other.returncode and "DO NOT MATCH THE HASHES" in other.stderr
    assert not (tmp_path / "house").exists() or not list((tmp_path / "house").iterdir())


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The layers of each service, from a wheelhouse of the project's own wheel: the others' are installed here."""
    project = tmp_path_factory.mktemp("project")
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(REPOSITORY / name, project)
    for root in (name for name in ROOTS if name not in WHEELS):
        shutil.copytree(REPOSITORY / root, project / root, ignore=shutil.ignore_patterns("__pycache__", "results"))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", "wheelhouse"]
    subprocess.run(command, cwd=project, env=environment, capture_output=True, check=True)
    made = {}
    for service in MODULES:
        made[service] = tmp_path_factory.mktemp(service)
        made[service].chmod(0o755)  # for who runs there
        command = [str(IMAGES / "layers.sh"), service, str(project / "wheelhouse"), str(made[service])]
        subprocess.run(command, env=environment | {"PYTHON": sys.executable, "PIP_NO_DEPS": "1"}, check=True)
    return made


def command(folder: Path, *arguments: str) -> tuple[list[str], dict[str, str]]:
    """A command in the image's root, and the environment of the script that makes it."""
    packages = sysconfig.get_paths()["purelib"]
    given = [str(IMAGES / "run.sh"), str(folder), str(MODELS), "python3", *arguments]
    return given, os.environ | {"PYTHON": sys.executable, "PACKAGES": packages}


@pytest.mark.slow
@pytest.mark.parametrize("service", MODULES)
def test_the_root_is_bare_and_cannot_be_written(folders: dict[str, Path], service: str) -> None:
    parts = {path.name for path in (folders[service] / "outrider").iterdir()}
    assert MODULES[service] in parts and not parts & PARTS[service]
    given, environment = command(folders[service], "-c", LOOK)
    run = subprocess.run(given, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stderr
    assert os.getuid() or run.stdout.strip() == "10001", "who is root here is not root there"


@asynccontextmanager
async def started(folder: Path, service: str, *flags: str) -> AsyncIterator[str]:
    """A service in its root; gives the address that it says it listens on."""
    given, environment = command(folder, "-m", f"outrider.{MODULES[service]}", "--listen", "127.0.0.1:0", *flags)
    process: Process = await asyncio.create_subprocess_exec(*given, env=environment, stdout=PIPE, stderr=DEVNULL)
    assert process.stdout is not None
    try:
        line = (await asyncio.wait_for(process.stdout.readline(), 120)).decode()
        assert line.startswith(f"{service} listening on "), line
        yield line.rpartition(" ")[2].strip()
    finally:
        if process.returncode is None:
            process.terminate()
        await asyncio.wait_for(process.wait(), 30)


@pytest.mark.slow
async def test_three_services_in_their_roots_complete_a_prompt(folders: dict[str, Path]) -> None:
    engine = ("--num-blocks", "64", "--threads", "1", "--grace-s", "1")
    async with AsyncExitStack() as stack:
        start = stack.enter_async_context
        target = await start(started(folders["target"], "target", "--model", "/models/target", *engine))
        draft = await start(started(folders["draft"], "draft", "--model", "/models/draft", *engine))
        peers = ("--target", target, "--draft", draft, "--tokenizer", "/models/target", "--grace-s", "1")
        gateway = await start(started(folders["gateway"], "gateway", *peers))
        client = await start(Client(gateway))
        parts = client.generate("def parse_args(argv):", temperature=0.0, max_tokens=16)
        assert "".join([part.text async for part in parts])


@pytest.mark.slow
def test_compiled_kernels_are_in_the_layers(folders: dict[str, Path]) -> None:
    for service in ("target", "draft"):
        kernels = folders[service] / "outrider/kernels/cpu"
        assert list(kernels.glob("*.so")) and (folders[service] / "lib/libgomp.so.1").is_file()
    assert not (folders["gateway"] / "lib").exists()
