"""A slow draft service as a worker: `python -m outrider.bench.network.draft ARGUMENTS of outrider draft`. Every pass of
its model is stretched to a length by sleeping, which leaves the cores to others. It is ready with {"address"} once it
listens, and takes {"pass_ms"} at any time."""

from __future__ import annotations

import io
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from typing import Any

from outrider.bench.worker import Send, answer_requests, take_output
from outrider.cli.__main__ import main as run_command
from outrider.cli.local_services import LISTENING
from outrider.proposers.draft_model import DraftModelProposer
from outrider.proposers.draft_rows import DraftedToken, DraftRows


class PassPacer:
    """How long a pass takes at least. Set from any thread."""

    def __init__(self) -> None:
        self.pass_s = 0.0

    def stretch_passes(self) -> None:
        """Makes every draft model of this process take its time: a pass, its sampling included, with any number of
        rows, as on a device whose memory is the limit."""
        run = DraftModelProposer.run

        def paced(
            proposer: DraftModelProposer, rows: Sequence[DraftRows], counts: Sequence[int]
        ) -> list[list[DraftedToken]]:
            end = time.perf_counter() + self.pass_s * counts[0]  # one a pass
            drafted = run(proposer, rows, counts)
            time.sleep(max(0.0, end - time.perf_counter()))
            return drafted

        setattr(DraftModelProposer, "run", paced)  # noqa: B010  # for this process, on purpose


class Announcement(io.StringIO):
    """Takes what the service prints, and passes its address on."""

    def __init__(self, send: Send) -> None:
        super().__init__()
        self._send = send

    def write(self, text: str) -> int:
        """Looks for the line that says where the service listens."""
        written = super().write(text)
        if "\n" in text and (found := re.search(LISTENING, self.getvalue())):
            self._send({"address": found[1]})
            self.seek(0)
            self.truncate()
        return written


def main(argv: Sequence[str]) -> int:
    """Serves until the input ends."""
    send = take_output()
    pace = PassPacer()
    pace.stretch_passes()
    threading.Thread(target=_take_orders, args=(pace, send), daemon=True).start()
    with redirect_stdout(Announcement(send)):
        return run_command(["draft", *argv])


def _take_orders(pace: PassPacer, send: Send) -> None:
    def handle(question: dict[str, Any]) -> dict[str, Any]:
        pace.pass_s = question["pass_ms"] / 1e3
        return question

    answer_requests(handle, send)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
