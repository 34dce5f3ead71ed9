"""The pair of engines behind an LLM in the caller's own process: loads the checkpoints, chooses the target's engine,
sizes the caches and joins draft and target with the gateway's own engine of generation."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

import torch

from outrider.engine.checkpoint import read_config
from outrider.engine.loader import LoadedModel
from outrider.engine.models.base import UnsupportedModel, WrongCheckpoint
from outrider.engine.quantized.rounding import BITS_OF
from outrider.engine.worker import set_switch_interval
from outrider.gateway.engine import EngineConfig, GenerationEngine
from outrider.gateway.media import MediaLimits
from outrider.gateway.peers.handshake import check_tokenizer
from outrider.gateway.text.tokenizer import Tokenizer
from outrider.llm.arguments import EngineArguments
from outrider.llm.backends import LoopThread
from outrider.llm.config import SpeculativeConfig
from outrider.llm.drafts import PlainDecoding, draft_of
from outrider.llm.engine_choice import (
    INSTALL,
    OURS,
    beyond_ours,
    choose_engine,
    has_vllm,
    lacks,
    require_vllm_can,
)
from outrider.llm.lora.held import HeldAdapters
from outrider.llm.lora.request import LoRARequest
from outrider.llm.memory import blocks_beside_vllm, shared_blocks
from outrider.llm.service_settings import MEDIA_BYTES, our_target, vllm_target
from outrider.llm.services import LocalTarget, LocalVerifier, VllmTarget
from outrider.llm.weights import ServedWeights
from outrider.rpc.messages import ModelInfo
from outrider.rpc.words.answer import GenerationDelta
from outrider.rpc.words.request import GenerationRequest, SpeculationOptions
from outrider.target_service.boot import load as load_target
from outrider.target_service.settings import TargetSettings

log = logging.getLogger(__name__)

UNBOUNDED = 2**31 - 1


@dataclass(frozen=True, slots=True)
class LocalBackend:
    """A pair of engines, and the loop that runs between them."""

    runtime: LoopThread
    engine: GenerationEngine
    tokenizer: Tokenizer
    target: LocalVerifier
    draft: PlainDecoding
    adapters: HeldAdapters
    num_draft_tokens: int
    weights: ServedWeights | None  # None: they stay

    @property
    def info(self) -> ModelInfo:
        """The target's model."""
        return self.target.info.model

    @property
    def speculation(self) -> SpeculationOptions:
        """What every request says of speculation."""
        return self.draft.options

    @property
    def can_couple(self) -> bool:
        """Whether requests may be accepted by the coupled rule."""
        return "acceptance.coupled" in self.target.info.capabilities

    def encode(self, text: str) -> tuple[int, ...]:
        """The ids of a prompt."""
        return tuple(self.tokenizer.encode(text))

    def generate(
        self, request: GenerationRequest, lora: LoRARequest | None = None
    ) -> AsyncGenerator[GenerationDelta, None]:
        """The deltas of a request, whose adapter `lora` describes. Called on the loop."""
        return self.engine.generate(request) if lora is None else self._with_adapter(request, lora)

    async def _with_adapter(
        self, request: GenerationRequest, lora: LoRARequest
    ) -> AsyncGenerator[GenerationDelta, None]:
        async with self.adapters.using(lora), aclosing(self.engine.generate(request)) as deltas:
            async for delta in deltas:
                yield delta

    def cache_usage(self) -> float:
        """The share of the target's cache that is in use."""
        return self.target.cache_usage()

    def reset_prefix_cache(self) -> None:
        """Forgets every cached prefix of the target."""
        self.target.reset_prefix_cache()

    def close(self) -> None:
        """Ends the loop, then the device threads."""
        self.runtime.close(self._leave)
        self.target.stop()
        self.draft.stop()
        if self.weights is not None:
            self.weights.close()

    def _leave(self) -> None:
        self.target.leave()
        self.draft.leave()


def start_local(
    runtime: LoopThread,
    arguments: EngineArguments,
    speculation: SpeculativeConfig | None,
    k: int,
    num_running: Callable[[], int],
) -> LocalBackend:
    """Loads and starts; at most `k` tokens are drafted. Raises ValueError for a pair that is none."""
    if arguments.model is None:
        raise ValueError("there is no model to load")
    set_switch_interval()
    device = _device(arguments.device)
    tokenizer = Tokenizer.load(arguments.tokenizer or arguments.model)
    draft = draft_of(arguments, speculation, device)
    try:
        target = _Start(runtime, arguments, speculation, draft, device, k).target()
    except UnsupportedModel as error:
        raise ValueError(str(error)) from error
    try:
        _warn(check_tokenizer(tokenizer, target.info.model))
        _warn(_shorter(target.info.model.max_model_len, target.longest))
        drafter = draft.start(runtime, target, num_running)
        _warn(draft.check(target))
        drafter = draft.believed(runtime, target, drafter, tokenizer.encode)
        config = _engine_config(arguments, draft, k)
        engine = runtime.call(lambda: GenerationEngine(tokenizer, target, drafter, config))
    except BaseException:
        target.stop()
        draft.stop()
        raise
    adapters = HeldAdapters(target, arguments.num_adapters)
    weights = ServedWeights(target, adapters) if isinstance(target, LocalTarget) else None
    return LocalBackend(runtime, engine, tokenizer, target, draft, adapters, k, weights)


def _engine_config(arguments: EngineArguments, draft: PlainDecoding, k: int) -> EngineConfig:
    folder = arguments.allowed_local_media_path
    return EngineConfig(
        num_draft_tokens=k,
        mode=arguments.mode or "sequential",
        schedule=draft.schedule,
        max_draft_tokens=k,  # a controller goes below k, never above
        max_active=arguments.max_num_seqs,
        max_waiting=UNBOUNDED,
        model_name=arguments.served_model_name or "",
        max_logprobs=arguments.max_logprobs,
        media=MediaLimits(MEDIA_BYTES, folder=Path(folder) if folder else None),
    )


@dataclass(frozen=True, slots=True)
class _Start:
    """What a pair is started with."""

    runtime: LoopThread
    arguments: EngineArguments
    speculation: SpeculativeConfig | None
    draft: PlainDecoding
    device: str
    k: int  # tokens that are drafted at most

    def target(self) -> LocalVerifier:
        """On our engine, or on vLLM, by the arguments, the checkpoint, or since ours refuses it; the draft's model is
        loaded then, too. Raises UnsupportedModel, Unsupported."""
        arguments, reason = self.arguments, _beyond_ours(self.arguments)
        if choose_engine(arguments, reason, has_vllm()) == OURS:
            settings = our_target(arguments, self.device, self.k, self.draft.of_target())
            try:
                loaded = load_target(settings)
            except UnsupportedModel as error:
                is_rounded = arguments.quantization in BITS_OF
                is_settings_fault = arguments.batch_invariant or arguments.dtype != "auto" or is_rounded
                if isinstance(error, WrongCheckpoint) or is_settings_fault or arguments.engine == OURS:
                    raise
                reason = str(error)
                if not has_vllm():
                    raise UnsupportedModel(f"{reason}; vLLM may run it: {INSTALL}") from error
            else:
                return self._ours(settings, loaded)
        if arguments.engine == "auto":
            log.warning("the target runs on vLLM: %s", reason)
        require_vllm_can(arguments, self.speculation)
        return self._vllm(vllm_target(arguments, self.device, self.k, self.draft.of_vllm()))

    def _ours(self, settings: TargetSettings, loaded: LoadedModel) -> LocalVerifier:
        """Beside the target's weights come the draft's, or the head's; both caches share what is left."""
        draft, loop = self.draft, self.runtime.loop
        tried = draft.load_head(settings, loaded)
        draft.load(loaded.max_model_len)
        if settings.num_blocks is None:
            blocks = shared_blocks(self.arguments, self.device, loaded, draft.loaded, tried.head)
            settings = settings.model_copy(update={"num_blocks": blocks})
        draft.reserve(settings.num_blocks)
        return self.runtime.call(lambda: LocalTarget(settings, loaded, loop, tried, self.arguments.tokenizer))

    def _vllm(self, settings: TargetSettings) -> LocalVerifier:
        """The draft's cache takes little: vLLM has taken its memory first."""
        draft, target = self.draft, self.runtime.run(VllmTarget.started(settings))
        try:
            draft.load(target.longest)
            if draft.loaded is not None:
                draft.reserve(blocks_beside_vllm(self.arguments, self.device, draft.loaded, target.longest))
        except BaseException:
            target.stop()
            raise
        return target


def _beyond_ours(arguments: EngineArguments) -> str:
    """Why the target is not for our engine; empty where it may be."""
    said = read_config(arguments.model or Path())
    reason = beyond_ours(arguments, said)
    beside = lacks(said)
    if not reason and arguments.engine == "auto" and beside and has_vllm():
        return f"the checkpoint {beside}, which our engine does not (engine='outrider' runs it without)"
    return reason


def _device(name: str) -> str:
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"


def _shorter(held: int, longest: int) -> str:
    return f"max_model_len is {held}: the key-value cache holds no more of the model's {longest}" * (held < longest)


def _warn(message: str) -> None:
    if message:
        log.warning("%s", message)
