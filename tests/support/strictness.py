"""pytest's hooks of a strict run: a skip that nothing excuses has failed, of a test or of a whole module."""

from __future__ import annotations

from collections.abc import Generator

import pytest
from support.skips import STRICT, is_excused, reason_of


def judge(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Fails the report if it is of a skip that a strict run does not let through."""
    if STRICT and report.outcome == "skipped":
        reason = reason_of(report.longrepr)
        if not is_excused(reason):
            report.outcome = "failed"
            report.longrepr = f"skipped, where a skip is a failure: {reason}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    judge(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    judge(report)
    return report
