"""The C kernels in `cpu/`, compiled for this very processor when they are first wanted, and kept in the user's cache.

Without a C compiler with OpenMP (gcc or clang) there is no library, and PyTorch computes instead. The environment
variable OUTRIDER_CPU_KERNELS=off asks for that."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

SOURCES = Path(__file__).with_name("cpu")
FLAGS = ("-O3", "-march=native", "-fopenmp", "-std=gnu11", "-shared", "-fPIC")
COMPILERS = ("cc", "gcc", "clang")
SWITCH = "OUTRIDER_CPU_KERNELS"
COMPILE_S = 120

log = logging.getLogger(__name__)


@cache
def cpu_library() -> ctypes.CDLL | None:
    """The compiled kernels; None where they are not wanted or cannot be had. torch must be imported before: the two
    share its threads."""
    if os.environ.get(SWITCH, "on") == "off":
        return None
    compiler = next((path for name in COMPILERS if (path := shutil.which(name)) is not None), None)
    if compiler is None:
        log.info("no C compiler: PyTorch's CPU kernels are used, which are slower")
        return None
    try:
        return ctypes.CDLL(str(_built(compiler)))
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or b"").decode(errors="replace").strip()
        log.warning("the CPU kernels could not be compiled, PyTorch's are used, which are slower: %s", said or error)
        return None


def _built(compiler: str) -> Path:
    """The library for these sources, this compiler and this processor; compiled where it is not there yet."""
    key = hashlib.sha256(_target(compiler))
    for path in sorted(SOURCES.iterdir()):
        key.update(path.name.encode() + path.read_bytes())
    path = _cache_folder() / f"cpu-{key.hexdigest()[:24]}.so"
    if not path.is_file():
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            fresh = Path(folder) / path.name
            _run(compiler, *FLAGS, *map(str, sorted(SOURCES.glob("*.c"))), "-o", str(fresh), "-lm")
            fresh.replace(path)  # at once: other processes may be here, too
    return path


def _target(compiler: str) -> bytes:
    """What the compiler says of itself and of the processor."""
    return _run(compiler, *FLAGS[:4], "-dM", "-E", "-x", "c", os.devnull)


def _cache_folder() -> Path:
    """The user's, or a new one that ends with the machine's temporary files."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outrider"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # a user without a home
        return Path(tempfile.mkdtemp(prefix="outrider-"))
    return folder if os.access(folder, os.W_OK) else Path(tempfile.mkdtemp(prefix="outrider-"))


def _run(*command: str) -> bytes:
    return subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_S).stdout
