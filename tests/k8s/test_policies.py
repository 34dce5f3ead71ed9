"""What every overlay of k8s/ holds to, by the project's own words: the manifests name the ports, services, variables
and time series that the code has, and nobody may reach more than is used."""

from __future__ import annotations

import re
import stat
import tomllib
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import yaml
from support.manifests import KUBERNETES, LEADER, OVERLAYS, Manifest, Overlay, Workload
from support.metrics import sample_names

from outrider.draft_service.settings import DraftSettings
from outrider.gateway.settings import GatewaySettings, by_model
from outrider.rpc.settings import ServerSettings, load_settings
from outrider.target_service.settings import TargetSettings
from outrider.v1 import draft_pb2, generation_pb2, target_pb2

SETTINGS: dict[str, type[ServerSettings]] = {
    "target": TargetSettings,
    "draft": DraftSettings,
    "gateway": GatewaySettings,
}
SERVICES = {
    "target": target_pb2.DESCRIPTOR.services_by_name["TargetService"].full_name,
    "draft": draft_pb2.DESCRIPTOR.services_by_name["DraftService"].full_name,
    "gateway": generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name,
}
PROJECT = tomllib.loads((KUBERNETES.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
DNS, ANYONE, ANY_PORT = "kube-system", "anyone", 0
Edge = tuple[str, str, int]  # from, to, port


@pytest.fixture(scope="module", params=OVERLAYS)
def overlay(request: pytest.FixtureRequest) -> Overlay:
    return Overlay(request.param)


@pytest.fixture(params=sorted(SETTINGS))
def workload(request: pytest.FixtureRequest, overlay: Overlay) -> Workload:
    (found,) = [workload for workload in overlay.workloads if workload.role == request.param]
    return found


def settings_of(workload: Workload) -> Any:
    """As the service reads them; a variable that it does not know raises."""
    return load_settings(SETTINGS[workload.role], environ=workload.environment)


def addresses_of(gateway: GatewaySettings) -> list[str]:
    """Of the targets and drafts of all its models."""
    return [address for given in (gateway.target, gateway.draft) for one in by_model(given).values() for address in one]


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def test_variables_are_settings_and_listen_where_the_ports_are(workload: Workload) -> None:
    settings = settings_of(workload)
    declared = {entry["name"]: entry["containerPort"] for entry in workload.container["ports"]}
    listens = {"grpc": settings.listen, "health": settings.health}
    listens |= {name: getattr(settings, name, "") for name in ("http", "metrics")}
    assert declared == {name: port_of(address) for name, address in listens.items() if address}
    assert all(address.startswith(":") for address in listens.values() if address), "a pod is reached from outside"


def test_probes_ask_for_health_on_its_own_port(workload: Workload) -> None:
    probes = {name: workload.container[f"{name}Probe"]["grpc"] for name in ("startup", "readiness", "liveness")}
    assert all(workload.port(probe["port"]) == port_of(settings_of(workload).health) for probe in probes.values())
    assert probes["readiness"]["service"] == SERVICES[workload.role]
    assert "service" not in probes["liveness"], "what is not ready is not to be killed"
    assert probes["startup"].get("service", SERVICES[workload.role]) == SERVICES[workload.role]


def test_a_stream_ends_before_its_pod_is_killed(workload: Workload) -> None:
    settings = settings_of(workload)
    pause_s = workload.container["lifecycle"]["preStop"]["sleep"]["seconds"]
    drain_s = pause_s + getattr(settings, "drain_delay_s", 0.0) + settings.grace_s
    assert pause_s >= 5 and drain_s < workload.pod["terminationGracePeriodSeconds"]
    gateways = [settings_of(other) for other in workload.overlay.workloads if other.role == "gateway"]
    assert all(settings.grace_s >= gateway.grace_s for gateway in gateways), "a gateway's streams need the others"


def test_pods_are_restricted(workload: Workload) -> None:
    pod, container = workload.pod, workload.container
    assert pod["automountServiceAccountToken"] is False and pod["enableServiceLinks"] is False
    assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()


def test_only_what_is_scratch_can_be_written(workload: Workload) -> None:
    volumes = {volume["name"]: volume for volume in workload.pod["volumes"]}
    mounts = {mount["name"]: mount for mount in workload.container["volumeMounts"]}
    assert volumes.keys() == mounts.keys()
    for name, mount in mounts.items():
        assert mount.get("readOnly") or volumes[name].get("emptyDir", {}).get("sizeLimit")
    writable = [mount["mountPath"] for mount in mounts.values() if not mount.get("readOnly")]
    assert any(workload.environment["XDG_CACHE_HOME"].startswith(f"{path}/") for path in writable)


def test_secrets_are_for_the_services_user_alone(overlay: Overlay) -> None:
    for workload in overlay.workloads:
        context = workload.pod["securityContext"]
        assert context["fsGroup"] == context["runAsGroup"]
        for volume in workload.pod["volumes"]:
            mode = volume.get("secret", {"defaultMode": stat.S_IRGRP})["defaultMode"]
            assert mode & stat.S_IRGRP and not mode & (stat.S_IRWXO | stat.S_IWGRP), volume["name"]


SECURED = ["prod", "prod-hpa", "vllm-hosts", "vllm-tp"]


def certificate_of(workload: Workload, *files: str) -> Manifest:
    """What fills the secret that these files are of."""
    (mount,) = [one for one in workload.container["volumeMounts"] if one["name"] == "tls"]
    (volume,) = [one for one in workload.pod["volumes"] if one["name"] == "tls"]
    assert files == tuple(f"{mount['mountPath']}/{name}" for name in ("tls.crt", "tls.key", "ca.crt"))
    (found,) = [
        one for one in workload.overlay.of("Certificate") if one["spec"]["secretName"] == volume["secret"]["secretName"]
    ]
    return found


@pytest.mark.parametrize("name", SECURED)
def test_services_know_one_another_by_certificates(name: str) -> None:
    overlay = Overlay(name)
    workloads = {workload.role: workload for workload in overlay.workloads}
    gateway = settings_of(workloads["gateway"])
    shown = certificate_of(workloads["gateway"], *map(str, (gateway.peer_cert, gateway.peer_key, gateway.peer_ca)))
    assert shown["spec"]["usages"] == ["client auth", "server auth"]
    for role, expected in (("target", gateway.target_tls_name), ("draft", gateway.draft_tls_name)):
        settings = settings_of(workloads[role])
        files = map(str, (settings.tls_cert, settings.tls_key, settings.tls_client_ca))
        own = certificate_of(workloads[role], *files)
        assert own["spec"]["usages"] == ["server auth"] and own["spec"]["dnsNames"] == [expected]
        assert settings.tls_client_name == shown["spec"]["dnsNames"]
        assert own["spec"]["issuerRef"] == shown["spec"]["issuerRef"]
    (issuer,) = [one for one in overlay.of("Issuer") if one["metadata"]["name"] == shown["spec"]["issuerRef"]["name"]]
    (authority,) = [one for one in overlay.of("Certificate") if one["spec"].get("isCA")]
    assert authority["spec"]["secretName"] == issuer["spec"]["ca"]["secretName"]


@pytest.mark.parametrize("name", SECURED)
def test_routes_reach_gateways_by_tls(name: str) -> None:
    """A policy for the Service that every route names; its authority signed what the gateways show there."""
    overlay = Overlay(name)
    (workload,) = [one for one in overlay.workloads if one.role == "gateway"]
    settings = settings_of(workload)
    shown = certificate_of(workload, str(settings.tls_cert), str(settings.tls_key), "/tls/ca.crt")
    (policy,) = overlay.of("BackendTLSPolicy")
    (target,), validation = policy["spec"]["targetRefs"], policy["spec"]["validation"]
    backends = [
        backend["name"]
        for kind in ("GRPCRoute", "HTTPRoute")
        for route in overlay.of(kind)
        for rule in route["spec"]["rules"]
        for backend in rule["backendRefs"]
    ]
    service = overlay.named("Service", target["name"])
    assert {*backends} == {target["name"]} and overlay.selected({"matchLabels": service["spec"]["selector"]}) == [
        workload
    ]
    assert validation["hostname"] in shown["spec"]["dnsNames"]
    assert [one["name"] for one in validation["caCertificateRefs"]] == [shown["spec"]["secretName"]]
    assert not [port for port in service["spec"]["ports"] if "h2c" in port.get("appProtocol", "")], "that is plaintext"


def test_who_comes_by_a_public_route_shows_a_token() -> None:
    """Of a Secret that the overlay does not hold, and that a pod waits for."""
    routed = [overlay for overlay in map(Overlay, OVERLAYS) if overlay.of("HTTPRoute")]
    assert routed
    for overlay in routed:
        (workload,) = [one for one in overlay.workloads if one.role == "gateway"]
        path = settings_of(workload).tokens
        assert path is not None, overlay
        (mount,) = [one for one in workload.container["volumeMounts"] if one["mountPath"] == str(path.parent)]
        (volume,) = [one for one in workload.pod["volumes"] if one["name"] == mount["name"]]
        assert not volume["secret"].get("optional") and not overlay.of("Secret"), overlay


@pytest.mark.parametrize("name", SECURED)
def test_clients_come_to_know_gateways_that_were_added(name: str) -> None:
    (workload,) = [one for one in Overlay(name).workloads if one.role == "gateway"]
    assert 60 <= settings_of(workload).max_connection_age_s <= 3600


def test_plaintext_is_said_aloud_and_only_where_it_is_meant(workload: Workload) -> None:
    assert settings_of(workload).insecure == (workload.overlay.name not in SECURED)


def test_models_are_there(workload: Workload) -> None:
    settings = settings_of(workload)
    (volume,) = [volume for volume in workload.pod["volumes"] if volume["name"] == "models"]
    (mount,) = [mount for mount in workload.container["volumeMounts"] if mount["name"] == "models"]
    folders = [settings.model] if workload.role != "gateway" else []
    if workload.role == "gateway":
        folders = [folder for name in settings.models for folder in settings.of_model(name).tokenizer]
    assert (
        all(str(folder).startswith(f"{mount['mountPath']}/") for folder in folders)
        and workload.environment["HF_HUB_OFFLINE"] == "1"
    )
    if "persistentVolumeClaim" in volume:
        workload.overlay.named("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"])
    else:
        assert volume["image"]["reference"].startswith("outrider-models:")


def test_resources_are_requested_as_they_are_limited(workload: Workload) -> None:
    resources = workload.container["resources"]
    assert resources["requests"] == resources["limits"] and {"cpu", "memory"} <= resources["limits"].keys()
    uses_gpu = getattr(settings_of(workload), "device", "cpu") == "cuda"
    assert ("nvidia.com/gpu" in resources["limits"]) == uses_gpu
    tolerated = {toleration["key"] for toleration in workload.pod.get("tolerations", ())}
    assert not uses_gpu or tolerated == {"nvidia.com/gpu"}


@pytest.mark.parametrize("name", ["vllm-tp", "vllm-hosts"])
def test_vllm_has_the_gpus_that_share_the_model(name: str) -> None:
    targets = [workload for workload in Overlay(name).workloads if workload.role.startswith("target")]
    gpus = {int(workload.container["resources"]["limits"]["nvidia.com/gpu"]) for workload in targets}
    settings = load_settings(TargetSettings, environ=targets[0].environment)
    assert settings.engine == "vllm" and gpus == {
        settings.tensor_parallel_size // settings.engine_args.get("nnodes", 1)
    }
    for workload in targets:
        shared = {volume["name"]: volume.get("emptyDir", {}).get("medium") for volume in workload.pod["volumes"]}
        (mount,) = [one for one in workload.container["volumeMounts"] if one["mountPath"] == "/dev/shm"]
        assert shared[mount["name"]] == "Memory" and workload.environment["HOME"] == "/tmp"


def test_the_nodes_of_a_target_differ_by_their_rank() -> None:
    leader, worker = hosts_of(Overlay("vllm-hosts"))
    first, further = (load_settings(TargetSettings, environ=one.environment) for one in (leader, worker))
    assert (leader.role, first.node_rank) == ("target", 0) and (worker.role, further.node_rank) == ("target-worker", 1)
    address = {"nnodes": 2, "master_addr": LEADER}
    assert first.engine_args == address | {"node_rank": 0}
    assert further == first.model_copy(update={"engine_args": address | {"node_rank": 1}})
    served = {"ports", "lifecycle", "startupProbe", "readinessProbe", "livenessProbe"}
    assert leader.container.keys() - worker.container.keys() == served
    assert {name: value for name, value in leader.container.items() if name not in served} == worker.container


def test_a_set_of_hosts_leaves_names_and_scaling_whole() -> None:
    overlay, (leader, worker) = Overlay("vllm-hosts"), hosts_of(Overlay("vllm-hosts"))
    name = leader.manifest["metadata"]["name"]
    assert not [service for service in overlay.of("Service") if service["metadata"]["name"] == name], "it makes its own"
    assert LEADER.startswith(f"{name}-0.{name}.")
    scaled = overlay.named("ScaledObject", "outrider-target")["spec"]["scaleTargetRef"]
    assert scaled == {"apiVersion": leader.manifest["apiVersion"], "kind": "LeaderWorkerSet", "name": name}
    assert not [one for one in overlay.workloads if one.role == "target" and one.manifest["kind"] == "Deployment"]
    assert worker.pod["terminationGracePeriodSeconds"] == leader.pod["terminationGracePeriodSeconds"], "it ends last"


def test_two_models_are_two_targets_before_one_pool_of_drafts() -> None:
    """Each with its weights and tokenizer, and by settings that differ in these alone."""
    workloads = {workload.role: workload for workload in Overlay("two-models").workloads}
    gateway = settings_of(workloads["gateway"])
    default, other = map(gateway.of_model, gateway.models)
    assert gateway.models == ["", "other"] and default.draft == other.draft and default.target != other.target
    first, second = (
        load_settings(TargetSettings, environ=workloads[role].environment) for role in ("target", "target-other")
    )
    assert [first.model, second.model] == [default.tokenizer[0], other.tokenizer[0]]
    assert second.model_copy(update={"model": first.model}) == first


@pytest.mark.parametrize("name", ["prod", "prod-hpa"])
def test_draft_and_target_have_pools_of_their_own(name: str) -> None:
    pools = {workload.role: workload.pod.get("nodeSelector") for workload in Overlay(name).workloads}
    assert pools["target"] and pools["draft"] and pools["target"] != pools["draft"] and pools["gateway"] is None


def test_a_pod_counts_once(workload: Workload) -> None:
    """By its labels it belongs to one Deployment, one Service and one disruption budget."""
    overlay, spec = workload.overlay, workload.manifest["spec"]
    if "selector" in spec:  # a LeaderWorkerSet knows its pods by labels of its own
        assert [found.role for found in overlay.selected(spec["selector"])] == [workload.role]
    for kind in ("Service", "PodDisruptionBudget"):
        manifest = overlay.named(kind, f"outrider-{workload.role}")
        selector = manifest["spec"]["selector"]
        found = overlay.selected({"matchLabels": selector} if kind == "Service" else selector)
        assert [other.role for other in found] == [workload.role]
    served = {other.role for other in overlay.workloads} - {"target-worker"}
    assert len(overlay.of("Service")) == len(overlay.of("PodDisruptionBudget")) == len(served)
    assert overlay.named("PodDisruptionBudget", f"outrider-{workload.role}")["spec"]["maxUnavailable"] == 1
    (constraint,) = workload.pod["topologySpreadConstraints"]
    assert [found.role for found in overlay.selected(constraint["labelSelector"])] == [workload.role]


def test_services_lead_to_ports_and_gateways_to_services(workload: Workload) -> None:
    service = workload.overlay.named("Service", f"outrider-{workload.role}")["spec"]
    for port in service["ports"]:
        assert workload.port(port["targetPort"]) == port["port"]
    assert (service.get("clusterIP") == "None") == (workload.role != "gateway"), "gateways choose among pods"
    if workload.role == "gateway":
        settings = settings_of(workload)
        for address in addresses_of(settings):
            name, _, number = address.removeprefix("dns:///").partition(":")
            ports = workload.overlay.named("Service", name)["spec"]["ports"]
            assert address.startswith("dns:///") and int(number) in {port["port"] for port in ports}


def test_everything_has_the_overlays_namespace_and_the_projects_label(overlay: Overlay) -> None:
    (namespace,) = overlay.of("Namespace")
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    for manifest in overlay.manifests:
        if manifest["kind"] != "Namespace":
            assert manifest["metadata"]["namespace"] == namespace["metadata"]["name"], manifest["metadata"]["name"]
    assert all(workload.labels["app.kubernetes.io/part-of"] == "outrider" for workload in overlay.workloads)


def test_images_are_of_this_version(workload: Workload) -> None:
    name, _, tag = workload.container["image"].partition(":")
    engine = getattr(settings_of(workload), "engine", "outrider")
    assert name == f"outrider-{workload.role}{'-vllm' if engine == 'vllm' else ''}"
    assert tag == ("dev" if workload.overlay.name == "cpu-dev" else PROJECT["version"])


def peers_of(overlay: Overlay, peers: list[Manifest]) -> Iterator[str]:
    """Roles of this overlay, the name of pods that are not of it, or the namespace that a peer is in."""
    for peer in peers:
        if "namespaceSelector" in peer:
            yield peer["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"]
        else:
            roles = [workload.role for workload in overlay.selected(peer["podSelector"])]
            yield from roles or [peer["podSelector"]["matchLabels"]["app.kubernetes.io/name"]]


def hosts_of(overlay: Overlay) -> list[Workload]:
    """What shares a model over several nodes."""
    return [workload for workload in overlay.workloads if workload.manifest["kind"] == "LeaderWorkerSet"]


def allowed_edges(overlay: Overlay, direction: str) -> set[Edge]:
    """Of all policies; "ingress" or "egress"."""
    side = "from" if direction == "ingress" else "to"
    edges = set()
    for policy in overlay.of("NetworkPolicy"):
        for workload in overlay.selected(policy["spec"]["podSelector"]):
            for rule in policy["spec"].get(direction, ()):
                for peer in peers_of(overlay, rule[side]) if side in rule else (ANYONE,):
                    for port in rule.get("ports", ({"port": ANY_PORT},)):
                        if port["port"] == ANY_PORT:
                            edges.add((peer, workload.role, ANY_PORT))
                        elif port["port"] == "metrics" and workload.role == "target-worker":
                            continue  # it has none
                        elif direction == "ingress":
                            edges.add((peer, workload.role, workload.port(port["port"])))
                        else:
                            edges.add((workload.role, peer, int(port["port"])))
    return edges


def used_edges(overlay: Overlay) -> set[Edge]:
    """What the settings, the services and the scrapes of an overlay need."""
    edges: set[Edge] = set()
    for workload in overlay.workloads:
        endpoint = workload.environment.get("OTEL_EXPORTER_OTLP_ENDPOINT", "")
        if endpoint:
            namespace, port = re.fullmatch(r"http://[\w-]+\.([\w-]+)\.svc:(\d+)", endpoint).groups()  # type: ignore[union-attr]
            edges |= {(workload.role, namespace, int(port)), (workload.role, DNS, 53)}
        if workload.role == "gateway":
            settings = settings_of(workload)
            for address in addresses_of(settings):
                name = re.fullmatch(r"dns:///outrider-([\w-]+):\d+", address)
                assert name is not None
                edges |= {("gateway", name[1], port_of(address)), ("gateway", DNS, 53)}
            public = overlay.named("Service", "outrider-gateway")["spec"]["ports"]
            edges |= {(ANYONE, "gateway", port["port"]) for port in public}
        for pool in overlay.of("InferencePool") if workload.role == "gateway" else ():
            edges.add((pool["spec"]["endpointPickerRef"]["name"], "gateway", workload.port("metrics")))
    for one, other in product(hosts_of(overlay), repeat=2):  # vLLM's queues and NCCL choose their ports
        edges |= {(one.role, other.role, ANY_PORT), (one.role, DNS, 53)}
    for monitor in overlay.of("PodMonitor"):
        for workload in overlay.selected(monitor["spec"]["selector"]):
            if workload.role == "target-worker":
                continue
            for endpoint in monitor["spec"]["podMetricsEndpoints"]:
                edges.add(("monitoring", workload.role, workload.port(endpoint["port"])))
    return edges


def test_allowed_edges_are_those_that_are_used(overlay: Overlay) -> None:
    denied = overlay.named("NetworkPolicy", "outrider-default-deny")["spec"]
    assert len(overlay.selected(denied["podSelector"])) == len(overlay.workloads)
    assert denied["policyTypes"] == ["Ingress", "Egress"] and not {"ingress", "egress"} & denied.keys()
    used, roles = used_edges(overlay), {workload.role for workload in overlay.workloads}
    assert allowed_edges(overlay, "ingress") == {edge for edge in used if edge[1] in roles}
    assert allowed_edges(overlay, "egress") == {edge for edge in used if edge[0] in roles}
    assert {("gateway", "target", 50051), ("gateway", "draft", 50052)} <= used


def test_routes_lead_to_the_gateway() -> None:
    overlay = Overlay("prod")
    ports = {port["port"] for port in overlay.named("Service", "outrider-gateway")["spec"]["ports"]}
    (grpc,), (http,) = overlay.of("GRPCRoute"), overlay.of("HTTPRoute")
    backends = [backend for route in (grpc, http) for rule in route["spec"]["rules"] for backend in rule["backendRefs"]]
    assert {backend["name"] for backend in backends} == {"outrider-gateway"}
    assert {backend["port"] for backend in backends} == ports
    (match,) = grpc["spec"]["rules"][0]["matches"]
    assert match["method"]["service"] == SERVICES["gateway"]


def queries_of(overlay: Overlay) -> dict[str, tuple[str, str, float]]:
    """Each query that scales something, in one line: the Deployment, the type and the threshold."""
    found = {}
    for scaled in overlay.of("ScaledObject"):
        for trigger in scaled["spec"]["triggers"]:
            if trigger["type"] == "prometheus":
                query, threshold = trigger["metadata"]["query"], float(trigger["metadata"]["threshold"])
                found[query] = scaled["spec"]["scaleTargetRef"]["name"], trigger["metricType"], threshold
    for scaler in overlay.of("HorizontalPodAutoscaler"):
        rules = yaml.safe_load(overlay.named("ConfigMap", "outrider-adapter-rules")["data"]["config.yaml"])
        queries = {rule["name"]["as"]: rule["metricsQuery"] for rule in rules["externalRules"]}
        for metric in scaler["spec"]["metrics"]:
            if metric["type"] == "External":
                target = dict(metric["external"]["target"])
                kind = target.pop("type")
                (bound,) = map(str, target.values())
                amount = float(bound[:-1]) / 1000 if bound.endswith("m") else float(bound)
                found[queries[metric["external"]["metric"]["name"]]] = (
                    scaler["spec"]["scaleTargetRef"]["name"],
                    kind,
                    amount,
                )
    return found


@pytest.mark.parametrize("name", ["prod", "prod-hpa"])
def test_what_scales_is_counted_by_the_code_in_this_namespace(name: str) -> None:
    overlay, known = Overlay(name), sample_names()
    queries = queries_of(overlay)
    assert len(queries) == 5
    assert {deployment for deployment, _, _ in queries.values()} == {f"outrider-{role}" for role in SETTINGS}
    for query in queries:
        named = re.findall(r"\b(outrider_\w+)\{", query)
        assert named and set(named) <= known, "a series that no service has"
        assert query.count('namespace="outrider"') == len(named)
    assert overlay.of("Namespace")[0]["metadata"]["name"] == "outrider"


def test_both_ways_to_scale_ask_the_same() -> None:
    keda, plain = Overlay("prod"), Overlay("prod-hpa")
    assert queries_of(keda) == queries_of(plain)
    bounds = {
        scaled["metadata"]["name"]: (scaled["spec"]["minReplicaCount"], scaled["spec"]["maxReplicaCount"])
        for scaled in keda.of("ScaledObject")
    }
    assert bounds == {
        scaler["metadata"]["name"]: (scaler["spec"]["minReplicas"], scaler["spec"]["maxReplicas"])
        for scaler in plain.of("HorizontalPodAutoscaler")
    }


def test_what_is_scaled_states_no_number_of_replicas(workload: Workload) -> None:
    assert "replicas" not in workload.manifest["spec"], "an update would undo what the autoscaler did"
