"""The libraries of C kernels: which one a processor gets, where it comes from, and what is said without any."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from kernels.test_cpu_decoder import decoder, run

from outrider.kernels.cpu import build
from outrider.kernels.cpu import decoder as decoder_module
from outrider.kernels.cpu import library as module
from outrider.kernels.cpu.decoder import Kind

ON_X86 = platform.machine() == "x86_64"
ZEN_5 = (
    "fpu sse sse2 avx avx2 bmi1 bmi2 f16c fma abm movbe avx512f avx512dq avx512cd avx512bw avx512vl avx512_bf16"
    " avx512_vnni"
)
CASCADE_LAKE, HASWELL, NEHALEM = ZEN_5.replace("avx512_bf16 ", ""), ZEN_5.partition(" avx512f")[0], "fpu sse sse2"
SAPPHIRE_RAPIDS = f"{ZEN_5} amx_bf16 amx_tile amx_int8"

pytestmark = pytest.mark.skipif(build.find_compiler() is None, reason="no C compiler")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test finds what another one has compiled, nor what came with the package."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "SOURCES", tmp_path)


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine that only runs what was built elsewhere, on a read-only root."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/no-folder")


@pytest.fixture
def packaged(tmp_path: Path) -> Path:
    """The library of this processor, where the package has it."""
    library = module.cpu_library()
    assert library is not None
    return Path(shutil.copy(library._name, tmp_path))


def load() -> tuple[str, ctypes.CDLL] | None:
    return module._loaded.__wrapped__()


@pytest.mark.skipif(not ON_X86, reason="the variants of x86-64")
@pytest.mark.parametrize(
    ("flags", "names"),
    [
        (SAPPHIRE_RAPIDS, ["c-amx", "c-vnni", "c-avx512", "c-avx2", "c-sse2"]),
        (ZEN_5, ["c-vnni", "c-avx512", "c-avx2", "c-sse2"]),
        (CASCADE_LAKE, ["c-vnni", "c-avx512", "c-avx2", "c-sse2"]),
        (HASWELL, ["c-avx2", "c-sse2"]),
        (NEHALEM, ["c-sse2"]),
    ],
)
def test_what_a_processor_runs(flags: str, names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: {flags}\nbugs\t\t: spectre_v1\n")
    monkeypatch.setattr(module, "CPUINFO", tmp_path / "cpuinfo")
    features = module.cpu_features()
    assert [variant.name for variant in module.wanted_variants("on", features)] == names
    assert module.wanted_variants("off", features) == []
    assert [variant.name for variant in module.wanted_variants(names[-1], features)] == names[-1:]
    with pytest.raises(ValueError, match="OUTRIDER_CPU_KERNELS: is 'c-avx1024'; allowed here: on, off, c-"):
        module.wanted_variants("c-avx1024", features)


def test_other_machines_have_one_variant(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "CPUINFO", tmp_path / "none")  # as where it is not Linux that runs
    for machine, name in (("aarch64", "c-neon"), ("arm64", "c-neon"), ("riscv64", "c-riscv64")):
        monkeypatch.setattr(platform, "machine", lambda machine=machine: machine)
        assert [variant.name for variant in module.wanted_variants("on", module.cpu_features())] == [name]


def test_other_sources_or_flags_are_another_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {variant.file_name for variant in build.variants()}
    shutil.copytree(build.SOURCES, tmp_path / "cpu")
    with (tmp_path / "cpu" / "vectors.h").open("a") as source:
        source.write("/* */\n")
    monkeypatch.setattr(build, "SOURCES", tmp_path / "cpu")
    assert names.isdisjoint(variant.file_name for variant in build.variants())
    plain, tuned = build.Variant("c"), build.Variant("c", flags=("-O2",))
    assert plain.file_name != tuned.file_name


@pytest.mark.slow
def test_every_variant_computes_the_same_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """... each with bits that depend on the row alone."""
    expected, of_8_bits = run(decoder(), 61), run(decoder(int8=True), 61)
    for variant in module.wanted_variants("on", module.cpu_features()):
        monkeypatch.setenv(module.SWITCH, variant.name)
        loaded = load()
        assert loaded is not None and loaded[0].rpartition("-")[0] == variant.name
        monkeypatch.setattr(decoder_module, "cpu_library", lambda loaded=loaded: loaded[1])
        for model in (decoder(), decoder(nudge=1e-7), decoder(int8=True)):  # 16 bits, 32, and 8
            logits = run(model, 61)
            wanted = of_8_bits if model.kind is Kind.BYTES else expected
            torch.testing.assert_close(logits, wanted, atol=1e-5, rtol=0)
            for num_rows in (1, 2, 3, 5, 13, 60):
                assert torch.equal(run(model, num_rows), logits[:num_rows]), (variant.name, num_rows)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("aarch64-linux-gnu-gcc") is None, reason="no cross compiler")
def test_they_compile_for_arm(tmp_path: Path) -> None:
    assert build.compile_library(build.Variant("c-neon"), tmp_path, "aarch64-linux-gnu-gcc").stat().st_size


@pytest.mark.skipif(shutil.which("readelf") is None, reason="no binutils")
def test_a_fault_in_them_is_of_use_to_nobody(packaged: Path) -> None:
    """What they call cannot be written over, nor what lies on the stack without being seen."""
    command = ("readelf", "--wide", "--dynamic", "--segments", "--dyn-syms", str(packaged))
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (stack,) = (line for line in said.splitlines() if line.split()[:1] == ["GNU_STACK"])
    assert "GNU_RELRO" in said and "BIND_NOW" in said and "RWE" not in stack
    assert "__stack_chk_fail" in said and "__memcpy_chk" in said


def test_they_are_compiled_once(tmp_path: Path) -> None:
    loaded = load()
    (built,) = (tmp_path / "cache" / "outrider").iterdir()
    before = built.stat().st_mtime_ns
    assert loaded is not None and built.name.startswith(f"{loaded[0].rpartition('-')[0]}-") and load() is not None
    assert [built] == list((tmp_path / "cache" / "outrider").iterdir()) and built.stat().st_mtime_ns == before


def test_the_packaged_library_needs_no_compiler(
    packaged: Path, no_compiler: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """... and no folder to write to, and computes the same bits."""
    expected = run(decoder(), 13)
    loaded = load()
    assert loaded is not None and packaged.name.startswith(f"{loaded[0].rpartition('-')[0]}-") and not caplog.records
    assert loaded[1]._name == str(packaged)
    monkeypatch.setattr(decoder_module, "cpu_library", lambda: loaded[1])
    assert torch.equal(run(decoder(), 13), expected)


def test_without_any_library_a_warning_says_so_once(no_compiler: None, caplog: pytest.LogCaptureFixture) -> None:
    module._loaded.cache_clear()
    try:
        assert module.cpu_library() is None and module.cpu_library_name() is None
        assert not decoder_module.can_run(48, 16)
    finally:
        module._loaded.cache_clear()
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "no C compiler" in record.message


def test_a_compiler_that_fails_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho no float today >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert load() is None and "no float today" in caplog.text


def test_builds_are_told_apart_by_their_bytes(packaged: Path) -> None:
    """Two compilers' libraries of one variant may compute other bits."""
    first, again = load(), load()
    with packaged.open("ab") as library:
        library.write(b"by another compiler")
    other = load()
    assert first is not None and again is not None and other is not None and first[0] == again[0] != other[0]
    assert first[0].rpartition("-")[0] == other[0].rpartition("-")[0] and first[0].startswith("c-")


def test_one_compiler_makes_the_same_bytes_wherever_it_runs(tmp_path: Path) -> None:
    compiler, variant = build.find_compiler(), build.Variant("c", flags=("-O0",))
    assert compiler is not None
    for folder in (folders := (tmp_path / "here", tmp_path / "there")):
        folder.mkdir()
    here, there = (build.compile_library(variant, folder, compiler).read_bytes() for folder in folders)
    assert here == there


def test_a_matrix_unit_that_the_system_refuses_is_said(
    monkeypatch: pytest.MonkeyPatch, packaged: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Where that variant was asked for, PyTorch computes."""
    amx = build.Variant("c-amx")
    monkeypatch.setattr(module, "wanted_variants", lambda switch, features: [amx])
    monkeypatch.setattr(module, "_path", lambda variant: packaged)
    monkeypatch.setattr(ctypes, "CDLL", lambda path: SimpleNamespace(tiles_allowed=lambda: 0))
    assert load() is None and "c-amx: the system does not let" in caplog.text


def test_switched_off(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv(module.SWITCH, "off")
    assert load() is None and not caplog.records
