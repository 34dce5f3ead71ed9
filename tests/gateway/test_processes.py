"""What a gateway process has to do with those beside it: one scrape of all, and its supervisor."""

from __future__ import annotations

import asyncio
import os
import signal
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from support.fakes import until
from support.metrics import samples_of

from outrider.gateway.processes import READY, GatewayProcess
from outrider.rpc.metrics import Metrics, MetricsServer
from outrider.rpc.server import HealthMonitor

OPENMETRICS = "application/openmetrics-text; version=1.0.0"
TRACE = {"trace_id": "0af7651916cd43dd8448eb211c80319c"}


async def test_one_scrape_has_the_series_of_all(tmp_path: Path) -> None:
    """Each sample with its process, in both formats; exemplars stay; a socket without a process is passed over."""
    health, servers = HealthMonitor(["s"]), []
    for index in (0, 1, 10):
        metrics = Metrics("toy")
        metrics.counter("ends", 'Of "all" {kinds}', "why").labels('a"}{b').inc(index + 1)
        metrics.histogram("wait_seconds", "Waits", (0.1, 1.0)).observe(0.5, TRACE if index else None)
        metrics.gauge("load", "Now", partial(int, index))
        servers.append(MetricsServer(GatewayProcess(index, tmp_path).metrics, metrics, health))
    for server in servers:
        server.start()
    await asyncio.to_thread(servers.pop().stop)
    text, content_type = await asyncio.to_thread(GatewayProcess(0, tmp_path).render, "")
    found = samples_of(text.decode())
    assert content_type.startswith("text/plain")
    assert [found["ends_total", (("process", str(index)), ("why", 'a"}{b'))] for index in (0, 1)] == [1, 2]
    assert [found["load", (("process", str(index)),)] for index in (0, 1)] == [0, 1]
    assert not [labels for _, labels in found if ("process", "10") in labels], "it has ended"
    assert text.count(b"# TYPE outrider_load gauge") == 1
    text, content_type = await asyncio.to_thread(GatewayProcess(0, tmp_path).render, OPENMETRICS)
    assert "openmetrics" in content_type
    (waits,) = (family for family in parse_openmetrics(text.decode()) if family.name == "outrider_wait_seconds")
    exemplars = [(one.labels, one.exemplar) for one in waits.samples if one.name.endswith("_bucket") and one.exemplar]
    assert [(labels, one.labels) for labels, one in exemplars] == [({"process": "1", "le": "1.0"}, TRACE)]
    for server in servers:
        await asyncio.to_thread(server.stop)


async def test_it_reports_until_the_supervisor_has_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while nobody reads; then it ends as on SIGTERM."""
    reader, writer = os.pipe()
    stdout, sent = SimpleNamespace(fileno=lambda: writer), []
    monkeypatch.setattr("outrider.gateway.processes.POLL_S", 0.001)
    monkeypatch.setattr(os, "kill", lambda *given: sent.append(given))
    monkeypatch.setattr("sys.stdout", stdout)
    health = HealthMonitor(["s"])
    await health.start()
    reporting = asyncio.create_task(GatewayProcess(0, tmp_path).report(health))
    assert await asyncio.to_thread(os.read, reader, len(READY)) == READY
    os.write(writer, b"x" * (1 << 20))  # all that the pipe holds
    await asyncio.sleep(0.01)
    assert not reporting.done()
    os.close(reader)
    await until(reporting.done)
    os.close(writer)
    await health.stop()
    assert sent == [(os.getpid(), signal.SIGTERM)] and reporting.exception() is None
