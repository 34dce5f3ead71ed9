"""vLLM behind Verify: commands in, requests to its engine, commits out as its scheduler says them over the link.

Everything here belongs to the event loop; the device belongs to vLLM's own processes. It stands where our own engine
and its thread stand together: see TargetEngine."""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from outrider.engine.batch import PreparedAdapter
from outrider.engine.worker import DeviceStopped
from outrider.planner.estimates import OpenWork
from outrider.rpc.errors import (
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    OutriderError,
    ResourceExhausted,
    Unavailable,
    Violation,
    unexpected,
)
from outrider.rpc.logs import of
from outrider.rpc.media import num_bytes
from outrider.rpc.messages import (
    Close,
    Closed,
    Commit,
    Credit,
    DraftTokens,
    Failure,
    Load,
    Open,
    TargetCommand,
    TargetEvent,
    to_failure,
)
from outrider.rpc.servicer import Detach
from outrider.rpc.words.sampling_params import FinishReason
from outrider.target_service.adapters import AdapterTable, ServedAdapter
from outrider.target_service.engine import TargetEngineCommand
from outrider.target_service.observed import EngineStats, ObservedStep
from outrider.target_service.sequence import SequenceKey, Sink, TargetLimits, with_prompt
from outrider.vllm.link_messages import LinkCommand, LinkEvent
from outrider.vllm.source import StepReport
from outrider.vllm.target.adapters import VllmAdapters
from outrider.vllm.target.grammars import VllmGrammars
from outrider.vllm.target.pictures import Pictures, PlacedPrompt
from outrider.vllm.target.requests import VLLM_CAPABILITIES, check_request, prompt_of, refusals, sampling_of

log = logging.getLogger(__name__)

MEDIA_AT_ONCE = 16  # times what one sequence's pictures may have are held of all that are open
BACK_MS = 1000  # when more may come
LAST_COMMIT_S = 5.0  # behind a request's end, of which vLLM tells another way than its scheduler of commits


@dataclass(slots=True)
class VllmSequence:
    """One sequence, which is a request of vLLM's from its first credit on."""

    key: SequenceKey
    number: int  # among all of this engine: the link's sequence id
    open: Open  # with its prompt, also of a fork
    sink: Sink
    adapter: ServedAdapter | None = None
    request: asyncio.Task[None] | None = None
    deadline: asyncio.TimerHandle | None = None
    placed: PlacedPrompt | None = None  # with pictures, once they have their places
    held: list[Credit | DraftTokens] = field(default_factory=list)  # until then

    @property
    def offset(self) -> int:
        """Tokens that vLLM has more before each position than its ids say."""
        return 0 if self.placed is None else self.placed.offset


class Link(Protocol):
    """What the engine needs of an EngineLink."""

    on_event: Callable[[LinkEvent], None]
    on_end: Callable[[], None]

    @property
    def step_started(self) -> float:
        """When the step under way began, in seconds of time.monotonic; 0 between steps."""

    def send(self, commands: Sequence[LinkCommand]) -> None:
        """To the scheduler. Raises OSError once it is gone."""

    def close(self) -> None:
        """Ends the link."""


class VllmEngine:
    """`llm` is vLLM's AsyncLLM. `flush` is called after each step with answers, `on_step` is told of each."""

    is_streamed = False  # whether tokens come with vLLM's own outputs

    def __init__(
        self,
        llm: Any,
        link: Link,
        limits: TargetLimits,
        *,
        flush: Callable[[], None] = lambda: None,
        on_step: Callable[[ObservedStep], None] | None = None,
        capabilities: Sequence[str] = VLLM_CAPABILITIES,
        grammars: VllmGrammars | None = None,
        pictures: Pictures | None = None,
        vllm_adapters: VllmAdapters | None = None,  # where vLLM was started for any
    ) -> None:
        self.limits, self._pictures = limits, pictures
        self.adapters, self.vllm_adapters = AdapterTable(self._forget_adapter), vllm_adapters
        self.capabilities, self._grammars = capabilities, grammars
        self.ended: Future[None] = Future()
        self._llm, self._link = llm, link
        self._flush = flush
        self._on_step = on_step
        self._loop = asyncio.get_running_loop()
        self._sequences: dict[SequenceKey, VllmSequence] = {}
        self._by_number: dict[int, VllmSequence] = {}
        self._work = OpenWork(limits.max_sequences, limits.max_open_tokens)
        self._numbers = itertools.count(1)
        self._unsent: list[LinkCommand] = []
        self._load = Load(free_blocks=limits.num_blocks)
        self._num_looked_up = self._num_found = self._num_preempted = 0
        link.on_event, link.on_end = self._on_link_event, self._on_link_end

    # What the servicer and the process ask for.

    @property
    def is_alive(self) -> bool:
        """Whether it takes commands."""
        return not self.ended.done()

    def step_age_s(self) -> float:
        """For how long the step under way has run; 0 between steps."""
        started = self._link.step_started
        return time.monotonic() - started if started else 0.0

    def load(self) -> Load:
        """The present load, from any thread; what waits for its first step counts as waiting."""
        sequences = list(self._sequences.values())  # at once: the loop changes it
        waiting = sum(one.request is not None for one in sequences) - self._load.running
        return replace(self._load, waiting=max(0, waiting))

    def stats(self) -> EngineStats:
        """What metrics read; from any thread."""
        return EngineStats(
            self.load(),
            num_open=len(self._sequences),
            num_blocks=self.limits.num_blocks,
            block_size=self.limits.block_size,
            num_free=self._load.free_blocks,
            num_looked_up=self._num_looked_up,
            num_found=self._num_found,
            num_preempted=self._num_preempted,
            num_adapters=len(self.adapters),
            adapter_sequences=self.adapters.num_sequences(),
        )

    def _forget_adapter(self, prepared: PreparedAdapter) -> None:
        if self.vllm_adapters is not None:
            self.vllm_adapters.forget(prepared)

    def submit(self, command: TargetEngineCommand) -> None:
        """Applies one command. Raises DeviceStopped once the engine has ended."""
        if not self.is_alive:
            raise DeviceStopped("vLLM's engine has ended")
        if isinstance(command, Detach):
            for sequence in [one for one in self._sequences.values() if one.key[0] == command.stream]:
                self._remove(sequence)
            self._hand_over()
            return
        for message in command.messages:
            try:
                self._apply(command.stream, message, command.sink)
            except Exception as error:
                log.exception("a %s of sequence %d failed", type(message).__name__, message.sequence_id)
                failed = unexpected(error, "a message failed in the engine; see the log", "COMMAND_FAILED")
                self._refuse((command.stream, message.sequence_id), command.sink, failed)
        self._hand_over()

    def call(self, function: Callable[[], Any]) -> Future[Any]:
        """Runs a function at once."""
        future: Future[Any] = Future()
        try:
            future.set_result(function())
        except Exception as error:
            future.set_exception(error)
        return future

    async def reset_prefix_cache(self) -> None:
        """Forgets every cached prefix."""
        await self._llm.reset_prefix_cache()

    def probe(self) -> None:
        """A sign of life. Raises where vLLM's engine is dead."""
        if self._llm is None or self._llm.errored:
            raise RuntimeError("vLLM's engine has ended")

    def unlink(self) -> None:
        """Ends the link, on the loop; vLLM goes on plainly."""
        self._link.close()

    def stop(self) -> None:
        """Ends vLLM's processes. Where the loop has ended before, `unlink` comes first."""
        if not self.ended.done():
            self.ended.set_result(None)
        self._link.close()
        if self._grammars is not None:
            self._grammars.close()
        if self._pictures is not None:
            self._pictures.close()
        llm, self._llm = self._llm, None
        if llm is not None:
            llm.shutdown()
            del llm
            gc.collect()  # it is in cycles, and would end itself again as the interpreter's last act
        if self.vllm_adapters is not None:
            self.vllm_adapters.close()

    # What the gateways say.

    def _apply(self, stream: int, message: TargetCommand, sink: Sink) -> None:
        key = (stream, message.sequence_id)
        if isinstance(message, Open):
            try:
                self._open(key, message, sink)
            except OutriderError as error:
                self._refuse(key, sink, error)
            return
        sequence = self._sequences.get(key)
        if isinstance(message, Close):
            if sequence is not None:
                self._remove(sequence)
            sink(Closed(message.sequence_id))
        elif sequence is not None:  # else it finished or failed before this arrived
            if isinstance(message, DraftTokens) and self.limits.untrusted_draft:
                message = replace(message, weights=())
            self._tell(sequence, replace(message, sequence_id=sequence.number))
            if isinstance(message, Credit) and sequence.request is None and message.until > committed_at(sequence.open):
                sequence.request = self._loop.create_task(self._run(sequence))
                if sequence.adapter is not None and self.vllm_adapters is not None:
                    self.vllm_adapters.note(sequence.adapter.prepared, sequence.request)

    def _open(self, key: SequenceKey, message: Open, sink: Sink) -> None:
        now, num_tokens = time.monotonic(), len(message.prompt_ids) + message.sampling.max_tokens
        parent = self._sequences.get((key[0], message.fork_of)) if message.fork_of is not None else None
        whole = with_prompt(message, parent.open if parent else None)
        adapter = self.adapters.find(message, parent.adapter if parent else None)
        check_request(whole, self.limits, self.capabilities, None if adapter is None else adapter.info)
        self._work.check(num_tokens, now, message.was_promised)
        if message.media:
            self._check_room(whole)
        sequence = VllmSequence(key, next(self._numbers), whole, sink, adapter)
        if adapter is not None:
            adapter.num_sequences += 1
        if whole.timeout_ms:
            late = DeadlineExceeded("the request's time ran out", reason="DEADLINE")
            sequence.deadline = self._loop.call_later(whole.timeout_ms / 1000, self._fail, sequence, late)
        self._sequences[key] = self._by_number[sequence.number] = sequence
        self._work.add(key, num_tokens, now)

    def _check_room(self, message: Open) -> None:
        """Checks that there is room for the bytes of its pictures, beside those of what is open; forks share theirs."""
        held = {id(one.open.media): num_bytes(one.open.media) for one in self._sequences.values()}
        most, size = MEDIA_AT_ONCE * self.limits.max_media_bytes, sum(held.values()) + num_bytes(message.media)
        if size > most and not message.was_promised:
            problem = f"with it {size} bytes of media would be open; allowed: {most}"
            raise ResourceExhausted(problem, reason="BUSY", retry_after_ms=BACK_MS)

    async def _place(self, sequence: VllmSequence) -> PlacedPrompt | None:
        """Gives its pictures, if it has any, their places; what was said of its positions meanwhile is told then."""
        if self._pictures is None or not sequence.open.media:
            return None
        placed = sequence.placed = await self._pictures.placed(sequence.open)
        num_tokens = len(sequence.open.prompt_ids) + sequence.open.sampling.max_tokens
        self._work.add(sequence.key, num_tokens + placed.offset, time.monotonic())
        held, sequence.held = sequence.held, []
        for command in held:
            self._tell(sequence, command)
        self._hand_over()
        return placed

    async def _run(self, sequence: VllmSequence) -> None:
        """The request's life in vLLM; its tokens come over the link."""
        message = sequence.open
        try:
            grammar = None
            if self._grammars is not None and message.sampling.structured_output is not None:
                grammar = await self._grammars.params_of(message)
            params = sampling_of(message, self.limits.eos_ids, sequence.number, self.is_streamed, grammar)
            prompt = prompt_of(message)
            if (placed := await self._place(sequence)) is not None:
                prompt, params = placed.prompt, placed.bound(params, self.limits.max_model_len)
            weights = None if sequence.adapter is None else sequence.adapter.prepared.weights
            name = f"outrider-{sequence.number}"
            made = self._llm.generate(prompt, params, name, lora_request=weights, priority=message.priority)
            async for answer in made:
                reason = answer.outputs[0].finish_reason
                if reason in ("abort", "error"):
                    self._fail(sequence, ended_by_vllm(message))
                else:
                    self._answered(sequence, answer)
            if sequence.key in self._sequences and not self.is_streamed:
                lost = Internal(
                    "the request ended, and its last commit did not come; see the log", reason="COMMIT_LOST"
                )
                self._loop.call_later(LAST_COMMIT_S, self._fail, sequence, lost)
        except (InvalidArgument, ResourceExhausted, Unavailable) as error:
            self._fail(sequence, error)
        except Exception as error:
            if isinstance(error, refusals()):
                self._fail(sequence, refused_by_vllm(message, error))
                return
            if self._llm is None or self._llm.errored:
                self._end(error)
            else:
                log.exception("sequence %d failed in vLLM", message.sequence_id, extra=of(message))
                self._fail(sequence, unexpected(error, "the request failed in vLLM; see the log", "STEP_FAILED"))

    def _answered(self, sequence: VllmSequence, answer: Any) -> None:
        """vLLM's own output of the whole request: it has left over the link already."""

    # What vLLM's scheduler says.

    def _on_link_event(self, event: LinkEvent) -> None:
        events: Sequence[TargetEvent] = (event,) if isinstance(event, Commit) else event.events
        if isinstance(event, StepReport):
            self._load, self._num_preempted = event.load, event.num_preempted
            if self._on_step is not None:
                self._on_step(self._observed(event))
        for one in events:
            sequence = self._by_number.get(one.sequence_id)
            if sequence is None:
                continue
            try:
                self._hand_on(sequence, one, self._load)  # as the step left it
            except Exception as error:  # the others' commits are in the same report
                log.exception("a commit of sequence %d failed", sequence.open.sequence_id, extra=of(sequence.open))
                self._fail(sequence, unexpected(error, "a commit failed in the engine; see the log", "COMMIT_FAILED"))
        self._hand_over()

    def _on_link_end(self) -> None:
        """The scheduler's process is gone."""
        self._end(None)

    def _observed(self, report: StepReport) -> ObservedStep:
        commits = [event for event in report.events if isinstance(event, Commit)]
        known = (self._by_number.get(commit.sequence_id) for commit in commits)
        return ObservedStep(
            report.started_ns,
            report.seconds,
            report.timings,
            num_verify_rows=sum(commit.num_drafted + 1 for commit in commits),
            num_drafted=sum(commit.num_drafted for commit in commits),
            num_accepted=sum(commit.num_accepted for commit in commits),
            traceparents=[sequence.open.traceparent for sequence in known if sequence is not None],
            waits=report.waits,
        )

    def _hand_on(self, sequence: VllmSequence, event: TargetEvent, load: Load) -> None:
        """An event of the scheduler's, whose sequence has another id on its stream."""
        own = sequence.open.sequence_id
        if not isinstance(event, Commit):
            if isinstance(event, Failure):
                self._remove(sequence)
            sequence.sink(replace(event, sequence_id=own))
            return
        if event.finish_reason is FinishReason.ERROR:
            self._fail(sequence, ended_by_vllm(sequence.open))
            return
        event.sequence_id, event.load = own, load
        if sequence.placed is not None:
            event.position -= 0 if self.is_streamed else sequence.offset  # else it was counted by the ids
            event.num_cached_ids = sequence.placed.cached(event.num_cached_ids)
        if event.ids and event.position == committed_at(sequence.open):
            self._num_looked_up += event.position
            self._num_found += event.num_cached_ids
        if event.stop_token_id not in sequence.open.sampling.stop_token_ids:
            event.stop_token_id = None  # an end of sequence
        sequence.sink(event)
        if event.finish_reason is not None:
            self._remove(sequence, has_finished=True)

    # How sequences end.

    def _fail(self, sequence: VllmSequence, error: OutriderError) -> None:
        if sequence.key in self._sequences:
            self._remove(sequence)
            sequence.sink(to_failure(sequence.open.sequence_id, error))
            self._hand_over()

    def _refuse(self, key: SequenceKey, sink: Sink, error: OutriderError) -> None:
        sequence = self._sequences.get(key)
        if sequence is not None:
            self._remove(sequence)
        sink(to_failure(key[1], error))

    def _remove(self, sequence: VllmSequence, has_finished: bool = False) -> None:
        """Forgets a sequence; vLLM aborts what it has not finished."""
        if self._sequences.pop(sequence.key, None) is None:
            return
        del self._by_number[sequence.number]
        self._work.remove(sequence.key, time.monotonic())
        self._send(Close(sequence.number))
        if sequence.deadline is not None:
            sequence.deadline.cancel()
        if sequence.request is not None and not has_finished:
            sequence.request.cancel()
        if sequence.adapter is not None:
            self.adapters.close(sequence.adapter)
            sequence.adapter = None

    def _tell(self, sequence: VllmSequence, command: Credit | DraftTokens) -> None:
        """What is said of a sequence's positions, which are vLLM's own there."""
        if self.is_streamed or not sequence.open.media:
            self._send(command)
        elif sequence.placed is None:
            sequence.held.append(command)
        else:
            self._send(sequence.placed.shifted(command))

    def _send(self, command: LinkCommand) -> None:
        self._unsent.append(command)

    def _hand_over(self) -> None:
        """What one turn says leaves together, either way."""
        self._flush()
        unsent, self._unsent = self._unsent, []
        try:
            if unsent:
                self._link.send(unsent)
        except OSError as error:
            self._end(error)

    def _end(self, error: BaseException | None) -> None:
        """vLLM's engine is gone, and this process with it: the gateways open elsewhere."""
        if self.ended.done():
            return
        self.ended.set_exception(RuntimeError("vLLM's engine has ended; see its log"))
        log.error("vLLM's engine has ended", exc_info=error)
        gone = Unavailable("vLLM's engine has ended", reason="DEVICE_DEAD")
        for sequence in list(self._sequences.values()):
            self._sequences.pop(sequence.key)
            sequence.sink(to_failure(sequence.open.sequence_id, gone))
        self._flush()


def ended_by_vllm(message: Open) -> OutriderError:
    """Why vLLM ended a request that nobody asked it to end. With a grammar: that failed to compile, does not fit what
    was generated before, or grew beyond vLLM's bounds."""
    if message.sampling.structured_output is None:
        return Internal("vLLM ended the request; see its log", reason="STEP_FAILED")
    problem = "is a grammar that vLLM cannot follow, or not from output_ids on; see the target's log"
    return InvalidArgument.of([Violation("sampling.structured_output", problem)])


def refused_by_vllm(message: Open, error: Exception) -> OutriderError:
    """What vLLM says of a request that it does not take. Of one with a grammar 0.33 says it where that fails to
    compile, and 0.32 ends the request: see `ended_by_vllm`."""
    problem = f"vLLM refuses the request: {error}"
    if message.sampling.structured_output is None:
        return InvalidArgument(problem)
    return InvalidArgument.of([Violation("sampling.structured_output", problem)])


def committed_at(message: Open) -> int:
    """The committed length that a sequence opens with."""
    return len(message.prompt_ids) + len(message.output_ids)
