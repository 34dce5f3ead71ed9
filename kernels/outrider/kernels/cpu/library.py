"""The C kernels in `cpu/`: which of their libraries this processor runs.

The package brings a library for each kind of processor. Where it has none of these very sources (it was built without a
compiler, or they have changed since), the library is compiled when it is first wanted, and kept in the user's cache.
With no compiler either, PyTorch computes instead. The environment variable OUTRIDER_CPU_KERNELS=off asks for that; a
variant's name, such as c-avx2, asks for that one: replicas on different processors then compute the same bits."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch  # noqa: F401  brings the OpenMP runtime that the libraries ask for; both then share its threads

from outrider.kernels.cpu.build import SOURCES, Variant, compile_library, find_compiler, reason, variants

SWITCH = "OUTRIDER_CPU_KERNELS"
CPUINFO = Path("/proc/cpuinfo")

log = logging.getLogger(__name__)


def cpu_library() -> ctypes.CDLL | None:
    """The kernels, which share torch's threads; None where they are not wanted or cannot be had."""
    loaded = _loaded()
    return None if loaded is None else loaded[1]


def cpu_library_name() -> str | None:
    """The variant and, since compilers differ, the start of the SHA-256 of its library: "c-avx512-1a2b3c"; None without
    any."""
    loaded = _loaded()
    return None if loaded is None else loaded[0]


@cache
def _loaded() -> tuple[str, ctypes.CDLL] | None:
    """The first variant that this processor can run and that is to be had."""
    problems = []
    for variant in wanted_variants(os.environ.get(SWITCH, "on"), cpu_features()):
        try:
            path = _path(variant)
            build, library = hashlib.sha256(path.read_bytes()).hexdigest(), ctypes.CDLL(str(path))
        except (OSError, subprocess.SubprocessError) as error:
            problems.append(f"{variant.name}: {reason(error)}")
            continue
        library.tiles_allowed.restype = ctypes.c_int64
        if variant.name == "c-amx" and not library.tiles_allowed():
            problems.append(f"{variant.name}: the system does not let processes use the matrix unit")
            continue
        return f"{variant.name}-{build[:6]}", library
    if problems:
        log.warning("no C kernels, PyTorch computes, which is slower: %s", problems[0])
    return None


def wanted_variants(switch: str, features: frozenset[str]) -> list[Variant]:
    """What a processor can run of what the switch asks for, the fastest first. Raises ValueError for another switch."""
    fitting = {variant.name: variant for variant in variants() if variant.needs <= features}
    if switch in ("on", "off"):
        return list(fitting.values()) if switch == "on" else []
    if switch not in fitting:
        raise ValueError(f"{SWITCH}: is {switch[:100]!r}; allowed here: on, off, {', '.join(fitting)}")
    return [fitting[switch]]


def cpu_features() -> frozenset[str]:
    """What the processor can do, in Linux' words; none are known elsewhere."""
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2] for line in lines if line.startswith("flags")), "").split())


def _path(variant: Variant) -> Path:
    """Of the library: the wheel's, or the one in the user's cache, compiled where it is not there yet."""
    name = variant.file_name
    packaged = SOURCES / name
    if packaged.is_file():
        return packaged
    compiler = find_compiler()
    if compiler is None:
        raise FileNotFoundError("not in the package, and no C compiler")
    folder = _cache_folder()
    kept = folder / name
    return kept if kept.is_file() else compile_library(variant, folder, compiler)


def _cache_folder() -> Path:
    """The user's, or a new one that ends with the machine's temporary files."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outrider"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # a user without a home
        return Path(tempfile.mkdtemp(prefix="outrider-"))
    return folder if os.access(folder, os.W_OK) else Path(tempfile.mkdtemp(prefix="outrider-"))
