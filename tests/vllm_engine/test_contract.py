"""Every hook of vLLM's that is used exists with the shape that is used: of a release that changes one, this says which,
before anything else fails. And what is mended in vLLM is still broken: of a release that mended it, our mend goes."""

from __future__ import annotations

import inspect
import pickle
import re
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import msgspec
import pytest
import torch
from packaging.version import Version

from outrider.engine.adapters.loader import LoadedAdapter
from outrider.engine.adapters.ranks import MOST_RANK_ON_VLLM
from outrider.engine.adapters.resident import AdapterRoom
from outrider.engine.models.base import LowRank
from outrider.rpc.messages import Open, TokenWeights
from outrider.rpc.words.sampling_params import SamplingParams
from outrider.target_service.settings import TargetSettings
from outrider.vllm import patches
from outrider.vllm.outputs import FINISH_REASONS
from outrider.vllm.scheduler import ask_no_worker
from outrider.vllm.target.adapters import RANKS, AdapterBase, with_rows, write_adapter
from outrider.vllm.target.assembly import ONE_PROCESS, engine_args, vllm_version
from outrider.vllm.target.requests import prompt_of
from outrider.vllm.weights import ATTRIBUTE, weights_of

SCHEDULER = "vllm.v1.core.sched.scheduler.Scheduler"
REQUEST = "vllm.v1.request.Request"
GRAMMARS = "vllm.v1.structured_output.StructuredOutputManager"
RUNNER = "vllm.v1.worker.gpu_model_runner.GPUModelRunner"

SELF, ONE = object(), object()
# How each is called, by us or by vLLM what we put in its place.
CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    f"{SCHEDULER}.schedule": ((SELF,), {}),
    f"{SCHEDULER}.update_from_output": ((SELF,), {"scheduler_output": ONE, "model_runner_output": ONE}),
    f"{SCHEDULER}.add_request": ((SELF, ONE), {}),
    f"{SCHEDULER}.finish_requests": ((SELF, ONE, ONE), {}),
    f"{SCHEDULER}.update_draft_token_ids": ((SELF, ONE), {}),
    f"{SCHEDULER}.get_request_counts": ((SELF,), {}),
    f"{SCHEDULER}.shutdown": ((SELF,), {}),
    f"{SCHEDULER}._handle_blocked_waiting_request": ((SELF, ONE), {}),
    f"{SCHEDULER}._preempt_request": ((SELF, ONE, 0.0), {}),
    "vllm.v1.core.block_pool.BlockPool.get_num_free_blocks": ((SELF,), {}),
    f"{RUNNER}._get_spec_decode_draft_probs": ((SELF, ONE), {}),
    "vllm.v1.worker.gpu_worker.Worker.init_device": ((SELF,), {}),
    "vllm.v1.worker.gpu_worker.Worker.execute_model": ((SELF, ONE), {}),
    "vllm.v1.engine.async_llm.AsyncLLM.from_engine_args": ((ONE,), {"stat_loggers": []}),
    "vllm.v1.metrics.loggers.StatLoggerBase": ((ONE, 0), {}),
    "vllm.v1.metrics.loggers.StatLoggerBase.record": ((SELF, ONE, ONE), {}),
    "vllm.v1.metrics.loggers.StatLoggerBase.log_engine_initialized": ((SELF,), {}),
    "vllm.v1.engine.async_llm.AsyncLLM.generate": ((SELF, {}, ONE, "id"), {"lora_request": ONE, "priority": 0}),
    "vllm.v1.engine.async_llm.AsyncLLM.add_lora": ((SELF, ONE), {}),
    "vllm.v1.engine.async_llm.AsyncLLM.remove_lora": ((SELF, 1), {}),
    "vllm.lora.request.LoRARequest": (("name", 1, "/path"), {}),
    "vllm.v1.worker.gpu_worker.Worker.add_lora": ((SELF, ONE), {}),
    "vllm.v1.worker.gpu_worker.Worker.load_model": ((SELF,), {}),
    "vllm.v1.worker.gpu_worker.Worker.remove_lora": ((SELF, 1), {}),
    "vllm.lora.model_manager.LoRAModelManager.get_adapter": ((SELF, 1), {}),
    "vllm.engine.arg_utils.AsyncEngineArgs.create_model_config": ((SELF,), {}),
    "vllm.v1.engine.async_llm.AsyncLLM.shutdown": ((SELF,), {}),
    "vllm.v1.engine.async_llm.AsyncLLM.reset_prefix_cache": ((SELF,), {}),
    "vllm.engine.arg_utils.AsyncEngineArgs.create_engine_config": ((SELF,), {"headless": True}),
    "vllm.v1.executor.multiproc_executor.MultiprocExecutor": ((ONE,), {"monitor_workers": False}),
    "vllm.v1.executor.multiproc_executor.MultiprocExecutor.shutdown": ((SELF,), {}),
    "vllm.v1.outputs.DraftTokenIds": ((["id"], [[1]]), {}),
    "vllm.v1.outputs.LogprobsTensors.tolists": ((SELF,), {}),
    "vllm.config.model.ModelConfig.get_vocab_size": ((SELF,), {}),
    "vllm.sampling_params.StructuredOutputsParams": (
        (),
        {"json": "{}", "regex": None, "grammar": None, "choice": None, "json_object": None, "structural_tag": None},
    ),
    "vllm.renderers.base.BaseRenderer.render_cmpl_async": ((SELF, [ONE]), {"skip_mm_cache": True}),
    "vllm.multimodal.media.ImageMediaIO": ((), {}),
    "vllm.multimodal.media.ImageMediaIO.load_bytes": ((SELF, b""), {}),
    f"{GRAMMARS}.grammar_init": ((SELF, ONE), {}),
    "vllm.v1.structured_output.backend_types.StructuredOutputGrammar.accept_tokens": ((SELF, "id", [1]), {}),
}
# What instances are given while they are made, or know by themselves.
ATTRIBUTES = {
    SCHEDULER: [
        "running",
        "waiting",
        "kv_holding_waiting",
        "requests",
        "current_step",
        "num_spec_tokens",
        "block_size",
        "kv_cache_manager",
        "structured_output_manager",
    ],
    GRAMMARS: ["executor"],
    "vllm.v1.structured_output.request.StructuredOutputRequest": ["grammar", "_grammar"],
    "vllm.v1.core.kv_cache_manager.KVCacheManager": ["block_pool"],
    REQUEST: [
        "request_id",
        "sampling_params",
        "all_token_ids",
        "num_prompt_tokens",
        "num_tokens",
        "max_tokens",
        "is_prefill_chunk",
        "next_decode_eligible_step",
        "prompt_token_ids",
        "prompt_embeds",
        "mm_features",
        "resumable",
        "structured_output_request",
        "priority",
        "cache_salt",
        "trace_headers",
        "lora_request",
    ],
    "vllm.v1.worker.gpu_input_batch.InputBatch": ["req_ids", "vocab_size"],
    RUNNER: ["input_batch", "rejection_sampler", "lora_manager"],
    "vllm.lora.worker_manager.LRUCacheWorkerLoRAManager": ["_adapter_manager"],
    "vllm.lora.model_manager.LoRAModelManager": ["modules"],
    "vllm.lora.lora_model.LoRAModel": ["loras"],
    "vllm.v1.worker.worker_base.WorkerBase": ["model_runner"],
    "vllm.v1.engine.async_llm.AsyncLLM": ["vllm_config", "errored", "tokenizer", "renderer"],
    "vllm.renderers.base.BaseRenderer": ["mm_processor"],
    "vllm.multimodal.processing.context.BaseProcessingInfo": ["allowed_mm_limits"],
    "vllm.v1.executor.multiproc_executor.MultiprocExecutor": ["workers"],
    "vllm.sampling_params.SamplingParams": ["bad_words_token_ids", "all_stop_token_ids"],
    "vllm.v1.metrics.stats.IterationStats": ["num_preempted_reqs"],
    "vllm.outputs.RequestOutput": ["outputs", "prompt_logprobs", "num_cached_tokens"],
}
FIELDS = {
    "vllm.v1.core.sched.output.SchedulerOutput": [
        "num_scheduled_tokens",
        "total_num_scheduled_tokens",
        "scheduled_spec_decode_tokens",
        "preempted_req_ids",
    ],
    "vllm.multimodal.inputs.PlaceholderRange": ["offset", "length"],
    "vllm.v1.outputs.ModelRunnerOutput": ["sampled_token_ids", "req_id_to_index"],
    "vllm.v1.outputs.LogprobsLists": ["logprob_token_ids", "logprobs", "sampled_token_ranks"],
    "vllm.v1.spec_decode.metadata.SpecDecodeMetadata": ["num_draft_tokens", "draft_token_ids"],
    "vllm.v1.engine.EngineCoreOutputs": ["outputs", "finished_requests", "scheduler_stats"],
    "vllm.v1.engine.EngineCoreOutput": [
        "request_id",
        "new_token_ids",
        "new_logprobs",
        "new_prompt_logprobs_tensors",
        "finish_reason",
        "stop_reason",
        "prefill_stats",
    ],
    "vllm.outputs.CompletionOutput": [
        "token_ids",
        "logprobs",
        "finish_reason",
        "stop_reason",
        "spec_decode_metrics",
    ],
    "vllm.v1.metrics.stats.SchedulerStats": ["num_running_reqs", "num_waiting_reqs", "kv_cache_usage"],
    "vllm.v1.metrics.stats.PrefillStats": ["num_cached_tokens"],
    "vllm.v1.metrics.stats.RequestSpecDecodeMetrics": ["histogram", "num_draft_tokens"],
    "vllm.config.ParallelConfig": [
        "worker_cls",
        "pipeline_parallel_size",
        "node_rank",
        "nnodes",
        "master_addr",
        "master_port",
    ],
    "vllm.config.SchedulerConfig": ["scheduler_cls", "async_scheduling", "max_num_seqs"],
    "vllm.config.lora.LoRAConfig": ["max_loras"],
    "vllm.lora.request.LoRARequest": ["lora_name", "lora_int_id"],
    "vllm.config.SpeculativeConfig": ["method", "model", "num_speculative_tokens"],
    "vllm.config.structured_outputs.StructuredOutputsConfig": ["backend"],
    "vllm.config.CacheConfig": ["num_gpu_blocks", "block_size"],
    "vllm.config.ModelConfig": ["model", "tokenizer", "tokenizer_revision", "max_model_len", "quantization", "dtype"],
    "vllm.sampling_params.SamplingParams": [
        "temperature",
        "top_p",
        "top_k",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "seed",
        "stop_token_ids",
        "ignore_eos",
        "max_tokens",
        "min_tokens",
        "logprobs",
        "prompt_logprobs",
        "allowed_token_ids",
        "detokenize",
        "output_kind",
        "extra_args",
        "_bad_words_token_ids",
    ],
}


def found(name: str) -> Any:
    """What stands under a dotted name; a failure that names what is gone."""
    parts, rest = name.split("."), list[str]()
    while True:
        try:
            here: Any = import_module(".".join(parts))
            break
        except ModuleNotFoundError:
            rest.insert(0, parts.pop())
    for part in rest:
        assert hasattr(here, part), f"{name} is gone: {here!r} has no {part}"
        here = getattr(here, part)
    return here


def fields_of(kind: Any) -> set[str]:
    """Of a dataclass, a named tuple or a struct."""
    if issubclass(kind, msgspec.Struct):
        return set(kind.__struct_fields__)
    return set(getattr(kind, "_fields", ())) or set(kind.__dataclass_fields__)


def test_the_version_is_one_that_was_read() -> None:
    assert Version("0.32") <= Version(vllm_version()) < Version("0.34")


@pytest.mark.parametrize("name", CALLS)
def test_it_is_called_like_this(name: str) -> None:
    args, kwargs = CALLS[name]
    inspect.signature(found(name)).bind(*args, **kwargs)


@pytest.mark.parametrize(("owner", "name"), [(owner, name) for owner in ATTRIBUTES for name in ATTRIBUTES[owner]])
def test_it_is_an_attribute(owner: str, name: str) -> None:
    kind = found(owner)
    set_somewhere = re.compile(rf"self\.{name}\b\s*(:[^=\n]+)?=[^=]")
    assert hasattr(kind, name) or any(
        set_somewhere.search(inspect.getsource(base)) for base in kind.__mro__ if base.__module__.startswith("vllm.")
    ), f"{owner} has no {name}"


@pytest.mark.parametrize(("owner", "name"), [(owner, name) for owner in FIELDS for name in FIELDS[owner]])
def test_it_is_a_field(owner: str, name: str) -> None:
    assert name in fields_of(found(owner))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("own", [{}, {"speculative_config": {"method": "eagle"}}])
def test_engine_arguments_have_these_names(device: str, own: dict[str, Any]) -> None:
    said = {"device": device, "max_model_len": 64, "cache_mb": 64, "num_blocks": 4, "engine_args": own}
    base = AdapterBase({"model.layers.0.mlp.up_proj": (2, 2)}, "digest", AdapterRoom(2, 8))
    arguments = engine_args(TargetSettings(model="model", engine="vllm", **said), base)
    arguments = with_rows(arguments, 1, lambda: 1)
    assert set(arguments) <= fields_of(found("vllm.engine.arg_utils.AsyncEngineArgs"))


def test_finish_reasons_have_these_names() -> None:
    assert set(found("vllm.v1.engine.FinishReason").__members__) == set(FINISH_REASONS)


def test_a_proposer_of_a_class_of_ones_own_may_be_asked_for() -> None:
    assert "custom_class" in str(found("vllm.config.speculative.SpeculativeMethod"))


def test_a_row_is_held_by_its_step() -> None:
    source = inspect.getsource(found(f"{SCHEDULER}.schedule"))
    assert source.index("self.current_step += 1") < source.index(
        "self.current_step < request.next_decode_eligible_step"
    )


def test_every_request_that_waits_is_asked_for_before_it_runs() -> None:
    source = inspect.getsource(found(f"{SCHEDULER}.schedule"))
    asked = "ready_to_schedule = self._handle_blocked_waiting_request(request)\n"
    assert source.index("request = request_queue.peek_request()") < source.index(asked)
    assert source.index(asked) < source.index("request = request_queue.pop_request()")


def test_tokens_of_a_request_are_read_as_they_grow() -> None:
    params = found("vllm.sampling_params.SamplingParams")(max_tokens=7, extra_args={"outrider": {"sequence_id": 1}})
    request = found(REQUEST)("id", [5, 6], params, None)
    tokens = request.all_token_ids
    request.append_output_token_ids([7])
    assert list(tokens) == [5, 6, 7] and (request.num_prompt_tokens, request.max_tokens) == (2, 7)
    assert request.sampling_params.extra_args == {"outrider": {"sequence_id": 1}}


def test_what_is_put_beside_a_step_gets_to_the_workers() -> None:
    step = found("vllm.v1.core.sched.output.SchedulerOutput").make_empty()
    assert weights_of(step) == {}
    given = {"id": [None, TokenWeights.of([1], [1])]}
    setattr(step, ATTRIBUTE, given)
    assert weights_of(pickle.loads(pickle.dumps(step))) == given


def test_the_runner_asks_for_the_probabilities_of_the_drafts() -> None:
    source = inspect.getsource(found(f"{RUNNER}._sample"))
    call = r"draft_probs = self\._get_spec_decode_draft_probs\(spec_decode_metadata\)\s+sampler_output = "
    call += r"self\.rejection_sampler\(\s*spec_decode_metadata,\s*draft_probs,\s*logits,\s*sampling_metadata,?\s*\)"
    assert re.search(call, source)


def test_a_grammar_is_being_compiled_when_its_request_comes_to_the_scheduler() -> None:
    """So that what was generated before can be put behind it, on the same threads."""
    source = inspect.getsource(found("vllm.v1.engine.core.EngineCore.preprocess_add_request"))
    assert "self.structured_output_manager.grammar_init(req)" in source
    source = inspect.getsource(found(f"{GRAMMARS}.grammar_init"))
    assert "self.executor.submit(self._create_grammar, request)" in source
    waits = inspect.getsource(found(f"{SCHEDULER}._handle_blocked_waiting_request"))
    assert "isinstance(struct_output_req.grammar, Exception)" in waits


@pytest.mark.parametrize("name", ["multiproc_executor.MultiprocExecutor", "uniproc_executor.UniProcExecutor"])
def test_workers_are_asked_for_drafts_by_what_we_replace(name: str) -> None:
    source = inspect.getsource(found("vllm.v1.engine.core.EngineCore.post_step"))
    assert "draft_token_ids = self.model_executor.take_draft_token_ids()\n" in source
    assert "if draft_token_ids is not None:" in source
    executor = found(f"vllm.v1.executor.{name}")
    ask_no_worker()
    assert executor.take_draft_token_ids(executor.__new__(executor)) is None


def test_an_engine_that_computes_by_itself_may_be_asked_for_on_a_cpu() -> None:
    """By its class's name: the short one is taken for a worker in a process of its own, for the threads' sake."""
    config = found("vllm.config.ParallelConfig")(distributed_executor_backend=ONE_PROCESS)
    made = found("vllm.v1.executor.abstract.Executor.get_class")(SimpleNamespace(parallel_config=config))
    assert made is found(ONE_PROCESS)
    source = inspect.getsource(found("vllm.platforms.cpu.CpuPlatform.check_and_update_config"))
    assert 'distributed_executor_backend == "uni"\n' in source
    assert source.count("distributed_executor_backend") == 2


def test_a_prompt_of_ids_is_taken_as_its_renderer_makes_it() -> None:
    message = Open(1, (5, 6), SamplingParams(max_tokens=4), output_ids=(7,), salt="salt")
    assert prompt_of(message) == found("vllm.inputs.engine.tokens_input")([5, 6, 7], cache_salt="salt")
    source = inspect.getsource(found("vllm.v1.engine.async_llm.AsyncLLM.add_request"))
    assert 'isinstance(prompt, dict) and "type" in prompt' in source


def test_what_vllm_refuses_is_known() -> None:
    assert not issubclass(found("vllm.exceptions.VLLMServerError"), found("vllm.exceptions.VLLMClientError"))
    assert issubclass(found("vllm.exceptions.VLLMValidationError"), found("vllm.exceptions.VLLMClientError"))


def test_our_classes_are_vllms() -> None:
    from outrider.vllm import AdaptedWorker, DraftScheduler, Worker

    assert issubclass(DraftScheduler, found(SCHEDULER))
    assert issubclass(Worker, AdaptedWorker) and issubclass(AdaptedWorker, found("vllm.v1.worker.gpu_worker.Worker"))


# Adapters.


def test_ranks_are_those_that_vllm_makes_room_for() -> None:
    assert get_args(found("vllm.config.lora.MaxLoRARanks")) == RANKS
    assert RANKS[-1] == MOST_RANK_ON_VLLM


def test_blocks_are_parted_by_an_adapters_name_and_folder() -> None:
    """Both of which are the content's, so that blocks of one are found by all who have it, and by nobody else."""
    request = SimpleNamespace(lora_request=found("vllm.lora.request.LoRARequest")("digest", 3, "/copies/digest"))
    keys = found("vllm.v1.core.kv_cache_utils._gen_lora_extra_hash_keys")(request)
    assert keys == [("lora", "digest", "/copies/digest")]


def test_a_step_of_more_adapters_than_fit_still_ends_the_engine() -> None:
    """Wherefore rows that are held and come back take turns."""
    source = inspect.getsource(found(f"{SCHEDULER}.schedule"))
    assert "assert len(scheduled_loras) <= self.lora_config.max_loras" in source
    counted = source.index("for req in scheduled_running_reqs\n                if req.lora_request")
    assert counted < source.index("request = request_queue.peek_request()")


def test_rows_of_a_step_are_bounded_as_we_reckon() -> None:
    source = inspect.getsource(found("vllm.engine.arg_utils.EngineArgs.create_engine_config"))
    bound = r"scheduler_config\.max_num_seqs\s+\* \(speculative_config\.num_speculative_tokens \+ 1\)"
    assert re.search(r"lora_config is not None\s+and speculative_config is not None", source)
    assert re.search(bound, source)


def test_what_we_write_is_read_as_it_was_meant(tmp_path: Path) -> None:
    """Ranks and factors of each module, by vLLM's own reader."""
    names = {"model.layers.0.mlp.up_proj": 2.0, "model.layers.1.mlp.up_proj": 2.0, "model.layers.11.mlp.up_proj": 0.7}
    modules = {name: LowRank(torch.ones(3, 4), torch.ones(5, 3), scaling) for name, scaling in names.items()}
    modules["model.layers.2.mlp.up_proj"] = LowRank(torch.ones(7, 4), torch.ones(5, 7), 8 / 7)
    stems = {name: f"base_model.model.{name}" for name in modules}
    write_adapter(tmp_path / "copy", LoadedAdapter("digest", 7, modules, stems))
    helper = found("vllm.lora.peft_helper.PEFTHelper").from_local_dir(str(tmp_path / "copy"), None)
    helper.validate_legal(found("vllm.config.lora.LoRAConfig")(max_lora_rank=8))
    for name, one in modules.items():
        rank, scaling = helper.get_rank_and_scaling(name)
        assert (rank, scaling) == (len(one.down), pytest.approx(one.scaling, rel=1e-12))
    parse = found("vllm.lora.utils.parse_fine_tuned_lora_name")
    assert parse("base_model.model.model.layers.0.mlp.up_proj.lora_A.weight") == ("model.layers.0.mlp.up_proj", True)


# What is mended.

KERNELS = "vllm.utils.cpu_triton_utils"
END = torch.tensor([2, 3], dtype=torch.int32)  # of two requests' drafted tokens


def test_a_plugin_is_loaded_before_kernels_are_registered() -> None:
    source = inspect.getsource(found("vllm.v1.worker.worker_base.WorkerWrapperBase.init_worker"))
    plugins, kernels = "load_general_plugins()\n", "register_triton_kernel_overrides()"
    assert source.index(plugins) < source.index(kernels) < source.index("worker_class")
    registered = inspect.getsource(found("vllm.platforms.cpu.CpuPlatform.register_triton_kernel_overrides"))
    for kernel in ("_expand_kernel_impl", "_rejection_random_sample_kernel_impl"):
        assert f"cpu_tl.{kernel}" in registered


@pytest.mark.parametrize("values", [[0.0, 0.75], [3, 0]])
def test_values_of_drafted_rows_are_still_broken(values: list[float]) -> None:
    given = torch.tensor(values, dtype=torch.float32 if isinstance(values[0], float) else torch.int32)
    right = [values[0] or 1, values[0] or 1, values[1] or 1]
    broken, mended = given.new_full((3,), 9), given.new_full((3,), 9)
    found(f"{KERNELS}._expand_kernel_impl")(broken, given, END, 0, 1)
    patches.expand(mended, given, END, 0, 1)
    assert broken.tolist() != right
    assert mended.tolist() == right


def judged(kernel: Any, draft_ids: list[int], probs: torch.Tensor | None) -> list[list[int]]:
    """Two requests of two drafted tokens and one, of which the target would take 3, 3, and 0; the bonus is 7, what is
    recovered is 5."""
    output = torch.full((2, 3), -1, dtype=torch.int32)
    law = torch.eye(4)[[3, 3, 0]]  # [drafted, vocab]
    bonus, recovered = torch.full((2, 1), 7), torch.full((3,), 5, dtype=torch.int32)
    uniforms = torch.full((3,), 0.5, dtype=torch.float64)
    ids = torch.tensor(draft_ids, dtype=torch.int32)
    kernel(output, END, ids, probs, law, bonus, recovered, uniforms, None, 2, 4, None, probs is None, False)
    made: list[list[int]] = output.tolist()
    return made


@pytest.mark.parametrize("probs", [None, torch.eye(4)[[3, 3, 3]]])
def test_rows_that_were_filled_up_are_still_broken(probs: torch.Tensor | None) -> None:
    broken = found(f"{KERNELS}._rejection_random_sample_kernel_impl")
    mended = patches.refusing_padding(broken)
    assert judged(broken, [3, 3, 0], None) == judged(mended, [3, 3, 0], None) == [[3, 3, 7], [0, 7, -1]]
    assert judged(broken, [3, 3, -1], probs)[1] == [-1, 7, -1]  # it took none, and goes on behind it
    assert judged(mended, [3, 3, -1], probs)[1] == [5, -1, -1]


def test_rows_without_an_adapter_still_get_the_last_ones() -> None:
    broken = found("vllm.lora.ops.torch_ops.lora_ops.bgmv_shrink")
    broken = inspect.getclosurevars(broken).nonlocals.get("shrink", broken)  # mended in this process
    factors = torch.stack([torch.full((1, 2, 3), 1.0), torch.full((1, 2, 3), 7.0)])  # [places, 1, rank, in]
    rows, places = torch.ones(3, 3), torch.tensor([0, -1, 1])
    wrong, right = torch.empty(3, 2), torch.empty(3, 2)
    broken(rows, factors, wrong, places)
    patches.of_rows_with_adapters(broken)(rows, factors, right, places)
    assert wrong.tolist() == [[3, 3], [21, 21], [21, 21]]
    assert right.tolist() == [[3, 3], [0, 0], [21, 21]]
    assert "bgmv_shrink(" in inspect.getsource(found("vllm.lora.ops.torch_ops.lora_ops.sgmv_shrink"))


def test_adapters_of_packed_weights_still_have_no_place() -> None:
    with pytest.raises(AttributeError, match="device"):
        found("vllm.lora.layers.utils._get_lora_device")(SimpleNamespace(weight=None))
    source = inspect.getsource(found("vllm.lora.layers.base_linear.BaseLinearLayerWithLoRA.__init__"))
    assert "self.device = _get_lora_device(self.base_layer)" in source


def test_a_cut_of_no_rows_is_still_broken() -> None:
    broken = found("vllm.v1.sample.ops.topk_topp_sampler.apply_top_k_only")
    none = torch.empty(0, 4), torch.empty(0, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="max"):
        broken(*none)
    mended = patches.of_any_number(broken)
    assert mended(*none).shape == (0, 4)
    law, two = torch.tensor([[0.0, 3.0, 1.0, 2.0]]), torch.tensor([2], dtype=torch.int32)
    assert mended(law.clone(), two).tolist() == broken(law.clone(), two).tolist()


def test_products_of_8_bits_still_ask_nothing_of_the_rows_type() -> None:
    """With AMX a model in float32 ends its engine by it; what is asked is the weights' type."""
    kernel = found("vllm.model_executor.kernels.linear.scaled_mm.cpu.CPUInt8ScaledMMLinearKernel")
    source = inspect.getsource(kernel.process_weights_after_loading)
    assert "dtype = weight.dtype" in source and "check_cpu_sgl_kernel(N, K, dtype)" in source
    assert "float32" not in source
