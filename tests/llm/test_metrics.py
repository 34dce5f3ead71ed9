"""get_metrics: vLLM's names, kinds and meanings; and the progress bar's numbers."""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest
from support.pairs import TinyPair

from outrider.llm import LLM, Counter, Gauge, Histogram, SamplingParams, Vector
from outrider.llm.metrics import SpeculationLog
from outrider.rpc.words.answer import SpeculationStats

SPEC = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_accepted_tokens_per_pos")


def test_the_four_of_speculation_and_the_others(tiny_pair: TinyPair) -> None:
    config = {"draft_trial": "off", "model": str(tiny_pair.draft), "num_speculative_tokens": 3}
    with LLM(tiny_pair.target, threads=1, speculative_config=config, served_model_name="tiny") as made:
        before = {metric.name: metric for metric in made.get_metrics() if "spec_decode" in metric.name}
        assert list(before) == [f"vllm:spec_decode_{name}" for name in SPEC]
        assert [metric.value for metric in before.values()] == [0, 0, 0, [0, 0, 0]]  # type: ignore[attr-defined]
        params = [SamplingParams(temperature=0, max_tokens=30), SamplingParams(temperature=1, n=2, max_tokens=20)]
        outputs = made.generate([[9] * 20, [5, 6]], params, use_tqdm=False)
        made.generate([[9] * 20], params[0], use_tqdm=False)
        metrics = made.get_metrics()
    stats = [output.metrics for output in outputs]
    assert [own and own.num_generation_tokens for own in stats] == [30, 40]
    for own in stats:  # in vLLM's order of moments
        assert own is not None and not own.is_corrupted and 0 < time.time() - own.arrival_time < 600
        assert 0 < own.queued_ts <= own.scheduled_ts <= own.first_token_ts < own.last_token_ts
        assert own.first_token_latency == own.first_token_ts - own.queued_ts
    found: dict[str, Any] = {metric.name.removeprefix("vllm:"): metric for metric in metrics}
    drafts, drafted, accepted, by_position = (found[f"spec_decode_{name}"] for name in SPEC)
    assert isinstance(drafts, Counter) and isinstance(by_position, Vector)
    assert by_position.value == by_position.values and len(by_position.values) == 3
    assert accepted.value == sum(by_position.values) <= drafted.value <= 3 * drafts.value
    assert drafts.value >= by_position.values[0] >= by_position.values[1] >= by_position.values[2]
    assert by_position.labels == {"model_name": "tiny", "engine": "0"}
    num_output = sum(len(c.token_ids) for output in outputs for c in output.outputs) + 30
    assert 0 < accepted.value < num_output and 0 < drafts.value < num_output
    assert found["generation_tokens"].value == num_output == 100
    assert found["prompt_tokens"].value == 20 + 2 * 2 + 20
    assert found["prefix_cache_hits"].value == 16  # the second time, all whole blocks but the last token's
    finished = {m.labels["finished_reason"]: m.value for m in metrics if m.name == "vllm:request_success"}  # type: ignore[attr-defined]
    assert finished == {"stop": 0, "length": 4, "abort": 0, "error": 0}
    assert isinstance(found["num_requests_running"], Gauge) and found["num_requests_running"].value == 0
    first = found["time_to_first_token_seconds"]
    assert isinstance(first, Histogram) and first.count == first.buckets["+Inf"] == 4 and first.sum > 0
    assert list(first.buckets.values()) == sorted(first.buckets.values())
    assert found["e2e_request_latency_seconds"].count == found["request_time_per_output_token_seconds"].count == 4
    between = found["inter_token_latency_seconds"]
    assert (
        drafts.value - 4 <= between.count <= num_output - 4 and between.sum <= found["e2e_request_latency_seconds"].sum
    )


def test_what_speculation_came_to_for_one_completion(tiny_pair: TinyPair) -> None:
    config: dict[str, Any] = {"draft_trial": "off", "model": str(tiny_pair.draft), "num_speculative_tokens": 3}
    options: dict[str, Any] = {"per_request_spec_decode_metrics": "detailed", "threads": 1}
    with LLM(tiny_pair.target, speculative_config=config, **options) as made:
        params = SamplingParams(temperature=1, n=2, max_tokens=40)
        (output,) = made.generate([[9] * 20], params, use_tqdm=False)
        whole: dict[str, Any] = {metric.name.removeprefix("vllm:spec_decode_"): metric for metric in made.get_metrics()}
    each = [completion.spec_decode_metrics for completion in output.outputs]
    for one in each:
        assert one is not None and one.per_step_accepted is not None and one.per_step_drafted is not None
        assert (
            one.acceptance_histogram == [one.per_step_accepted.count(i) for i in range(4)] and one.num_spec_tokens == 3
        )
        assert one.num_spec_steps == sum(one.acceptance_histogram) == len(one.per_step_drafted) > 0
        assert one.num_accepted_draft_tokens == sum(one.per_step_accepted) > 0
        assert one.num_draft_tokens == sum(one.per_step_drafted)
        assert one.mean_acceptance_length == 1 + one.num_accepted_draft_tokens / one.num_spec_steps
        assert one.draft_acceptance_rate == one.num_accepted_draft_tokens / one.num_draft_tokens
    assert sum(one.num_spec_steps for one in each if one) == whole["num_drafts"].value
    assert sum(one.num_accepted_draft_tokens for one in each if one) == whole["num_accepted_tokens"].value


def test_the_log_line(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    line = SpeculationLog(lambda: now)
    with caplog.at_level(logging.INFO):
        now = 9.0
        line.add(
            SpeculationStats(num_drafts=4, num_draft_tokens=8, num_accepted_tokens=3, num_accepted_per_position=(2, 1))
        )
        assert not caplog.messages
        now = 10.0
        line.add(
            SpeculationStats(num_drafts=1, num_draft_tokens=2, num_accepted_tokens=2, num_accepted_per_position=(1, 1))
        )
        now = 20.0
        line.add(SpeculationStats(num_rounds=3))  # nothing was drafted: nothing is said
    assert caplog.messages == [
        "SpecDecoding metrics: Mean acceptance length: 2.00, Accepted throughput: 0.50 tokens/s, Drafted throughput: "
        "1.00 tokens/s, Accepted: 5 tokens, Drafted: 10 tokens, Per-position acceptance rate: 0.600, 0.400, Avg Draft "
        "acceptance rate: 50.0%"
    ]


def test_there_are_none_without_a_draft_or_with_stats_off(tiny_pair: TinyPair) -> None:
    with LLM(tiny_pair.target, threads=1) as made:
        assert not [metric for metric in made.get_metrics() if "spec_decode" in metric.name]
    with LLM(tiny_pair.target, threads=1, disable_log_stats=True) as made:
        with pytest.raises(RuntimeError, match="stats"):
            made.get_metrics()
        (output,) = made.generate([[5, 6]], SamplingParams(max_tokens=1), use_tqdm=False)
        assert output.metrics is None


def test_the_bar_counts_prompts_and_tokens(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate([[5, 6], [7, 8]], SamplingParams(temperature=0, max_tokens=3), use_tqdm=True)
    assert "Processed prompts: 100%" in capsys.readouterr().err
    llm.generate([[5, 6]], SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)
    assert capsys.readouterr().err == ""
