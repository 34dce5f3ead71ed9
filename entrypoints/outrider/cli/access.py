"""How commands get in: to a gateway by TLS, as every client of a service has it, and a token; to targets and drafts by
TLS alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import Field

from outrider.gateway.peers.addresses import Addresses
from outrider.rpc.errors import InvalidArgument
from outrider.rpc.private_files import warn_if_open
from outrider.rpc.security import ClientTls
from outrider.rpc.settings import PeerSettings

GATEWAY = "127.0.0.1:50050"  # where a gateway is unless another address is given


def check_addresses(given: list[str]) -> list[str]:
    """A list of services' addresses. ValueError for one that is none."""
    try:
        Addresses(given)
    except InvalidArgument as error:
        raise ValueError(error.violations[0].problem) from None
    return given


class AccessSettings(PeerSettings):
    """What a gateway is shown, and by what it is known as itself."""

    peer_name: str = Field("", description="name (SAN) that the gateway's certificate must have (default: its host)")
    token_file: Path | None = Field(None, description="file with the token that the gateway knows this caller by")

    @property
    def token(self) -> str:
        """What the file holds; empty without one. OSError for a file that cannot be read."""
        if self.token_file is None:
            return ""
        warn_if_open(self.token_file, "the token")
        return self.token_file.read_text(encoding="utf-8").strip()

    def access(self) -> dict[str, Any]:
        """What a client is given to get in. OSError or OutriderError for files that cannot be used."""
        tls = ClientTls.of(self, self.peer_name)
        if tls is None:
            return {"token": self.token}
        return {"token": self.token, "credentials": tls.credentials(), "server_name": tls.name}


class ServicesAccessSettings(PeerSettings):
    """What targets and drafts are shown, and by what they are known."""

    target_tls_name: str = Field("", description="name (SAN) that a target's certificate must have (default: its host)")
    draft_tls_name: str = Field("", description="the same of a draft's")

    def target_tls(self) -> ClientTls | None:
        """How targets are reached over TLS, if they are. OutriderError for files that cannot be used."""
        return ClientTls.of(self, self.target_tls_name)

    def draft_tls(self) -> ClientTls | None:
        """How drafts are reached over TLS, if they are. OutriderError for files that cannot be used."""
        return ClientTls.of(self, self.draft_tls_name)


@dataclass(frozen=True, slots=True)
class Access:
    """How each kind of process lets one in; without anything in plaintext."""

    client: Mapping[str, Any] = field(default_factory=dict)  # a Client's arguments
    gateway: ClientTls | None = None
    target: ClientTls | None = None
    draft: ClientTls | None = None


class DeploymentAccessSettings(AccessSettings, ServicesAccessSettings):
    """What all of a deployment is shown, and by what it is known."""

    def deployment_access(self) -> Access:
        """OSError or OutriderError for files that cannot be used."""
        return Access(self.access(), ClientTls.of(self, self.peer_name), self.target_tls(), self.draft_tls())
