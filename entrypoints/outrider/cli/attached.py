"""Runs a command as a child that never outlives its parent: `python -m outrider.cli.attached COMMAND ...`.

The parent holds the write end of this process's stdin and never writes. However the parent ends, even by SIGKILL, the
read then returns, and this process ends as on SIGTERM. Works wherever pipes do, and needs no polling."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Sequence

from outrider.cli.__main__ import main as run_command

GRACE_S = 3.0  # for what SIGTERM starts


def main(argv: Sequence[str]) -> int:
    """Runs the command line until it ends or the parent does."""
    threading.Thread(target=_end_with_parent, name="parent-watch", daemon=True).start()
    return run_command(argv)


def _end_with_parent() -> None:
    while os.read(0, 1):
        continue
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os._exit(1)  # the services' own signal handlers may be waiting for something


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
