"""The dependency rules of the source roots, read from the syntax trees. Imports inside functions count, too, but for
the command line's, which is made of them; between files all count, also those for types alone."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
ROOTS = tuple(sorted(path.parent.name for path in REPOSITORY.glob("*/outrider")))
WHEELS = tuple(sorted(path.parent.name for path in REPOSITORY.glob("outrider-*/pyproject.toml")))  # beside the first

RPC = {"rpc", "words", "v1"}
MODEL = {"kernels", "engine", "proposers"}
SERVICES = {"draft_service", "target_service", "gateway"}
ALLOWED: dict[str, set[str]] = {
    "__main__": {"cli"},  # python -m outrider
    "v1": set(),
    "words": set(),  # rpc.words: data alone
    "rpc": {"v1", "words", "pairs", "gguf"},  # whose name stands for its folders
    "planner": {"rpc", "words"},
    "kernels": set(),
    "engine": {"kernels", "words", "gguf"},
    "proposers": {"kernels", "engine", "words"},
    "draft_service": MODEL | RPC | {"planner"},
    "target_service": MODEL | RPC | {"planner", "pairs"},  # --expand builds a large network from a small one
    "vllm": RPC | {"kernels", "target_service"},  # what a vLLM's own processes load
    "vllm.target": MODEL | RPC | {"planner", "target_service", "vllm"},
    "gateway": RPC | {"planner", "proposers"},  # of the proposers only TOKEN_ONLY
    "llm": MODEL | RPC | SERVICES | {"planner", "client", "gguf"},
    "client": RPC,
    "cli": MODEL | RPC | SERVICES | {"planner", "pairs", "llm", "client"},
    "bench": MODEL | RPC | SERVICES | {"planner", "pairs", "llm", "client", "cli", "learning", "training"},
    "pairs": set(),
    "gguf": set(),
    "training": MODEL | RPC | {"pairs", "cli"},
    "learning": MODEL | RPC | {"training", "gateway", "cli"},
}
TOKEN_ONLY = {"base", "registry", "ngram", "prediction", "suffix"}
FORBIDDEN: dict[str, set[str]] = {
    "words": {"torch", "transformers", "grpc", "google", "tokenizers", "numpy", "pydantic"},
    "rpc": {"torch", "transformers"},
    "planner": {"torch", "grpc", "asyncio"},
    "kernels": {"grpc"},
    "engine": {"grpc"},
    "gateway": {"torch"},
    "client": {"torch", "transformers"},
    "gguf": {"torch", "transformers"},
}
# Who may know protobuf; everybody else sees dataclasses.
KNOWS_PROTOBUF = (
    "rpc/codec.py",
    "rpc/field_codec.py",
    "rpc/generation_codec.py",
    "rpc/sampling_codec.py",
    "peers/remote.py",
    "peers/vocabulary_offer.py",
    "vllm/draft_pool.py",
    "bench/gateway_peers.py",
)
KNOWS_STATUS = ("rpc/status.py", "rpc/interceptors.py", *KNOWS_PROTOBUF)


@dataclass(frozen=True)
class Import:
    """One imported module, as `a.b.c`; `from a.b import c` gives both a.b and a.b.c."""

    path: Path
    line: int
    name: str

    @property
    def package(self) -> str:
        """The part of the namespace that the importing file belongs to: "engine", "llm", ..."""
        return package_of(self.path)

    @property
    def parts(self) -> list[str]:
        return self.name.split(".")

    @property
    def root(self) -> str:
        """The part of the namespace that is imported."""
        return "words" if self.parts[1:3] == ["rpc", "words"] else self.parts[1]

    def __str__(self) -> str:
        return f"{self.path.relative_to(REPOSITORY)}:{self.line} imports {self.name}"


def package_of(path: Path) -> str:
    parts = path.parts[path.parts.index("outrider", len(REPOSITORY.parts)) + 1 :]
    if parts[:2] == ("rpc", "words"):
        return "words"
    return "vllm.target" if parts[:2] == ("vllm", "target") else parts[0].removesuffix(".py")


def sources() -> list[Path]:
    return sorted(path for root in ROOTS for path in (REPOSITORY / root / "outrider").rglob("*.py"))


def nodes(tree: ast.AST, *, lazy: bool) -> Iterator[ast.AST]:
    """All nodes; without those inside functions unless `lazy`."""
    for child in ast.iter_child_nodes(tree):
        yield child
        if lazy or not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from nodes(child, lazy=lazy)


def imports_of(path: Path, *, lazy: bool | None = None) -> Iterator[Import]:
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    for node in nodes(tree, lazy=package_of(path) != "cli" if lazy is None else lazy):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(path, node.lineno, alias.name)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield Import(path, node.lineno, node.module or "")
            for alias in node.names:
                yield Import(path, node.lineno, f"{node.module}.{alias.name}")


@pytest.fixture(scope="module")
def imports() -> list[Import]:
    return [
        found
        for path in sources()
        if package_of(path) != "v1"  # generated
        for found in imports_of(path)
    ]


def test_the_namespace_has_no_init() -> None:
    assert not [root for root in ROOTS if (REPOSITORY / root / "outrider/__init__.py").exists()]
    assert any(package_of(path) == "rpc" for path in sources())


def test_every_part_is_known_and_imports_are_absolute() -> None:
    assert {package_of(path) for path in sources()} <= ALLOWED.keys()
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            assert not (isinstance(node, ast.ImportFrom) and node.level), f"{path}:{node.lineno} is relative"


def test_dependencies_point_one_way(imports: list[Import]) -> None:
    wrong = [
        found
        for found in imports
        if found.parts[0] == "outrider"
        and len(found.parts) > 1
        and found.name != "outrider.rpc"  # `from outrider.rpc import words` names it, too, and it is empty
        and found.root not in ALLOWED[found.package] | {found.package}
    ]
    assert not wrong, "\n".join(map(str, wrong))


def test_forbidden_libraries(imports: list[Import]) -> None:
    wrong = [found for found in imports if found.parts[0] in FORBIDDEN.get(found.package, ())]
    assert not wrong, "\n".join(map(str, wrong))


def test_the_gateway_takes_only_token_only_proposers(imports: list[Import]) -> None:
    wrong = [
        found
        for found in imports
        if found.package == "gateway"
        and found.parts[:2] == ["outrider", "proposers"]
        and not (len(found.parts) > 2 and found.parts[2] in TOKEN_ONLY)
    ]
    # `from outrider.proposers import ngram` also names the package itself, which is empty and harmless.
    wrong = [found for found in wrong if found.name != "outrider.proposers"]
    assert not wrong, "\n".join(map(str, wrong))


def test_words_are_data_alone() -> None:
    """Whoever imports all of them has neither gRPC nor protobuf nor torch, whatever these import in turn."""
    names = [f"outrider.rpc.words.{path.stem}" for path in sources() if package_of(path) == "words"]
    script = f"import sys, {', '.join(names)}\nprint(*(sys.modules.keys() & {{'grpc', 'google.protobuf', 'torch'}}))"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    assert len(names) > 5 and not ran.stdout.strip()


def _is_token_only(path: Path) -> bool:
    """A method is a file, or a folder."""
    return bool(TOKEN_ONLY & {*path.relative_to(REPOSITORY).with_suffix("").parts})


def test_token_only_proposers_import_no_other_root(imports: list[Import]) -> None:
    mine = [found for found in imports if found.package == "proposers" and _is_token_only(found.path)]
    wrong = [found for found in mine if found.parts[0] in {"torch", "numpy", "grpc", "transformers"}]
    wrong += [
        found
        for found in mine
        if found.parts[0] == "outrider"
        and found.name not in {"outrider", "outrider.proposers"}
        and found.root != "words"
        and (found.root != "proposers" or found.parts[2] not in TOKEN_ONLY)
    ]
    assert not wrong, "\n".join(map(str, wrong))


def knows_protobuf(path: Path) -> bool:
    relative = path.as_posix()
    return package_of(path) == "client" or path.name == "servicer.py" or relative.endswith(KNOWS_PROTOBUF)


def test_only_codecs_servicers_and_clients_know_protobuf(imports: list[Import]) -> None:
    wrong = [
        found
        for found in imports
        if (found.name.startswith("outrider.v1") and not knows_protobuf(found.path))
        or (
            found.name.startswith("google.rpc")
            and not knows_protobuf(found.path)
            and not found.path.as_posix().endswith(KNOWS_STATUS)
        )
    ]
    assert not wrong, "\n".join(map(str, wrong))


def module_of(path: Path) -> str:
    parts = path.with_suffix("").parts[path.parts.index("outrider", len(REPOSITORY.parts)) :]
    return ".".join(parts).removesuffix(".__init__")


def circles_of(graph: Mapping[str, set[str]]) -> set[frozenset[str]]:
    """The files that lead back to themselves, with those on the way."""
    reached: dict[str, set[str]] = {}
    for start in graph:
        seen, left = set[str](), list(graph[start])
        while left:
            if (name := left.pop()) not in seen:
                seen.add(name)
                left += graph[name]
        reached[start] = seen
    return {
        frozenset({other for other in seen if start in reached[other]})
        for start, seen in reached.items()
        if start in seen
    }


def test_circles_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set[str](), "e": {"e"}}
    assert circles_of(graph) == {frozenset({"b", "c"}), frozenset({"e"})}


def test_files_import_each_other_one_way() -> None:
    """A circle of files cannot be read from any end: to know one, all have to be known."""
    paths = {module_of(path): path for path in sources() if package_of(path) != "v1"}
    graph = {
        module: {found.name for found in imports_of(path, lazy=True) if found.name in paths} - {module}
        for module, path in paths.items()
    }
    assert not circles_of(graph)
