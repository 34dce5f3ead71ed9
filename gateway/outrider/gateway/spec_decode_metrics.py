"""What speculation came to for a completion, with vLLM's names: `LLM` has it as `CompletionOutput.spec_decode_metrics`,
an answer over HTTP as `metrics.speculative_decoding`, where it is asked for."""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass
from typing import Any

from outrider.gateway.request_times import RequestTimes
from outrider.rpc.words.answer import GenerationDelta, SpeculationStats


@dataclass
class SpecDecodeMetrics:
    """`acceptance_histogram[i]` is how many drafts had i tokens accepted; the lists by step are for "detailed"."""

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]  # [num_spec_tokens + 1]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int  # k
    per_step_accepted: list[int] | None = None
    per_step_drafted: list[int] | None = None


class SpecDecodeRecorder:
    """Follows the completions of one request."""

    def __init__(self, num_spec_tokens: int, detailed: bool) -> None:
        self._k, self._detailed = num_spec_tokens, detailed
        self._steps: dict[int, list[tuple[int, int]]] = {}  # by completion: drafted and accepted of each step

    def add(self, delta: GenerationDelta) -> SpecDecodeMetrics | None:
        """One commit; the metrics with a completion's last one."""
        steps = self._steps.setdefault(delta.index, [])
        if self._detailed and delta.round is not None and delta.round.commit.num_drafted:
            steps.append((delta.round.commit.num_drafted, delta.round.commit.num_accepted))
        if delta.speculation is None:
            return None
        metrics = summary_of(delta.speculation, self._k)
        if self._detailed:
            metrics.per_step_drafted = [drafted for drafted, _ in steps]
            metrics.per_step_accepted = [accepted for _, accepted in steps]
        return metrics


def summary_of(stats: SpeculationStats, k: int) -> SpecDecodeMetrics:
    """Drafts that got to position i, less those that got further, ended there."""
    reached = [stats.num_drafts, *stats.num_accepted_per_position]
    reached += [0] * (k + 2 - len(reached))
    return SpecDecodeMetrics(
        mean_acceptance_length=stats.mean_acceptance_length,
        draft_acceptance_rate=stats.acceptance_rate,
        acceptance_histogram=[here - further for here, further in itertools.pairwise(reached)],
        num_spec_steps=stats.num_drafts,
        num_accepted_draft_tokens=stats.num_accepted_tokens,
        num_draft_tokens=stats.num_draft_tokens,
        num_spec_tokens=k,
    )


def add_drafts(total: SpeculationStats, more: SpeculationStats) -> None:
    """What became of a completion's drafts, to that of others."""
    total.num_drafts += more.num_drafts
    total.num_draft_tokens += more.num_draft_tokens
    total.num_accepted_tokens += more.num_accepted_tokens
    pairs = itertools.zip_longest(total.num_accepted_per_position, more.num_accepted_per_position, fillvalue=0)
    total.num_accepted_per_position = tuple(before + added for before, added in pairs)


class AnswerRecorder:
    """Follows all completions of one answer, which says what became of their drafts together, unless `wanted` is
    "none". `times` are None where it says none, as of several completions."""

    def __init__(self, wanted: str = "none", times: RequestTimes | None = None) -> None:
        self._wanted, self._detailed, self._times = wanted, wanted == "detailed", times
        self._total = SpeculationStats()
        self._steps: list[tuple[int, int]] = []  # drafted and accepted of each step, in the order of commits

    def add(self, delta: GenerationDelta) -> None:
        """One commit of any of them."""
        if self._times is not None:
            self._times.add(delta)
        if self._detailed and delta.round is not None and delta.round.commit.num_drafted:
            self._steps.append((delta.round.commit.num_drafted, delta.round.commit.num_accepted))
        if delta.speculation is not None:
            add_drafts(self._total, delta.speculation)

    def shape(self, num_draft_tokens: int) -> dict[str, Any]:
        """The answer's `metrics`, if it has any."""
        times = {} if self._times is None else self._times.shape()
        drafts = {} if self._wanted == "none" else self._drafts(num_draft_tokens)
        return {"metrics": times | drafts} if times or drafts else {}

    def _drafts(self, num_draft_tokens: int) -> dict[str, Any]:
        """The object that AIPerf reads. k is what is drafted a round, or the most that was."""
        k = max(num_draft_tokens, len(self._total.num_accepted_per_position))
        metrics = summary_of(self._total, k)
        if self._detailed:
            metrics.per_step_drafted = [drafted for drafted, _ in self._steps]
            metrics.per_step_accepted = [accepted for _, accepted in self._steps]
        return {"speculative_decoding": {name: value for name, value in asdict(metrics).items() if value is not None}}
