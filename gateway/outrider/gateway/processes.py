"""What a gateway process has to do with the others behind the same addresses: it tells their supervisor how it fares,
and whoever is scraped has the series of all. Each serves its own on a socket in a folder of theirs; they are read from
there and get the label `process`, so that they stand as if each process had been scraped by itself."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path

from outrider.rpc.server import POLL_S, HealthMonitor

log = logging.getLogger(__name__)

READY, NOT_READY = b"ready\n", b"not ready\n"  # what a process tells its supervisor, twice a second
SCRAPE_S = 2.0
END = "# EOF\n"  # of OpenMetrics
_FAMILY = re.compile(r"^(?=# HELP )", re.MULTILINE)
_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(\{?)")


@dataclass(frozen=True, slots=True)
class GatewayProcess:
    """One process, by its number, and the folder that has the settings and the sockets of all. It is their user's
    alone."""

    index: int
    folder: Path

    @property
    def settings(self) -> Path:
        """What all are told, as JSON."""
        return self.folder / "settings.json"

    @property
    def metrics(self) -> str:
        """Where this process serves its own series."""
        return f"unix:{self.folder / f'{self.index}.metrics'}"

    async def report(self, health: HealthMonitor) -> None:
        """Says on standard output whether this process is ready, again and again: that its event loop turns is news,
        too. Where the supervisor has gone, however it ended, this process ends as on SIGTERM."""
        descriptor = sys.stdout.fileno()
        os.set_blocking(descriptor, False)
        while True:
            try:
                with suppress(BlockingIOError):  # the supervisor is stopped
                    os.write(descriptor, READY if health.ready else NOT_READY)
            except BrokenPipeError:
                log.error("the supervisor has gone")
                os.kill(os.getpid(), signal.SIGTERM)
                return
            await asyncio.sleep(POLL_S)

    def render(self, accept: str) -> tuple[bytes, str]:
        """The series of all processes that answer, as text, and its content type. Not for the event loop."""
        texts, content_type = {}, "text/plain"
        for path in sorted(self.folder.glob("*.metrics"), key=lambda path: int(path.stem)):
            try:
                texts[path.stem], content_type = _scrape(path, accept)
            except ConnectionRefusedError:
                continue  # it has died, and is being started again
            except (OSError, HTTPException) as error:
                log.warning("process %s does not tell its series: %s", path.stem, error)
        return join_series(texts).encode(), content_type


def join_series(texts: Mapping[str, str], label: str = "process") -> str:
    """One text of several, which are given by a label's value: each family stands once, each sample has the label."""
    families: dict[str, list[str]] = {}  # samples by the help and type before them
    for value, text in texts.items():
        for family in filter(None, _FAMILY.split(text.removesuffix(END))):
            lines = family.splitlines()
            head = "\n".join(line for line in lines if line.startswith("#"))
            samples = (_labelled(line, label, value) for line in lines if not line.startswith("#"))
            families.setdefault(head, []).extend(samples)
    lines = [line for head, samples in families.items() for line in (head, *samples)]
    end = END if any(text.endswith(END) for text in texts.values()) else ""
    return "".join(f"{line}\n" for line in lines) + end


def _labelled(sample: str, label: str, value: str) -> str:
    """Labels, value and exemplar stay as they are."""
    found = _SAMPLE.match(sample)
    if found is None:
        return sample
    name, brace = found.groups()
    return f'{name}{{{label}="{value}"{"," if brace else "}"}{sample[found.end() :]}'


def _scrape(path: Path, accept: str) -> tuple[str, str]:
    connection = _UnixConnection(path)
    try:
        connection.request("GET", "/metrics", headers={"accept": accept})
        answer = connection.getresponse()
        return answer.read().decode(), answer.getheader("content-type") or ""
    finally:
        connection.close()


class _UnixConnection(HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=SCRAPE_S)
        self._path = path

    def connect(self) -> None:
        """Connects to the socket of the path."""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(SCRAPE_S)
        self.sock.connect(str(self._path))
