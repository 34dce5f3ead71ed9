"""One completion of a request: its rounds become deltas, its ids text; a stop string cuts both at the same token."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from outrider.gateway.backends import Drafter, Verifier
from outrider.gateway.driver import SpeculationDriver
from outrider.gateway.generation import GenerationDelta, Usage
from outrider.gateway.loop import speculate
from outrider.gateway.policy import Chooser, Policy
from outrider.gateway.prepare import Prepared
from outrider.gateway.rounds import Round, SpeculationTally
from outrider.gateway.text import TextStream
from outrider.gateway.tokenizer import Tokenizer
from outrider.gateway.tracing import RequestTrace
from outrider.wire.sampling import FinishReason


@dataclass(slots=True)
class RequestRun:
    """What the completions of one request share."""

    prepared: Prepared
    tokenizer: Tokenizer
    drafter: Drafter | None
    verifier: Verifier
    policy: Policy
    timeout_ms: int
    trace: RequestTrace
    eos_token_ids: tuple[int, ...]
    on_draft_stop: Callable[[str], None]
    new_chooser: Callable[[], Chooser | None] = lambda: None
    drivers: list[SpeculationDriver] = field(default_factory=list)  # of the completions that have started


class Completion:
    """Turns the rounds of one completion into deltas."""

    def __init__(self, run: RequestRun, index: int) -> None:
        prepared = run.prepared
        self._run, self._index = run, index
        self._output_ids = prepared.output_ids(index)
        self._text = TextStream(run.tokenizer, prepared.sampling, prepared.prompt_ids, self._output_ids)
        self._tally = SpeculationTally()
        self._num_returned = self._num_cached = 0
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
            prepared.open(self._index, run.timeout_ms, run.trace.traceparent),
            run.policy,
            examines_text=bool(prepared.sampling.stop),
            fork_of=run.drivers[0] if run.drivers else None,
            driver_out=run.drivers,
            on_draft_stop=run.on_draft_stop,
            chooser=run.new_chooser(),
        )
        async with aclosing(rounds):
            async for item in rounds:
                if not isinstance(item, Round):
                    yield self._marked(self._delta(prompt_logprobs=item.logprobs))
                    continue
                delta = self._delta_of(item)
                run.trace.add_round(item, self._index)
                yield delta
                if delta.finish_reason is not None:
                    return

    def _finished_before(self) -> GenerationDelta | None:
        """The finish of a completion that the client has whole, when another one of the request is resumed."""
        ids, sampling = self._output_ids, self._run.prepared.sampling
        if self._text.finished:
            resumed = self._text.resumed
            return self._delta(finish_reason=resumed.finish_reason, stop_string=resumed.stop_string)
        if ids and ids[-1] in sampling.stop_token_ids and len(ids) > sampling.min_tokens:
            return self._delta(finish_reason=FinishReason.STOP, stop_token_id=ids[-1])
        if ids and ids[-1] in self._run.eos_token_ids and len(ids) > sampling.min_tokens and not sampling.ignore_eos:
            return self._delta(finish_reason=FinishReason.STOP)
        if len(ids) >= sampling.max_tokens:
            return self._delta(finish_reason=FinishReason.LENGTH)
        return None

    def _delta_of(self, closed: Round) -> GenerationDelta:
        commit = closed.commit
        self._tally.add(closed)
        self._num_cached = max(self._num_cached, commit.num_cached_ids)
        cut = self._text.push(commit.ids, commit.finish_reason, commit.stop_token_id)
        self._num_returned += cut.num_ids
        delta = self._delta(
            text=cut.text,
            token_ids=commit.ids[: cut.num_ids],
            origins=commit.origins[: cut.num_ids],
            logprobs=commit.logprobs[: cut.num_ids],
            finish_reason=cut.finish_reason,
            stop_string=cut.stop_string,
            stop_token_id=cut.stop_token_id,
            round=closed,
            near_ties=closed.near_ties,
        )
        return self._marked(delta) if cut.finish_reason is None else self._last(delta)

    def _delta(self, **fields: object) -> GenerationDelta:
        return GenerationDelta(self._run.prepared.request_id, self._index, **fields)  # type: ignore[arg-type]

    def _last(self, delta: GenerationDelta) -> GenerationDelta:
        prompt_len = len(self._run.prepared.prompt_ids)
        return self._marked(
            replace(
                delta,
                usage=Usage(prompt_len, self._num_returned, self._num_cached),
                tally=self._tally,
                acceptance=self._run.prepared.acceptance,
            )
        )

    def _marked(self, delta: GenerationDelta) -> GenerationDelta:
        """The first delta says the seed and the model, and of completion 0 the prompt's ids."""
        if not self._first:
            return delta
        self._first = False
        prepared = self._run.prepared
        shown = self._index == 0 and prepared.request.token_ids is None
        prompt_ids = prepared.prompt_ids if shown else ()
        return replace(delta, seed=prepared.seed, model_digest=prepared.model_digest, prompt_token_ids=prompt_ids)
