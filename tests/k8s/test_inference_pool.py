"""What llm-d's router is told of gateways: that the pool is these, and that what its picker is to read of them is what
they expose."""

from __future__ import annotations

from typing import Any

import yaml
from support.fakes import QUICK, TargetServicer, ToyTarget, serving, target_info, until
from support.gateways import toy_tokenizer
from support.manifests import KUBERNETES, Overlay, Workload
from support.metrics import scraped

from outrider.gateway.engine import GenerationEngine
from outrider.gateway.peers.remote import RemoteTargets
from outrider.gateway.request_metrics import measure
from outrider.gateway.settings import GatewaySettings
from outrider.rpc.settings import load_settings

PICKER = yaml.safe_load((KUBERNETES / "components/inference-pool/endpoint-picker.yaml").read_text(encoding="utf-8"))


def parameters_of(kind: str) -> Any:
    """Of a plugin of the picker."""
    (found,) = [plugin["parameters"] for plugin in PICKER["plugins"] if plugin["type"] == kind]
    return found


def engine() -> dict[str, str]:
    """What is said of our pods."""
    (found,) = parameters_of("core-metrics-extractor")["engineConfigs"]
    return dict(found)


def gateway(overlay: Overlay) -> Workload:
    (found,) = [workload for workload in overlay.workloads if workload.role == "gateway"]
    return found


async def test_the_picker_reads_what_a_gateway_exposes() -> None:
    toy = ToyTarget(info=target_info(num_blocks=40, block_size=16))
    async with serving(TargetServicer(toy)) as server, RemoteTargets([server.address], stream_config=QUICK) as targets:
        await until(lambda: targets.usable)
        metrics = measure(GenerationEngine(toy_tokenizer(), targets), vllm_names=True)
        exposed = {name: dict(labels) for name, labels in scraped(metrics)}
    specs = {name: text.removeprefix("outrider_") for name, text in engine().items() if name.endswith("Spec")}
    assert specs.keys() == {"queuedRequestsSpec", "runningRequestsSpec", "kvUsageSpec", "cacheInfoSpec"}
    assert set(specs.values()) <= exposed.keys()
    cache = exposed[specs["cacheInfoSpec"]]  # labels by the names that the picker takes where it is told no others
    assert (cache["block_size"], cache["num_gpu_blocks"]) == ("16", "40")


def test_pods_say_what_engine_they_are_and_have_what_is_read() -> None:
    workload = gateway(Overlay("llm-d"))
    settings = load_settings(GatewaySettings, environ=workload.environment)
    assert workload.labels["llm-d.ai/engine-type"] == engine()["name"] and settings.vllm_metrics
    assert parameters_of("metrics-data-source")["port"] == workload.port("metrics")
    named = {plugin.get("name", plugin["type"]) for plugin in PICKER["plugins"]}
    refs = [entry for profile in PICKER["schedulingProfiles"] for entry in profile["plugins"]]
    for source in PICKER["dataLayer"]["sources"]:
        refs += [source, *source["extractors"]]
    assert {entry["pluginRef"] for entry in refs} <= named


def test_the_pool_is_the_gateways_and_what_comes_by_the_route_goes_there() -> None:
    overlay = Overlay("llm-d")
    (pool,), (route,) = overlay.of("InferencePool"), overlay.of("HTTPRoute")
    (workload,) = overlay.selected(pool["spec"]["selector"])
    assert workload.role == "gateway"
    assert [port["number"] for port in pool["spec"]["targetPorts"]] == [workload.port("http")]
    (backend,) = [backend for rule in route["spec"]["rules"] for backend in rule["backendRefs"]]
    group = pool["apiVersion"].partition("/")[0]
    assert backend == {"group": group, "kind": "InferencePool", "name": pool["metadata"]["name"]}
