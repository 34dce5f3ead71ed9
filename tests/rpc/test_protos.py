"""The committed stubs and image are what the protos make; what would break a peer is refused, until someone says so.
A client needs one file, which holds nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf.descriptor import Descriptor, EnumDescriptor

from outrider.v1 import generation_pb2

PROTOS = Path(__file__).parents[2] / "protos"


@pytest.fixture
def protos(tmp_path: Path) -> Path:
    """A copy to change; buf comes with the dev extra."""
    if shutil.which("buf", path=str(Path(sys.executable).parent)) is None:
        pytest.skip("buf comes with the dev extra")
    (tmp_path / "outrider/v1").mkdir(parents=True)
    for file in (*PROTOS.glob("*.sh"), *PROTOS.glob("*.binpb"), *PROTOS.glob("outrider/v1/*.proto")):
        shutil.copy(file, tmp_path / file.relative_to(PROTOS))
    return tmp_path


def run(script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PYTHON": sys.executable, "PATH": path}
    return subprocess.run(
        ["bash", str(script), *arguments], env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def edit(file: Path, before: str, after: str) -> None:
    text = file.read_text()
    assert text.count(before) == 1
    file.write_text(text.replace(before, after))


def test_an_addition_may_be_made_and_a_break_must_be_asked_for(protos: Path) -> None:
    common, image = protos / "outrider/v1/common.proto", protos / "image.binpb"
    credit = "  uint32 max_branches = 5;\n"
    edit(common, credit, f"{credit}  // extra is new.\n  uint32 extra = 15;\n")
    assert run(protos / "lint.sh").returncode == 0
    assert run(protos / "image.sh").returncode == 0 and b"extra" in image.read_bytes()
    edit(common, "  // extra is new.\n  uint32 extra = 15;\n", "")
    kept = image.read_bytes()
    for script in ("lint.sh", "image.sh"):
        broken = run(protos / script)
        assert broken.returncode != 0 and 'field "15" with name "extra"' in broken.stdout
    assert image.read_bytes() == kept
    assert run(protos / "image.sh", "--break").returncode == 0 and b"extra" not in image.read_bytes()


def stubs(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((root / "outrider/v1").glob("*_pb2*")) if path.is_file()}


def test_the_stubs_are_fresh(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools", reason="the generator comes with the dev extra")
    environment = os.environ | {"PYTHON": sys.executable}
    subprocess.run(["bash", str(PROTOS / "generate.sh"), str(tmp_path)], check=True, env=environment, timeout=60)
    committed, generated = stubs(PROTOS), stubs(tmp_path)
    assert committed.keys() == generated.keys()
    stale = [name for name in generated if committed[name] != generated[name]]
    assert not stale, f"run protos/generate.sh: {stale}"


def test_a_client_needs_one_file_and_all_that_is_in_it() -> None:
    file = generation_pb2.DESCRIPTOR
    assert not file.dependencies
    waiting: list[Descriptor | EnumDescriptor] = []
    for method in file.services_by_name["GenerationService"].methods:
        waiting += (method.input_type, method.output_type)
    met = set[str]()
    while waiting:
        one = waiting.pop()
        if one.full_name in met:
            continue
        met.add(one.full_name)
        for field in one.fields if isinstance(one, Descriptor) else ():
            waiting += [kind for kind in (field.message_type, field.enum_type) if kind is not None]
    defined = {one.full_name for one in (*file.message_types_by_name.values(), *file.enum_types_by_name.values())}
    assert defined <= met, f"for gateway, draft and target alone: {sorted(defined - met)}"
