"""What is for its user alone is said to be open where others may read it: keys, tokens, traces."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.certificates import Authority

from outrider.cli.access import AccessSettings
from outrider.gateway.auth import Tokens
from outrider.rpc.private_files import warn_if_open
from outrider.rpc.security import ClientTls, PemFiles, ServerTls
from outrider.rpc.telemetry import TraceFileExporter


@pytest.mark.parametrize(
    ("mode", "may"),
    [(0o600, ""), (0o640, ""), (0o440, ""), (0o644, "may read"), (0o444, "may read"), (0o602, "may change")],
)
def test_what_others_may_do(tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, may: str) -> None:
    path = tmp_path / "key"
    path.touch()
    path.chmod(mode)
    warn_if_open(path, "it")
    assert len(caplog.records) == bool(may) and may in caplog.text


def _traces(path: Path) -> None:
    TraceFileExporter(path).shutdown()


READERS: dict[str, Callable[[PemFiles, Path], object]] = {
    "server": lambda files, text: ServerTls(files),
    "client": lambda files, text: ClientTls(files),
    "tokens": lambda files, text: Tokens(text),
    "token": lambda files, text: AccessSettings(token_file=text).token,
    "traces": lambda files, text: _traces(text),
}


@pytest.mark.parametrize("reader", READERS)
def test_who_reads_one_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture, reader: str) -> None:
    text, files = tmp_path / "tokens", Authority(tmp_path).issue("own")
    text.write_text("alice: a-token-of-enough-characters")
    path = files.key if reader in ("server", "client") else text
    assert path is not None
    for mode in (0o600, 0o644):
        path.chmod(mode)
        READERS[reader](files, text)
    (record,) = caplog.records
    assert record.levelname == "WARNING" and str(path) in record.message and "a-token" not in record.message
