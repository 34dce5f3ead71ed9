"""A target's series move with what they say."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from support.engines import GRAMMAR_EOS, TargetHarness, grammars_at_once, opened, tiny_model
from support.metrics import MODEL, Idle, scraped

from outrider.planner.estimates import Acceptance
from outrider.rpc.messages import Close, Credit, DraftTokens
from outrider.rpc.words.structured import StructuredOutput
from outrider.target_service.goodput import Goodput
from outrider.target_service.metrics import TargetMetrics
from outrider.target_service.observed import ObservedStep, observed, stats_of
from outrider.target_service.settings import TargetSettings
from outrider.target_service.watchers import new_metrics

SAMPLED = f"00-{'a' * 32}-{'b' * 16}-01"


class Metered:
    """An engine whose series are scraped."""

    def __init__(self, num_blocks: int = 64, vllm_names: bool = False, **options: Any) -> None:
        self.metrics = TargetMetrics()
        self.harness = TargetHarness.of(
            tiny_model()[1], num_blocks, on_step=lambda step: self.metrics.add_step(observed(step)), **options
        )
        self.metrics.attach(partial(stats_of, self.harness.engine), Idle(), MODEL, vllm_names)

    def read(self, name: str, **labels: str) -> float:
        return scraped(self.metrics)[name, tuple(sorted(labels.items()))]


def test_sequences_and_the_cache() -> None:
    metered = Metered()
    harness, read = metered.harness, metered.read
    harness.send(opened(1, range(20)), opened(2, range(30, 50)), Credit(1, 24, 0))
    states = ("target_num_requests_running", "target_num_requests_waiting", "target_num_requests_open")
    assert [read(name) for name in states] == [1, 2, 2] and read("target_kv_cache_usage_perc") == 0
    harness.run()
    assert [read(name) for name in states] == [0, 1, 2], "one has no credit left, one never had any"
    assert read("target_kv_cache_usage_perc") == 2 / 64
    assert (read("target_cache_blocks"), read("target_cache_block_size_tokens")) == (64, 16)
    assert read("target_prefix_cache_queries_total") == 20 and read("target_prefix_cache_hits_total") == 0
    harness.send(opened(3, [*range(16), 90]), Credit(3, 18, 0))
    harness.run()
    assert read("target_prefix_cache_queries_total") == 37 and read("target_prefix_cache_hits_total") == 16
    harness.send(*(Close(number) for number in (1, 2, 3)))
    assert [read(name) for name in states] == [0, 0, 0] and read("target_kv_cache_usage_perc") == 0


def test_steps_by_rows() -> None:
    metered = Metered()
    metered.harness.send(opened(1, range(5)), Credit(1, 8, 0))
    metered.harness.run()
    assert metered.read("target_step_seconds_count", rows="8") == 1, "the prompt's five rows"
    assert metered.read("target_step_seconds_count", rows="1") == 2, "and two plain tokens"
    assert metered.read("target_step_rows_total", kind="prompt") == 4
    assert metered.read("target_step_rows_total", kind="verify") == 3
    assert metered.read("target_queue_seconds_count") == 3


def test_a_step_s_exemplar_is_a_sampled_trace() -> None:
    metered = Metered()
    request = opened(1, range(5))
    object.__setattr__(request, "traceparent", SAMPLED)
    metered.harness.send(request, Credit(1, 6, 0))
    metered.harness.run()
    text = metered.metrics.render("application/openmetrics-text")[0].decode()
    assert f'trace_id="{"a" * 32}"' in text


def test_who_gives_up_blocks_is_counted() -> None:
    metered = Metered(num_blocks=4)
    harness = metered.harness
    harness.send(opened(1, range(40)), Credit(1, 41, 0))
    harness.run()
    assert metered.read("target_num_preemptions_total") == 0
    harness.send(opened(2, range(50, 90)), Credit(2, 41, 0))  # the first one has no credit left
    harness.run()
    assert metered.read("target_num_preemptions_total") == 1


def test_rows_that_are_cut_are_counted() -> None:
    """Rows that cost much and drafts that never hold: of two windows hardly anything is verified together."""
    metered = Metered()
    harness = metered.harness
    engine = harness.engine
    for number in (1, 2):
        harness.send(opened(number, range(number, number + 5)), Credit(number, 6, 0))
    harness.run()
    engine.scheduler.goodput = Goodput([(1, 100), (2, 10_000), (4, 40_000), (8, 80_000)])
    for target in engine.scheduler.sequences.values():
        target.acceptance = Acceptance(forgets_untested=True)
        for _ in range(64):
            engine.scheduler.goodput.add_verified(target.acceptance, 4, 0)
    for number in (1, 2):
        harness.send(DraftTokens(number, 0, 6, (1, 2, 3, 4)), Credit(number, 11, 4, 60_000))
    harness.run()
    assert metered.read("target_rows_cut_total") > 0


def test_constraints_and_their_masks_are_counted() -> None:
    grammars = grammars_at_once()
    metered = Metered(eos_ids=(GRAMMAR_EOS,), grammars=grammars)
    grammars.on_compiled = metered.metrics.add_compiled
    harness, read = metered.harness, metered.read
    harness.send(opened(1, range(5), structured_output=StructuredOutput(regex="[ab]{9}")), Credit(1, 9, 0))
    harness.send(opened(2, range(5), structured_output=StructuredOutput(regex="([")), Credit(2, 9, 0))
    harness.run()
    assert len(harness.failures(2)) == 1 and not harness.failures(1)
    assert read("target_constraint_compile_seconds_count") == read("target_constraints_refused_total") == 1
    assert read("target_mask_wait_seconds_total") > 0 < read("target_mask_seconds_total")
    assert read("target_masks_late_total") == 0


def test_a_commit_tells_what_its_constraint_took() -> None:
    """Compiling once, with the first; the wait for masks with each. Forced tokens are none of the draft's."""
    steps: list[ObservedStep] = []
    harness = TargetHarness.of(
        tiny_model()[1],
        eos_ids=(GRAMMAR_EOS,),
        grammars=grammars_at_once(),
        on_step=lambda step: steps.append(observed(step)),
    )
    harness.engine.scheduler.max_forced = 4
    harness.send(opened(1, range(5), structured_output=StructuredOutput(regex="[ab]abcabc")), Credit(1, 12, 0))
    harness.run()
    commits = harness.commits(1)
    assert [commit.timings.compile_us > 0 for commit in commits] == [True, *[False] * (len(commits) - 1)]
    assert all(commit.timings.mask_us > 0 for commit in commits)
    assert [step.timings.mask_us for step in steps] == [commit.timings.mask_us for commit in commits]
    assert sum(step.num_forced for step in steps) == sum(commit.num_forced for commit in commits) > 0
    assert not any(step.num_drafted or step.num_accepted for step in steps)
    harness.send(opened(2, range(5)), Credit(2, 8, 0))
    harness.run()
    assert all(commit.timings.mask_us == commit.timings.compile_us == 0 for commit in harness.commits(2))


def test_idle_time_is_what_steps_leave() -> None:
    """Steps take the time that the test says; all else is the machine's own."""
    metered = Metered()
    before = metered.read("target_device_idle_seconds_total")
    assert metered.read("target_device_idle_seconds_total") > before >= 0
    times = iter(range(0, 10**6, 500))
    metered.harness.engine.steps._clock = lambda: float(next(times))
    metered.harness.send(opened(1, range(5)), Credit(1, 6, 0))
    metered.harness.run()
    assert metered.read("target_device_idle_seconds_total") == 0, "a step of 500 seconds was not idle"


def test_vllm_s_names_are_the_same_numbers() -> None:
    metered = Metered(vllm_names=True)
    metered.harness.send(opened(1, range(20)), opened(2, range(30, 50)), Credit(1, 30, 0))
    metered.harness.engine.step(0.0)
    labels = {"model_name": "tiny", "engine": "0"}
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert metered.read(f"vllm:{name}", **labels) == metered.read(f"target_{name}") > 0, name


def test_nothing_is_counted_without_the_flag(tmp_path: Path) -> None:
    assert new_metrics(TargetSettings(model=tmp_path)) is None
    assert new_metrics(TargetSettings(model=tmp_path, metrics=":0")) is not None
