"""What Kubernetes is told: the rendered manifests of an overlay, as objects with the questions that tests ask."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

KUBERNETES = Path(__file__).parents[2] / "k8s"
INSTALLED = KUBERNETES.parent / "build/k8s/bin"  # by tests/k8s/kubectl.sh
OVERLAYS = sorted(path.parent.name for path in KUBERNETES.glob("overlays/*/kustomization.yaml"))

LEADER = "outrider-target-hosts-0.outrider-target-hosts.outrider"  # as a LeaderWorkerSet's controller says it

Manifest = dict[str, Any]


@functools.cache
def rendered(name: str) -> str:
    """What Kustomize makes of an overlay. The test fails where nothing renders: it has seen nothing then."""
    kubectl = shutil.which("kubectl", path=os.pathsep.join((str(INSTALLED), os.environ["PATH"])))
    if kubectl is None:
        pytest.fail("no kubectl: tests/k8s/kubectl.sh gets one")
    command = [kubectl, "kustomize", str(KUBERNETES / "overlays" / name)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        pytest.fail(f"{kubectl} (tests/k8s/kubectl.sh gets one that renders): {run.stderr}")
    return run.stdout


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether a selector of labels alone fits; an empty one fits all."""
    assert selector.keys() <= {"matchLabels"}, "the tests know no other selector"
    return all(labels.get(name) == value for name, value in selector.get("matchLabels", {}).items())


@dataclass(frozen=True)
class Workload:
    """Pods of one container: a Deployment's, or the leaders or the workers of a LeaderWorkerSet."""

    manifest: Manifest
    overlay: Overlay
    template: Manifest  # of its pods
    variables: Mapping[str, str] = field(default_factory=dict)  # what the cluster puts before the container's own

    @property
    def role(self) -> str:
        """target, draft or gateway; target-worker, which serves nobody."""
        return str(self.labels["app.kubernetes.io/component"])

    @property
    def labels(self) -> dict[str, str]:
        """Of its pods."""
        return dict(self.template["metadata"]["labels"])

    @property
    def pod(self) -> Manifest:
        """The pods' spec."""
        return dict(self.template["spec"])

    @property
    def container(self) -> Manifest:
        """The only one."""
        (container,) = self.pod["containers"]
        return dict(container)

    @property
    def environment(self) -> dict[str, str]:
        """Every variable, those of config maps too. What the cluster fills in has no value here."""
        found = dict(self.variables)
        for source in self.container.get("envFrom", ()):
            found |= self.overlay.named("ConfigMap", source["configMapRef"]["name"])["data"]
        for entry in self.container["env"]:
            found[entry["name"]] = re.sub(r"\$\((\w+)\)", lambda name: found[name[1]], entry.get("value", ""))
        return found

    def port(self, port: int | str) -> int:
        """The number of a container's port, given by number or name. KeyError for one that it does not have."""
        ports = {entry["name"]: entry["containerPort"] for entry in self.container["ports"]}
        if isinstance(port, str):
            return int(ports[port])
        if port not in ports.values():
            raise KeyError(port)
        return port


class Overlay:
    """An overlay's manifests."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.manifests: list[Manifest] = list(yaml.load_all(rendered(name), yaml.CSafeLoader))

    def of(self, kind: str) -> list[Manifest]:
        """All of a kind."""
        return [manifest for manifest in self.manifests if manifest["kind"] == kind]

    def named(self, kind: str, name: str) -> Manifest:
        """The one of that name."""
        (found,) = [manifest for manifest in self.of(kind) if manifest["metadata"]["name"] == name]
        return found

    @property
    def workloads(self) -> list[Workload]:
        """All Deployments, and of each LeaderWorkerSet its leader and the first of its workers."""
        found = [Workload(manifest, self, manifest["spec"]["template"]) for manifest in self.of("Deployment")]
        for manifest in self.of("LeaderWorkerSet"):
            group = manifest["spec"]["leaderWorkerTemplate"]
            for index, template in enumerate(("leaderTemplate", "workerTemplate")):
                variables = {"LWS_LEADER_ADDRESS": LEADER, "LWS_GROUP_SIZE": str(group["size"])}
                variables["LWS_WORKER_INDEX"] = str(index)
                found.append(Workload(manifest, self, group[template], variables))
        return found

    def selected(self, selector: Mapping[str, Any]) -> list[Workload]:
        """Those of them whose pods a selector fits."""
        return [workload for workload in self.workloads if selects(selector, workload.labels)]
