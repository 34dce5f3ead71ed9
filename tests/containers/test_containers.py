"""The images of k8s/images, built without a network and run as containers and as the pods of an overlay. `make
test-images` installs what that needs (Debian, as root); no other command runs these."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc.aio
import pytest
import yaml
from support.environment import START_S
from support.gateways import SERVING, health
from support.manifests import Overlay, Workload
from test_layout import REPOSITORY

from outrider.client import Client

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

BUILT = REPOSITORY / "build/images"
PORTS = {"target": 50051, "draft": 50052, "gateway": 50050}
CONFIGURATION = """
[containers]
default_ulimits = ["nofile=8192:8192", "nproc=8192:8192"]  # a machine's own may be under podman's default
[engine]
runtime = "runc"
[network]
network_backend = "netavark"  # the other one has no names
"""
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


def driver() -> str:
    """How images are stored: vfs copies each layer whole, and is for kernels that cannot lay one over another."""
    BUILT.mkdir(parents=True, exist_ok=True)
    below = subprocess.check_output(["stat", "--file-system", "--format=%T", str(BUILT)], text=True).strip()
    laid = "\toverlay\n" in Path("/proc/filesystems").read_text() and below != "overlayfs"
    return "overlay" if laid else "vfs"


@pytest.fixture(scope="module", autouse=True)
def images() -> Iterator[None]:
    """Every image, in a storage of its own, which stays in build/images for the next time."""
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as name:
        settings = Path(name)
        (settings / "containers.conf").write_text(CONFIGURATION)
        storage = f'[storage]\ndriver = "{driver()}"\ngraphroot = "{BUILT}/storage"\nrunroot = "/run/outrider-images"\n'
        (settings / "storage.conf").write_text(storage)
        patch.setenv("CONTAINERS_CONF", str(settings / "containers.conf"))
        patch.setenv("CONTAINERS_STORAGE_CONF", str(settings / "storage.conf"))
        patch.setenv("PYTHON", sys.executable)
        subprocess.run([str(Path(__file__).with_name("build.sh")), str(BUILT)], env=os.environ, check=True)
        yield


@contextmanager
def container(image: str, *flags: str) -> Iterator[str]:
    """A service as `docker run` would start it, on the host's loopback; gives the address that it listens on."""
    shut = ("--read-only", "--cap-drop", "all", "--security-opt", "no-new-privileges", "--tmpfs", "/tmp:mode=1777")
    models = ("--mount", "type=image,source=localhost/outrider-models:dev,destination=/models")
    home = ("--env", "HOME=/tmp") if image == "target-vllm" else ()  # as the overlays with vLLM say it
    given = ("run", "--detach", "--network", "host", *shut, *models, *home, f"localhost/outrider-{image}:dev")
    name = podman(*given, "--listen", "127.0.0.1:0", "--grace-s", "1", *flags).strip()
    try:
        *user, compiler = podman("exec", name, "python", "-c", BARE).split()
        assert user == ["10001", "0" * 16, "1"] and (compiler == "None") == (image != "target-vllm")
        yield listening(name)
    finally:
        podman("rm", "--force", "--time", "10", name)


def listening(name: str) -> str:
    """The address that a container says it listens on, once it has; vLLM has other lines before it."""
    command = ["podman", "logs", "--follow", name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as logs:
        assert logs.stdout is not None
        try:
            for line in logs.stdout:
                if found := re.search(r"^\w+ listening on (\S+)$", line):
                    return found[1]
        finally:
            logs.terminate()
    pytest.fail(f"it has ended: {podman('logs', name)}")


async def text_of(client: Client) -> str:
    """A completion by the embedded pair."""
    return "".join(
        [part.text async for part in client.generate("def parse_args(argv):", temperature=0.0, max_tokens=16)]
    )


OURS = ("--num-blocks", "64", "--threads", "1")
VLLMS = ("--engine", "vllm", "--num-blocks", "24", "--max-model-len", "256", "--engine-args", '{"block_size": 32}')
ENGINES = {"target": OURS, "target-vllm": VLLMS}  # images of targets, and their flags


@pytest.mark.parametrize("engine", ENGINES)
async def test_three_containers_complete_a_prompt(engine: str) -> None:
    with ExitStack() as stack:
        target = stack.enter_context(container(engine, "--model", "/models/target", *ENGINES[engine]))
        draft = stack.enter_context(container("draft", "--model", "/models/draft", *OURS))
        peers = ("--target", target, "--draft", draft, "--tokenizer", "/models/target")
        async with Client(stack.enter_context(container("gateway", *peers))) as client:
            assert await text_of(client)


def pod_of(workload: Workload, models: str) -> dict[str, Any]:
    """A Deployment's pod under its service's name, which podman resolves as a cluster resolves the service's. Its
    models lie where the image that the overlay mounts is mounted on this machine."""
    pod, container = workload.pod, workload.container
    name = f"outrider-{workload.role}"

    def of_pod(one: dict[str, Any]) -> dict[str, Any]:
        return one | {"name": f"{name}-{one['name']}"}  # podman has one volume of a name, for all pods

    (volume,) = [one for one in pod["volumes"] if one["name"] == "models"]
    assert volume["image"]["reference"] == "outrider-models:dev"
    mounted = {"name": "models", "hostPath": {"path": models, "type": "Directory"}}
    volumes = [mounted if one is volume else one for one in pod["volumes"]]
    container["image"] = f"localhost/{container['image']}"
    container["volumeMounts"] = list(map(of_pod, container["volumeMounts"]))
    del container["ports"]  # podman would publish them on this machine, where every pod's health has the same
    spec = pod | {"containers": [container], "volumes": list(map(of_pod, volumes))}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": workload.labels}, "spec": spec}


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The pods of cpu-dev, all started; the address of each service."""
    models = podman("image", "mount", "localhost/outrider-models:dev").strip()
    workloads = [found for found in Overlay("cpu-dev").workloads if found.role in PORTS]
    assert {workload.role for workload in workloads} == PORTS.keys()
    path = tmp_path / "pods.yaml"
    path.write_text(yaml.dump_all([pod_of(workload, models) for workload in workloads]))
    try:
        podman("kube", "play", "--replace", str(path))
        yield {role: f"{address_of(f'outrider-{role}')}:{port}" for role, port in PORTS.items()}
    finally:
        podman("kube", "down", str(path), check=False)
        podman("image", "unmount", "localhost/outrider-models:dev")


def address_of(pod: str) -> str:
    """A pod's address in the network of all pods."""
    infra = podman("pod", "inspect", pod, "--format", "{{.InfraContainerID}}").strip()
    every = "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}"
    return podman("inspect", infra, "--format", every).strip()


async def until_ready(address: str) -> None:
    """A gateway's readiness probe, which podman does not ask."""
    async with asyncio.timeout(START_S):
        while True:
            with suppress(grpc.aio.AioRpcError):  # while nothing listens yet
                if await health(address) == SERVING:
                    return
            await asyncio.sleep(0.2)


async def test_the_pods_of_cpu_dev_complete_a_prompt(pods: dict[str, str]) -> None:
    await until_ready(f"{address_of('outrider-gateway')}:50060")
    async with Client(pods["gateway"]) as client:
        assert await text_of(client)
    for role in PORTS:
        seen = podman("exec", f"outrider-{role}-{role}", "python", "-c", BARE).split()
        assert seen == ["10001", "0" * 16, "1", "None"], role
