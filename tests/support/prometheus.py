"""Expressions of Prometheus as k8s/ has them, and a Prometheus of this machine that answers them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.environment import START_S

REPOSITORY = Path(__file__).parents[2]
RULES, DASHBOARDS = REPOSITORY / "k8s/rules", REPOSITORY / "k8s/dashboards"


def rules() -> list[dict[str, Any]]:
    """All of k8s/rules, as Prometheus takes them."""
    files = [yaml.safe_load((RULES / name).read_text(encoding="utf-8")) for name in ("recording.yaml", "alerts.yaml")]
    return [rule for file in files for group in file["spec"]["groups"] for rule in group["rules"]]


def write_rules(path: Path) -> Path:
    """The rules in a file of Prometheus' own; without annotations, whose texts no test repeats."""
    plain = [{name: value for name, value in rule.items() if name != "annotations"} for rule in rules()]
    path.write_text(yaml.safe_dump({"groups": [{"name": "outrider", "interval": "1s", "rules": plain}]}))
    return path


def panels() -> dict[str, str]:
    """The expression of every target of every panel, by where it stands, as Grafana would send it."""
    found = {}
    for path in sorted(DASHBOARDS.glob("*.json")):
        for panel in json.loads(path.read_text(encoding="utf-8"))["panels"]:
            for target in panel.get("targets", ()):
                expression = re.sub(
                    r"\$(namespace|served_model)\b", ".*", target["expr"].replace("$__rate_interval", "1m")
                )
                found[f"{path.stem}: {panel['title']}, {target['legendFormat']}"] = expression
    return found


def without_comparison(expression: str) -> str:
    """An alert's expression that has a value whether it fires or not: a difference in place of each comparison."""
    return re.sub(r" (<|>|==) ", " - ", expression)


def names_in(expression: str) -> set[str]:
    """The series that an expression names."""
    bare = re.sub(r"\{[^}]*\}|\"[^\"]*\"", "", expression)
    return set(re.findall(r"\b(?:outrider|process|vllm)[\w:]*", bare))


def program(name: str) -> str:
    """`prometheus` or `promtool`, of the system or as tests/k8s/prometheus.sh has put it."""
    found = shutil.which(name, path=os.pathsep.join((os.environ["PATH"], str(REPOSITORY / "build/k8s/usr/bin"))))
    if found is None:
        pytest.skip(f"no {name}: tests/k8s/prometheus.sh gets it")
    return found


class Prometheus:
    """A running one."""

    def __init__(self, url: str) -> None:
        self._url = url

    def query(self, expression: str) -> list[Any]:
        """What an expression is now: a sample a series."""
        asked = urllib.parse.urlencode({"query": expression})
        with urllib.request.urlopen(f"{self._url}/api/v1/query?{asked}", timeout=10) as answer:
            found: list[Any] = json.load(answer)["data"]["result"]
        return found

    def until(self, expression: str, timeout_s: float = 20.0) -> list[Any]:
        """Waits for data; what there is then, if nothing: nothing."""
        end = time.monotonic() + timeout_s
        while not (found := self.query(expression)) and time.monotonic() < end:
            time.sleep(0.25)
        return found


@contextmanager
def scraping(jobs: Mapping[str, Sequence[str]], folder: Path, port: int) -> Iterator[Prometheus]:
    """A Prometheus that scrapes addresses by job, every second, and evaluates the rules as often."""
    write_rules(folder / "rules.yaml")
    scrapes = [{"job_name": job, "static_configs": [{"targets": list(found)}]} for job, found in jobs.items()]
    every = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config = {"global": every, "rule_files": ["rules.yaml"], "scrape_configs": scrapes}
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{port}"
    command = [program("prometheus"), f"--config.file={folder}/prometheus.yaml", f"--web.listen-address={address}"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([*command, f"--storage.tsdb.path={folder}/data"], stdout=log, stderr=log)
    try:
        _wait_ready(f"http://{address}", process, folder / "log")
        yield Prometheus(f"http://{address}")
    finally:
        process.terminate()
        process.wait(60)


def _wait_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < end:
        try:
            with urllib.request.urlopen(f"{url}/-/ready", timeout=5):
                return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.1)
    raise RuntimeError(f"prometheus does not start:\n{log.read_text(errors='replace')[-2000:]}")
