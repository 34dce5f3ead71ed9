"""How the C kernels of this folder are compiled: one library for each kind of processor, by the build hook of the wheel
(`hatch_build.py`), or here when one is first wanted. The hook runs without our dependencies: nothing but the standard
library is imported."""

from __future__ import annotations

import hashlib
import platform
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).parent
# Nobody asks for floating-point exceptions, which would keep loops with a choice between two numbers out of AVX2.
COMPUTING = ("-O3", "-fno-trapping-math", "-fopenmp", "-std=gnu11", "-shared", "-fPIC")
# A fault shall end the process and be of use to nobody: a function's way back and buffers of known size are guarded,
# and addresses of what is called are found at load and are read-only from then on. Some compilers have a level of
# FORTIFY of their own, which is taken back first; macOS' linker knows no -z.
HARDENED = ("-fstack-protector-strong", "-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=3")
LINKED = () if sys.platform == "darwin" else ("-Wl,-z,relro,-z,now,-z,noexecstack",)
FLAGS = (*COMPUTING, *HARDENED, *LINKED)
COMPILERS = ("cc", "gcc", "clang")
COMPILE_S = 300  # of a process that waits for it, on a machine that does other things, too
BUILD_S = 3600  # of a build, whose wheel would lack what took longer

_AVX2 = frozenset({"avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_VNNI = _AVX512 | {"avx512_vnni"}
_AMX = _VNNI | {"avx512_bf16", "amx_tile", "amx_bf16"}


@dataclass(frozen=True, slots=True)
class Variant:
    """The kernels for one kind of processor. What one compiler makes of a variant computes the same bits wherever it
    runs; two variants may differ."""

    name: str
    needs: frozenset[str] = frozenset()  # of a processor, in the words of Linux' /proc/cpuinfo
    flags: tuple[str, ...] = ()  # of the compiler

    @property
    def file_name(self) -> str:
        """Of its library: other sources or other flags have another."""
        key = hashlib.sha256(" ".join((platform.machine(), *FLAGS, *self.flags)).encode())
        for path in sorted(SOURCES.glob("*.[ch]")):
            key.update(path.name.encode() + path.read_bytes())
        return f"{self.name}-{key.hexdigest()[:16]}.so"


_X86 = (
    Variant("c-amx", _AMX, ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16", "-mamx-tile", "-mamx-bf16")),
    Variant("c-vnni", _VNNI, ("-march=x86-64-v4", "-mavx512vnni")),
    Variant("c-avx512", _AVX512, ("-march=x86-64-v4",)),
    Variant("c-avx2", _AVX2, ("-march=x86-64-v3",)),
    Variant("c-sse2"),
)
_OTHERS = {"x86_64": _X86, "amd64": _X86, "aarch64": (Variant("c-neon"),), "arm64": (Variant("c-neon"),)}


def variants() -> tuple[Variant, ...]:
    """Those for this kind of machine, the fastest first. The last one needs nothing."""
    machine = platform.machine().lower()
    return _OTHERS.get(machine, (Variant(f"c-{machine}"),))


def find_compiler() -> str | None:
    """The path of gcc or clang; None if there is none."""
    return next((path for name in COMPILERS if (path := shutil.which(name)) is not None), None)


def compile_library(variant: Variant, folder: Path, compiler: str, timeout_s: float = COMPILE_S) -> Path:
    """The variant's library in `folder`; other processes may do the same at once. Raises OSError and SubprocessError,
    as where the compiler is too old for these processors, or takes longer than `timeout_s`."""
    path = folder / variant.file_name
    with tempfile.TemporaryDirectory(dir=folder) as fresh:
        built = Path(fresh) / path.name
        sources = map(str, sorted(SOURCES.glob("*.c")))
        command = (compiler, *FLAGS, *variant.flags, *sources, "-o", str(built), "-lm")
        subprocess.run(command, check=True, capture_output=True, timeout=timeout_s)
        built.replace(path)
    return path


def reason(error: Exception) -> str:
    """What the compiler, or the system, said."""
    said = (getattr(error, "stderr", None) or b"").decode(errors="replace").strip()
    return said or str(error)
