"""What speculation came to for a completion, with vLLM's names: `LLM` has it as `CompletionOutput.spec_decode_metrics`,
an answer over HTTP as `metrics.speculative_decoding`, where it is asked for."""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass
from typing import Any

from outrider.gateway.request_record import RequestObserver, RequestRecord, add_stats
from outrider.rpc.words.answer import GenerationDelta, SpeculationStats

TIMES = ("time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms", "tokens_per_second")


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


class AnswerRecorder(RequestObserver):
    """Observes the requests of one answer over HTTP, which says what became of their drafts together, unless `wanted`
    is "none". An answer of several completions shows no times."""

    def __init__(self, wanted: str = "none", shows_times: bool = False) -> None:
        self._wanted, self._detailed, self._shows_times = wanted, wanted == "detailed", shows_times
        self._records: list[RequestRecord] = []
        self._steps: list[tuple[RequestRecord, int, int]] = []  # drafted and accepted of each, as commits came

    def began(self, record: RequestRecord) -> None:
        """One of the answer's requests may run."""
        self._records.append(record)

    def add(self, record: RequestRecord, delta: GenerationDelta) -> None:
        """Notes a step, where each is told of."""
        if self._detailed and delta.round is not None and delta.round.commit.num_drafted:
            self._steps.append((record, delta.round.commit.num_drafted, delta.round.commit.num_accepted))

    def restarted(self, record: RequestRecord) -> None:
        """Its steps are no part of the answer."""
        self._steps = [step for step in self._steps if step[0] is not record]

    def shape(self, num_draft_tokens: int) -> dict[str, Any]:
        """The answer's `metrics`, if it has any."""
        times = times_shape(self._records[0]) if self._shows_times and self._records else {}
        drafts = {} if self._wanted == "none" else self._drafts(num_draft_tokens)
        return {"metrics": times | drafts} if times or drafts else {}

    def _drafts(self, num_draft_tokens: int) -> dict[str, Any]:
        """The object that AIPerf reads. k is what is drafted a round, or the most that was."""
        total = SpeculationStats()
        for record in self._records:
            add_stats(total, record.tally)
        metrics = summary_of(total, max(num_draft_tokens, len(total.num_accepted_per_position)))
        if self._detailed:
            metrics.per_step_drafted = [drafted for _, drafted, _ in self._steps]
            metrics.per_step_accepted = [accepted for _, _, accepted in self._steps]
        return {"speculative_decoding": {name: value for name, value in asdict(metrics).items() if value is not None}}


def times_shape(record: RequestRecord) -> dict[str, float | None]:
    """When a request's tokens came, as vLLM's answers have it; null where it says nothing."""
    if not record.num_tokens or not record.scheduled:
        return dict.fromkeys(TIMES)
    decoding, whole = record.last_token - record.first_token, record.last_token - record.scheduled
    values = (
        (record.first_token - record.scheduled) * 1e3,
        decoding * 1e3,
        max(0.0, record.scheduled - record.arrived) * 1e3,
        decoding * 1e3 / (record.num_tokens - 1) if record.num_tokens > 1 else None,
        record.num_tokens / whole if whole > 0 else None,
    )
    return dict(zip(TIMES, values, strict=True))
