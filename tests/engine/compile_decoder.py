"""Captures a decoder's steps for a GPU that is not there, then launches steps with prompts, and prints how many
binaries each kernel needed: python compile_decoder.py CAPABILITY BATCH_INVARIANT"""

from __future__ import annotations

import json
import sys
from collections import defaultdict

import torch
from offline_compiler import compile_only
from replayed import Replayed
from tiny import tiny_config

from outrider.engine.batch import BatchEntry, StepLimits
from outrider.engine.model_runner import ModelRunner
from outrider.engine.models.decoder import Decoder
from outrider.engine.models.decoder_config import parse_config
from outrider.engine.models.weights import expected_shapes
from outrider.kernels import dispatch

SHAPES = (  # rows and context of a prompt's chunk, and how many windows beside it
    (40, 0, 3), (64, 640, 0), (65, 0, 1), (300, 900, 2), (17, 5, 0), (33, 1000, 1), (100, 2000, 5), (512, 0, 0),
)  # fmt: skip


def main() -> None:
    """Prints JSON: how many binaries of each kernel the captured steps needed, and how many all steps."""
    launched = compile_only(int(sys.argv[1]))
    dispatch.runs_triton = lambda x: True
    runner = ModelRunner(_model(batch_invariant=bool(int(sys.argv[2]))), 512)
    runner.capture(StepLimits(64, 8, 5), Replayed())
    captured = _binaries(launched)
    for rows, context, others in SHAPES:
        table = list(range(-(-(context + rows) // 16)))
        beside = [BatchEntry([0] * (1 + index), 9, [300 + index], 1) for index in range(others)]
        runner.forward([BatchEntry([0] * rows, context, table, 1), *beside])
    print(json.dumps({"captured": captured, "all": _binaries(launched)}))


def _model(batch_invariant: bool) -> Decoder:
    config = parse_config(
        tiny_config(
            "qwen3", hidden_size=256, num_attention_heads=4, num_key_value_heads=1, head_dim=64, num_hidden_layers=1,
            max_position_embeddings=4096,
        )
    )  # fmt: skip
    state = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in expected_shapes(config).items()}
    return Decoder(config, state, dtype=torch.bfloat16, device=torch.device("cpu"), batch_invariant=batch_invariant)


def _binaries(launched: list[tuple[str, str]]) -> dict[str, int]:
    found: dict[str, set[str]] = defaultdict(set)
    for name, binary in launched:
        found[name].add(binary)
    return {name: len(binaries) for name, binaries in found.items()}


if __name__ == "__main__":
    main()
