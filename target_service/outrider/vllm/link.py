"""Between a target service and the vLLM engine that it drives, whose scheduler lives in another process: pieces and
credit one way, what steps committed the other. A Unix socket of this machine, whose two ends know one key; it carries
the protocol's dataclasses as they are.

The engine's end never waits for the service: a thread reads, and what it reads lies ready for the next step."""

from __future__ import annotations

import logging
import os
import secrets
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from outrider.rpc.messages import Close, Commit, Credit, DraftTokens
from outrider.target_service.draft_buffer import ChainBuffer
from outrider.vllm.rows import DraftedRow
from outrider.vllm.source import LINK, StepReport

log = logging.getLogger(__name__)

KEY = "OUTRIDER_LINK_KEY"
EXTRA = "outrider"  # key of a request's extra_args
LinkCommand = DraftTokens | Credit | Close


@dataclass(frozen=True, slots=True)
class Stepping:
    """A step begins."""


LinkEvent = Stepping | StepReport | Commit  # one without ids, that names dropped chains


class LinkedService:
    """The engine's end: a DraftSource. Raises ConnectionError or OSError where no service listens."""

    def __init__(self, address: str, vllm_config: Any) -> None:
        self._connection: Any = Client(address, "AF_UNIX", bytes.fromhex(os.environ[KEY]))
        self._vocab_size = vllm_config.model_config.get_vocab_size()
        self._arrived: deque[LinkCommand] = deque()
        self._early: dict[int, list[LinkCommand]] = {}  # of sequences whose request has not come yet
        self._wake = threading.Event()
        threading.Thread(target=self._read, name="outrider-link", daemon=True).start()

    def opened(self, request: Any) -> DraftedRow | None:
        """A request that the service added says which of its sequences it is."""
        extra = (request.sampling_params.extra_args or {}).get(EXTRA)
        if extra is None:
            return None
        row = DraftedRow(
            request_id=request.request_id,
            sequence_id=extra["sequence_id"],
            tokens=request.all_token_ids,
            prompt_len=request.num_prompt_tokens,
            max_tokens=request.max_tokens,
            weighs=extra["weighs"],
            chains=ChainBuffer(request.all_token_ids, self._vocab_size),
        )
        for command in self._early.pop(row.sequence_id, ()):
            self._apply(row, command)
        return row

    def closed(self, row: DraftedRow) -> None:
        """The service knows it, or closed it itself."""

    def take(self, rows: Mapping[int, DraftedRow]) -> None:
        """Applies what the service sent."""
        self._wake.clear()
        while self._arrived:
            command = self._arrived.popleft()
            row = rows.get(command.sequence_id)
            if isinstance(command, Close):
                self._early.pop(command.sequence_id, None)
            elif row is not None:
                self._apply(row, command)
            else:
                self._early.setdefault(command.sequence_id, []).append(command)

    def wait(self, timeout_s: float) -> None:
        """Until the service sends something."""
        self._wake.wait(timeout_s)

    def stepping(self, started: float) -> None:
        """The service counts from here how long a step takes."""
        self._connection.send(Stepping())

    def committed(self, report: StepReport) -> None:
        """To the service, at once."""
        self._connection.send(report)

    def close(self) -> None:
        """The service sees the end of the link."""
        self._connection.close()

    def _apply(self, row: DraftedRow, command: LinkCommand) -> None:
        if isinstance(command, Credit):
            row.grant(command)
        elif isinstance(command, DraftTokens):
            row.add(command)
            if row.chains.has_dropped:  # said at once: the draft then starts a chain that is not refused
                dropped = row.chains.take_dropped()
                self._connection.send(Commit(row.sequence_id, row.committed, (), dropped=dropped))

    def _read(self) -> None:
        try:
            while True:
                self._arrived.extend(self._connection.recv())
                self._wake.set()
        except (EOFError, OSError):
            log.warning("the link to the target service has ended")


class EngineLink:
    """The service's end. It listens from construction on; `environment` tells the engine's process where."""

    def __init__(self) -> None:
        self.on_event: Callable[[LinkEvent], None] = lambda event: None
        self.on_end: Callable[[], None] = lambda: None
        self._folder = tempfile.TemporaryDirectory(prefix="outrider-")  # only this user may enter it
        self._key = secrets.token_bytes(32)
        self._address = str(Path(self._folder.name) / "link")
        self._listener = Listener(self._address, "AF_UNIX", authkey=self._key)
        self._connection: Connection[Sequence[LinkCommand], LinkEvent] | None = None
        threading.Thread(target=self._serve, name="outrider-link", daemon=True).start()

    @property
    def environment(self) -> Mapping[str, str]:
        """What the engine's process must find in its environment."""
        return {LINK: self._address, KEY: self._key.hex()}

    def send(self, commands: Sequence[LinkCommand]) -> None:
        """To the scheduler, before its next step. Raises OSError once the engine is gone."""
        if self._connection is None:
            raise ConnectionError("the engine is not linked")
        self._connection.send(commands)

    def close(self) -> None:
        """Ends it; the engine goes on plainly."""
        self._listener.close()
        if self._connection is not None:
            self._connection.close()
        self._folder.cleanup()

    def _serve(self) -> None:
        """`on_event` and `on_end` are called here."""
        try:
            self._connection = connection = self._listener.accept()
            while True:
                self.on_event(connection.recv())
        except (EOFError, OSError):
            self.on_end()
