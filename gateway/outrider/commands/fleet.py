"""The demo's processes: a draft, a target and a gateway on loopback, on ports that the system chooses."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from outrider.commands.demo_settings import DemoSettings
from outrider.commands.processes import Service, Services
from outrider.commands.progress import Advance
from outrider.commands.readiness import wait_for_draft

LOOPBACK = "127.0.0.1:0"
GRACE_S = "2"


@dataclass(frozen=True, slots=True)
class Folders:
    """The checkpoints of a pair."""

    target: Path
    draft: Path


@dataclass(slots=True)
class Fleet:
    """The services of one demo. The target, and the gateway with it, can be replaced."""

    services: Services
    settings: DemoSettings
    folders: Folders
    draft: Service | None = None
    target: Service | None = None
    gateway: Service | None = None

    def start(self, advance: Advance) -> str:
        """Starts the three services and returns the gateway's address."""
        self.draft = self._start("draft", "--model", str(self.folders.draft))
        self.target = self._start_target()  # both load at the same time
        advance(f"draft listens on {self._wait(self.draft)}")
        return self._connect(advance, self.draft, self.target)

    def enlarge(self, advance: Advance) -> str:
        """Puts the pair's expansion in the target's place and returns the new gateway's address."""
        if self.draft is None or self.target is None or self.gateway is None:
            raise ValueError("there is no fleet to enlarge: start it first")
        self.services.stop(self.gateway, self.target)
        self.target = self._start_target("--expand")
        return self._connect(advance, self.draft, self.target)

    def _connect(self, advance: Advance, draft: Service, target: Service) -> str:
        """Waits for the target and starts a gateway in front of the two."""
        advance(f"target listens on {self._wait(target)}")
        self.gateway = self._start(
            "gateway", "--target", target.address, "--draft", draft.address, "--tokenizer", str(self.folders.target),
            "--num-draft-tokens", str(self.settings.num_draft_tokens),
        )  # fmt: skip
        address = self._wait(self.gateway)
        wait_for_draft(address, self.settings.start_timeout, self.services.check)
        advance(f"gateway listens on {address}")
        return address

    def _start_target(self, *more: str) -> Service:
        if self.settings.threads is not None:
            more += ("--threads", str(self.settings.threads))
        return self._start("target", "--model", str(self.folders.target), *more)

    def _start(self, name: str, *arguments: str) -> Service:
        common = ["--listen", LOOPBACK, "--grace-s", GRACE_S, "--trace-file", str(self.settings.trace_file)]
        return self.services.start(name, [name, *common, *arguments])

    def _wait(self, service: Service) -> str:
        return self.services.wait(service, self.settings.start_timeout)
