"""The gateway's one entry point: a request in, the deltas of its completions out. gRPC, HTTP and the in-process LLM
call the same method. Of each completion rounds become deltas, ids text; a stop string cuts both at the same token."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from math import inf

from opentelemetry import trace

from outrider.gateway.admission import Admission, AdmissionCost, AdmissionGate
from outrider.gateway.goals import ServiceTimes
from outrider.gateway.learning import Learned, RequestKind, are_apart, draft_costs_of, limits_of
from outrider.gateway.media import MediaLimits
from outrider.gateway.prediction import PREDICTION, predictor
from outrider.gateway.prepare import Prepared, Served, least_tokens, no_such_model, num_long_chars, prepare
from outrider.gateway.request_log import RequestLog
from outrider.gateway.request_record import RequestObserver, RequestRecord, Watch
from outrider.gateway.speculation.backends import Drafter, Verifier
from outrider.gateway.speculation.controller import Controller
from outrider.gateway.speculation.loop import SpeculationDriver, speculate
from outrider.gateway.speculation.retry_budget import Retries
from outrider.gateway.speculation.schedule import BatchSchedule
from outrider.gateway.text.chat import MAX_RENDERED, in_turn
from outrider.gateway.text.reasoning import AUTO, find_markers
from outrider.gateway.text.tokenizer import LONG_TEXT, MAX_TOKENISED, Tokenizer, in_thread
from outrider.gateway.text.tools.use import AnswerText
from outrider.gateway.tracing import MAX_TRACED_ROUNDS, RequestTrace
from outrider.planner.forecast import Forecast, SharedStats, VerifyCosts
from outrider.planner.policy import MethodShare, Policy, PolicyController, Round, SpeculationTally
from outrider.proposers.prediction import PredictionState
from outrider.rpc.errors import OTHER_MODEL, WEIGHTS_RESTART, DeadlineExceeded, InvalidArgument, Unavailable
from outrider.rpc.logs import OnceWarnings
from outrider.rpc.media import MEDIA, MEDIA_TYPES
from outrider.rpc.messages import MAX_PATIENCE_MS, DraftTokens, DraftTrial, TargetInfo, to_failure
from outrider.rpc.words.answer import GenerationDelta, Usage
from outrider.rpc.words.request import GenerationRequest
from outrider.rpc.words.sampling_params import MAX_LOGPROBS, FinishReason

HEARS_S, LOOK_S = 2.0, 0.01  # until a gateway has asked anew what a target serves; between two looks
MEDIA_AT_ONCE = 16  # times what one request's pictures may have are held of all
_EXPIRED = "the request's time ran out"
_TRACER = "outrider.gateway"


@dataclass(slots=True)
class RequestRun:
    """What the completions of one request share."""

    prepared: Prepared
    drafter: Drafter | None
    verifier: Verifier
    policy: Policy
    timeout_ms: int
    watch: Watch
    eos_token_ids: tuple[int, ...]
    most_drafted: Callable[[], int] | None  # by the target itself, at present
    on_draft_stop: Callable[[str], None]
    retries: Retries | None = None
    new_controller: Callable[[], PolicyController | None] = lambda: None
    drivers: list[SpeculationDriver] = field(default_factory=list)  # of the completions that have started

    @property
    def method(self) -> str:
        """How is drafted: what was asked for, else the draft's default, with commas between several; else empty."""
        if self.prepared.at_target:
            return self.prepared.methods[0] if self.prepared.num_draft_tokens else ""
        info = None if self.drafter is None or not self.prepared.num_draft_tokens else self.drafter.info
        return "" if info is None else ",".join(self.prepared.methods or info.defaults)


class Completion:
    """Turns the rounds of one completion into deltas."""

    def __init__(self, run: RequestRun, index: int, text: AnswerText) -> None:
        prepared = run.prepared
        self._run, self._index = run, index
        self._output_ids = prepared.output_ids(index)
        self._text = text
        self._tally = SpeculationTally(acceptance=prepared.acceptance)
        self._method = ""  # the one that drafts; empty: not known yet, or several do
        self._predicted = PredictionState(prepared.prediction) if prepared.prediction else None
        if self._predicted is not None:
            self._predicted.append(self._output_ids)
        self._num_returned = self._num_reasoning = self._num_cached = 0
        self._first = True

    async def deltas(self) -> AsyncGenerator[GenerationDelta, None]:
        """The completion, to its end. Driven to its first wait it has opened its sequence."""
        finished = self._finished_before()
        if finished is not None:
            yield self._last(finished)
            return
        run, prepared = self._run, self._run.prepared
        rounds = speculate(
            run.drafter,
            run.verifier,
            prepared.open(self._index, run.timeout_ms, run.watch.record.traceparent),
            run.policy,
            examines_text=bool(prepared.sampling.stop),
            at_target=prepared.at_target,
            most_drafted=run.most_drafted if prepared.at_target else None,
            fork_of=run.drivers[0] if run.drivers else None,
            driver_out=run.drivers,
            on_draft_stop=run.on_draft_stop,
            controller=run.new_controller(),
            retries=run.retries,
            on_piece=self._note_piece,
        )
        async with aclosing(rounds):
            async for item in rounds:
                if not isinstance(item, Round):
                    yield self._marked(self._delta(prompt_logprobs=item.logprobs))
                    continue
                if item.commit.num_drafted and not item.drafted_by:
                    item.drafted_by = self._drafted_by(item)
                delta = await in_thread(self._text.num_held > LONG_TEXT, self._delta_of, item)
                yield delta
                if delta.finish_reason is not None:
                    return

    def _note_piece(self, piece: DraftTokens) -> None:
        self._run.watch.drafted(self._index, piece)

    def _finished_before(self) -> GenerationDelta | None:
        """The finish of a completion that the client has whole, when another one of the request is resumed."""
        ids, sampling = self._output_ids, self._run.prepared.sampling
        if self._text.finished:
            resumed = self._text.resumed
            return self._delta(finish_reason=resumed.finish_reason, stop_reason=resumed.stop_string)
        last = ids[-1] if len(ids) > sampling.min_tokens else None
        if last in sampling.stop_token_ids or (last in self._run.eos_token_ids and not sampling.ignore_eos):
            reason = self._text.push((), FinishReason.STOP).finish_reason
            return self._delta(finish_reason=reason, stop_reason=last if last in sampling.stop_token_ids else None)
        if len(ids) >= sampling.max_tokens:
            return self._delta(finish_reason=FinishReason.LENGTH)
        return None

    def _drafted_by(self, closed: Round) -> tuple[MethodShare, ...]:
        """Where one method drafts, its pieces do not say it."""
        self._method = self._method or self._run.method
        if "," in self._method:  # of several it did not say which
            return ()
        return (MethodShare(self._method, closed.commit.num_drafted, closed.commit.num_accepted),)

    def _delta_of(self, closed: Round) -> GenerationDelta:
        commit = closed.commit
        self._tally.add(closed)
        self._num_cached = max(self._num_cached, commit.num_cached_ids)
        cut = self._text.push(commit.ids, commit.finish_reason, commit.stop_token_id)
        self._num_returned += cut.num_ids
        self._num_reasoning += cut.num_reasoning
        if self._predicted is not None:
            self._predicted.append(commit.ids[: cut.num_ids])
        delta = GenerationDelta(
            self._run.prepared.request_id,
            self._index,
            text=cut.text,
            reasoning=cut.reasoning,
            token_ids=commit.ids[: cut.num_ids],
            num_reasoning=cut.num_reasoning,
            origins=commit.origins[: cut.num_ids],
            logprobs=commit.logprobs[: cut.num_ids],
            finish_reason=cut.finish_reason,
            stop_reason=cut.stop_token_id if cut.stop_string is None else cut.stop_string,
            tool_calls=cut.tool_calls,
            round=closed,
            near_ties=closed.near_ties,
        )
        return self._marked(delta) if cut.finish_reason is None else self._last(delta)

    def _delta(self, **fields: object) -> GenerationDelta:
        return GenerationDelta(self._run.prepared.request_id, self._index, **fields)  # type: ignore[arg-type]

    def _last(self, delta: GenerationDelta) -> GenerationDelta:
        prompt_len, num_predicted = len(self._run.prepared.prompt_ids), len(self._run.prepared.prediction)
        num_met = 0 if self._predicted is None else self._predicted.num_met
        self._tally.method = self._run.method
        predicted = num_met, num_predicted - num_met
        return self._marked(
            replace(
                delta,
                usage=Usage(prompt_len, self._num_returned, self._num_cached, *predicted, self._num_reasoning),
                speculation=self._tally,
            )
        )

    def _marked(self, delta: GenerationDelta) -> GenerationDelta:
        """The first delta says the seed, the model and the prompt's ids."""
        if not self._first:
            return delta
        self._first = False
        prepared = self._run.prepared
        prompt_ids = prepared.prompt_ids
        return replace(delta, seed=prepared.seed, model_digest=prepared.model_digest, prompt_token_ids=prompt_ids)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What holds for every request."""

    num_draft_tokens: int = 4
    mode: str = "sequential"  # "auto": the controller chooses for each request
    max_draft_tokens: int = 8  # that the controller may choose
    schedule: BatchSchedule | None = None  # where the target drafts for itself; any other drafter keeps to its own
    draft_patience_ms: int = 500
    max_active: int = 64  # sequences that run at once
    max_waiting: int = 960  # sequences that may wait
    max_admitted_tokens: int | None = None  # of all these; None: half a context for each
    caller_share: float = 1.0  # of what others leave of both, that one caller may have
    max_running_tokens: Callable[[], int] | None = None  # of all targets; None: as the target says; 0: any number
    room_wait_s: float = 0.0  # that a request which may run waits for a target with room
    away_wait_s: float = 0.0  # that it waits while no target is there
    model_name: str = ""  # empty: the target's
    reasoning_parser: str = AUTO  # how the model tells its reasoning apart: by what the tokenizer has; NONE: not
    max_logprobs: int = MAX_LOGPROBS  # of a position; -1: as many as the vocabulary has ids
    trust_request_chat_template: bool = False  # a conversation over HTTP may bring a template of its own
    log_requests: str = "off"  # "counts": a line of the log for each at its end; "prompts": with its prompt
    trace_rounds: int = MAX_TRACED_ROUNDS  # of a completion, with spans of their own
    trust_traceparent: bool = False  # a client's trace is gone on with, recorded where it says so
    media: MediaLimits = field(default_factory=MediaLimits)  # what it takes of a request's pictures


class GenerationEngine:
    """Generates with a verifier and, where there is one, a drafter."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        verifier: Verifier,
        drafter: Drafter | None = None,
        config: EngineConfig | None = None,
        tracer: trace.Tracer | None = None,
    ) -> None:
        self.tokenizer, self.verifier, self.drafter = tokenizer, verifier, drafter
        self._predictor = predictor(drafter)
        self.config = config or EngineConfig()
        limits = self._max_admitted_tokens, self._max_running_tokens, self.config.caller_share
        most_media = MEDIA_AT_ONCE * self.config.media.max_bytes
        self.admission = Admission(self.config.max_active, self.config.max_waiting, *limits, max_bytes=most_media)
        self._templates = Admission(MAX_RENDERED, sys.maxsize, share=0.5)
        self._texts = Admission(MAX_TOKENISED, sys.maxsize, share=0.5)
        self._markers = find_markers(tokenizer, self.config.reasoning_parser)
        self._tracer = tracer
        self._new_observers: list[Callable[[], RequestObserver]] = []  # one of each for every request
        self._draft_warnings = OnceWarnings("decoding goes on without a draft: %s")
        self.num_running = 0  # sequences
        self._retries = Retries(self.config.max_active)
        self._service_times = ServiceTimes()
        self.learned: Learned | None = None  # of the last pair
        self.draft_trials: Callable[[], tuple[DraftTrial, ...]] = lambda: ()  # of drafts beside the present target

    @property
    def model_name(self) -> str:
        """The name that the model is served under."""
        return self.config.model_name or self.verifier.info.model.name

    @property
    def engines(self) -> tuple[GenerationEngine, ...]:
        """As Models has them: this one alone."""
        return (self,)

    def called(self, name: str | None) -> GenerationEngine:
        """As Models does: this one, which judges the name itself."""
        return self

    @property
    def known(self) -> TargetInfo | None:
        """What a target said of itself; None while none has answered."""
        try:
            return self.verifier.info
        except Unavailable:
            return None

    def adapter_called(self, model: str | None) -> str:
        """The adapter that is meant where OpenAI's interface has a model's name; empty: the model itself. NotFound for
        any other name."""
        if model in (None, self.model_name):
            return ""
        names = [adapter.name for adapter in self.verifier.info.adapters]
        if model not in names:
            raise no_such_model(str(model), self.model_name, *names)
        return str(model)

    @property
    def trials(self) -> tuple[DraftTrial, ...]:
        """What the target's heads, and drafts beside it, were found to be worth."""
        return (*self.verifier.info.trials, *self.draft_trials())

    @property
    def media_types(self) -> tuple[str, ...]:
        """The types of the pictures that requests may have; none where the target, or this gateway, takes none."""
        takes = self.config.media.max_bytes and MEDIA in self.verifier.info.capabilities
        return MEDIA_TYPES if takes else ()

    @property
    def num_draft_tokens(self) -> int:
        """Tokens drafted a round, where a request does not say; 0 where nothing drafts."""
        return self.config.num_draft_tokens if self.drafter is not None or self.verifier.info.methods else 0

    def watch_with(self, new_observer: Callable[[], RequestObserver]) -> None:
        """Has every request from now on observed, each by an observer of its own."""
        self._new_observers.append(new_observer)

    def round_trip_us(self) -> float:
        """The measured round trip to the draft; 0 without one."""
        return 0.0 if self.drafter is None else self.drafter.round_trip_us

    def forecast(self, stats: SharedStats) -> Forecast:
        """What each way to draft would cost a token now, by what was measured."""
        return Forecast(stats, False, stats.acceptance, stats.hits, self.round_trip_us, lambda: self.num_running)

    async def generate(
        self, request: GenerationRequest, gate: AdmissionGate | None = None, observers: Sequence[RequestObserver] = ()
    ) -> AsyncGenerator[GenerationDelta, None]:
        """Yields the deltas of all completions as they are committed. Raises OutriderError. Closing the iterator ends
        every sequence at once; what is not asked for is not generated far ahead. It waits at `gate`, or by itself.
        `observers` see it beside those that see all requests."""
        loop = asyncio.get_running_loop()
        deadline = None if request.timeout_s is None else loop.time() + request.timeout_s
        root = self._new_trace(request)
        with Watch(RequestRecord(request), [*self._observers_of(root), *observers]) as watch:
            prepared = await self._admit(watch.record, gate or self.admission, deadline)
            left, of_completion = prepared.work, AdmissionCost(1, prepared.sampling.max_tokens, request.account)
            try:
                prepared = await self._of_served_model(prepared)
                watch.began(prepared)
                recorded = root is not None and root.recording
                held: list[GenerationDelta] = []
                async with aclosing(self._decoded(prepared, watch, deadline, recorded, held)) as deltas:
                    async for delta in deltas:
                        watch.add(delta)
                        if delta.finish_reason is not None:
                            left -= of_completion
                            self.admission.leave(of_completion)
                        if request.whole:
                            held.append(delta)
                        else:
                            yield delta
                for delta in held:
                    yield delta
                self._service_times.add(watch.record, self.num_running + request.n)
            except InvalidArgument as error:
                raise error if prepared.tools is None else prepared.tools.named(error) from error
            finally:
                self.admission.leave(left)

    def _observers_of(self, root: RequestTrace | None) -> list[RequestObserver]:
        """Makes the observers of the next request. The trace comes first: the others name it."""
        observers: list[RequestObserver] = [] if root is None else [root]
        if self.config.log_requests != "off":
            observers.append(RequestLog(self.model_name, self.config.log_requests == "prompts"))
        return observers + [new_observer() for new_observer in self._new_observers]

    async def _admit(self, record: RequestRecord, gate: AdmissionGate, deadline: float | None) -> Prepared:
        request = record.request
        least = least_tokens(request, self.verifier.info.model.max_model_len)
        least = least if least <= self._max_admitted_tokens() else 0  # what is always too much is told with all else
        self.admission.require_room(AdmissionCost(1, least, request.account))  # before anything is spent on it
        if request.model not in ("", self.model_name):
            raise no_such_model(request.model, self.model_name)
        try:
            async with asyncio.timeout_at(deadline):
                prepared = await self._prepare(request)
                if request.goals.by_name:
                    num_running = min(self.num_running + request.n, self.config.max_active)
                    prepared = self._service_times.placed(prepared, record, self.admission, num_running)
                await gate.enter(prepared.work, prepared.request.priority)
        except TimeoutError:
            raise DeadlineExceeded(_EXPIRED) from None
        return prepared

    @asynccontextmanager
    async def template_turn(self, account: str, num_messages: int) -> AsyncIterator[None]:
        """A turn at the threads on which conversations are rendered, fair between callers: one that has half of them or
        more comes after all others. ResourceExhausted where it does not come in time."""
        work = AdmissionCost(1, num_messages, account)
        await in_turn(self._templates.enter(work))
        try:
            yield
        finally:
            self._templates.leave(work)

    @asynccontextmanager
    async def text_turn(self, account: str, num_long_chars: int) -> AsyncIterator[None]:
        """A turn at the threads on which long texts are tokenised, fair as those of templates. It comes, since no text
        takes for ever. Without such texts there is none."""
        if not num_long_chars:
            yield
            return
        work = AdmissionCost(1, num_long_chars, account)
        await self._texts.enter(work)
        try:
            yield
        finally:
            self._texts.leave(work)

    async def _prepare(self, request: GenerationRequest) -> Prepared:
        if request.messages is None:
            async with self.text_turn(request.account, num_long_chars(request)):
                return await self._prepared(request)
        async with self.template_turn(request.account, len(request.messages)):
            return await self._prepared(request)

    async def _of_served_model(self, prepared: Prepared) -> Prepared:
        """The request, prepared again where another model is served since."""
        if prepared.model_digest == self.verifier.info.digest_of(prepared.request.adapter):
            return prepared
        return await self._prepare(prepared.request)

    async def _prepared(self, request: GenerationRequest) -> Prepared:
        config = self.config
        served = Served(
            self.tokenizer,
            self.verifier.info,
            None if self.drafter is None else self.drafter.info,
            self.num_draft_tokens,
            config.mode,
            config.max_logprobs,
            self._markers,
            config.media,
        )
        return await prepare(request, served)

    async def _decoded(
        self,
        prepared: Prepared,
        watch: Watch,
        deadline: float | None,
        recorded: bool,
        held: list[GenerationDelta],
    ) -> AsyncGenerator[GenerationDelta, None]:
        """The deltas of a request. Where its targets changed their weights as it was opened, and before this gateway
        heard of it, or where they ended it to be restarted, it begins anew with theirs: nothing was decoded of it, or
        all is still `held`, and is dropped."""
        while True:
            texts = await self._texts_of(prepared)
            run, has_begun = self._new_run(prepared, watch, _ms_until(deadline), recorded), False
            try:
                async with aclosing(self._run(run, texts, deadline)) as deltas:
                    async for delta in deltas:
                        has_begun = True
                        yield delta
                return
            except Unavailable as error:
                restarts = error.reason == WEIGHTS_RESTART and watch.may_restart
                if (has_begun and not restarts) or prepared.request.model_digest:
                    raise
                wait_s = HEARS_S if error.reason in (OTHER_MODEL, WEIGHTS_RESTART) else 0.0
                if not await self._hears_of_another(prepared, wait_s, deadline):
                    raise
            if has_begun:
                held.clear()
                watch.restart()
            prepared = await self._of_served_model(prepared)

    async def _hears_of_another(self, prepared: Prepared, wait_s: float, deadline: float | None) -> bool:
        """Whether another model serves new requests; waits so long for it."""
        loop = asyncio.get_running_loop()
        until = min(loop.time() + wait_s, deadline or inf)
        while self.verifier.info.digest_of(prepared.request.adapter) in (prepared.model_digest, None):
            if loop.time() >= until:
                return False
            await asyncio.sleep(LOOK_S)
        return True

    async def _run(
        self, run: RequestRun, texts: list[AnswerText], deadline: float | None
    ) -> AsyncGenerator[GenerationDelta, None]:
        timer = None if deadline is None else asyncio.get_running_loop().call_at(deadline, _expire, run)
        num_sequences = run.prepared.request.n
        self.num_running += num_sequences
        self._retries.num_sequences += num_sequences
        try:
            merged = merge([Completion(run, index, text).deltas() for index, text in enumerate(texts)])
            async with aclosing(merged):
                async for delta in merged:
                    yield delta
        finally:
            self.num_running -= num_sequences
            if timer is not None:
                timer.cancel()

    async def _texts_of(self, prepared: Prepared) -> list[AnswerText]:
        """The texts of all completions, with what the client has of them; made beside the event loop where that is
        long."""
        num_ids = sum(map(len, prepared.request.output_ids))
        is_long = num_ids > LONG_TEXT
        async with self.text_turn(prepared.request.account, num_ids if is_long else 0):
            return await in_thread(is_long, prepared.text_streams, self.tokenizer)

    def _new_trace(self, request: GenerationRequest) -> RequestTrace | None:
        """None where nothing is recorded here, and no client's trace is to be passed on."""
        tracer, trusts = self._recording_tracer(), self.config.trust_traceparent
        if tracer is None and not (trusts and request.traceparent):
            return None
        return RequestTrace(tracer or trace.get_tracer(_TRACER), self.model_name, trusts, self.config.trace_rounds)

    def _recording_tracer(self) -> trace.Tracer | None:
        """None where nothing is recorded here."""
        if self._tracer is None and isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
            return None
        return self._tracer or trace.get_tracer(_TRACER)

    def _new_run(self, prepared: Prepared, watch: Watch, timeout_ms: int, recorded: bool) -> RequestRun:
        drafter = self._drafter_for(prepared)
        k = prepared.num_draft_tokens if drafter is not None or prepared.at_target else 0
        room_s, away_s = self.config.room_wait_s, self.config.away_wait_s
        policy = Policy(k, self._patience_ms(), room_s=room_s, away_s=away_s)
        schedule = self.config.schedule
        return RequestRun(
            prepared=prepared,
            drafter=drafter,
            verifier=self.verifier,
            policy=policy,
            new_controller=lambda: self._new_controller(prepared, policy, recorded) if k else None,
            timeout_ms=timeout_ms,
            watch=watch,
            eos_token_ids=self.verifier.info.model.eos_token_ids,
            most_drafted=None if schedule is None else lambda: schedule.num_draft_tokens(self.num_running),
            on_draft_stop=self._draft_warnings.warn,
            retries=self._retries,
        )

    def _drafter_for(self, prepared: Prepared) -> Drafter | None:
        """What drafts for a request: by a prediction the gateway itself, where the draft does not. None where the
        target does."""
        if prepared.at_target:
            return None
        info = None if self.drafter is None else self.drafter.info
        methods = () if info is None else [method.name for method in info.methods]
        return self._predictor if prepared.methods == (PREDICTION,) and PREDICTION not in methods else self.drafter

    def _new_controller(self, prepared: Prepared, base: Policy, explains: bool) -> Controller | None:
        """None where nothing is to be chosen. `explains`: a trace is to say what it chose by."""
        info = self.verifier.info
        limits = limits_of(prepared, base, self.config.max_draft_tokens, info.max_window)
        if limits is None:
            return None
        draft = None if self.drafter is None else self.drafter.info
        known = self.learned.pair if self.learned is not None else ("", "")
        pair = info.model.digest, known[1] if draft is None else draft.model.digest  # a draft may come back
        if self.learned is None or known != pair:
            self.learned = Learned(pair, VerifyCosts(info.step_costs, info.expert_costs))
        costs, apart = draft_costs_of(draft, prepared.methods), are_apart(info, draft)
        stats, trials = self.learned.of(prepared.methods, prepared.at_target, RequestKind.of(prepared), costs, apart)
        goal_us = 1e3 * (prepared.request.goals.tpot_ms or 0.0)
        return Controller(limits, stats, trials, self.round_trip_us, lambda: self.num_running, explains, goal_us)

    def _max_admitted_tokens(self) -> int:
        """Half a context for each sequence that may run or wait, if nothing else is set; a whole one for each that may
        run."""
        if self.config.max_admitted_tokens is not None:
            return self.config.max_admitted_tokens
        num_active, num_waiting = self.config.max_active, self.config.max_waiting
        return self.verifier.info.model.max_model_len * max(num_active, (num_active + num_waiting) // 2)

    def _max_running_tokens(self) -> int:
        of_all = self.config.max_running_tokens
        return (self.verifier.info.model.max_open_tokens if of_all is None else of_all()) or sys.maxsize

    def _patience_ms(self) -> int:
        """How long a target waits for a draft: at least the measured round trip to it."""
        return min(MAX_PATIENCE_MS, max(self.config.draft_patience_ms, math.ceil(self.round_trip_us() / 1000)))


def _ms_until(deadline: float | None) -> int:
    """What is left of the time of the event loop; 0: there is no deadline."""
    return 0 if deadline is None else max(1, round((deadline - asyncio.get_running_loop().time()) * 1000))


def _expire(run: RequestRun) -> None:
    for driver in run.drivers:
        driver.fail(to_failure(0, DeadlineExceeded(_EXPIRED)))


def merge(completions: list[AsyncGenerator[GenerationDelta, None]]) -> AsyncGenerator[GenerationDelta, None]:
    """Deltas of all as they come; the first error ends all. One completion needs no task of its own."""
    return _merged(completions) if completions[1:] else completions[0]


async def _merged(completions: list[AsyncGenerator[GenerationDelta, None]]) -> AsyncGenerator[GenerationDelta, None]:
    queue: asyncio.Queue[GenerationDelta | Exception | None] = asyncio.Queue(len(completions))
    tasks = [asyncio.create_task(_forward(completion, queue)) for completion in completions]
    try:
        left = len(tasks)
        while left:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                left -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _forward(
    completion: AsyncGenerator[GenerationDelta, None], queue: asyncio.Queue[GenerationDelta | Exception | None]
) -> None:
    """Moves deltas to the queue, None at the end. A full queue holds the completion, and so its credit, up."""
    try:
        async with aclosing(completion):
            async for delta in completion:
                await queue.put(delta)
    except Exception as error:  # the reader raises it
        await queue.put(error)
    else:
        await queue.put(None)
