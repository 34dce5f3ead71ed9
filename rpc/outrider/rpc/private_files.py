"""Files that are for their user alone: private keys, tokens, traces."""

from __future__ import annotations

import logging
import stat
from pathlib import Path

log = logging.getLogger(__name__)

PRIVATE = 0o600


def warn_if_open(path: Path, what: str) -> None:
    """Logs where every user of this machine may read or change a file, by the file's own mode. OSError for none."""
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & (stat.S_IROTH | stat.S_IWOTH):
        may = "change" if mode & stat.S_IWOTH else "read"
        log.warning("%s (mode %04o): every user of this machine may %s %s; chmod o-rwx", path, mode, may, what)
