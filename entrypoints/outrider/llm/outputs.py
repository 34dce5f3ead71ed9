"""What `generate` returns: RequestOutput, CompletionOutput and Logprob, with vLLM's fields."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from outrider.gateway.request import GenerationDelta
from outrider.gateway.spec_decode_metrics import SpecDecodeMetrics, SpecDecodeRecorder
from outrider.gateway.text.tokenizer import Tokenizer
from outrider.llm.inputs import Prompt
from outrider.llm.lora.request import LoRARequest
from outrider.rpc.messages import PositionLogprobs
from outrider.rpc.sampling_params import FinishReason


@dataclass
class Logprob:
    """One candidate at one position; rank is 1-based."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    """One completion. `stop_reason` is the stop string or the stop token's id; None for EOS and for all else."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
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
class RequestOutput:
    """All completions of one prompt."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int] | None
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: Any = None
    lora_request: LoRARequest | None = None
    encoder_prompt: str | None = None
    encoder_prompt_token_ids: list[int] | None = None
    num_cached_tokens: int | None = None
    multi_modal_placeholders: dict[str, Any] = field(default_factory=dict)
    kv_transfer_params: dict[str, Any] | None = None
    num_cache_creation_tokens: int | None = None
    prompt_token_id_logprobs: Any = None
    ec_transfer_params: dict[str, Any] | None = None


class OutputBuilder:
    """Puts the deltas of one request together."""

    def __init__(
        self,
        request_id: str,
        prompt: Prompt,
        n: int,
        wants_logprobs: bool,
        tokenizer: Tokenizer | None,
        steps: SpecDecodeRecorder | None = None,
        lora: LoRARequest | None = None,
    ) -> None:
        self._tokenizer, self._wants_logprobs, self._steps = tokenizer, wants_logprobs, steps
        ids = None if prompt.token_ids is None else list(prompt.token_ids)
        self.output = RequestOutput(request_id, prompt.text, ids, None, [CompletionOutput(i) for i in range(n)], False)
        self.output.lora_request = lora
        for completion in self.output.outputs:
            completion.lora_request = lora
            if wants_logprobs:
                completion.logprobs, completion.cumulative_logprob = [], 0.0

    def add(self, delta: GenerationDelta) -> None:
        """One commit's part of one completion."""
        output, completion = self.output, self.output.outputs[delta.index]
        if delta.prompt_token_ids:
            output.prompt_token_ids = list(delta.prompt_token_ids)
        if delta.prompt_logprobs:
            output.prompt_logprobs = output.prompt_logprobs or []  # a long prompt's come in slices
            output.prompt_logprobs += [self._candidates(row) if row else None for row in delta.prompt_logprobs]
        completion.text += delta.text
        completion.token_ids.extend(delta.token_ids)
        if self._wants_logprobs:
            self._add_logprobs(completion, delta.logprobs)
        if delta.finish_reason is not None:
            completion.finish_reason = finish_name(delta.finish_reason)
            completion.stop_reason = delta.stop_token_id if delta.stop_string is None else delta.stop_string
        if self._steps is not None:
            completion.spec_decode_metrics = self._steps.add(delta)
        if delta.usage is not None:
            output.num_cached_tokens = max(output.num_cached_tokens or 0, delta.usage.cached_tokens)
        output.finished = all(one.finished() for one in output.outputs)

    def _add_logprobs(self, completion: CompletionOutput, rows: Iterable[PositionLogprobs]) -> None:
        for row in rows:
            if completion.logprobs is not None and completion.cumulative_logprob is not None:
                completion.logprobs.append(self._candidates(row))
                completion.cumulative_logprob += row[0].logprob

    def _candidates(self, row: PositionLogprobs) -> dict[int, Logprob]:
        return {entry.id: Logprob(entry.logprob, entry.rank, self._text_of(entry.id)) for entry in row}

    def _text_of(self, token_id: int) -> str | None:
        return None if self._tokenizer is None else self._tokenizer.decode([token_id])


def finish_name(reason: FinishReason) -> str:
    """vLLM's word."""
    return reason.name.lower()
