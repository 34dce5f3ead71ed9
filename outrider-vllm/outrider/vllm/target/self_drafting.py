"""vLLM that drafts for itself, by its own `speculative_config`: methods that read hidden states, which no other process
has. Nothing drives its scheduler, so there is no link: what a request's steps committed comes with its outputs, and how
full the engine is with vLLM's count of each step. Answers that come in one turn of the loop are of one step, which
began when the one before ended, or when a request came to an engine that rested."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.rpc.messages import Close, Commit, Credit, Load, Open, PromptLogprobs, StepTimings
from outrider.rpc.words.answer import PositionLogprobs, TokenLogprob
from outrider.rpc.words.sampling_params import FinishReason
from outrider.target_service.observed import ObservedStep
from outrider.target_service.sequence import TargetLimits
from outrider.vllm.link_messages import LinkCommand, LinkEvent
from outrider.vllm.outputs import origins_of
from outrider.vllm.target.adapters import VllmAdapters
from outrider.vllm.target.engine import VllmEngine, VllmSequence, committed_at
from outrider.vllm.target.pictures import Pictures

FINISH_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "repetition": FinishReason.STOP}


class Unlinked:
    """Stands in the link's place: drafts and closes go nowhere, and of steps vLLM says its count alone."""

    on_event: Callable[[LinkEvent], None]
    on_end: Callable[[], None]
    step_started = 0.0  # nobody says

    def __init__(self) -> None:
        self.on_count: Callable[[Any, Any], None] = lambda scheduler, iteration: None

    def stat_logger(self) -> Any:
        """What vLLM's AsyncLLM takes among `stat_loggers`."""
        from vllm.v1.metrics.loggers import StatLoggerBase

        unlinked = self

        class StepCount(StatLoggerBase):  # type: ignore[misc]
            """Hands on what vLLM counts of a step."""

            def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
                pass

            def record(self, scheduler_stats: Any, iteration_stats: Any, *args: Any, **kwargs: Any) -> None:
                """vLLM's SchedulerStats and IterationStats; None where there are none."""
                unlinked.on_count(scheduler_stats, iteration_stats)

            def log_engine_initialized(self) -> None:
                """Nothing to say."""

        return StepCount

    def send(self, commands: Sequence[Any]) -> None:
        """Drops the messages, which nobody takes."""

    def close(self) -> None:
        """Does nothing: there is no link to end."""


@dataclass(slots=True)
class Progress:
    """What a sequence's steps have committed, and what of it has no credit yet."""

    committed: int  # tokens, with those that are held
    until: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    last: float = field(default_factory=time.monotonic)
    held: deque[Commit] = field(default_factory=deque)


@dataclass(slots=True)
class AnsweredStep:
    """What the answers of one turn of the loop add up to."""

    traceparents: list[str] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)  # seconds, of requests in their first step
    num_rows: int = 0
    num_verify_rows: int = 0
    num_drafted: int = 0
    num_accepted: int = 0


class SelfDraftingEngine(VllmEngine):
    """`k` is how many tokens vLLM drafts a step."""

    is_streamed = True

    def __init__(
        self,
        llm: Any,
        unlinked: Unlinked,
        limits: TargetLimits,
        k: int,
        *,
        flush: Callable[[], None] = lambda: None,
        on_step: Callable[[ObservedStep], None] | None = None,
        pictures: Pictures | None = None,
        vllm_adapters: VllmAdapters | None = None,
    ) -> None:
        brought: dict[str, Any] = {"pictures": pictures, "vllm_adapters": vllm_adapters}
        super().__init__(llm, unlinked, limits, flush=flush, on_step=on_step, **brought)
        unlinked.on_count = self._count
        self._k = k
        self._progress: dict[int, Progress] = {}  # by the sequences' numbers
        self._step: AnsweredStep | None = None  # of this turn of the loop
        self._step_began = time.monotonic()

    async def _run(self, sequence: VllmSequence) -> None:
        if not self._load.running:
            self._step_began = time.monotonic()
        await super()._run(sequence)

    def _count(self, scheduler: Any, iteration: Any) -> None:
        """vLLM's count of the step whose answers come in the loop's next turn."""
        if scheduler is not None:
            free = round((1 - scheduler.kv_cache_usage) * self.limits.num_blocks)
            self._load = Load(scheduler.num_running_reqs, scheduler.num_waiting_reqs, free)
        if iteration is not None:
            self._num_preempted += iteration.num_preempted_reqs

    def _send(self, command: LinkCommand) -> None:
        """A credit lets out what was computed; vLLM itself knows none, and computes on."""
        if isinstance(command, Close):
            self._progress.pop(command.sequence_id, None)
        elif isinstance(command, Credit):
            sequence = self._by_number[command.sequence_id]
            progress = self._progress_of(sequence)
            progress.until = max(progress.until, command.until)
            self._let_out(sequence, progress)

    def _progress_of(self, sequence: VllmSequence) -> Progress:
        return self._progress.setdefault(sequence.number, Progress(committed_at(sequence.open)))

    def _answered(self, sequence: VllmSequence, answer: Any) -> None:
        """What one step, or several in a row, gave a request."""
        if sequence.key not in self._sequences:
            return
        progress, output, own = self._progress_of(sequence), answer.outputs[0], sequence.open.sequence_id
        if answer.prompt_logprobs and progress.committed == committed_at(sequence.open):
            told = zip(prompt_of(sequence.open), answer.prompt_logprobs, strict=True)
            rows = tuple(position_of(token, row) if row else () for token, row in told)
            sequence.sink(PromptLogprobs(own, 0, rows))
        ids = tuple(output.token_ids)
        rows = tuple(position_of(token, row) for token, row in zip(ids, output.logprobs or (), strict=False))
        drafted, accepted = self._counts(sequence, progress, output, len(ids))
        now = time.monotonic()
        self._add_to_step(sequence, progress, answer, drafted, accepted)
        commit = Commit(
            sequence_id=own,
            position=progress.committed,
            ids=ids,
            origins=origins_of(len(ids), drafted, accepted),
            num_drafted=drafted,
            num_accepted=accepted,
            logprobs=rows,
            finish_reason=FINISH_REASONS.get(output.finish_reason),
            stop_token_id=output.stop_reason if isinstance(output.stop_reason, int) else None,
            timings=StepTimings(verify_us=round((now - progress.last) * 1e6), num_rows=drafted + 1),
            num_cached_ids=answer.num_cached_tokens or 0,
        )
        progress.last, progress.committed = now, progress.committed + len(ids)
        progress.num_drafted += drafted
        progress.num_accepted += accepted
        progress.held.append(commit)
        self._let_out(sequence, progress)

    def _counts(self, sequence: VllmSequence, progress: Progress, output: Any, num_ids: int) -> tuple[int, int]:
        """Drafted and accepted tokens of a step: all but one of its tokens were drafted. At the end vLLM says the
        request's sums, to which the last step's make them up, also where outputs came together or a stop cut one."""
        if output.spec_decode_metrics is not None:
            said = output.spec_decode_metrics
            accepted = sum(count * times for count, times in enumerate(said.histogram))
            accepted = max(0, accepted - progress.num_accepted)
            return max(accepted, said.num_draft_tokens - progress.num_drafted), accepted
        if progress.committed == committed_at(sequence.open):
            return 0, 0  # the prompt's own step
        return max(self._k, num_ids - 1), max(0, num_ids - 1)

    def _add_to_step(
        self, sequence: VllmSequence, progress: Progress, answer: Any, num_drafted: int, num_accepted: int
    ) -> None:
        if self._step is None:
            self._step = AnsweredStep()
            self._loop.call_soon(self._end_step)
        step, begins_at = self._step, committed_at(sequence.open)
        is_first = progress.committed == begins_at
        step.traceparents.append(sequence.open.traceparent)
        if is_first:
            step.waits.append(max(0.0, self._step_began - progress.last))
        num_verify_rows = num_drafted + 1
        num_prompt_rows = begins_at + sequence.offset - (answer.num_cached_tokens or 0)
        step.num_rows += num_prompt_rows if is_first else num_verify_rows
        step.num_verify_rows += num_verify_rows
        step.num_drafted += num_drafted
        step.num_accepted += num_accepted

    def _end_step(self) -> None:
        """All answers of this turn are in."""
        step, self._step = self._step, None
        seconds = time.monotonic() - self._step_began
        self._step_began += seconds
        if step is None or self._on_step is None:
            return
        timings = StepTimings(
            verify_us=round(seconds * 1e6), num_rows=step.num_rows, num_sequences=len(step.traceparents)
        )
        self._on_step(
            ObservedStep(
                time.time_ns() - round(seconds * 1e9),
                seconds,
                timings,
                num_verify_rows=step.num_verify_rows,
                num_drafted=step.num_drafted,
                num_accepted=step.num_accepted,
                traceparents=step.traceparents,
                waits=step.waits,
            )
        )

    def _let_out(self, sequence: VllmSequence, progress: Progress) -> None:
        """A step's tokens leave together, at most k past the credit."""
        while progress.held and (progress.held[0].position < progress.until or not progress.held[0].ids):
            self._hand_on(sequence, progress.held.popleft(), self.load())
        self._flush()


def prompt_of(message: Open) -> tuple[int, ...]:
    """What vLLM got as the prompt."""
    return message.prompt_ids + message.output_ids


def position_of(token: int, row: Any) -> PositionLogprobs:
    """vLLM's dict of a position, the chosen token first."""
    others = [TokenLogprob(other, one.logprob, one.rank) for other, one in row.items() if other != token]
    return (TokenLogprob(token, row[token].logprob, row[token].rank), *sorted(others, key=lambda one: one.rank))
