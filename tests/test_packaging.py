"""The extras: each has the libraries that its commands import, the gateway's alone can serve, and what is missing is
said. "Installed alone" is a folder with the project's own wheel and links to the distributions that an extra asks for,
read by an interpreter that sees nothing else; under --prove it is a new environment from a package index."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
from asyncio.subprocess import DEVNULL, PIPE, Process
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import httpx
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from support.fakes import DraftServicer, TargetServicer, ToyDraft, ToyTarget, expected, serving
from support.gateways import save_toy_tokenizer
from test_layout import REPOSITORY, ROOTS, WHEELS, Import, imports_of, sources

from outrider.cli.__main__ import COMMANDS
from outrider.client import Client

LIBRARIES = {"client": "", "llm": "llm", "training": "llm"}  # what is imported, not run by a command
COME_ALONG = {
    "triton",  # with torch where that is built for CUDA, and is imported only there
    "pydantic_core",  # with pydantic, always of one version with it
}
PEERS = {"vllm", "llama_cpp", "gguf"}  # other engines that the bench compares with, where they are
FORBIDDEN = {"torch", "transformers", "numpy", "safetensors"}
DISTRIBUTIONS = metadata.packages_distributions()
SERVICES = ("gateway", "target", "draft")
PROMPT_IDS = [11, 12, 13]


def project_in(folder: Path) -> dict[str, Any]:
    """The table [project] of a wheel's folder."""
    table: dict[str, Any] = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return table


VERSION = project_in(REPOSITORY)["version"]
SIBLINGS = {name: project_in(REPOSITORY / name) for name in WHEELS}
TIMEOUT_S = 30.0


def modules() -> dict[str, Path]:
    """Every module of the project by name."""
    found = {}
    for path in sources():
        parts = path.with_suffix("").parts
        found[".".join(parts[parts.index("outrider", len(REPOSITORY.parts)) :]).removesuffix(".__init__")] = path
    return found


MODULES = modules()


@cache
def imports_in(name: str, *, lazy: bool) -> list[Import]:
    """What a module imports when it is imported; with `lazy` in its functions, too."""
    return list(imports_of(MODULES[name], lazy=lazy))


def reached(entries: list[str]) -> set[str]:
    """The project's modules that these import, directly or not."""
    left, seen = list(entries), set()
    while left:
        if (name := left.pop()) not in seen:
            seen.add(name)
            found = [found.name for found in imports_in(name, lazy=True)]
            packages = [name.rpartition(".")[0]]
            left += [other for other in found + packages if other in MODULES]
    return seen


def libraries(names: set[str]) -> dict[str, str]:
    """Other people's packages that modules import when they are imported, each with one that does."""
    imports = [found for name in names for found in imports_in(name, lazy=False)]
    return {
        found.parts[0]: str(found)
        for found in imports
        if found.parts[0] not in sys.stdlib_module_names and found.parts[0] != "outrider"
    }


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a wheel is made of, without compiled kernels and without the embedded pair's weights, for speed."""
    folder = tmp_path_factory.mktemp("project")
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(REPOSITORY / name, folder)
    skipped = shutil.ignore_patterns("*.so", "*.safetensors", "__pycache__", "results")
    for root in {*ROOTS, *WHEELS}:
        shutil.copytree(REPOSITORY / root, folder / root, ignore=skipped)
    return folder


@pytest.fixture(scope="module")
def wheel(project: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", "out"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"PATH": ""}
    subprocess.run(command, cwd=project, env=environment, capture_output=True, check=True)
    (built,) = (project / "out").iterdir()
    return built


@pytest.fixture(scope="module")
def requirements(wheel: Path) -> list[Requirement]:
    """What the wheel asks for, with the markers of its extras."""
    with ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        text = archive.read(name).decode()
    return [Requirement(line) for line in re.findall(r"^Requires-Dist: (.+)$", text, re.MULTILINE)]


def asked(requirements: list[Requirement], extra: str) -> set[str]:
    """The distributions that an extra and the package itself ask for on this machine, by its other wheels, too."""
    names = set[str]()
    for found in requirements:
        if found.marker is None or found.marker.evaluate({"extra": extra}):
            names.add(canonicalize_name(found.name))
            inner = [Requirement(line) for line in SIBLINGS.get(found.name, {}).get("dependencies", ())]
            for one in (found, *inner):
                names.add(canonicalize_name(one.name))
                for own in one.extras if one.name == "outrider" else ():
                    names |= asked(requirements, own)
    return names


def with_dependencies(names: set[str]) -> set[str]:
    """These distributions and all that they ask for, as they are installed here."""
    left, seen = [(name, "") for name in names], set()
    while left:
        if (pair := left.pop()) not in seen:
            seen.add(pair)
            name, extra = pair
            for found in map(Requirement, metadata.requires(name) or ()):
                if found.marker is None or found.marker.evaluate({"extra": extra}):
                    left += [(canonicalize_name(found.name), inner) for inner in ("", *found.extras)]
    return {name for name, _ in seen}


def entries(extra: str) -> list[str]:
    """The modules that an extra is for: its commands', and what is imported."""
    commands = [command for command in COMMANDS.values() if command.extra == extra]
    packages = [package for package, needed in LIBRARIES.items() if needed == extra]
    named = {command.module for command in commands if command.module}
    if any(not command.module for command in commands):
        points = SIBLINGS[f"outrider-{extra}"]["entry-points"]["outrider.commands"]
        named |= {point.partition(":")[0] for point in points.values()}
    return sorted(named) + [
        name for name in MODULES for package in packages if f"{name}.".startswith(f"outrider.{package}.")
    ]


@pytest.mark.parametrize("extra", ["", "gateway", "target", "draft", "llm", "bench"])
def test_an_extra_has_what_its_commands_import(requirements: list[Requirement], extra: str) -> None:
    """And the gateway's, the target's and the draft's have nothing else."""
    wanted = asked(requirements, extra)
    names = reached(entries(extra))
    used = set()
    for library, where in libraries(names).items():
        providers = {canonicalize_name(name) for name in DISTRIBUTIONS.get(library, ())}
        assert library in COME_ALONG | PEERS or providers & wanted, f"{where}, which is not of outrider[{extra}]"
        used |= providers
    if extra in SERVICES:
        assert wanted - asked(requirements, "") <= used, "nothing imports it"


def test_the_development_extra_has_everything(requirements: list[Requirement]) -> None:
    everything = asked(requirements, "dev")
    assert all(asked(requirements, extra) <= everything for extra in ("gateway", "target", "draft", "llm", "bench"))


def test_no_other_extra_brings_a_model_to_the_gateway(requirements: list[Requirement]) -> None:
    for extra in ("", "gateway"):
        assert not FORBIDDEN & with_dependencies(asked(requirements, extra))
    assert with_dependencies(asked(requirements, "target")) >= FORBIDDEN


def test_the_wheel_holds_every_root_and_no_test(wheel: Path) -> None:
    names = ZipFile(wheel).namelist()
    own = {name.split("/")[1].removesuffix(".py") for name in names if name.startswith("outrider/")}
    beside = {name.split(".")[1] for name, path in MODULES.items() if path.relative_to(REPOSITORY).parts[0] in WHEELS}
    assert own == {name.split(".")[1] for name in MODULES} - beside
    assert {name.split("/")[0] for name in names} == {"outrider", names[-1].split("/")[0]}


@pytest.fixture(scope="module")
def alone(wheel: Path, requirements: list[Requirement], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `outrider[gateway]` and nothing else."""
    folder = tmp_path_factory.mktemp("gateway")
    ZipFile(wheel).extractall(folder)
    for name in with_dependencies(asked(requirements, "gateway")):
        distribution = metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (folder / top).exists():
                (folder / top).symlink_to(Path(str(distribution.locate_file(top))))
    return folder


@dataclass(frozen=True)
class Python:
    """An interpreter, and the folder that holds all that it sees beside the standard library; none: its own."""

    command: tuple[str, ...]
    folder: Path | None = None

    async def start(self, *arguments: str) -> Process:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment |= {"PYTHONPATH": str(self.folder)} if self.folder else {}
        return await asyncio.create_subprocess_exec(
            *self.command, *arguments, env=environment, stdin=DEVNULL, stdout=PIPE, stderr=PIPE
        )

    async def outrider(self, *arguments: str) -> tuple[int | None, str]:
        """Runs a command to its end: its status and what it wrote to stderr."""
        process = await self.start("-m", "outrider.cli", *arguments)
        _, said = await asyncio.wait_for(process.communicate(), TIMEOUT_S)
        return process.returncode, said.decode()


async def serve_alone(python: Python, folder: Path) -> None:
    """A gateway in that interpreter completes a prompt over gRPC and HTTP, with the tokens that its target makes."""
    save_toy_tokenizer(folder)
    script = f"import importlib.util as u; print([n for n in {sorted(FORBIDDEN)} if u.find_spec(n)])"
    found, _ = await (await python.start("-c", script)).communicate()
    assert found.decode().strip() == "[]"
    async with serving(TargetServicer(ToyTarget())) as target, serving(DraftServicer(ToyDraft())) as draft:
        peers = ("--target", target.address, "--draft", draft.address, "--tokenizer", str(folder))
        ports = ("--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--grace-s", "1")
        process = await python.start("-m", "outrider.cli", "gateway", *peers, *ports)
        try:
            grpc_address, http_address = await addresses(process)
            async with httpx.AsyncClient(base_url=f"http://{http_address}", timeout=TIMEOUT_S) as client:
                async with asyncio.timeout(TIMEOUT_S):
                    while (await client.get("/health")).status_code != 200:  # noqa: ASYNC110 (another process)
                        await asyncio.sleep(0.05)
                body = {"prompt": PROMPT_IDS, "max_tokens": 24, "temperature": 0, "return_token_ids": True}
                answer = (await client.post("/v1/completions", json={**body, "model": "toy"})).json()
            assert answer["choices"][0]["token_ids"] == expected(PROMPT_IDS, 24)
            async with Client(grpc_address) as own:
                parts = [part async for part in own.generate(token_ids=PROMPT_IDS, temperature=0.0, max_tokens=24)]
            assert [token for part in parts for token in part.token_ids] == expected(PROMPT_IDS, 24)
        finally:
            process.terminate()
            await asyncio.wait_for(process.communicate(), TIMEOUT_S)


async def addresses(process: Process) -> tuple[str, str]:
    """Where a gateway listens for gRPC and for HTTP, as it prints it."""
    assert process.stdout is not None
    found: dict[str, str] = {}
    async with asyncio.timeout(TIMEOUT_S):
        while len(found) < 2:
            line = (await process.stdout.readline()).decode()
            assert line or process.stderr is None, (await process.stderr.read()).decode()
            if said := re.fullmatch(r"(?:\S+ (listening)|gateway (http)) on (\S+)\n", line):
                found[said[1] or said[2]] = said[3]
    return found["listening"], found["http"]


@pytest.fixture
def python(alone: Path) -> Python:
    return Python((sys.executable, "-S"), alone)


async def test_the_gateway_alone_serves(python: Python, tmp_path: Path) -> None:
    await serve_alone(python, tmp_path)


@pytest.mark.parametrize("command", ["target", "draft", "model check"])
async def test_what_is_missing_is_said(python: Python, command: str, tmp_path: Path) -> None:
    flags = ("--model", str(tmp_path)) if command in SERVICES else ("--target", str(tmp_path), "--draft", str(tmp_path))
    extra = COMMANDS[command].extra
    missing = "compressed-tensors, llguidance, numpy, regex, safetensors, torch, transformers"
    assert await python.outrider(*command.split(), *flags) == (
        2,
        f"outrider {command}: error: not installed: {missing}; pip install 'outrider[{extra}]'\n",
    )


async def test_a_tokenizer_that_only_transformers_reads(python: Python, tmp_path: Path) -> None:
    status, said = await python.outrider("gateway", "--target", "127.0.0.1:1", "--tokenizer", str(tmp_path))
    assert status == 2 and "has no tokenizer.json" in said and "pip install transformers" in said


@pytest.fixture
def fresh(wheel: Path, tmp_path: Path) -> Python:
    """A new environment with `outrider[gateway]` from a package index."""
    venv.create(tmp_path / "venv", with_pip=True)
    command = str(tmp_path / "venv/bin/python")
    pip = (command, "-m", "pip", "--disable-pip-version-check", "install", "--quiet")
    if subprocess.run([*pip, "prometheus-client"], capture_output=True, check=False).returncode:
        pytest.skip("no package index can be reached")
    subprocess.run([*pip, f"{wheel}[gateway]"], check=True)
    return Python((command,))


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_the_gateway_alone_from_a_package_index(fresh: Python, tmp_path: Path) -> None:
    await serve_alone(fresh, tmp_path)


@pytest.fixture
def clone(project: Path, tmp_path: Path) -> Path:
    """A repository of the project with one commit, in which a build takes seconds."""
    folder = tmp_path / "clone"
    shutil.copytree(project, folder, ignore=shutil.ignore_patterns("out"))
    for name in ("CHANGELOG.md", "release.sh", "sbom.py"):
        shutil.copy(REPOSITORY / name, folder)
    changes = folder / "CHANGELOG.md"  # a release gives what is new its number
    text = changes.read_text(encoding="utf-8")
    text = re.sub("^## .*$", f"## {VERSION} (2026-01-01)", text, count=1, flags=re.MULTILINE)
    changes.write_text(text, encoding="utf-8")
    git(folder, "init", "--quiet")
    commit(folder)
    return folder


def git(folder: Path, *arguments: str) -> None:
    names = ("-c", "user.name=nobody", "-c", "user.email=nobody@localhost", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *names, *arguments], cwd=folder, check=True, capture_output=True)


def commit(folder: Path) -> None:
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "all")


def release(folder: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    """With what is on this machine but its compilers."""
    tools = folder.parent / "tools"
    tools.mkdir(exist_ok=True)
    for name in ("bash", "cp", "dirname", "git", "head", "mktemp", "rm", "sed"):
        if not (tools / name).exists():
            (tools / name).symlink_to(str(shutil.which(name)))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"PATH": str(tools), "PYTHON": sys.executable, **settings}
    return subprocess.run(["./release.sh"], cwd=folder, env=environment, capture_output=True, text=True, check=False)


def check_bill(bill: dict[str, Any]) -> None:
    """What is installed here for the extras of services is in it, in its version, with what it asks for."""
    assert (bill["bomFormat"], bill["specVersion"], bill["metadata"]["component"]["version"]) == (
        "CycloneDX", "1.6", VERSION,
    )  # fmt: skip
    by_name = {one["name"]: one for one in bill["components"]}
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for extra, asked in {"": project["dependencies"], **project["optional-dependencies"]}.items():
        for found in map(Requirement, asked if extra not in ("dev", "vllm") else ()):
            if (name := canonicalize_name(found.name)) != "outrider" and name not in WHEELS:
                assert by_name[name]["version"] == metadata.version(name)
                assert by_name[name]["purl"] == f"pkg:pypi/{name}@{metadata.version(name)}"
    assert with_dependencies({"grpcio", "pydantic", "torch"}) <= by_name.keys() and "pytest" not in by_name
    assert by_name["grpcio"]["scope"] == "required" and by_name["torch"]["scope"] == "optional"
    assert "target" in by_name["torch"]["properties"][0]["value"].split(",")
    refs = {one["bom-ref"] for one in (*bill["components"], bill["metadata"]["component"])}
    assert len(refs) == len(by_name) + 1 and {one["ref"] for one in bill["dependencies"]} == refs
    assert {inner for one in bill["dependencies"] for inner in one["dependsOn"]} <= refs
    (ours,) = [one["dependsOn"] for one in bill["dependencies"] if one["ref"] == f"pkg:pypi/outrider@{VERSION}"]
    assert by_name["torch"]["bom-ref"] in ours and by_name["pydantic-core"]["bom-ref"] not in ours


def test_every_dependency_has_a_lowest_and_a_highest_version() -> None:
    """What was never tried is not installed by chance: the next major version of a library is another library."""
    build = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["build-system"]
    lists = [build["requires"]]
    for project in (project_in(REPOSITORY), *SIBLINGS.values()):
        lists += [project["dependencies"], *project.get("optional-dependencies", {}).values()]
    open_ended = [
        str(found)
        for found in (Requirement(line) for lines in lists for line in lines)
        if found.name != "outrider" and not is_bounded({one.operator for one in found.specifier})
    ]
    assert not open_ended, "as name>=1.2,<2: " + ", ".join(open_ended)


def test_the_wheels_of_one_release_ask_for_one_another() -> None:
    """All have one version, and whatever asks for one asks for that."""
    projects = {"outrider": project_in(REPOSITORY), **SIBLINGS}
    assert {project["version"] for project in projects.values()} == {VERSION}
    assert [project["name"] for project in projects.values()] == list(projects)
    for project in projects.values():
        extras = project.get("optional-dependencies", {}).values()
        for found in map(Requirement, [*project["dependencies"], *(line for lines in extras for line in lines)]):
            if found.name in projects and found.name != project["name"]:
                assert str(found.specifier) == f"=={VERSION}", f"{project['name']} asks for {found}"


def is_bounded(operators: set[str]) -> bool:
    return bool(operators & {"==", "~="} or (operators & {">=", ">"} and operators & {"<", "<="}))


@pytest.mark.parametrize(
    ("line", "bounded"),
    [("a", False), ("a>=1", False), ("a<2", False), ("a>=1,<2", True), ("a==1", True), ("a~=1.2", True)],
)
def test_what_a_bound_is(line: str, bounded: bool) -> None:
    assert is_bounded({one.operator for one in Requirement(line).specifier}) is bounded


@pytest.mark.skipif(shutil.which("git") is None, reason="no git")
def test_a_release_is_built_and_installed(clone: Path) -> None:
    done = release(clone)
    assert done.returncode == 0 and done.stdout.endswith(
        f"dist/ holds outrider {VERSION}; tag it: git tag v{VERSION}\n"
    )
    built = {path.name for path in (clone / "dist").iterdir()}
    bill = f"outrider-{VERSION}.cdx.json"
    names = [name.replace("-", "_") for name in ("outrider", *WHEELS)]
    files = {f"{name}-{VERSION}{end}" for name in names for end in (".tar.gz", "-py3-none-any.whl")}
    assert built == {*files, bill}
    with tarfile.open(clone / "dist" / f"outrider-{VERSION}.tar.gz") as archive:
        assert not [name for name in archive.getnames() if "/outrider-" in name]
    check_bill(json.loads((clone / "dist" / bill).read_text(encoding="utf-8")))
    git(clone, "tag", f"v{VERSION}")
    (clone / "README.md").write_text("another")
    commit(clone)
    assert "is another commit: raise the version" in release(clone).stderr


@pytest.mark.skipif(shutil.which("git") is None, reason="no git")
def test_a_release_takes_the_wheels_of_other_platforms(clone: Path, wheel: Path, tmp_path: Path) -> None:
    """Instead of one that it builds; it installs the one for this platform."""
    platforms = tmp_path / "wheels"
    platforms.mkdir()
    names = {f"outrider-{VERSION}-py3-none-manylinux_2_17_{machine}.whl" for machine in ("x86_64", "aarch64")}
    for name in names:
        shutil.copy(wheel, platforms / name)
    shutil.copy(wheel, platforms / "outrider-0.0.1-py3-none-any.whl")
    done = release(clone, PLATFORM_WHEELS=str(platforms))
    assert done.returncode == 0, done.stderr
    built = {path.name for path in (clone / "dist").iterdir()}
    assert {name for name in built if name.startswith("outrider-")} == {
        *names, f"outrider-{VERSION}.tar.gz", f"outrider-{VERSION}.cdx.json",
    }  # fmt: skip


@pytest.mark.skipif(shutil.which("git") is None, reason="no git")
def test_a_release_that_is_not_written_down_is_refused(clone: Path) -> None:
    (clone / "more.txt").write_text("more")
    done = release(clone)
    assert done.returncode == 1 and "the tree is not clean; commit or remove: ?? more.txt" in done.stderr
    text = (clone / "pyproject.toml").read_text(encoding="utf-8")
    (clone / "pyproject.toml").write_text(text.replace(f'version = "{VERSION}"', 'version = "7.0"', 1))
    commit(clone)
    done = release(clone)
    assert done.returncode == 1 and not (clone / "dist").exists()
    assert f"CHANGELOG.md begins with {VERSION} (2026-01-01), pyproject.toml has 7.0" in done.stderr
