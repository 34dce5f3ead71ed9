"""k8s/rules: every series that they name exists, and each alert fires where it should and nowhere else (promtool)."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.metrics import sample_names
from support.prometheus import names_in, program, rules, write_rules

ALERTS = {rule["alert"]: rule for rule in rules() if "alert" in rule}
RECORDED = {rule["record"] for rule in rules() if "record" in rule}

Series = dict[str, str]  # values by series, one a minute, in promtool's notation
DRAFTED, ACCEPTED = "outrider_spec_decode_num_draft_tokens_total", "outrider_spec_decode_num_accepted_tokens_total"
LOOKED_UP, FOUND = "outrider_target_prefix_cache_queries_total", "outrider_target_prefix_cache_hits_total"
HOURS = 6 * 60


def rounds(mode: str, model: str = "") -> Series:
    return {f'outrider_rounds_total{{mode="{mode}"{model}}}': "0+50x60"}


def drafted(accepted: int, mode: str, model: str = "") -> Series:
    """Of four hundred tokens a minute."""
    named = f', served_model="{model}"' if model else ""
    counts = {DRAFTED: "0+400x60", ACCEPTED: f"0+{accepted}x60"}
    return {f"{name}{{{named[2:]}}}": count for name, count in counts.items()} | rounds(mode, named)


def replica(address: str, digest: str = "d1", kernels: str = "c-avx2", role: str = "target") -> Series:
    labels = f'role="{role}", address="{address}", digest="{digest}", kernels="{kernels}"'
    return {f"outrider_replica_info{{{labels}}}": "1x60"}


def prefix_hits(before: int, then: int) -> Series:
    """Tokens found of a hundred looked up a minute: for hours, then for one."""
    return {LOOKED_UP: f"0+100x{HOURS + 60}", FOUND: f"0+{before}x{HOURS} {HOURS * before}+{then}x60"}


def first_tokens(accepted: int, at_trial: float) -> Series:
    """Of a hundred first tokens a minute, and what share was accepted at the trial."""
    return {
        'outrider_spec_decode_num_tested_tokens_per_pos_total{position="0"}': "0+100x90",
        'outrider_spec_decode_num_accepted_tokens_per_pos_total{position="0"}': f"0+{accepted}x90",
        'outrider_draft_trial_acceptance{method="eagle3", position="0"}': f"{at_trial}x90",
        **rounds("chains"),
    }


# By alert: series with which it fires, at the minute given, with the labels given; and series with which it does not.
FIRES: dict[str, tuple[Series, int, dict[str, str]]] = {
    "OutriderDraftDead": (
        drafted(8, "chains", "small") | drafted(300, "chains", "large"),
        30,
        {"served_model": "small"},
    ),
    "OutriderAcceptanceFell": (first_tokens(20, 0.5), 60, {"position": "0"}),
    "OutriderDraftRefused": (
        {'outrider_draft_trial_refused{method="eagle3"}': "0x5 1x60"},
        30,
        {"method": "eagle3"},
    ),
    "OutriderPrefixHitsDropped": (prefix_hits(80, 10), HOURS + 40, {}),
    "OutriderKernelsFallback": (
        {**replica("a"), **replica("b", kernels="torch-avx2")},
        10,
        {"role": "target", "address": "b", "kernels": "torch-avx2"},
    ),
    "OutriderQueueGrows": ({"outrider_num_requests_waiting": "0+2x60"}, 30, {}),
    "OutriderReplicaOfAnotherDigest": ({**replica("a"), **replica("b", digest="d2")}, 40, {"role": "target"}),
    "OutriderReplicaDown": (
        {'outrider_replica_up{role="draft", address="a"}': "1x5 0x60"},
        30,
        {"role": "draft", "address": "a"},
    ),
    "OutriderReplicaDisagrees": (
        {'outrider_replica_disagrees{role="target", address="a"}': "0x5 1x60"},
        30,
        {"role": "target", "address": "a"},
    ),
}
QUIET: dict[str, list[Series]] = {
    "OutriderDraftDead": [
        drafted(80, "chains"),
        drafted(8, "off"),
        {DRAFTED: "0x60", ACCEPTED: "0x60", **rounds("off")},
    ],
    "OutriderAcceptanceFell": [first_tokens(40, 0.5), first_tokens(20, 0.3)],
    "OutriderDraftRefused": [{'outrider_draft_trial_refused{method="eagle3"}': "0x60"}],
    "OutriderPrefixHitsDropped": [prefix_hits(80, 70), prefix_hits(10, 80)],
    "OutriderKernelsFallback": [{**replica("a"), **replica("b", kernels="c-avx512")}],
    "OutriderQueueGrows": [
        {"outrider_num_requests_waiting": "200-2x60"},
        {"outrider_num_requests_waiting": "0+0.1x60"},
    ],
    "OutriderReplicaOfAnotherDigest": [
        {  # two models behind one gateway
            'outrider_replica_info{served_model="a", role="target", address="a", digest="d1"}': "1x60",
            'outrider_replica_info{served_model="b", role="target", address="b", digest="d2"}': "1x60",
        },
        {**replica("a"), **replica("b"), **replica("c", digest="d2", role="draft")},
    ],
    "OutriderReplicaDown": [
        {'outrider_replica_up{role="draft", address="a"}': "1x5 0x3 1x60"},
        {  # one gateway of two cannot reach it: that is another fault
            'outrider_replica_up{role="draft", address="a", instance="g1"}': "0x60",
            'outrider_replica_up{role="draft", address="a", instance="g2"}': "1x60",
        },
    ],
    "OutriderReplicaDisagrees": [{'outrider_replica_disagrees{role="target", address="a"}': "0x5 1x2 0x60"}],
}


def test_every_series_that_they_name_exists() -> None:
    known = sample_names() | RECORDED
    assert {name for rule in rules() for name in names_in(rule["expr"])} - known == set()
    assert len(ALERTS) >= 5 and all({"summary", "description"} <= set(rule["annotations"]) for rule in ALERTS.values())


def test_promtool_can_read_them(tmp_path: Path) -> None:
    path = tmp_path / "rules.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "outrider", "rules": rules()}]}))
    done = subprocess.run([program("promtool"), "check", "rules", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("alert", sorted(ALERTS))
def test_an_alert_fires_where_it_should(alert: str, tmp_path: Path) -> None:
    series, minute, labels = FIRES[alert]
    fired = {"exp_labels": {**labels, **ALERTS[alert]["labels"]}}
    cases = [case(alert, series, minute, [fired])]
    cases += [case(alert, quiet, minute, []) for quiet in QUIET[alert]]
    write_rules(tmp_path / "rules.yaml")
    tests = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": cases}
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(tests))
    done = subprocess.run(
        [program("promtool"), "test", "rules", "test.yaml"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def case(alert: str, series: Series, minute: int, expected: list[dict[str, Any]]) -> dict[str, Any]:
    """One of promtool's."""
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "alert_rule_test": [{"eval_time": f"{minute}m", "alertname": alert, "exp_alerts": expected}],
    }
