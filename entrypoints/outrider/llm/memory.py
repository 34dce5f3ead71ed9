"""How much memory the key-value caches of an LLM take: that of the target, and that of the draft or head beside it."""

from __future__ import annotations

import torch

from outrider.engine.batch import ROWS
from outrider.engine.kv_cache import bytes_per_block
from outrider.engine.kv_cache_manager import BLOCK_SIZE
from outrider.engine.loader import LoadedModel
from outrider.engine.model_runner import sampling_bytes
from outrider.engine.models.base import TakesAdapters
from outrider.llm.arguments import EngineArguments
from outrider.proposers.heads.head import HeadShape, bytes_beside_block

CPU_CACHE_BYTES = 512 << 20  # of both caches where there is no GPU; beside vLLM of each
CACHE_BESIDE_VLLM = 256 << 20  # of a draft on the GPU of a vLLM, which takes its share first
WORKING_SHARE = 0.05  # of a GPU's memory: activations, beside weights and caches


def shared_blocks(
    arguments: EngineArguments, device: str, target: LoadedModel, draft: LoadedModel | None, head: HeadShape | None
) -> int:
    """Blocks of the target's cache, and of the draft's: both share what the weights leave."""
    beside = sum(sampling_bytes(ROWS[-1], model.vocab_size) for model in (target, draft) if model is not None)
    memory = cache_bytes(arguments, device, beside + _adapter_bytes(target, arguments))
    return num_blocks(target, draft, memory, arguments, head)


def blocks_beside_vllm(arguments: EngineArguments, device: str, draft: LoadedModel, longest: int) -> int:
    """Blocks of a draft's cache beside a target on vLLM, which has taken its memory already."""
    memory = arguments.kv_cache_memory_bytes or (CPU_CACHE_BYTES if device == "cpu" else CACHE_BESIDE_VLLM)
    blocks = max(1, memory // bytes_per_block(draft.model.layers, draft.model.dtype))
    return min(blocks, _usable_blocks(arguments, longest))


def cache_bytes(arguments: EngineArguments, device: str, beside: int) -> int:
    """What the caches of both models may take, now that the weights are there, on a GPU beside so many bytes of
    sampling and adapters. Raises ValueError where nothing is left."""
    if arguments.kv_cache_memory_bytes is not None:
        return arguments.kv_cache_memory_bytes
    if torch.device(device).type != "cuda":
        return CPU_CACHE_BYTES
    free, total = torch.cuda.mem_get_info(torch.device(device))
    left = int(arguments.gpu_memory_utilization * total) - (total - free) - int(WORKING_SHARE * total) - beside
    if left <= 0:
        raise ValueError(
            f"gpu_memory_utilization={arguments.gpu_memory_utilization} leaves no memory for the key-value cache: "
            f"{(total - free) >> 20} of {total >> 20} MiB are in use"
        )
    return left


def num_blocks(
    target: LoadedModel,
    draft: LoadedModel | None,
    memory: int,
    arguments: EngineArguments,
    head: HeadShape | None = None,
) -> int:
    """As many blocks for the draft, or the head, as for the target, and no more than can be used. Raises ValueError
    where a length that was asked for does not fit."""
    size = bytes_per_block(target.model.layers, target.model.dtype) + bytes_beside_block(head, target.model.dtype)
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
    return min(blocks, _usable_blocks(arguments, target.max_model_len))


def _usable_blocks(arguments: EngineArguments, longest: int) -> int:
    return arguments.max_num_seqs * -(-longest // BLOCK_SIZE)


def _adapter_bytes(loaded: LoadedModel, arguments: EngineArguments) -> int:
    """What the target will take for adapters beside its weights."""
    if not arguments.enable_lora or not isinstance(loaded.model, TakesAdapters):
        return 0
    numbers = sum(outputs + inputs for outputs, inputs in loaded.model.adapters.linears.values())
    return arguments.max_loras * arguments.max_lora_rank * numbers * loaded.model.dtype.itemsize
