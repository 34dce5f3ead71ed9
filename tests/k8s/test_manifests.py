"""The manifests of k8s/: valid by the schemas of three versions of Kubernetes and of the
custom resources. No control plane is asked: it would also run its admission and its controllers."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
from support.manifests import KUBERNETES, OVERLAYS, Manifest, Overlay, rendered

VERSIONS = ("1.32", "1.34", "1.37")
CUSTOM = ("keda.sh/", "monitoring.coreos.com/", "gateway.networking.k8s.io/", "cert-manager.io/")
LEADER_WORKER_SET, INFERENCE = "leaderworkerset.x-k8s.io/", "inference.networking.k8s.io/"
MODULES = KUBERNETES.parent / "build/k8s/node_modules"


def is_custom(manifest: Manifest) -> bool:
    return bool(manifest["apiVersion"].startswith(CUSTOM))


def native_parts(manifest: Manifest) -> list[Manifest]:
    """What of a manifest Kubernetes' own schemas describe: all of it, the pods of a LeaderWorkerSet, or nothing."""
    if manifest["apiVersion"].startswith(LEADER_WORKER_SET):
        group, head = manifest["spec"]["leaderWorkerTemplate"], {"apiVersion": "v1", "kind": "PodTemplate"}
        return [head | {"template": group[name]} for name in ("leaderTemplate", "workerTemplate")]
    return [] if is_custom(manifest) or manifest["apiVersion"].startswith(INFERENCE) else [manifest]


@pytest.mark.parametrize(("kubectl", "said"), [(None, "no kubectl: tests/k8s/kubectl"), ("/bin/false", "/bin/false")])
def test_where_nothing_renders_a_test_fails(monkeypatch: pytest.MonkeyPatch, kubectl: str | None, said: str) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_, **__: kubectl)
    with pytest.raises(pytest.fail.Exception, match=said):
        rendered.__wrapped__("prod")


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_knows_every_field(version: str) -> None:
    everything = [one for name in OVERLAYS for manifest in Overlay(name).manifests for one in native_parts(manifest)]
    for manifest in {json.dumps(manifest): manifest for manifest in everything}.values():  # overlays share most
        kubernetes_validate.validate(manifest, version, strict=True)


def test_a_wrong_field_is_found() -> None:
    manifest = copy.deepcopy(Overlay("prod").workloads[0].manifest)
    manifest["spec"]["template"]["spec"]["containers"][0]["livenessProbe"]["periodSecond"] = 1
    with pytest.raises(kubernetes_validate.ValidationError, match="periodSecond"):
        kubernetes_validate.validate(manifest, VERSIONS[0], strict=True)


def test_a_leader_worker_set_fits_its_schema() -> None:
    schema = json.loads(Path(__file__).with_name("leaderworkerset.json").read_text(encoding="utf-8"))
    (manifest,) = Overlay("vllm-hosts").of("LeaderWorkerSet")
    jsonschema.validate(manifest, schema)
    for path in (("leaderWorkerTemplate", "Size"), ("startupPolicy",), ("rolloutStrategy", "maxSurge")):
        wrong = copy.deepcopy(manifest)
        place = wrong["spec"] if len(path) == 1 else wrong["spec"][path[0]]
        place[path[-1]] = "Leader"
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)
    del manifest["spec"]["leaderWorkerTemplate"]["workerTemplate"]
    with pytest.raises(jsonschema.ValidationError, match="workerTemplate"):
        jsonschema.validate(manifest, schema)


def test_an_inference_pool_fits_its_schema() -> None:
    schema = json.loads(Path(__file__).with_name("inferencepool.json").read_text(encoding="utf-8"))
    (manifest,) = Overlay("llm-d").of("InferencePool")
    jsonschema.validate(manifest, schema)
    wrongs: tuple[tuple[str, object], ...] = (
        ("selector", {"app.kubernetes.io/name": "outrider"}),  # without matchLabels, as before v1
        ("targetPortNumber", 8000),
        ("targetPorts", [8000]),
        ("targetPorts", []),
        ("endpointPickerRef", {"name": "outrider-epp"}),  # a Service without its port
        ("extensionRef", {"name": "outrider-epp"}),
    )
    for name, value in wrongs:
        wrong = copy.deepcopy(manifest)
        wrong["spec"][name] = value
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)


def test_a_wrong_field_of_a_leaders_pod_is_found() -> None:
    (manifest,) = copy.deepcopy(Overlay("vllm-hosts").of("LeaderWorkerSet"))
    leader, _ = native_parts(manifest)
    leader["template"]["spec"]["containers"][0]["volumeMount"] = []
    with pytest.raises(kubernetes_validate.ValidationError, match="volumeMount"):
        kubernetes_validate.validate(leader, VERSIONS[0], strict=True)


@pytest.fixture(scope="module")
def schemas(prove: bool) -> Path:
    """Of the custom resources; make test-k8s installs them."""
    if not MODULES.is_dir() and not prove:
        pytest.skip("tests/k8s/install.sh has not run")
    return MODULES


def faults(schemas: Path, manifests: list[Manifest]) -> list[str]:
    command = ["node", str(Path(__file__).with_name("crds.mjs")), str(schemas)]
    run = subprocess.run(command, input=json.dumps(manifests), capture_output=True, text=True, check=True)
    return run.stdout.splitlines()


def test_custom_resources_fit_their_schemas(schemas: Path) -> None:
    custom = [manifest for name in OVERLAYS for manifest in Overlay(name).manifests if is_custom(manifest)]
    routes = {"GRPCRoute", "HTTPRoute", "BackendTLSPolicy"}
    assert {"ScaledObject", "PodMonitor", "PrometheusRule", *routes, "Certificate", "Issuer"} <= {
        manifest["kind"] for manifest in custom
    }
    assert faults(schemas, custom) == []


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("ScaledObject", ("spec", "maxReplicaCount"), "eight"),
        ("ScaledObject", ("spec", "scaleTargetRef"), None),
        ("PodMonitor", ("spec", "selector"), None),
        ("GRPCRoute", ("spec", "rules"), "all"),
        ("Certificate", ("spec", "issuerRef"), None),
        ("BackendTLSPolicy", ("spec", "validation", "hostname"), None),
    ],
)
def test_a_wrong_custom_resource_is_found(schemas: Path, kind: str, path: tuple[str, ...], value: str | None) -> None:
    manifest = copy.deepcopy(Overlay("prod").of(kind)[0])
    *parents, last = path
    place = manifest
    for parent in parents:
        place = place[parent]
    if value is None:
        del place[last]
    else:
        place[last] = value
    (fault,) = faults(schemas, [manifest])
    assert fault.startswith(f"{kind} {manifest['metadata']['name']}: ") and last in fault
