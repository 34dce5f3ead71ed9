"""A hub of models without a network: its cache as a download would have left it, and an endpoint on loopback."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest

CACHED_COMMIT = "5f3c7a1b" * 5


def cached(monkeypatch: pytest.MonkeyPatch, cache: Path, **models: Path) -> None:
    """The folders as models of the hub's org `tests`, by name; nothing may be downloaded."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    for name, folder in models.items():
        root = cache / f"models--tests--{name}"
        snapshot = root / "snapshots" / CACHED_COMMIT
        snapshot.mkdir(parents=True)
        (root / "refs").mkdir()
        (root / "refs" / "main").write_text(CACHED_COMMIT)
        for file in folder.iterdir():
            (snapshot / file.name).symlink_to(file.resolve())


MODEL, GATED = "tests/model", "tests/gated"
COMMIT, BRANCH = "0123456789" * 4, "main"


@dataclass(slots=True)
class HubEndpoint:
    """Its address, and the files that were asked for."""

    url: str
    served: list[str] = field(default_factory=list)


@contextmanager
def hub_endpoint(files: Mapping[str, bytes]) -> Iterator[HubEndpoint]:
    """Serves `files` as MODEL."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            path = urlsplit(self.path).path
            if path.startswith(f"/api/models/{MODEL}/revision/"):
                known = path.endswith((BRANCH, COMMIT))
                self._json({"id": MODEL, "sha": COMMIT}) if known else self._refuse(404, "RevisionNotFound")
            elif path.startswith(f"/api/models/{MODEL}/tree/"):
                self._json(
                    [{"type": "file", "path": name, "size": len(files[name]), "oid": oid(name)} for name in files]
                )
            elif path.startswith(f"/{MODEL}/resolve/{COMMIT}/"):
                name = path.rpartition(f"{COMMIT}/")[2]
                endpoint.served.append(name)
                self._send(200, files[name], {"ETag": f'"{oid(name)}"', "X-Repo-Commit": COMMIT})
            elif GATED in path:
                self._refuse(403, "GatedRepo")
            else:
                self._refuse(404, "RepoNotFound")

        do_GET = do_HEAD

        def log_message(self, format: str, *args: object) -> None:
            """Says nothing."""

        def _json(self, value: object) -> None:
            self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

        def _refuse(self, status: int, code: str) -> None:
            self._send(status, b"", {"X-Error-Code": code, "X-Error-Message": code})

        def _send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

    def oid(name: str) -> str:
        return hashlib.sha1(files[name]).hexdigest()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    endpoint = HubEndpoint(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield endpoint
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
