"""k8s/dashboards: they are Grafana's, every series that they name exists; and a real Prometheus that scrapes the three
services, and evaluates k8s/rules, has data for every panel, every recording rule and every alert."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from support.environment import START_S
from support.metrics import model_series, sample_names
from support.prometheus import DASHBOARDS, Prometheus, names_in, panels, program, rules, scraping, without_comparison
from support.services import COMMON, wait_for_draft

from outrider.cli.local_services import Services
from outrider.cli.serve import METRICS
from outrider.client import SyncClient
from outrider.pairs import pair_path
from outrider.rpc.words.structured import StructuredOutput

PROMPTS = (
    "def parse(path):\n    return",
    "import os\n\nfor name in os.listdir(",
    "class Point:\n    def __init__(self",
)
CONSTRAINTS = (StructuredOutput(regex='"[a-z]{1,8}"'), None, None)
RECORDED = {rule["record"] for rule in rules() if "record" in rule}
OF_THE_CLIENT = {"process_cpu_seconds_total", "process_resident_memory_bytes"}  # prometheus_client's own


@pytest.mark.parametrize("path", sorted(DASHBOARDS.glob("*.json")), ids=lambda path: path.stem)
def test_a_dashboard_is_one(path: Path) -> None:
    board = json.loads(path.read_text(encoding="utf-8"))
    assert board["uid"] == f"outrider-{path.stem}" and board["title"].startswith("Outrider: ")
    shown = [panel for panel in board["panels"] if panel["type"] != "row"]
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]]
    assert len(set(places)) == len(places)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in board["panels"])
    for panel in shown:
        assert panel["description"] and panel["targets"], panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}" and panel["fieldConfig"]["defaults"]["unit"]
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
    assert {variable["name"] for variable in board["templating"]["list"]} == {"datasource", "namespace", "served_model"}
    kustomization = yaml.safe_load((DASHBOARDS / "kustomization.yaml").read_text(encoding="utf-8"))
    assert path.name in kustomization["configMapGenerator"][0]["files"]


def test_every_series_that_they_name_exists() -> None:
    named = {name for expression in panels().values() for name in names_in(expression)}
    assert len(named) > 40
    assert named - sample_names() - RECORDED - OF_THE_CLIENT == set()


def test_what_a_gateway_says_of_a_model_is_asked_for_by_model() -> None:
    """In every panel, and in every rule that looks at a gateway; a recording of it keeps the label."""
    of_models = model_series() | {
        rule["record"] for rule in rules() if "record" in rule and "served_model" in rule["expr"]
    }
    for place, expression in panels().items():
        for name, labels in re.findall(r"([\w:]+)\{([^}]*)\}", expression):
            assert (name in of_models) == ("served_model" in labels), f"{place}: {name}"
    by_address = {"OutriderKernelsFallback", "OutriderReplicaDisagrees"}
    for rule in rules():
        if names_in(rule["expr"]) & of_models and rule.get("alert") not in by_address:
            by = re.findall(r"\b(?:by|on) \(([^)]*)\)", rule["expr"])
            assert all("served_model" in labels for labels in by), rule["expr"]


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """It scrapes the embedded pair's services, which answer all the time."""
    program("prometheus")
    pair, folder = pair_path(), tmp_path_factory.mktemp("prometheus")
    flags = [*COMMON, "--metrics", "127.0.0.1:0"]
    with Services() as services:
        draft = services.start("draft", ["draft", *flags, "--threads", "1", "--model", str(pair.draft)])
        target = services.start("target", ["target", *flags, "--threads", "1", "--model", str(pair.target)])
        peers = ["--target", services.wait(target, START_S), "--draft", services.wait(draft, START_S)]
        peers += ["--tokenizer", str(pair.target), "--mode", "sequential", "--draft-trial", "refuse"]
        gateway = services.start("gateway", ["gateway", *flags, *peers])
        address = services.wait(gateway, START_S)
        wait_for_draft(address, START_S, services.check)
        jobs = {service.name: [service.find(METRICS)] for service in (gateway, target, draft)}
        with scraping(jobs, folder, free_port()) as prometheus, asking(address):
            assert prometheus.until("rate(outrider_generation_tokens_total[1m]) > 0"), "nothing is scraped"
            yield prometheus


@pytest.mark.timeout(180)
def test_every_expression_returns_data(prometheus: Prometheus) -> None:
    asked = panels()
    asked |= {rule["record"]: rule["record"] for rule in rules() if "record" in rule}
    asked |= {rule["alert"]: without_comparison(rule["expr"]) for rule in rules() if "alert" in rule}
    without = {place: expression for place, expression in asked.items() if not prometheus.until(expression)}
    assert not without, "\n".join(f"{place}: {expression}" for place, expression in without.items())


def test_nothing_is_wrong_with_the_demo(prometheus: Prometheus) -> None:
    """Each alert's condition, whatever its patience; drafts of the pair are accepted, and no replica is missing."""
    assert not [rule["alert"] for rule in rules() if "alert" in rule and prometheus.query(rule["expr"])]
    assert float(prometheus.query("outrider:acceptance:ratio_rate5m")[0]["value"][1]) > 0.1


@contextmanager
def asking(address: str) -> Iterator[None]:
    """Requests, one after the other, until it is left: the first of every turn under a constraint."""
    enough = threading.Event()

    def ask() -> None:
        with SyncClient(address) as client:
            while not enough.is_set():
                for prompt, constraint in zip(PROMPTS, CONSTRAINTS, strict=True):
                    for _ in client.generate(prompt, max_tokens=32, temperature=0.0, structured_output=constraint):
                        pass

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        enough.set()
        thread.join()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
