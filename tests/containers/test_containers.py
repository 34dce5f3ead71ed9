"""The images of k8s/images, built without a network and run as containers and as the pods of an overlay. `make
test-images` installs what that needs (Debian, as root); no other command runs these."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.gateways import until_serving
from support.manifests import Overlay, Workload
from test_layout import REPOSITORY

from outrider.client import Client

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

BUILT = REPOSITORY / "build/images"
SERVICES = {"target": "target_service", "draft": "draft_service", "gateway": "gateway"}
PORTS = {"target": 50051, "draft": 50052, "gateway": 50050}
LIMITS = 'default_ulimits = ["nofile=8192:8192", "nproc=8192:8192"]'  # a machine's own may be under podman's default
BARE = """
import os, shutil
for folder in ("/", "/app", "/usr/lib"):
    try:
        open(f"{folder}/x", "w")
        raise SystemExit(f"{folder} can be written")
    except OSError:
        pass
status = open("/proc/self/status").read().split()
print(os.getuid(), *(status[status.index(name) + 1] for name in ("CapEff:", "NoNewPrivs:")), shutil.which("gcc"))
"""


def podman(*arguments: str, check: bool = True) -> str:
    """What podman prints. The test fails with what it complains of."""
    run = subprocess.run(["podman", *arguments], capture_output=True, text=True, check=False)
    if check and run.returncode:
        pytest.fail(f"podman {' '.join(arguments)}: {run.stderr}")
    return run.stdout


@pytest.fixture(scope="module", autouse=True)
def images(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Every image, in a storage of its own, which stays in build/images for the next time."""
    settings = tmp_path_factory.mktemp("containers")
    (settings / "containers.conf").write_text(f"[containers]\n{LIMITS}\n")
    storage = f'[storage]\ndriver = "vfs"\ngraphroot = "{BUILT}/storage"\nrunroot = "{settings}/run"\n'
    (settings / "storage.conf").write_text(storage)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CONTAINERS_CONF", str(settings / "containers.conf"))
        patch.setenv("CONTAINERS_STORAGE_CONF", str(settings / "storage.conf"))
        patch.setenv("PYTHON", sys.executable)
        subprocess.run([str(Path(__file__).with_name("build.sh")), str(BUILT)], env=os.environ, check=True)
        yield


@contextmanager
def container(service: str, *flags: str) -> Iterator[str]:
    """A service as `docker run` would start it, on the host's loopback; gives the address that it listens on."""
    shut = ("--read-only", "--cap-drop", "all", "--security-opt", "no-new-privileges", "--tmpfs", "/tmp:mode=1777")
    models = ("--mount", "type=image,source=localhost/outrider-models:dev,destination=/models")
    given = ("run", "--detach", "--network", "host", *shut, *models, f"localhost/outrider-{service}:dev")
    name = podman(*given, "--listen", "127.0.0.1:0", "--grace-s", "1", *flags).strip()
    try:
        assert podman("exec", name, "python", "-c", BARE).split() == ["10001", "0" * 16, "1", "None"]
        yield listening(name)
    finally:
        podman("rm", "--force", "--time", "10", name)


def listening(name: str) -> str:
    """The address in a container's first line, once it has printed it."""
    command = ["podman", "logs", "--follow", name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as logs:
        assert logs.stdout is not None
        try:
            line = logs.stdout.readline()
        finally:
            logs.terminate()
    found = re.search(r" listening on (\S+)$", line)
    assert found is not None, podman("logs", name) + line
    return found[1]


async def text_of(client: Client) -> str:
    """A completion by the embedded pair."""
    return "".join(
        [part.text async for part in client.generate("def parse_args(argv):", temperature=0.0, max_tokens=16)]
    )


async def test_three_containers_complete_a_prompt() -> None:
    engine = ("--num-blocks", "64", "--threads", "1")
    with ExitStack() as stack:
        target = stack.enter_context(container("target", "--model", "/models/target", *engine))
        draft = stack.enter_context(container("draft", "--model", "/models/draft", *engine))
        peers = ("--target", target, "--draft", draft, "--tokenizer", "/models/target")
        async with Client(stack.enter_context(container("gateway", *peers))) as client:
            assert await text_of(client)


def pod_of(workload: Workload, models: str) -> dict[str, Any]:
    """A Deployment's pod under its service's name, which podman resolves as a cluster resolves the service's. Its
    models lie where the image that the overlay mounts is mounted on this machine."""
    pod = workload.pod
    (volume,) = [one for one in pod["volumes"] if one["name"] == "models"]
    assert volume["image"]["reference"] == "outrider-models:dev"
    volumes = [one for one in pod["volumes"] if one is not volume]
    volumes.append({"name": "models", "hostPath": {"path": models, "type": "Directory"}})
    container = workload.container | {"image": f"localhost/{workload.container['image']}"}
    name = f"outrider-{workload.role}"
    spec = pod | {"containers": [container], "volumes": volumes}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": workload.labels}, "spec": spec}


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The pods of cpu-dev, all started; the address of each service."""
    models = podman("image", "mount", "localhost/outrider-models:dev").strip()
    workloads = [found for found in Overlay("cpu-dev").workloads if found.role in SERVICES]
    assert {workload.role for workload in workloads} == SERVICES.keys()
    path = tmp_path / "pods.yaml"
    path.write_text(yaml.dump_all([pod_of(workload, models) for workload in workloads]))
    try:
        podman("kube", "play", str(path))
        yield {role: f"{address_of(f'outrider-{role}')}:{port}" for role, port in PORTS.items()}
    finally:
        podman("kube", "down", str(path), check=False)
        podman("image", "unmount", "localhost/outrider-models:dev")


def address_of(pod: str) -> str:
    """A pod's address in the network of all pods."""
    infra = podman("pod", "inspect", pod, "--format", "{{.InfraContainerID}}").strip()
    every = "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}"
    return podman("inspect", infra, "--format", every).strip()


async def test_the_pods_of_cpu_dev_complete_a_prompt(pods: dict[str, str]) -> None:
    await until_serving(f"{address_of('outrider-gateway')}:50060")
    async with Client(pods["gateway"]) as client:
        assert await text_of(client)
    for role in SERVICES:
        seen = podman("exec", f"outrider-{role}-{role}", "python", "-c", BARE).split()
        assert seen == ["10001", "0" * 16, "1", "None"], role
