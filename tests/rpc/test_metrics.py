"""/metrics, /livez and /readyz on a port of their own, and the series that every service has."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from support.fakes import until
from support.metrics import samples_of, scraped

from outrider.rpc import metrics as module
from outrider.rpc.errors import Unavailable
from outrider.rpc.messages import ModelInfo
from outrider.rpc.metrics import EngineState, Metrics, MetricsServer, VllmCollector, exemplar_of, exported
from outrider.rpc.server import HealthMonitor

TRACE = "0af7651916cd43dd8448eb211c80319c"


class Service:
    """A process with one series of its own."""

    def __init__(self) -> None:
        self.alive = self.ready = True
        self.health = HealthMonitor(["s"], is_alive=lambda: self.alive, is_ready=lambda: self.ready, poll_s=0.01)
        self.metrics = Metrics("toy", "toy")
        self.waits = self.metrics.histogram("wait_seconds", "Waits", (0.1, 1.0))


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    service = Service()
    await service.health.start()
    yield service
    await service.health.stop()


@pytest.fixture
async def client(service: Service, capsys: pytest.CaptureFixture[str]) -> AsyncIterator[httpx.AsyncClient]:
    async with exported(service.metrics, "127.0.0.1:0", service.health, "toy"):
        name, _, address = capsys.readouterr().out.strip().rpartition(" on ")
        assert name == "toy metrics"
        async with httpx.AsyncClient(base_url=f"http://{address}", timeout=60) as client:
            yield client


async def test_probes_say_what_health_does(service: Service, client: httpx.AsyncClient) -> None:
    async def statuses() -> tuple[int, int]:
        return (await client.get("/livez")).status_code, (await client.get("/readyz")).status_code

    assert await statuses() == (200, 200)
    service.ready = False
    await until(lambda: not service.health.ready)
    assert await statuses() == (200, 503)
    service.alive = False
    await until(lambda: not service.health.alive)
    assert await statuses() == (503, 503)
    assert (await client.get("/else")).status_code == 404


async def test_a_loop_that_hangs_is_not_alive(
    service: Service, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOOP_ANSWERS_S", 0.05)
    with ThreadPoolExecutor(1) as pool:  # whose answer this loop waits for, as it should not
        assert pool.submit(httpx.get, f"{client.base_url}/livez", timeout=60).result().status_code == 503
    time.sleep(2 * module.LAG_PERIOD_S)  # noqa: ASYNC251
    await asyncio.sleep(0.05)
    monkeypatch.undo()
    assert (await client.get("/livez")).status_code == 200, "it goes on"
    lag = samples_of((await client.get("/metrics")).text)
    assert lag["loop_lag_seconds_sum", ()] > 0.05 and lag["loop_lag_seconds_count", ()] > 0


async def test_both_formats_and_exemplars_of_sampled_traces(service: Service, client: httpx.AsyncClient) -> None:
    service.waits.observe(0.5, exemplar_of(f"00-{TRACE}-b7ad6b7169203331-01"))
    service.waits.observe(2.0, exemplar_of(f"00-{TRACE}-b7ad6b7169203331-00"))
    text = await client.get("/metrics")
    assert text.headers["content-type"].startswith("text/plain; version=")
    found = samples_of(text.text)
    assert found["toy_wait_seconds_count", ()] == 2
    assert any(name == "build_info" and dict(labels)["service"] == "toy" for name, labels in found)
    open_metrics = await client.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    assert open_metrics.headers["content-type"].startswith("application/openmetrics-text")
    samples = [sample for family in parse_openmetrics(open_metrics.text) for sample in family.samples]
    exemplars = [sample.exemplar for sample in samples if sample.exemplar]
    assert [(exemplar.labels, exemplar.value) for exemplar in exemplars] == [({"trace_id": TRACE}, 0.5)]


@pytest.mark.parametrize("header", ["", "00", f"00-{TRACE}-b7ad6b7169203331-00", f"00-{TRACE}-b7ad6b7169203331"])
def test_what_is_not_sampled_is_no_exemplar(header: str) -> None:
    assert exemplar_of(header) is None


async def test_a_port_in_use_is_refused(service: Service) -> None:
    server = MetricsServer("127.0.0.1:0", service.metrics, service.health)
    with pytest.raises(Unavailable, match="cannot listen"):
        MetricsServer(server.address, service.metrics, service.health)
    server.start()
    await asyncio.to_thread(server.stop)


def test_series_are_read_at_the_scrape(service: Service) -> None:
    metrics, counts = service.metrics, {"a": 1.0}
    metrics.gauge("now", "Now", lambda: counts["a"])
    metrics.read_counter("sum", "A sum", lambda: 2 * counts["a"])
    metrics.read_counters("sums", "Sums", "kind", lambda: counts)
    metrics.read_gauges("values", "Values", "kind", lambda: counts)
    metrics.model_info(ModelInfo("m", "0123456789abcdef", 9, 9, engine="e", kernels="k", dtype="float32"))
    for value in (3.0, 4.0):
        counts["a"] = counts["b"] = value
        found = scraped(metrics)
        assert found["toy_now", ()] == value and found["toy_sum_total", ()] == 2 * value
        for kind in ("a", "b"):
            assert found["toy_sums_total", (("kind", kind),)] == found["toy_values", (("kind", kind),)] == value
    (labels,) = (dict(labels) for name, labels in found if name == "toy_model_info")
    assert labels == {"model": "m", "digest": "0123456789ab", "engine": "e", "kernels": "k", "dtype": "float32"}


def test_vllm_s_names(service: Service) -> None:
    state: list[EngineState | None] = [None]
    service.metrics.registry.register(VllmCollector(lambda: state[0]))
    assert not any(name.startswith("vllm:") for name, _ in scraped(service.metrics)), "before anything is known"
    state[0] = EngineState("m", 3, 2, 0.25, 16, 64)
    found = {name: (value, dict(labels)) for (name, labels), value in scraped(service.metrics).items()}
    assert [found[f"vllm:num_requests_{which}"][0] for which in ("running", "waiting")] == [3, 2]
    assert found["vllm:kv_cache_usage_perc"] == (0.25, {"model_name": "m", "engine": "0"})
    cache = found["vllm:cache_config_info"][1]
    assert (cache["block_size"], cache["num_gpu_blocks"], cache["model_name"]) == ("16", "64", "m")


def test_local_histograms_say_what_the_librarys_do() -> None:
    bounds, values, trace = (0.001, 0.01, 2.0), (0.0, 0.001, 0.0011, 0.5, 3.0), {"trace_id": TRACE}
    ours, theirs = Metrics("toy"), Metrics("toy")
    local, library = ours.local_histogram("x", "X", bounds), theirs.histogram("x", "X", bounds)
    (first, second) = ours.local_histograms("y", "Y", bounds, "part", ("a", "b"))
    labelled = theirs.histogram("y", "Y", bounds, "part")
    for value in values:
        local.observe(value)
        library.observe(value)
        second.observe(value)
        labelled.labels("b").observe(value)
    first.observe(0.5, trace)
    labelled.labels("a").observe(0.5, trace)

    def shown(metrics: Metrics) -> list[str]:
        text = metrics.render("application/openmetrics-text")[0].decode()
        lines = [line for line in text.splitlines() if "outrider_x" in line or "outrider_y" in line]
        return sorted(line.rpartition(" ")[0] if TRACE in line else line for line in lines)  # without its time

    assert shown(ours) == shown(theirs) and any(TRACE in line for line in shown(ours))
