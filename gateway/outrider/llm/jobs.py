"""A prompt and its parameters become a job: a request of the gateway's own, and what collects its output."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from outrider.gateway.generation import GenerationRequest
from outrider.llm.arguments import EngineArguments
from outrider.llm.batch import Backend, Job
from outrider.llm.defaults import default_params
from outrider.llm.inputs import Prompt
from outrider.llm.outputs import OutputBuilder
from outrider.llm.request_metrics import SpecDecodeRecorder
from outrider.llm.sampling_params import SamplingParams, one_each, seeded, to_wire


class JobMaker:
    """Numbers the requests of one LLM; `k` is 0 where nothing drafts."""

    def __init__(self, arguments: EngineArguments, backend: Backend, k: int) -> None:
        self._arguments, self._backend, self._k = arguments, backend, k
        self._numbers = itertools.count()

    def make(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: Sequence[int] | None,
    ) -> list[Job]:
        """A job for each prompt, in order. Raises ValueError where the numbers differ."""
        if sampling_params is None:
            sampling_params = default_params(self._arguments, self._backend.info)
        params = one_each(sampling_params, len(prompts))
        if priority is not None and len(priority) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts and {len(priority)} priorities: their numbers must be the same.")
        return [self._job(*entry) for entry in zip(prompts, params, priority or [0] * len(prompts), strict=True)]

    def _job(self, prompt: Prompt, params: SamplingParams, priority: int) -> Job:
        arguments, backend, number = self._arguments, self._backend, next(self._numbers)
        sampling = to_wire(params, arguments.logprobs_mode, arguments.max_logprobs, backend.info.max_model_len)
        prompt = self._encoded(prompt, sampling.truncate_prompt_tokens)
        request = GenerationRequest(
            text=prompt.text if prompt.token_ids is None else None,
            token_ids=prompt.token_ids,
            sampling=seeded(sampling, arguments.seed, number),
            max_tokens_given=False,  # as in vLLM a completion ends where the context does
            speculation=replace(backend.speculation, acceptance=arguments.acceptance_for(params.seed)),
            request_id=str(number),
            n=params.n,
            priority=int(priority),
            salt=f"{prompt.salt}/{number}" if params.skip_reading_prefix_cache else prompt.salt,
        )
        wants_logprobs = params.logprobs is not None
        return Job(
            request, OutputBuilder(str(number), prompt, params.n, wants_logprobs, backend.tokenizer, self._recorder())
        )

    def _encoded(self, prompt: Prompt, keep: int | None) -> Prompt:
        """With its ids, where they are made here: the order of requests then waits for no tokenizer. A prompt that is
        cut is shown as it is used."""
        ids = prompt.token_ids
        if ids is None and prompt.text is not None:
            ids = self._backend.encode(prompt.text)
        return prompt if ids is None else replace(prompt, token_ids=ids[-keep:] if keep else ids)

    def _recorder(self) -> SpecDecodeRecorder | None:
        wanted = self._arguments.per_request_spec_decode_metrics
        return SpecDecodeRecorder(self._k, wanted == "detailed") if self._k and wanted != "none" else None
