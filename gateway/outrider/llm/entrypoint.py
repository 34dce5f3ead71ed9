"""LLM: vLLM's offline class over the gateway's loop, with both engines in process or a gateway that runs elsewhere."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from outrider.gateway.tokenizer import Tokenizer
from outrider.llm.arguments import EngineArguments, take_speculation
from outrider.llm.attached import attach
from outrider.llm.batch import Backend, Job, run_jobs
from outrider.llm.chat import chat_prompts
from outrider.llm.config import SpeculativeConfig
from outrider.llm.defaults import default_params
from outrider.llm.errors import Unsupported, keywords_of
from outrider.llm.hf_tokenizer import as_transformers
from outrider.llm.inputs import Prompt, parse_prompts, with_ids
from outrider.llm.jobs import JobMaker
from outrider.llm.metrics import Metric, Statistics
from outrider.llm.outputs import RequestOutput
from outrider.llm.progress import with_progress
from outrider.llm.refusals import NOT_THERE, refuse
from outrider.llm.runtime import LoopThread
from outrider.llm.sampling_params import SamplingParams
from outrider.wire.errors import FailedPrecondition, InvalidArgument


class LLM:
    """Generates for many prompts at once. The engines live in this process until `close` (the end of a `with` block,
    of the object, or of the process); with `gateway="host:port"` they live behind a gateway."""

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        gateway: str | None = None,
        runner: str = "auto",
        tokenizer: str | Path | None = None,
        tokenizer_mode: str = "auto",
        skip_tokenizer_init: bool = False,
        trust_remote_code: bool = False,
        tensor_parallel_size: int = 1,
        dtype: Any = "auto",
        quantization: str | None = None,
        revision: str | None = None,
        tokenizer_revision: str | None = None,
        seed: int | None = 0,
        gpu_memory_utilization: float = 0.9,
        swap_space: float | None = 4,
        enforce_eager: bool = False,
        max_model_len: int | None = None,
        disable_log_stats: bool = False,
        speculative_config: dict[str, Any] | SpeculativeConfig | None = None,
        **kwargs: Any,
    ) -> None:
        options: dict[str, Any] = dict(
            model=model, gateway=gateway, runner=runner, tokenizer=tokenizer, tokenizer_mode=tokenizer_mode,
            skip_tokenizer_init=skip_tokenizer_init, trust_remote_code=trust_remote_code,
            tensor_parallel_size=tensor_parallel_size, dtype=dtype, quantization=quantization, revision=revision,
            tokenizer_revision=tokenizer_revision, seed=seed, gpu_memory_utilization=gpu_memory_utilization,
            swap_space=swap_space, enforce_eager=enforce_eager, max_model_len=max_model_len,
            disable_log_stats=disable_log_stats, speculative_config=speculative_config, **kwargs,
        )  # fmt: skip
        config = take_speculation(options)
        self.arguments = EngineArguments.of(options)
        self._runtime = LoopThread()
        try:
            self._backend, self._statistics, self._maker = self._start(config)
        except BaseException as error:
            self._runtime.close()
            if isinstance(error, FailedPrecondition | InvalidArgument):  # models or settings that do not go together
                raise ValueError(error.message) from error
            raise
        self._close = weakref.finalize(self, self._backend.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        if name in NOT_THERE:
            raise Unsupported(f"LLM.{name} is not supported: {NOT_THERE[name]}")
        raise AttributeError(f"LLM has no attribute {name!r}")

    def close(self) -> None:
        """Ends the threads and frees the models. A second call does nothing."""
        self._close()

    @keywords_of("LLM.generate")
    def generate(
        self,
        prompts: Any = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        prompt_token_ids: Any = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: Any = None,
        prompt_adapter_request: Any = None,
        logits_processor: Any = None,
        *,
        priority: Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """The outputs in the prompts' order. One SamplingParams serves all prompts, a list has one for each; None is
        the model's own defaults. Lower numbers of `priority` go first."""
        refuse(
            lora_request=lora_request,
            prompt_adapter_request=prompt_adapter_request,
            logits_processor=logits_processor,
            tokenization_kwargs=tokenization_kwargs,
            mm_processor_kwargs=mm_processor_kwargs,
        )
        if prompt_token_ids is not None:
            warnings.warn("prompt_token_ids: give TokensPrompt prompts instead", DeprecationWarning, stacklevel=3)
            return self._generate(with_ids(prompts, prompt_token_ids), sampling_params, use_tqdm, priority)
        if prompts is None:
            raise ValueError("prompts are needed")
        return self._generate(parse_prompts(prompts), sampling_params, use_tqdm, priority)

    @keywords_of("LLM.chat")
    def chat(
        self,
        messages: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: Any = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        *,
        priority: Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """The same for conversations: one list of messages, or several."""
        refuse(
            lora_request=lora_request, mm_processor_kwargs=mm_processor_kwargs, tokenization_kwargs=tokenization_kwargs
        )
        if chat_template_content_format not in ("auto", "string"):
            raise Unsupported("chat_template_content_format: contents are strings")
        prompts = chat_prompts(
            self._tokenizer("chat()"),
            messages,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables={**(chat_template_kwargs or {}), **({"tools": tools} if tools else {})},
        )
        return self._generate(prompts, sampling_params, use_tqdm, priority)

    def get_default_sampling_params(self) -> SamplingParams:
        """The model authors' recommendation, from generation_config.json; vLLM's defaults where they give none."""
        return default_params(self.arguments, self._backend.info)

    def get_metrics(self) -> list[Metric]:
        """Counters and times since the start."""
        if self.arguments.disable_log_stats:
            raise RuntimeError("there are no metrics with disable_log_stats=True")
        return self._statistics.snapshot(self._backend.cache_usage())

    def get_tokenizer(self) -> Any:
        """The tokenizer, as a PreTrainedTokenizerFast of transformers."""
        return as_transformers(self._tokenizer("get_tokenizer()"))

    def reset_prefix_cache(self) -> bool:
        """Forgets every cached prefix of the target."""
        self._backend.reset_prefix_cache()
        return True

    def _start(self, config: SpeculativeConfig | Mapping[str, Any] | None) -> tuple[Backend, Statistics, JobMaker]:
        if self.arguments.gateway is not None:
            arguments = self.arguments.located()
            attached = attach(self._runtime, arguments, config)
            k = attached.speculation.num_draft_tokens
            k = attached.num_draft_tokens if k is None else k
            statistics = Statistics(attached.info.name, k, arguments.max_num_seqs)
            return attached, statistics, JobMaker(arguments, attached, k)
        speculation = SpeculativeConfig.supported(config)
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: two models share the cores
        from outrider.llm.local import start_local  # torch comes with it: not for who only asks a gateway

        arguments = self.arguments.located()
        k = (speculation.num_speculative_tokens or 0) if speculation is not None else 0
        statistics = Statistics(arguments.served_model_name or str(arguments.model), k, arguments.max_num_seqs)
        local = start_local(self._runtime, arguments, speculation, lambda: statistics.num_running)
        return local, statistics, JobMaker(arguments, local, k)

    def _generate(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool | Callable[..., Any],
        priority: Sequence[int] | None,
    ) -> list[RequestOutput]:
        if not self._close.alive:
            raise RuntimeError("this LLM is closed")
        jobs = self._maker.make(prompts, sampling_params, priority)
        backend, statistics = self._backend, self._statistics

        def start(put: Callable[[Job], None]) -> Coroutine[Any, Any, None]:
            return run_jobs(backend, jobs, statistics, put)

        try:
            with closing(self._runtime.iterate(start)) as ended:
                for _ in with_progress(ended, len(jobs), use_tqdm):
                    pass
        except InvalidArgument as error:
            raise ValueError(error.message) from error
        return [job.builder.output for job in jobs]

    def _tokenizer(self, what: str) -> Tokenizer:
        tokenizer = self._backend.tokenizer
        if tokenizer is None:
            raise ValueError(f"{what} needs LLM(gateway=..., tokenizer=...): the folder of the target's tokenizer")
        return tokenizer
