"""What systems other than Linux lack of what the program stands on."""

from __future__ import annotations

import platform


def require_posix() -> None:
    """Raises ImportError, with what is lacking in one line, where nothing but `outrider.client` can be imported."""
    if platform.system() == "Windows":
        raise ImportError(
            "Windows lacks the file locks, signals and limits of POSIX: run this in WSL 2 or on Linux; "
            "of the package outrider.client alone works on Windows"
        )


def lacking_for_models() -> str | None:
    """What a process that runs models lacks on this system, in one line; None where it lacks nothing."""
    if platform.system() != "Darwin":
        return None
    if platform.machine() == "x86_64":
        return (
            "PyTorch is built for Intel Macs no more: models run on Linux or Apple silicon, clients and gateways here"
        )
    return "no kernels are built for macOS: where cc has no OpenMP, as Apple's, PyTorch computes, several times slower"
