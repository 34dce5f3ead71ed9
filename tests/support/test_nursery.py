"""Services that are forked are children as others, and run as they would from a command line."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
from support.environment import START_S
from support.nursery import Forked, nurseries

from outrider.cli.local_services import Service, ServiceFailed, Services

DRAFT = ["draft", "--listen", "127.0.0.1:0", "--method", "ngram", "--grace-s", "0"]

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes are adopted on Linux alone")


@pytest.fixture(scope="module", autouse=True)
def forking(prove: bool) -> Iterator[None]:
    """The short forms have it everywhere."""
    with nurseries() if prove else nullcontext():
        yield


def forked(service: Service) -> bool:
    return isinstance(service._process, Forked)


def test_a_fork_is_a_child_as_any_other() -> None:
    with Services() as services:
        first, second = (services.start("draft", DRAFT) for _ in range(2))
        assert forked(first) and forked(second)
        assert services.wait(first, START_S) != services.wait(second, START_S)
        for service in (first, second):
            parent, group, session = Path(f"/proc/{service.pid}/stat").read_text().rpartition(")")[2].split()[1:4]
            assert (int(parent), int(group), int(session)) == (os.getpid(), service.pid, service.pid)
        os.killpg(first.pid, signal.SIGKILL)
        first._process.wait(START_S)
        with pytest.raises(ServiceFailed, match="ended by SIGKILL"):
            first.check()
        services.stop(first, second)
        assert second._process.poll() == 0


def test_a_fork_runs_where_its_parent_runs() -> None:
    cores = os.sched_getaffinity(0)
    with Services() as services:
        os.sched_setaffinity(0, {min(cores)})
        try:
            service = services.start("draft", DRAFT)
        finally:
            os.sched_setaffinity(0, cores)
        services.wait(service, START_S)
        assert os.sched_getaffinity(service.pid) == {min(cores)} and Path(f"/proc/{service.pid}/cwd").samefile(".")


def test_bad_flags_are_told() -> None:
    with Services() as services:
        service = services.start("gateway", ["gateway", "--tokeniser", "x"])
        assert forked(service)
        with pytest.raises(ServiceFailed, match=r"(?s)ended with status 2.*--tokeniser"):
            services.wait(service, START_S)


def test_the_gateway_has_no_torch(tmp_path: Path) -> None:
    with Services() as services:
        arguments = ["gateway", "--listen", "127.0.0.1:0", "--target", "127.0.0.1:1", "--tokenizer", str(tmp_path)]
        service = services.start("gateway", arguments)
        assert "torch" not in Path(f"/proc/{service.pid}/maps").read_text()


def test_another_environment_starts_another_program(monkeypatch: pytest.MonkeyPatch) -> None:
    with Services() as services:
        monkeypatch.setenv("SET_BY_A_LIBRARY", "1")
        assert forked(services.start("draft", DRAFT))
        monkeypatch.setenv("PYTHONOPTIMIZE", "1")
        assert not forked(services.start("draft", DRAFT))
