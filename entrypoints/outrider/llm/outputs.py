"""What `generate` returns: RequestOutput, CompletionOutput and Logprob, with vLLM's fields."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import TYPE_CHECKING, Any

from outrider.gateway.request_record import RequestRecord
from outrider.gateway.spec_decode_metrics import SpecDecodeMetrics, SpecDecodeRecorder
from outrider.gateway.text.tokenizer import Tokenizer
from outrider.llm.inputs import Prompt
from outrider.llm.logprobs import FlatLogprobs, Logprob
from outrider.llm.lora.request import LoRARequest
from outrider.llm.sampling_params import SamplingParams
from outrider.rpc.words.answer import GenerationDelta, PositionLogprobs
from outrider.rpc.words.sampling_params import FinishReason

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class CompletionOutput:
    """One completion. `stop_reason` is the stop string or the stop token's id; None for EOS and for all else."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | FlatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: LoRARequest | None = None
    routed_experts: Any = None
    sampling_mask: Any = None
    spec_decode_metrics: SpecDecodeMetrics | None = None  # with LLM(per_request_spec_decode_metrics=...)
    weight_versions: Any = None

    def finished(self) -> bool:
        """Whether it has ended."""
        return self.finish_reason is not None


@dataclass
class RequestStateStats:
    """When a request was made (wall clock), scheduled and answered (monotonic clock); seconds, 0.0: it is not known."""

    num_generation_tokens: int = 0
    arrival_time: float = 0.0
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0  # not known of a gateway's
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    first_token_latency: float = 0.0
    is_corrupted: bool = False

    @classmethod
    def of(cls, record: RequestRecord) -> RequestStateStats:
        """Of a request, as far as it has come."""
        latency = max(0.0, record.first_token - record.arrived)
        arrival = time.time() - (time.monotonic() - record.arrived)
        moments = record.arrived, record.scheduled, record.first_token, record.last_token
        return cls(record.num_tokens, arrival, *moments, latency)


@dataclass
class RequestOutput:
    """All completions of one prompt."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int] | None
    prompt_logprobs: list[dict[int, Logprob] | None] | FlatLogprobs | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestStateStats | None = None  # None with disable_log_stats
    lora_request: LoRARequest | None = None
    encoder_prompt: str | None = None
    encoder_prompt_token_ids: list[int] | None = None
    num_cached_tokens: int | None = None
    multi_modal_placeholders: dict[str, Any] = field(default_factory=dict)
    kv_transfer_params: dict[str, Any] | None = None
    num_cache_creation_tokens: int | None = None
    prompt_token_id_logprobs: Tensor | None = None  # [tokens scored, ids] float32: of prompt_logprob_token_ids
    ec_transfer_params: dict[str, Any] | None = None


class OutputBuilder:
    """Puts the deltas of one request together."""

    def __init__(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        steps: SpecDecodeRecorder | None = None,
        lora: LoRARequest | None = None,
        record: RequestRecord | None = None,
    ) -> None:
        self._new_logprobs: type[Any] = FlatLogprobs if params.flat_logprobs else list
        self._params, self._tokenizer, self._steps, self._record = params, tokenizer, steps, record
        self._wants_logprobs = params.logprobs is not None
        self._of_prompt: list[PositionLogprobs] = []
        ids = None if prompt.token_ids is None else list(prompt.token_ids)
        self.output = RequestOutput(
            request_id, prompt.text, ids, None, [CompletionOutput(i) for i in range(params.n)], False
        )
        self.output.lora_request = lora
        for completion in self.output.outputs:
            completion.lora_request = lora
            if self._wants_logprobs:
                completion.logprobs, completion.cumulative_logprob = self._new_logprobs(), 0.0

    def add(self, delta: GenerationDelta) -> None:
        """Takes one commit's part of one completion, which is in the record already."""
        output, completion = self.output, self.output.outputs[delta.index]
        if delta.prompt_token_ids and delta.index == 0:
            output.prompt_token_ids = list(delta.prompt_token_ids)
        if self._params.scored_ids:
            self._of_prompt += delta.prompt_logprobs  # a long prompt's come in slices
        if delta.prompt_logprobs and self._params.prompt_logprobs is not None:
            rows: Any = self._new_logprobs() if output.prompt_logprobs is None else output.prompt_logprobs
            rows.extend(self._candidates(row) if row else None for row in delta.prompt_logprobs)
            output.prompt_logprobs = rows
        completion.text += delta.text
        completion.token_ids.extend(delta.token_ids)
        if self._wants_logprobs:
            self._add_logprobs(completion, delta.logprobs)
        if delta.finish_reason is not None:
            completion.finish_reason = finish_name(delta.finish_reason)
            completion.stop_reason = delta.stop_reason
        if self._steps is not None:
            completion.spec_decode_metrics = self._steps.add(delta)
        if delta.usage is not None:
            cached, before = delta.usage.cached_tokens, output.num_cached_tokens
            output.num_cached_tokens = cached if before is None else min(before, cached)  # as in an answer over HTTP
        if self._record is not None and delta.finish_reason is not None:
            output.metrics = RequestStateStats.of(self._record)
        output.finished = all(one.finished() for one in output.outputs)
        if output.finished and (listed := self._params.scored_ids):
            output.prompt_token_id_logprobs = scores(self._of_prompt[self._params.prompt_logprob_start + 1 :], listed)

    def _add_logprobs(self, completion: CompletionOutput, rows: Iterable[PositionLogprobs]) -> None:
        for row in rows:
            if completion.logprobs is not None and completion.cumulative_logprob is not None:
                completion.logprobs.append(self._candidates(row))
                completion.cumulative_logprob += row[0].logprob

    def _candidates(self, row: PositionLogprobs) -> dict[int, Logprob]:
        return {entry.id: Logprob(entry.logprob, entry.rank, self._text_of(entry.id)) for entry in row}

    def _text_of(self, token_id: int) -> str | None:
        return None if self._tokenizer is None else self._tokenizer.decode([token_id])


def scores(rows: Sequence[PositionLogprobs], listed: Sequence[Sequence[int]]) -> Tensor:
    """What each row says of its list's ids, [tokens scored, ids] float32; one list is for all rows."""
    import torch  # only here: over a gateway nothing else needs it

    lists = repeat(listed[0], len(rows)) if len(listed) == 1 else listed
    found = [{entry.id: entry.logprob for entry in row} for row in rows]
    return torch.tensor([[row[token] for token in ids] for row, ids in zip(found, lists, strict=False)])


def finish_name(reason: FinishReason) -> str:
    """The name that vLLM has for it."""
    return reason.name.lower()
