"""The engines of an LLM in this process: loads the checkpoints, sizes the caches and joins them with the gateway's own
engine of generation."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from outrider.draft.settings import DraftSettings
from outrider.engine.blocks import BLOCK_SIZE
from outrider.engine.buckets import ROWS
from outrider.engine.device_thread import set_switch_interval
from outrider.engine.kv_cache import bytes_per_block
from outrider.engine.loader import LoadedModel, load_model
from outrider.engine.memory import sampling_bytes
from outrider.engine.models.base import UnsupportedModel
from outrider.gateway.backends import Drafter
from outrider.gateway.generation import GenerationDelta, GenerationRequest, SpeculationOptions
from outrider.gateway.local_ngram import LocalNgramDrafter
from outrider.gateway.pair import check_pair, check_tokenizer
from outrider.gateway.schedule import ScheduledDrafter
from outrider.gateway.service import EngineConfig, GenerationEngine
from outrider.gateway.tokenizer import Tokenizer
from outrider.inprocess import LocalDraft, LocalPeer, LocalTarget
from outrider.llm.arguments import EngineArguments
from outrider.llm.config import SpeculativeConfig
from outrider.llm.runtime import LoopThread
from outrider.proposers.ngram import NgramProposer
from outrider.target.boot import load as load_target
from outrider.target.settings import TargetSettings
from outrider.wire.hub import locate
from outrider.wire.messages import ModelInfo
from outrider.wire.validate import MAX_N

log = logging.getLogger(__name__)

CPU_CACHE_BYTES = 512 << 20  # of both caches where there is no GPU
WORKING_SHARE = 0.05  # of a GPU's memory: activations, beside weights and caches
UNBOUNDED = 2**31 - 1


@dataclass(frozen=True, slots=True)
class LocalBackend:
    """A pair of engines, and the loop that runs between them."""

    runtime: LoopThread
    engine: GenerationEngine
    tokenizer: Tokenizer
    info: ModelInfo
    peers: tuple[LocalPeer, ...]
    num_draft_tokens: int
    speculation: SpeculationOptions

    def encode(self, text: str) -> tuple[int, ...]:
        """A prompt's ids."""
        return tuple(self.tokenizer.encode(text))

    def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationDelta, None]:
        """The deltas of a request. Called on the loop."""
        return self.engine.generate(request)

    def cache_usage(self) -> float:
        """The share of the target's cache that is in use."""
        pool = self._target.engine.cache.pool
        return 1 - pool.num_free / pool.num_blocks

    def reset_prefix_cache(self) -> None:
        """Forgets every cached prefix of the target."""
        self._target.thread.call(self._target.engine.cache.pool.clear_cache).result()

    def close(self) -> None:
        """Ends the loop, then the device threads."""
        self.runtime.close()
        for peer in self.peers:
            peer.stop()

    @property
    def _target(self) -> LocalTarget:
        target = self.peers[0]
        if not isinstance(target, LocalTarget):
            raise TypeError("the first peer is the target")
        return target


def start_local(
    runtime: LoopThread,
    arguments: EngineArguments,
    speculation: SpeculativeConfig | None,
    num_running: Callable[[], int],
) -> LocalBackend:
    """Loads and starts. Raises ValueError for a pair that is none."""
    if arguments.model is None:
        raise ValueError("there is no model to load")
    set_switch_interval()
    k = (speculation.num_speculative_tokens or 0) if speculation else 0
    device = _device(arguments.device)
    tokenizer = Tokenizer.load(arguments.tokenizer or arguments.model)
    settings = _target_settings(arguments, arguments.model, device, speculation)
    folder = _draft_folder(arguments, speculation)
    try:
        loaded = load_target(settings)
        draft = _load_draft(arguments, speculation, folder, device, loaded.max_model_len)
    except UnsupportedModel as error:
        raise ValueError(str(error)) from error
    if settings.num_blocks is None:
        sampling = sum(sampling_bytes(ROWS[-1], model.vocab_size) for model in (loaded, draft) if model is not None)
        num_blocks = _num_blocks(loaded, draft, _cache_bytes(arguments, device, sampling), arguments)
        settings = settings.model_copy(update={"num_blocks": num_blocks})
    target = runtime.call(lambda: LocalTarget(settings, loaded, runtime.loop))
    peers: list[LocalPeer] = [target]
    try:
        _warn(check_tokenizer(tokenizer, target.info.model))
        _warn(_shorter(target.info.model.max_model_len, loaded.max_model_len))
        drafter: Drafter | None = None
        if draft is not None and folder is not None:
            draft_settings = _draft_settings(arguments, folder, device, settings.num_blocks)
            drafter = local = runtime.call(lambda: LocalDraft(draft_settings, draft, runtime.loop))
            peers.append(local)
            _warn(check_pair(target.info.model, local.info.model, (tokenizer, Tokenizer.load(folder))))
        elif speculation is not None:
            drafter = LocalNgramDrafter(NgramProposer(speculation.prompt_lookup_min, speculation.prompt_lookup_max))
        if drafter is not None and speculation is not None and not speculation.schedule.constant:
            drafter = ScheduledDrafter(drafter, speculation.schedule, num_running)
        config = EngineConfig(
            num_draft_tokens=k,
            mode=arguments.mode or "sequential",
            max_draft_tokens=k,  # a controller goes below k, never above
            max_active=arguments.max_num_seqs,
            max_waiting=UNBOUNDED,
            model_name=arguments.served_model_name or "",
            max_logprobs=arguments.max_logprobs,
        )
        engine = runtime.call(lambda: GenerationEngine(tokenizer, target, drafter, config))
    except BaseException:
        for peer in peers:
            peer.stop()
        raise
    options = SpeculationOptions(greedy_draft=speculation is not None and speculation.draft_sample_method == "greedy")
    return LocalBackend(runtime, engine, tokenizer, target.info.model, tuple(peers), k, options)


def _target_settings(
    arguments: EngineArguments, model: Path, device: str, speculation: SpeculativeConfig | None
) -> TargetSettings:
    k = (speculation.num_speculative_tokens or 0) if speculation else 0
    return TargetSettings.model_validate(
        {
            "model": model,
            "dtype": arguments.dtype,
            "device": device,
            "threads": arguments.threads,
            "max_model_len": arguments.max_model_len,
            "num_blocks": arguments.num_gpu_blocks_override,
            "prefix_cache": arguments.enable_prefix_caching is not False,
            "batch_invariant": arguments.batch_invariant,
            "max_rows": arguments.max_num_batched_tokens,
            "max_window": max(32, k),
            "max_logprobs": arguments.max_logprobs,
            "max_sequences": arguments.max_num_seqs * MAX_N,
            "trust_remote_code": arguments.trust_remote_code,
            "name": arguments.served_model_name or "",
            "cuda_graphs": not arguments.enforce_eager,
        }
    )


def _draft_settings(arguments: EngineArguments, folder: Path, device: str, num_blocks: int | None) -> DraftSettings:
    return DraftSettings.model_validate(
        {
            "model": folder,
            "device": device,
            "threads": arguments.threads,
            "num_blocks": num_blocks,
            "max_rows": arguments.max_num_batched_tokens,
            "max_sequences": arguments.max_num_seqs * MAX_N,
            "cuda_graphs": not arguments.enforce_eager,
        }
    )


def _draft_folder(arguments: EngineArguments, speculation: SpeculativeConfig | None) -> Path | None:
    """Of the draft model, if there is one."""
    if speculation is None or speculation.method != "draft_model":
        return None
    folder = locate(str(speculation.model), trust_remote_code=arguments.trust_remote_code)
    if not folder.is_dir():
        raise ValueError(f"speculative_config: there is no folder {folder}; allowed: a folder, or a hub id (org/name)")
    return folder


def _load_draft(
    arguments: EngineArguments,
    speculation: SpeculativeConfig | None,
    folder: Path | None,
    device: str,
    target_len: int,
) -> LoadedModel | None:
    if speculation is None or folder is None:
        return None
    if speculation.max_model_len is not None and speculation.max_model_len > target_len:
        raise ValueError(
            f"speculative_config: max_model_len={speculation.max_model_len} is more than the target's {target_len}"
        )
    return load_model(
        folder,
        dtype=arguments.dtype,
        device=device,
        max_model_len=speculation.max_model_len,
        trust_remote_code=arguments.trust_remote_code,
    )


def _device(name: str) -> str:
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"


def _cache_bytes(arguments: EngineArguments, device: str, sampling: int) -> int:
    """What the caches of both models may take, now that the weights are there, on a GPU beside so many bytes of
    sampling."""
    if arguments.kv_cache_memory_bytes is not None:
        return arguments.kv_cache_memory_bytes
    if torch.device(device).type != "cuda":
        return CPU_CACHE_BYTES
    free, total = torch.cuda.mem_get_info(torch.device(device))
    left = int(arguments.gpu_memory_utilization * total) - (total - free) - int(WORKING_SHARE * total) - sampling
    if left <= 0:
        raise ValueError(
            f"gpu_memory_utilization={arguments.gpu_memory_utilization} leaves no memory for the key-value cache: "
            f"{(total - free) >> 20} of {total >> 20} MiB are in use"
        )
    return left


def _num_blocks(target: LoadedModel, draft: LoadedModel | None, memory: int, arguments: EngineArguments) -> int:
    """As many blocks for the draft as for the target, and no more than can be used. A length that was asked for must
    fit."""
    size = bytes_per_block(target.model.layers, target.model.dtype)
    if draft is not None:
        size += bytes_per_block(draft.model.layers, draft.model.dtype)
    blocks = memory // size
    if blocks < 1:
        raise ValueError(f"{memory} bytes hold no block of the key-value cache")
    length = arguments.max_model_len
    if length is not None and blocks * BLOCK_SIZE < length:
        raise ValueError(
            f"max_model_len={length} does not fit: the key-value cache holds {blocks * BLOCK_SIZE} tokens; raise "
            "gpu_memory_utilization or kv_cache_memory_bytes, or lower max_model_len"
        )
    return min(blocks, arguments.max_num_seqs * -(-target.max_model_len // BLOCK_SIZE))


def _shorter(held: int, longest: int) -> str:
    return f"max_model_len is {held}: the key-value cache holds no more of the model's {longest}" * (held < longest)


def _warn(message: str) -> None:
    if message:
        log.warning("%s", message)
