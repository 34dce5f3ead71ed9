"""The three services as processes, with the embedded pair; started once for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from outrider.cli.local_services import Services, wait_for_draft
from outrider.pairs import PairPaths, pair_path

START_S = 60


@dataclass(frozen=True)
class Trio:
    """Where the services listen."""

    gateway: str
    target: str
    draft: str
    pair: PairPaths
    trace_file: Path


@pytest.fixture(scope="session")
def trio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trio]:
    pair = pair_path()
    trace_file = tmp_path_factory.mktemp("traces") / "trace.jsonl"
    common = ["--listen", "127.0.0.1:0", "--grace-s", "1"]
    with Services() as services:
        draft = services.start("draft", ["draft", *common, "--model", str(pair.draft), "--threads", "1"])
        target_flags = ["--model", str(pair.target), "--threads", "1", "--batch-invariant"]
        target = services.start("target", ["target", *common, *target_flags])
        addresses = [services.wait(draft, START_S), services.wait(target, START_S)]
        peers = ["--draft", addresses[0], "--target", addresses[1], "--tokenizer", str(pair.target)]
        gateway = services.start("gateway", ["gateway", *common, *peers, "--trace-file", str(trace_file)])
        address = services.wait(gateway, START_S)
        wait_for_draft(address, START_S, services.check)
        yield Trio(address, addresses[1], addresses[0], pair, trace_file)
