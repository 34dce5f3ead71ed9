"""vLLM's worker, whose sampler gets what drafted tokens were drawn from, and which takes no adapter in part. As vLLM's
`worker_cls`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outrider.vllm import patches
from outrider.vllm.weights import draft_probs, weights_of
from vllm.platforms import current_platform

SHOWN = 4  # modules in a message

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker
elif current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker


class AdaptedWorker(PlatformWorker):  # type: ignore[misc]
    """The platform's own, but for adapters of which it would leave something out without a word: modules that vLLM's
    model has by another name, or has not got."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """With room for adapters, if it is asked for."""
        if current_platform.is_cpu() and self.vllm_config.lora_config is not None:
            patches.place_adapters()
        super().load_model(*args, **kwargs)

    def add_lora(self, lora_request: Any) -> bool:
        """Raises ValueError where not all of it is computed; vLLM does not keep it then."""
        added = bool(super().add_lora(lora_request))
        manager, number = self.model_runner.lora_manager._adapter_manager, lora_request.lora_int_id
        if absent := sorted(manager.get_adapter(number).loras.keys() - manager.modules.keys()):
            self.remove_lora(number)
            raise ValueError(f"its model computes no adapter of {', '.join(absent[:SHOWN])} ({len(absent)} modules)")
        return added


class Worker(AdaptedWorker):
    """Besides, with rows of probabilities that its runner gives to the rejection sampler."""

    def init_device(self) -> None:
        """Puts the place where weights are looked for into the runner."""
        if patches.apply():  # plugins were left out
            current_platform.register_triton_kernel_overrides()
        super().init_device()
        self._weights: Any = {}
        self.model_runner._get_spec_decode_draft_probs = self._draft_probs

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """A step; its weights came with it."""
        self._weights = weights_of(scheduler_output)
        return super().execute_model(scheduler_output, *args, **kwargs)

    def _draft_probs(self, metadata: Any) -> Any:
        """[drafted, vocab] float32, or None where all are one-hot."""
        if not self._weights:
            return None
        batch = self.model_runner.input_batch
        return draft_probs(
            self._weights,
            batch.req_ids[: len(metadata.num_draft_tokens)],
            metadata.num_draft_tokens,
            metadata.draft_token_ids,
            batch.vocab_size,
        )
