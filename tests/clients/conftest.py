"""Draft, target and two gateways as processes, with the embedded pair; started once for all tests of this folder."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from outrider.cli.local_services import Service, Services, wait_for_draft
from outrider.pairs import PairPaths, pair_path

START_S = 60
COMMON = ("--listen", "127.0.0.1:0", "--grace-s", "1")


@dataclass
class Fleet:
    """The services; `gateway` lives as long as they do, `victim()` is one more that a test may kill."""

    services: Services
    pair: PairPaths
    target: str
    draft: str
    gateway: str
    _spare: Service | None = None

    def start_gateway(self, *flags: str) -> Service:
        """One more gateway, which need not listen yet."""
        peers = ["--draft", self.draft, "--target", self.target, "--tokenizer", str(self.pair.target)]
        return self.services.start("gateway", ["gateway", *COMMON, *peers, *flags])

    def victim(self) -> Service:
        """A gateway that is ready; the next one starts meanwhile."""
        service, self._spare = self._spare or self.start_gateway(), self.start_gateway()
        self.services.wait(service, START_S)
        wait_for_draft(service.address, START_S, lambda: None)
        return service

    def kill(self, service: Service) -> None:
        """As by a machine that loses its power."""
        os.killpg(service.pid, signal.SIGKILL)
        self.services.stop(service)


@pytest.fixture(scope="session")
def fleet() -> Iterator[Fleet]:
    pair = pair_path()
    with Services() as services:
        draft = services.start("draft", ["draft", *COMMON, "--model", str(pair.draft), "--threads", "1"])
        target_flags = ["--model", str(pair.target), "--threads", "1", "--batch-invariant"]
        target = services.start("target", ["target", *COMMON, *target_flags])
        started = Fleet(services, pair, services.wait(target, START_S), services.wait(draft, START_S), "")
        gateway = started.start_gateway("--reflection")
        started._spare = started.start_gateway()
        started.gateway = services.wait(gateway, START_S)
        wait_for_draft(started.gateway, START_S, services.check)
        yield started


@pytest.fixture(scope="session")
def build(repository: Path) -> Path:
    """Where examples/clients/build.sh puts what it makes."""
    return repository / "build" / "clients"
