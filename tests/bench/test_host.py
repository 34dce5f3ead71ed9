"""The bench of what services do beside the device: a small run, and its target under the engine's real steps. Nothing
here judges a speed."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.bench import run_bench

from outrider.bench.host_target import ACCEPTED, HostTarget, SleepingDevice


def test_every_cell_is_measured(tmp_path: Path) -> None:
    flags = ("--sequences", "1,3", "--streams", "2", "--steps", "2", "--seconds", "1", "--repeats", "1", "--no-store")
    text, result = run_bench(tmp_path, "host", *flags)
    counts = [("target", mode, count) for count in (1, 3) for mode in ("plain", "in turn")]
    counts += [("gateway", mode, 2) for mode in ("plain", "in turn")]
    assert [(cell["service"], cell["mode"], cell["sequences"]) for cell in result["cells"]] == counts
    for cell in result["cells"]:
        assert cell["us"]["median"] >= 0 and cell["us_at_reference"]["median"] >= 0
        assert cell["service"] in text
    assert [gap["sequences"] for gap in result["idle"]] == [1, 3]


@pytest.mark.parametrize("num_draft_tokens", [0, 4])
def test_a_round_of_the_target_is_one_step_of_all(num_draft_tokens: int) -> None:
    target = HostTarget(5, num_draft_tokens)
    before = target.ends
    assert [target.round()[1] for _ in range(3)] == [5, 5, 5]
    gained = 1 + min(ACCEPTED, num_draft_tokens)
    assert target.ends == tuple(end + 3 * gained for end in before)


@pytest.mark.parametrize(("ahead", "launched"), [(1, 3), (16, 4)])
def test_a_device_that_sleeps_gets_a_step_before_the_last_was_read(ahead: int, launched: int) -> None:
    device = SleepingDevice(0.002)
    target = HostTarget(3, 0, device, ahead)
    before, passes = target.ends, len(device.idle_s)
    assert [target.round()[1] for _ in range(3)] == [3, 3, 3]
    assert target.ends == tuple(end + 3 for end in before)
    assert len(device.idle_s) - passes == launched  # one of them nobody has read
