"""vLLM's scheduler, with drafts from somewhere else: before each step every running request is handed its drafted
tokens, or held while it waits for them, and after it whoever drafts is told what was committed.

It lives in the engine's process. What goes wrong in here must not end that: the step is then scheduled plainly, and
said once in the log. Every hook of vLLM's that is used is pinned by tests/vllm_engine/test_contract.py."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

from outrider.rpc.errors import unexpected
from outrider.rpc.messages import Load, StepTimings, TargetEvent, to_failure
from outrider.target_service.adapters import AdapterTurns
from outrider.vllm.grammar import continue_grammar
from outrider.vllm.outputs import commit_of, prompt_logprobs_of
from outrider.vllm.rows import DraftedRow
from outrider.vllm.source import DRAFT, LINK, DraftSource, StepReport
from outrider.vllm.weights import attach_weights
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

log = logging.getLogger(__name__)

SHORT_WAIT_S = 0.002  # nobody announces that a grammar is compiled
MOST_WAITING = 64  # requests that wait, whose adapters are looked at


class DraftScheduler(Scheduler):  # type: ignore[misc]
    """As vLLM's `scheduler_cls`. Raises ValueError for a vLLM whose steps it cannot serve."""

    def __init__(self, vllm_config: Any, *args: Any, source: DraftSource | None = None, **kwargs: Any) -> None:
        check_config(vllm_config)
        ask_no_worker()
        super().__init__(vllm_config, *args, **kwargs)
        self._source = source_of(vllm_config) if source is None else source
        self._rows: dict[str, DraftedRow] = {}  # by vLLM's ids
        self._by_sequence: dict[int, DraftedRow] = {}
        self._suspects: dict[str, DraftedRow] = {}  # of `rows`: each is alone in its steps
        self._alone = ""  # the suspect that has this step for itself, by vLLM's id
        self._started = 0.0, 0  # of the step under way: on the clock, and by the wall's
        self._is_stuck = False  # the last step had room for nobody
        lora = vllm_config.lora_config
        self._turns: AdapterTurns[int] | None = None if lora is None else AdapterTurns(lora.max_loras)
        self._chosen: frozenset[int] = frozenset()  # adapters of this step, by vLLM's numbers
        self._most_running: int = vllm_config.scheduler_config.max_num_seqs
        self._num_preempted = 0
        self._has_failed = False

    # What vLLM calls.

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Holds rows and hands out windows, then plans the step as ever."""
        with self._plainly():
            self._source.take(self._by_sequence)
            self._wait_for_drafts()
        with self._plainly():
            self._yield_blocks()
        self._give_turn()
        self._choose_adapters()
        self._prepare_rows()
        output: SchedulerOutput = super().schedule(*args, **kwargs)
        self._is_stuck = not output.total_num_scheduled_tokens
        self._num_preempted += len(output.preempted_req_ids or ())
        self._started = time.monotonic(), time.time_ns()
        with self._plainly():
            attach_weights(output, self._rows)
            if output.total_num_scheduled_tokens:
                self._source.stepping(self._started[0])
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, Any]:
        """Commits as ever, then says what was committed."""
        accepted: dict[str, int] = {}
        with self._plainly():
            accepted = num_accepted(scheduler_output, model_runner_output)  # before a stop cuts the lists
        outputs: dict[int, Any] = super().update_from_output(scheduler_output, model_runner_output)
        with self._plainly():
            made = [output for part in outputs.values() for output in part.outputs]
            self._report(scheduler_output, made, accepted)
        return self._for_client(outputs) if self._source.is_reader else outputs

    def _for_client(self, outputs: dict[int, Any]) -> dict[int, Any]:
        """Of what a step gave, by clients, what the source does not hand on itself: ends, and other requests."""
        for told in outputs.values():
            told.outputs = [
                one for one in told.outputs if one.finish_reason is not None or one.request_id not in self._rows
            ]
        return {
            client: told
            for client, told in outputs.items()
            if told.outputs or told.finished_requests or told.scheduler_stats
        }

    def add_request(self, request: Request) -> None:
        """A new request; its drafts begin."""
        continue_grammar(request, self.structured_output_manager, self._source.output_len(request))
        super().add_request(request)
        if self.requests.get(request.request_id) is not request:
            return  # more of one that is there
        with self._plainly():
            row = self._source.opened(request)
            if row is not None:
                self._rows[request.request_id] = self._by_sequence[row.sequence_id] = row
                if row.is_suspect:
                    self._suspects[request.request_id] = row

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> list[Request]:
        """Requests were aborted, or have failed; their drafts end."""
        ended: list[Request] = super().finish_requests(request_ids, finished_status)
        for request in ended:
            self._forget(request.request_id)
        return ended

    def shutdown(self) -> None:
        """The engine ends."""
        super().shutdown()
        with self._plainly():
            self._source.close()

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """The worker has none: see NoDraft."""

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        """One that gave up its blocks comes back when it may go on, and nobody begins in another's step."""
        row = self._rows.get(request.request_id)
        if self._stands_back(request.request_id) or self._waits_its_turn(request):
            return False
        if not (row is None or row.has_credit):
            return False
        return bool(super()._handle_blocked_waiting_request(request))

    # What is done for each step.

    def _wait_for_drafts(self) -> None:
        """Waits where nothing may run yet, until something comes or the first patience ends."""
        has_waiting = bool(self.waiting or self.kv_holding_waiting)
        if (has_waiting and not self._is_stuck) or not (has_waiting or self.running):
            return
        now = time.monotonic()
        end = now + (SHORT_WAIT_S if has_waiting else self._source.longest_wait_s)
        while (due := min(end, self._next_due(now, end))) > now:
            self._source.wait(due - now)
            if self._source.take(self._by_sequence):
                return
            now = time.monotonic()

    def _next_due(self, now: float, otherwise: float) -> float:
        """When the first running request may go on; `otherwise` where none has credit."""
        dues = (self._due(request, now) for request in self.running)
        return min((due for due in dues if due is not None), default=otherwise)

    def _yield_blocks(self) -> None:
        """Where blocks run out, rows without credit give up theirs first, the youngest before."""
        idle = [request for request in self.running if self._due(request, 0.0) is None]
        wanted = self._num_blocks_wanted(len(self.running) - len(idle)) if idle else 0
        while idle and self.kv_cache_manager.block_pool.get_num_free_blocks() < wanted:
            request = idle.pop()
            self.running.remove(request)
            self._preempt_request(request, time.monotonic())

    def _num_blocks_wanted(self, num_rows: int) -> int:
        """By the next step, at most: of the running rows that go on, and of the first that waits and may run."""
        may_run = (request for request in self.waiting if self._due(request, 0.0) is not None)
        of_waiting = (math.ceil(request.num_tokens / self.block_size) + 1 for request in may_run)
        return int(num_rows * math.ceil((1 + self.num_spec_tokens) / self.block_size) + next(of_waiting, 0))

    def _give_turn(self) -> None:
        """A suspect's steps take turns with those of all others, until it has committed a token."""
        if not self._suspects:
            self._alone = ""
            return
        self._suspects = {request_id: row for request_id, row in self._suspects.items() if row.is_suspect}
        ready = (request_id for request_id, row in self._suspects.items() if row.has_credit)
        is_others = bool(self._alone) and len(self.requests) > len(self._suspects)
        self._alone = "" if is_others else next(ready, "")

    def _stands_back(self, request_id: str) -> bool:
        """Whether the next step is another's."""
        return request_id != self._alone if self._alone else request_id in self._suspects

    def _choose_adapters(self) -> None:
        """vLLM counts adapters where a request begins, and takes it that whoever runs is in every step: rows that are
        held here, and come back, would bring more into one than it holds, which ends its engine. Where more are wanted
        than fit they take turns, those of requests that wait, too, unless nobody could begin."""
        if self._turns is None:
            return
        now = time.monotonic()
        may_run = [request for request in self.running if self._may_run(request, now)]
        is_full = (self._is_stuck and may_run) or len(self.running) >= self._most_running
        waiting = () if is_full else islice(self.waiting, MOST_WAITING)
        may_run += [request for request in waiting if self._may_run(request, now)]
        self._chosen = self._turns.choose(number for number in map(number_of_adapter, may_run) if number)

    def _may_run(self, request: Request, now: float) -> bool:
        due = self._due(request, now)
        return due is not None and due <= now and not self._stands_back(request.request_id)

    def _waits_its_turn(self, request: Request) -> bool:
        """Whether the next step is other adapters'."""
        number = number_of_adapter(request)
        return bool(number) and number not in self._chosen

    def _prepare_rows(self) -> None:
        """Hands every running request its window, or holds it for a step: its blocks stay, and the others go on."""
        now = time.monotonic()
        for request in self.running:
            if self._stands_back(request.request_id) or self._waits_its_turn(request):
                request.next_decode_eligible_step = self.current_step + 2
                continue
            row = self._rows.get(request.request_id)
            if row is not None and not request.is_prefill_chunk:
                with self._plainly():
                    self._prepare(request, row, now)

    def _prepare(self, request: Request, row: DraftedRow, now: float) -> None:
        due = row.due(now)
        if due is None or due > now:
            request.next_decode_eligible_step = self.current_step + 2
            return
        request.next_decode_eligible_step = 0
        window = list(row.cut_window(self.num_spec_tokens).ids)
        super().update_draft_token_ids(DraftTokenIds([request.request_id], [window]))

    def _due(self, request: Request, now: float) -> float | None:
        row = self._rows.get(request.request_id)
        return now if row is None or request.is_prefill_chunk else row.due(now)

    def _report(self, step: SchedulerOutput, outputs: Sequence[Any], accepted: Mapping[str, int]) -> None:
        ended, (started, started_ns) = time.monotonic(), self._started
        timings = StepTimings(
            verify_us=round((ended - started) * 1e6),
            num_rows=step.total_num_scheduled_tokens,
            num_sequences=len(step.num_scheduled_tokens),
        )
        load = self._load()
        events: list[TargetEvent] = []
        waits: list[float] = []
        for output in outputs:
            row = self._rows.get(output.request_id)
            if row is None:
                continue
            num_drafted = count_drafted(step, output.request_id)
            if row.last_commit == 0.0:
                waits.append(max(0.0, started - row.opened_at))
            try:
                row.advance(ended)
                if output.new_prompt_logprobs_tensors is not None:
                    events.append(prompt_logprobs_of(row, output))
                events.append(commit_of(row, output, num_drafted, accepted.get(output.request_id, 0), timings, load))
            except Exception as error:  # who asked for it must not wait for ever
                log.exception("a commit of request %s failed", output.request_id)
                failed = unexpected(error, "a commit failed in the engine; see the log", "COMMIT_FAILED")
                events.append(to_failure(row.sequence_id, failed))
                self._forget(output.request_id)
            if output.finish_reason is not None:
                self._forget(output.request_id)
        if timings.num_rows:
            seconds, num_preempted = ended - started, self._num_preempted
            self._source.committed(StepReport(started_ns, seconds, timings, events, load, num_preempted, waits))

    def _load(self) -> Load:
        running, waiting = self.get_request_counts()
        return Load(running, waiting, self.kv_cache_manager.block_pool.get_num_free_blocks())

    def _forget(self, request_id: str) -> None:
        row = self._rows.pop(request_id, None)
        if row is not None:
            self._suspects.pop(request_id, None)
            del self._by_sequence[row.sequence_id]
            with self._plainly():
                self._source.closed(row)

    @contextmanager
    def _plainly(self) -> Iterator[None]:
        """What raises in here costs drafts alone."""
        try:
            yield
        except Exception:
            if not self._has_failed:
                log.exception("drafting failed; steps go on without it where it fails, and it is said once")
            self._has_failed = True


def ask_no_worker() -> None:
    """For drafts, after each step: workers have none (see NoDraft), and the question is one of the three turns that
    engine and workers take in a step."""
    for executor in (MultiprocExecutor, UniProcExecutor):
        executor.take_draft_token_ids = lambda executor: None


def number_of_adapter(request: Request) -> int:
    """vLLM's, of the adapter that a request has; 0: none."""
    return 0 if request.lora_request is None else int(request.lora_request.lora_int_id)


def check_config(vllm_config: Any) -> None:
    """Raises ValueError for what would cut windows or hide drafts from the scheduler."""
    parallel, speculative = vllm_config.parallel_config, vllm_config.speculative_config
    if speculative is None or speculative.method != "custom_class":
        raise ValueError(
            'speculative_config is missing; allowed: {"method": "custom_class", "model": "outrider.vllm.NoDraft", '
            '"num_speculative_tokens": k}'
        )
    if parallel.pipeline_parallel_size > 1:
        raise ValueError(
            f"pipeline_parallel_size is {parallel.pipeline_parallel_size}; allowed: 1 (rows of drafted tokens would be "
            "rebuilt short); use tensor_parallel_size"
        )
    if vllm_config.scheduler_config.async_scheduling:
        raise ValueError("async_scheduling is on; allowed: off, since drafts come between two steps")


def count_drafted(step: SchedulerOutput, request_id: str) -> int:
    """Of a request's window in a step, without the -1 by which vLLM pads one that has just come."""
    return sum(token >= 0 for token in step.scheduled_spec_decode_tokens.get(request_id, ()))


def num_accepted(step: SchedulerOutput, output: ModelRunnerOutput) -> dict[str, int]:
    """Of each request with a window, how many of its drafted tokens hold, past a stop, too."""
    sampled = output.sampled_token_ids
    return {
        request_id: max(0, len(sampled[output.req_id_to_index[request_id]]) - 1)
        for request_id in step.scheduled_spec_decode_tokens
        if sampled
    }


def source_of(vllm_config: Any) -> DraftSource:
    """What the environment says. Raises ValueError where it says nothing."""
    if address := os.environ.get(LINK):
        from outrider.vllm.link import LinkedService

        return LinkedService(address, vllm_config)
    if addresses := os.environ.get(DRAFT):
        from outrider.vllm.draft_client import draft_client

        return draft_client(addresses, vllm_config)
    raise ValueError(f"neither {DRAFT} is set, to the addresses of draft services, nor {LINK}, by `outrider target`")
