"""Which skips a strict run (`.ci/run`) lets through: those for want of a GPU or of what a processor has, and those for
want of a tool that `.ci/tools` has named as missing. Any other has failed."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

STRICT = os.environ.get("OUTRIDER_CI_STRICT") == "1"
MISSING = frozenset(os.environ.get("OUTRIDER_CI_MISSING", "").split())  # tools

OF_THE_MACHINE = re.compile(
    r"needs a GPU|there is a GPU|needs TRITON_INTERPRET|graphs are CUDA's|a replay of the capture|the real capture"
    r"|this processor has no|the processor has no|no matrix unit|no such kernels|the variants of x86-64"
    r"|started by nohup"
)
# What a test says that lacks a tool, by the tools of which one is missing then.
FOR_WANT_OF = {
    r"no C compiler|no compiled kernels|no C kernels": ("gcc",),
    r"the compiler has no sanitizers": ("sanitizers", "gcc"),
    r"no cross compiler": ("cross-compiler",),
    r"no binutils": ("readelf",),
    r"no git\b": ("git",),
    r"no node on this machine": ("node",),
    r"node has no package|npm cannot install": ("node-packages", "npm-registry", "npm", "node"),
    r"no Chromium": ("chromium",),
    r"no prom\w+: ": ("prometheus",),
    r"tests/k8s/install.sh has not run": ("npm-registry", "npm", "node", "prometheus"),
    r"examples/clients/install.sh go": ("go-client",),
    r"examples/clients/install.sh cpp": ("cpp-client", "g++"),
    r"examples/clients/install.sh ruby": ("ruby-client",),
    r"examples/clients/install.sh node": ("node", "npm"),
    r"no package index": ("package-index",),
}


def is_excused(reason: str, missing: Iterable[str] = MISSING) -> bool:
    """Whether a test that says so may be skipped in a strict run."""
    absent = set(missing)
    wanted = [tools for pattern, tools in FOR_WANT_OF.items() if re.search(pattern, reason)]
    return bool(OF_THE_MACHINE.search(reason)) or any(absent & set(tools) for tools in wanted)


def reason_of(longrepr: object) -> str:
    """What a report of a skip says: pytest keeps file, line and reason."""
    return str(longrepr[-1]) if isinstance(longrepr, tuple) else str(longrepr)
