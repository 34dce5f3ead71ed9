"""Which engine runs an LLM's target: ours, or vLLM where ours cannot and it is installed."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from outrider.engine.adapters.ranks import MOST_RANK
from outrider.engine.models.base import UnsupportedModel
from outrider.engine.models.decoder_config import MODEL_TYPES
from outrider.engine.quantized.choice import is_known, kept_as
from outrider.engine.quantized.rounding import BITS_OF
from outrider.engine.quantized.state import layout_of, rounds_activations, said_of
from outrider.llm.arguments import EngineArguments
from outrider.llm.config import SpeculativeConfig
from outrider.llm.validation import Unsupported
from outrider.target_service.engines import has_engine

OURS, VLLM = "outrider", "vllm"
INSTALL = "install outrider[vllm]"


def beyond_ours(arguments: EngineArguments, config: Mapping[str, Any]) -> str:
    """Why our engine cannot run a target, by the arguments and its config.json; empty where it may."""
    if arguments.tensor_parallel_size > 1:
        return f"tensor_parallel_size={arguments.tensor_parallel_size}: our engine runs a target on one device"
    if arguments.enable_lora and arguments.max_lora_rank > MOST_RANK:
        return f"max_lora_rank={arguments.max_lora_rank}: our engine takes ranks to {MOST_RANK}"
    return _unread(arguments.quantization, config, Path(arguments.model or ""))


def _unread(quantization: str | None, config: Mapping[str, Any], folder: Path) -> str:
    """Why our engine does not read how the weights are kept; `quantization` is what the caller says of it."""
    said, kept = said_of(config), kept_as(folder, config)
    if not is_known(quantization, kept):
        allowed = ", ".join([*BITS_OF, *([kept] if kept else [])])
        return (
            f"quantization={quantization!r}: our engine rounds a target's weights, or takes them as its checkpoint "
            f"keeps them; allowed: none, {allowed}"
        )
    if said is None:
        return ""
    if config.get("model_type") not in MODEL_TYPES:
        return f"the checkpoint is quantised ({kept}), and no model of our own decoder's"
    try:
        layout_of(said)
    except UnsupportedModel as error:
        return f"the checkpoint is quantised, and its {error}"
    return ""


def lacks(config: Mapping[str, Any]) -> str:
    """What of a checkpoint our engine would leave out; empty: nothing."""
    if isinstance(config.get("vision_config"), Mapping):
        return "takes pictures"
    said = said_of(config)
    return "rounds activations, too" if isinstance(said, Mapping) and rounds_activations(said) else ""


def has_vllm() -> bool:
    """Whether it is installed, in either of its builds, and the wheel that drives it."""
    return has_engine(VLLM) and find_spec("vllm") is not None


def choose_engine(arguments: EngineArguments, reason: str, has_vllm: bool) -> str:
    """OURS or VLLM; `reason` is why ours cannot run the target. Raises Unsupported where nothing can."""
    if arguments.engine == OURS and reason:
        raise Unsupported(f"LLM(engine='outrider'): {reason}; engine='vllm' may run it ({INSTALL})")
    if arguments.engine == VLLM or reason:
        if not has_vllm:
            raise Unsupported(f"LLM: {reason or 'engine=' + repr(VLLM)}; vLLM is not installed: {INSTALL}")
        return VLLM
    return OURS


def require_vllm_can(arguments: EngineArguments, speculation: SpeculativeConfig | None) -> None:
    """Raises Unsupported for what our engine does and vLLM does not, by name."""
    if arguments.batch_invariant:
        raise Unsupported("LLM(batch_invariant=True) is for engine='outrider'")
    if speculation is None:
        return
    if speculation.head == "mlp_speculator":
        raise Unsupported(
            "speculative method 'mlp_speculator' is not supported with engine='vllm', whose V1 runner has not got it; "
            "engine='outrider' has, with tensor_parallel_size=1"
        )
    if speculation.tree is not None:
        raise Unsupported("speculative_config['speculative_token_tree'] is for engine='outrider'; allowed: a chain")
    if speculation.head and not speculation.schedule.constant:
        raise Unsupported(
            f"speculative method {speculation.head!r} is vLLM's own with engine='vllm', and drafts as many tokens at "
            "any batch size; leave disable_by_batch_size and num_speculative_tokens_per_batch_size out"
        )


def vllms_own(speculation: SpeculativeConfig) -> dict[str, Any]:
    """What vLLM is told of a method that reads hidden states, in its own words: it drafts by it itself."""
    passed_on = (
        "method",
        "num_speculative_tokens",
        "draft_tensor_parallel_size",
        "max_model_len",
        "draft_sample_method",
        "rejection_sample_method",
    )
    said = {name: getattr(speculation, name) for name in passed_on if getattr(speculation, name) is not None}
    if speculation.parallel_drafting:
        said["parallel_drafting"] = True
    return said if speculation.model is None else {**said, "model": str(speculation.model)}
