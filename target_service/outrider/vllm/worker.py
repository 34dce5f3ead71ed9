"""vLLM's worker, whose sampler gets what drafted tokens were drawn from. As vLLM's `worker_cls`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outrider.vllm import mends
from outrider.vllm.weights import draft_probs, weights_of
from vllm.platforms import current_platform

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker
elif current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker


class Worker(PlatformWorker):  # type: ignore[misc]
    """The platform's own, but for the rows of probabilities that its runner gives to the rejection sampler."""

    def init_device(self) -> None:
        """Puts the place where weights are looked for into the runner."""
        if mends.apply():  # plugins were left out
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
