"""What no source of the project does, read from the syntax trees: unpickle (`outrider model convert` alone reads
pickles, and takes nothing but tensors from them), check by `assert`, which `python -O` leaves out, run texts as code,
or trust the tags of YAML; and that the three services answer under `python -O`."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.environment import START_S
from support.services import COMMON, Trio, succeed, wait_for_draft
from test_layout import REPOSITORY, package_of, sources

from outrider.cli.local_services import Services

PICKLES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "jsonpickle"}
# With the reason.
MAY_PICKLE = {
    "entrypoints/outrider/cli/convert_file.py": "catches what torch.load raises, in a process of its own",
}
MAY_LOAD = {"entrypoints/outrider/cli/convert_file.py": "weights_only, in a process of its own"}
PACKAGES = {"np": "numpy", "pd": "pandas"}  # by the names that they are imported by
LOADERS = {("torch", "load"), ("numpy", "load"), ("pandas", "read_pickle")}
RUNS_TEXT = {"eval", "exec", "compile", "__import__"}
YAML = {"load", "load_all", "full_load", "unsafe_load"}  # safe_load is the one that makes nothing but values


def found(path: Path) -> Iterator[tuple[int, str]]:
    """What a file does of all this: the line, and what it is."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), filename=str(path))):
        if isinstance(node, ast.Assert) or (isinstance(node, ast.Name) and node.id == "__debug__"):
            yield node.lineno, "assert"
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            if PICKLES & {name.partition(".")[0] for name in names}:
                yield node.lineno, "pickle"
            if isinstance(node, ast.ImportFrom):
                loaders = (_loader(node.module or "", alias.name) for alias in node.names)
                yield from ((node.lineno, what) for what in loaders if what is not None)
        elif isinstance(node, ast.Call):
            yield from ((node.lineno, what) for what in _calls(node))


def _calls(node: ast.Call) -> Iterator[str]:
    function = node.func
    if isinstance(function, ast.Name) and function.id in RUNS_TEXT:
        yield "text as code"
    if isinstance(function, ast.Attribute):
        what = _loader(ast.unparse(function.value), function.attr)
        if what is not None:
            yield what
    for keyword in node.keywords:
        is_true = isinstance(keyword.value, ast.Constant) and keyword.value.value is True
        if keyword.arg in ("shell", "allow_pickle") and is_true:
            yield f"{keyword.arg}=True"


def _loader(owner: str, name: str) -> str | None:
    """What a function of a module, or of one within it, would do with a file."""
    package = owner.partition(".")[0]
    package = PACKAGES.get(package, package)
    if package == "yaml" and name in YAML:
        return "yaml"
    return "load" if (package, name) in LOADERS else None


def all_found() -> dict[str, set[str]]:
    """By kind the files that do it."""
    by_kind: dict[str, set[str]] = {}
    for path in sources():
        if package_of(path) == "v1":  # generated
            continue
        for _, what in found(path):
            by_kind.setdefault(what, set()).add(path.relative_to(REPOSITORY).as_posix())
    return by_kind


def test_pickles_are_read_by_convert_alone() -> None:
    by_kind = all_found()
    assert by_kind.pop("pickle") == {*MAY_PICKLE}
    assert by_kind.pop("load") == {*MAY_LOAD}
    assert not by_kind, by_kind


def test_convert_takes_tensors_alone() -> None:
    (load,) = [
        node
        for name in MAY_LOAD
        for node in ast.walk(ast.parse((REPOSITORY / name).read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load"
    ]
    assert "weights_only=True" in ast.unparse(load)


SAYS = {
    "assert x": "assert",
    "if __debug__: y()": "assert",
    "import pickle": "pickle",
    "from dill.x import y": "pickle",
    "torch.load(f)": "load",
    "np.load(f)": "load",
    "torch.serialization.load(f)": "load",
    "from torch import load": "load",
    "from torch.serialization import x, load as y": "load",
    "from numpy import load": "load",
    "from pandas import read_pickle": "load",
    "from pickle import loads": "pickle",
    "from yaml import load": "yaml",
    "eval('1')": "text as code",
    "yaml.load(f)": "yaml",
    "subprocess.run(x, shell=True)": "shell=True",
    "f(allow_pickle=True)": "allow_pickle=True",
    "yaml.safe_load(f)": None,
    "from yaml import safe_load": None,
    "from safetensors.torch import load": None,
    "from . import load": None,
    "re.compile('x')": None,
    "model.eval()": None,
}


@pytest.mark.parametrize("code", SAYS)
def test_what_is_looked_for_is_seen(code: str, tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text(code)
    assert [what for _, what in found(tmp_path / "x.py")] == ([SAYS[code]] if SAYS[code] else [])


def test_the_services_work_without_asserts(trio: Trio, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three processes under `python -O` answer as three without."""
    monkeypatch.setenv("PYTHONOPTIMIZE", "1")  # the processes that are started inherit it
    common = [*COMMON, "--threads", "1"]
    with Services() as services:
        target = services.start("target", ["target", *common, "--model", str(trio.pair.target), "--batch-invariant"])
        draft = services.start("draft", ["draft", *common, "--model", str(trio.pair.draft)])
        peers = ["--target", services.wait(target, START_S), "--draft", services.wait(draft, START_S)]
        gateway = services.start("gateway", ["gateway", *COMMON, *peers, "--tokenizer", str(trio.pair.target)])
        address = services.wait(gateway, START_S)
        wait_for_draft(address, START_S, services.check)
        request = ("generate", "def parse_args(argv):", "--max-tokens", "12", "--temperature", "0", "--json")
        answers = [json.loads(succeed(*request, "--gateway", one)) for one in (address, trio.gateway)]
    assert answers[0]["text"] == answers[1]["text"] != ""


def test_the_option_takes_asserts_out() -> None:
    """What the test above rests on."""
    environment = {**os.environ, "PYTHONOPTIMIZE": "1"}
    assert subprocess.run([sys.executable, "-c", "assert False"], env=environment, check=False).returncode == 0
