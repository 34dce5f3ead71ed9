"""Targets that tell what they judge: each, a program of its own, writes every window that it judges by rejection to a
file, before what is committed of it leaves. So one that is killed has told all that anybody got of it.

    python -m lossless.composition.telling FOLDER target ..."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from lossless.composition.replay import Judged

from outrider.cli import attached, local_services
from outrider.target_service import boot
from outrider.target_service.outputs import ComputedStep


@dataclass
class Told:
    """What the targets of a folder have written, read as it grows."""

    folder: Path
    _ends: dict[Path, int] = field(default_factory=dict)  # of what was read of a file

    def news(self) -> list[Judged]:
        """What was judged since the last call. What a target was killed over has left to nobody, and is left out."""
        found = []
        for file in sorted(self.folder.glob("*.pickle")):
            with file.open("rb") as opened:
                opened.seek(self._ends.get(file, 0))
                while True:
                    try:
                        found.append(pickle.load(opened))
                    except (EOFError, pickle.UnpicklingError):
                        break
                    self._ends[file] = opened.tell()
        return found


@contextmanager
def telling(folder: Path) -> Iterator[Told]:
    """Within it `Services` starts targets that tell; all else as ever."""
    folder.mkdir()
    usual = vars(local_services)["subprocess"].Popen

    def start(command: list[str], *, env: dict[str, str], **files: Any) -> Any:
        if command[3] != "target":
            return usual(command, env=env, **files)
        tells = [sys.executable, "-m", "lossless.composition.telling", str(folder), *command[3:]]
        return subprocess.Popen(tells, env=env | {"PYTHONPATH": os.pathsep.join(sys.path)}, **files)

    with patch.object(local_services, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": start})):
        yield Told(folder)


def main(folder: str, command: Sequence[str]) -> int:
    """Runs the target's command."""
    with Path(folder, f"{os.getpid()}.pickle").open("wb") as file:

        def tell(step: ComputedStep) -> None:
            for verified in step.verified:
                if verified.scheduled.target.rejects:
                    pickle.dump(Judged.of(verified), file)
            file.flush()

        with patch.object(boot, "own_step_watcher", lambda metrics: tell):
            return attached.main(command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
