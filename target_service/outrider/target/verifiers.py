"""Which verifier a target has: the host's, or the device's behind its captured passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from outrider.engine.runner import ModelRunner
from outrider.target.state import TargetSequence
from outrider.target.verifier import Judged, Verdict, Verifier


class StepVerifier(Protocol):
    """Judges the windows of a step."""

    def verify(self, logits: Tensor, judged: Sequence[Judged]) -> list[Verdict]:
        """Verdicts of every window, in no fixed order; logits are [rows that want logits, vocab] float32."""

    def prepare(self, target: TargetSequence) -> bool:
        """Uses idle time for a sequence's next window; whether there was something to do."""


def verifier_of(runner: ModelRunner, vocab_size: int) -> StepVerifier:
    """The verifier of the place where the model is."""
    device = runner.model.device
    if device.type == "cpu":
        return Verifier(vocab_size)
    from outrider.engine.cuda_graphs import CudaGraphs
    from outrider.target.device_verifier import DeviceVerifier

    with torch.cuda.device(device):
        steps = runner.captured
        verifier = DeviceVerifier(device, CudaGraphs(device) if steps is None else steps.graphs)
        if steps is not None:
            verifier.capture(steps)
    return verifier
