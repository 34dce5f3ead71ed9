"""LLM: vLLM's offline class over the gateway's loop, with both engines in process or a gateway that runs elsewhere.
Each prompt of a call becomes a job: a request of the gateway's own, and what collects its output."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import time
import warnings
import weakref
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from outrider.gateway.prediction import NUM_DRAFT_TOKENS
from outrider.gateway.request_record import RequestRecord
from outrider.gateway.spec_decode_metrics import SpecDecodeRecorder
from outrider.gateway.text.tokenizer import Tokenizer
from outrider.llm.arguments import ARGUMENTS, EMBEDS, NOT_THERE, EngineArguments, take_speculation
from outrider.llm.backends import Backend, Job, LoopThread, attach, run_jobs
from outrider.llm.config import SpeculativeConfig
from outrider.llm.errors import told
from outrider.llm.inputs import Prompt, as_transformers, chat_prompts, parse_prompts, with_ids
from outrider.llm.lora.request import LoRARequest, lora_per_prompt
from outrider.llm.metrics import Metric, Statistics
from outrider.llm.outputs import OutputBuilder, RequestOutput
from outrider.llm.sampling_params import (
    SamplingParams,
    params_per_prompt,
    reasoning_options,
    seeded,
    to_wire,
    with_guided,
)
from outrider.llm.validation import Unsupported, keywords_of, require_fixed
from outrider.rpc.errors import FailedPrecondition, InvalidArgument, OutriderError
from outrider.rpc.messages import ModelInfo
from outrider.rpc.words.request import GenerationRequest
from outrider.rpc.words.sampling_params import RECOMMENDED

if TYPE_CHECKING:
    from outrider.llm.weights import ServedWeights  # torch comes with it


def default_params(arguments: EngineArguments, info: ModelInfo) -> SamplingParams:
    """generation_config.json, under `override_generation_config`; vLLM's defaults where they say nothing."""
    given: dict[str, Any] = {}
    if arguments.generation_config == "auto":
        given = {name: getattr(info.default_sampling, name) for name in RECOMMENDED}
        given["max_new_tokens"] = _max_new_tokens(arguments)
    given |= arguments.override_generation_config or {}
    longest = given.pop("max_new_tokens", None)
    if longest is not None:
        given["max_tokens"] = longest
    return SamplingParams(**given)


def _max_new_tokens(arguments: EngineArguments) -> int | None:
    """It concerns only LLM: a gateway's requests say how long they may get."""
    file = None if arguments.model is None else arguments.model / "generation_config.json"
    if file is None or not file.is_file():
        return None
    longest: int | None = json.loads(file.read_text(encoding="utf-8")).get("max_new_tokens")
    return longest


class JobMaker:
    """Numbers the requests of one LLM."""

    def __init__(self, arguments: EngineArguments, backend: Backend) -> None:
        self._arguments, self._backend = arguments, backend
        self._numbers = itertools.count()

    def make(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int | Sequence[int] | None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[Job]:
        """A job for each prompt, in order. Raises ValueError where the numbers differ."""
        loras = lora_per_prompt(lora_request, len(prompts))
        if any(loras) and not (self._arguments.enable_lora or self._arguments.gateway):
            raise ValueError("lora_request is given, and LLM was made without adapters; allowed: LLM(enable_lora=True)")
        if sampling_params is None:
            sampling_params = default_params(self._arguments, self._backend.info)
        params = params_per_prompt(sampling_params, len(prompts))
        priorities = priority if isinstance(priority, Sequence) else [priority or 0] * len(prompts)
        if len(priorities) != len(prompts):
            counts = f"{len(prompts)} prompts and {len(priorities)} priorities"
            raise ValueError(f"{counts}: their numbers must be the same.")
        each = zip(prompts, params, priorities, loras, strict=True)
        return [self._job(*entry) for entry in each]

    def _job(self, prompt: Prompt, params: SamplingParams, priority: int, lora: LoRARequest | None) -> Job:
        arguments, backend, number = self._arguments, self._backend, next(self._numbers)
        sampling = to_wire(params, arguments.logprobs_mode, arguments.max_logprobs, backend.info.max_model_len)
        prompt = self._encoded(prompt, sampling.truncate_prompt_tokens)
        request = GenerationRequest(
            text=prompt.text if prompt.token_ids is None else None,
            token_ids=prompt.token_ids,
            sampling=seeded(sampling, arguments.seed, number),
            reasoning=reasoning_options(params),
            unset=("max_tokens",),  # as in vLLM a completion ends where the context does
            speculation=replace(
                backend.speculation,
                acceptance=arguments.acceptance_for(params.seed, backend.speculation.acceptance, backend.can_couple),
            ),
            request_id=str(number),
            n=params.n,
            priority=int(priority),
            salt=f"{prompt.salt}/{number}" if params.skip_reading_prefix_cache else prompt.salt,
            prediction=prompt.prediction,
            media=prompt.media,
            adapter="" if lora is None else lora.name,
        )
        recorder = self._recorder(prompt)
        record = RequestRecord(request)
        shown = None if arguments.disable_log_stats else record
        builder = OutputBuilder(str(number), prompt, params, backend.tokenizer, recorder, lora, shown)
        return Job(record, builder, lora)

    def _encoded(self, prompt: Prompt, keep: int | None) -> Prompt:
        """With its ids, where they are made here: the order of requests then waits for no tokenizer. A prompt that is
        cut is shown as it is used."""
        ids = prompt.token_ids
        if ids is None and prompt.text is not None:
            ids = self._backend.encode(prompt.text)
        return prompt if ids is None else replace(prompt, token_ids=ids[-keep:] if keep else ids)

    def _recorder(self, prompt: Prompt) -> SpecDecodeRecorder | None:
        wanted, k = self._arguments.per_request_spec_decode_metrics, self._backend.num_draft_tokens
        if prompt.prediction is not None:
            k = k or NUM_DRAFT_TOKENS
        return SpecDecodeRecorder(k, wanted == "detailed") if k and wanted != "none" else None


def with_progress(ended: Iterator[Job], total: int, use_tqdm: bool | Callable[..., Any]) -> Iterator[Job]:
    """Passes on what has ended. `use_tqdm` may be a class or function that makes the bar."""
    if not use_tqdm:
        yield from ended
        return
    make = use_tqdm if callable(use_tqdm) else importlib.import_module("tqdm.auto").tqdm
    began, num_in, num_out = time.monotonic(), 0, 0
    with make(total=total, desc="Processed prompts", dynamic_ncols=True) as bar:
        for job in ended:
            output = job.builder.output
            num_in += len(output.prompt_token_ids or ()) * len(output.outputs)
            num_out += sum(len(completion.token_ids) for completion in output.outputs)
            seconds = max(time.monotonic() - began, 1e-9)
            bar.set_postfix_str(
                f"est. speed input: {num_in / seconds:.2f} toks/s, output: {num_out / seconds:.2f} toks/s",
                refresh=False,
            )
            bar.update(1)
            yield job


class LLM:
    """Generates for many prompts at once. The engines live in this process until `close` (the end of a `with` block,
    of the object, or of the process); with `gateway="host:port"` they live behind a gateway."""

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        gateway: str | None = None,
        tokenizer: str | Path | None = None,
        trust_remote_code: bool = False,
        dtype: Any = "auto",
        seed: int | None = 0,
        gpu_memory_utilization: float = 0.9,
        enforce_eager: bool = False,
        max_model_len: int | None = None,
        disable_log_stats: bool = False,
        speculative_config: dict[str, Any] | SpeculativeConfig | None = None,
        **kwargs: Any,  # of EngineArguments, and those of vLLM's that must keep their value
    ) -> None:
        options: dict[str, Any] = dict(
            model=model, gateway=gateway, tokenizer=tokenizer, trust_remote_code=trust_remote_code, dtype=dtype,
            seed=seed, gpu_memory_utilization=gpu_memory_utilization, enforce_eager=enforce_eager,
            max_model_len=max_model_len, disable_log_stats=disable_log_stats, speculative_config=speculative_config,
            **kwargs,
        )  # fmt: skip
        config = take_speculation(options)
        arguments = EngineArguments.of(options)
        speculation = None if arguments.gateway is not None else SpeculativeConfig.supported(config)
        self.arguments = arguments.located()
        self._runtime = LoopThread()
        try:
            if arguments.gateway is not None:
                self._backend, self._statistics = self._attach(config)
            else:
                self._backend, self._statistics = self._start(speculation)
        except BaseException as error:
            self._runtime.close()
            if isinstance(error, FailedPrecondition | InvalidArgument):  # models or settings that do not go together
                raise ValueError(str(told(error))) from None
            raise
        self._maker = JobMaker(self.arguments, self._backend)
        self._enqueued: list[Job] = []
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
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        prompt_adapter_request: Any = None,
        logits_processor: Any = None,
        *,
        guided_options_request: Any = None,
        priority: int | Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """The outputs in the prompts' order. One SamplingParams serves all prompts, a list has one for each; None is
        the model's own defaults. `lora_request` is the adapter of all prompts, or a list of one or None for each. Lower
        numbers of `priority` go first; one is that of all prompts."""
        require_fixed(ARGUMENTS, locals(), "{}")
        if guided_options_request is not None:
            warnings.warn(
                "guided_options_request: use SamplingParams(structured_outputs=StructuredOutputsParams(...))",
                DeprecationWarning,
                stacklevel=3,
            )
            default = sampling_params or self.get_default_sampling_params()
            sampling_params = with_guided(default, guided_options_request)
        if prompt_token_ids is not None:
            warnings.warn("prompt_token_ids: give TokensPrompt prompts instead", DeprecationWarning, stacklevel=3)
        elif prompts is None:
            raise ValueError("prompts are needed")
        parsed = parse_prompts(prompts) if prompt_token_ids is None else with_ids(prompts, prompt_token_ids)
        return self._run(self._maker.make(parsed, sampling_params, priority, lora_request), use_tqdm)

    @keywords_of("LLM.chat")
    def chat(
        self,
        messages: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        *,
        priority: int | Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """The outputs of conversations, as `generate` gives those of prompts: one list of messages, or several."""
        return self._run(self._chat_jobs(locals()), use_tqdm)

    @keywords_of("LLM.enqueue")
    def enqueue(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: int | Sequence[int] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """Keeps prompts for `wait_for_completion`, where they run; their request ids."""
        require_fixed(ARGUMENTS, locals(), "{}")
        return self._kept(self._maker.make(parse_prompts(prompts), sampling_params, priority, lora_request))

    @keywords_of("LLM.enqueue_chat")
    def enqueue_chat(
        self,
        messages: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        *,
        priority: int | Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """Keeps conversations as `enqueue` keeps prompts; their request ids."""
        return self._kept(self._chat_jobs(locals()))

    def wait_for_completion(
        self, output_type: Any = None, *, use_tqdm: bool | Callable[..., Any] = True
    ) -> list[RequestOutput]:
        """Runs what was enqueued; the outputs, in that order."""
        if output_type not in (None, RequestOutput, (RequestOutput,)):
            raise Unsupported(f"wait_for_completion({output_type!r:.100}): {EMBEDS}")
        jobs, self._enqueued = self._enqueued, []
        return self._run(jobs, use_tqdm)

    @classmethod
    def from_engine_args(cls, engine_args: Any) -> Self:
        """The one of the keywords of an EngineArgs."""
        return cls(**vars(engine_args))

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

    def update_weights(self, request: Any) -> None:
        """Puts other weights in the target's place, of its shape and with its tokenizer: `request` is a folder,
        or `{"update_info": {"path": folder}}`, or `{"update_info": {"tensors": {name: tensor}}}`, by the checkpoint's
        names; those that are not given stay. Between `start_weight_update` and `finish_weight_update` it may come in
        parts, and all of it takes its place at the end; else at once. Calls of other threads are waited for. Raises
        ValueError for what cannot be used: the weights of before serve on."""
        self._weights("update_weights").update(request)

    def init_weight_transfer_engine(self, request: Any) -> None:
        """Nothing is to be prepared for tensors of this process; a channel between processes is refused."""
        self._weights("init_weight_transfer_engine").refuse_transfer(request)

    def start_weight_update(self) -> None:
        """Begins an update in parts."""
        self._weights("start_weight_update").start()

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Puts what was given in place. Raises as `update_weights`."""
        self._weights("finish_weight_update").finish(weight_version)

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Gives back the target's cache (1), and its weights, too (2); 0 gives back nothing. Until `wake_up` calls are
        refused; those of other threads are waited for, whatever `mode` says."""
        self._weights("sleep").sleep(level, mode)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Takes the memory again; `tags` may name `weights` alone, which can then be updated before `kv_cache`."""
        self._weights("wake_up").wake_up(tags)

    def _weights(self, name: str) -> ServedWeights:
        """What changes them. Raises Unsupported where they are not this process's."""
        if not self._close.alive:
            raise RuntimeError("this LLM is closed")
        if (weights := self._backend.weights) is None:
            whose = "the services behind the gateway have" if self.arguments.gateway else "vLLM's processes have"
            raise Unsupported(f"LLM.{name}: {whose} the weights; allowed: engine='outrider'")
        return weights

    def _attach(self, config: SpeculativeConfig | Mapping[str, Any] | None) -> tuple[Backend, Statistics]:
        backend = attach(self._runtime, self.arguments, config)
        return backend, Statistics(backend.info.name, backend.num_draft_tokens, self.arguments.max_num_seqs)

    def _start(self, speculation: SpeculativeConfig | None) -> tuple[Backend, Statistics]:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: two models share the cores
        # Whether there is a GPU is asked without a context, which processes that vLLM forks could not use.
        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        from outrider.llm.local import start_local  # torch comes with it: not for who only asks a gateway

        arguments, k = self.arguments, 0
        if speculation is not None and arguments.model is not None:
            speculation = speculation.located(arguments.model, arguments.trust_remote_code)
            k = speculation.num_speculative_tokens or 0
        statistics = Statistics(arguments.served_model_name or str(arguments.model), k, arguments.max_num_seqs)
        return start_local(self._runtime, arguments, speculation, k, lambda: statistics.num_running), statistics

    def _chat_jobs(self, given: Mapping[str, Any]) -> list[Job]:
        """The jobs of the arguments of `chat`."""
        require_fixed(ARGUMENTS, given, "{}")
        if given["chat_template_content_format"] not in ("auto", "string", "openai"):
            raise Unsupported("chat_template_content_format: the template says it; allowed: auto, string, openai")
        tools = {"tools": given["tools"]} if given["tools"] else {}
        prompts = chat_prompts(
            self._tokenizer("chat()"),
            given["messages"],
            chat_template=given["chat_template"],
            add_generation_prompt=given["add_generation_prompt"],
            continue_final_message=given["continue_final_message"],
            variables={**(given["chat_template_kwargs"] or {}), **tools},
        )
        return self._maker.make(prompts, given["sampling_params"], given["priority"], given["lora_request"])

    def _kept(self, jobs: list[Job]) -> list[str]:
        self._enqueued += jobs
        return [job.request.request_id for job in jobs]

    def _run(self, jobs: Sequence[Job], use_tqdm: bool | Callable[..., Any]) -> list[RequestOutput]:
        if not self._close.alive:
            raise RuntimeError("this LLM is closed")
        backend, statistics = self._backend, self._statistics

        def start(put: Callable[[Job], None]) -> Coroutine[Any, Any, None]:
            return run_jobs(backend, jobs, statistics, put)

        door = nullcontext() if backend.weights is None else backend.weights.passing()
        try:
            with door, closing(self._runtime.iterate(start)) as ended:
                for _ in with_progress(ended, len(jobs), use_tqdm):
                    pass
        except OutriderError as error:
            raise told(error, backend.info.max_model_len) from None
        return [job.builder.output for job in jobs]

    def _tokenizer(self, what: str) -> Tokenizer:
        tokenizer = self._backend.tokenizer
        if tokenizer is None:
            raise ValueError(f"{what} needs LLM(gateway=..., tokenizer=...): the folder of the target's tokenizer")
        return tokenizer
