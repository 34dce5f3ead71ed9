"""Every kernel of a decoder's step compiles for GPUs that are not here, and few times: a step that waits for a compiler
takes seconds.

Captures a decoder's steps for a GPU that is not there, then launches steps with prompts, and prints how many
binaries each kernel needed: python test_decoder_compiles.py CAPABILITY BATCH_INVARIANT"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from support.devices import Replayed
from support.kernels import Compiled, compile_only
from support.models import tiny_config

from outrider.engine.batch import BatchEntry, StepLimits
from outrider.engine.model_runner import ModelRunner
from outrider.engine.models.decoder import Decoder
from outrider.engine.models.decoder_config import parse_config
from outrider.engine.models.weights import expected_shapes
from outrider.kernels import dispatch

pytestmark = pytest.mark.compilers

KERNELS = {"attend_kernel", "merge_kernel", "_turn_kernel", "_norm_kernel", "_gate_kernel"}
MOST_CAPTURED = 3  # of one kernel: steps of one row a sequence, windows, and a window that needs no split
COMPILE_S = 1200  # of the long form beside another one, on a slow processor
MOST = 6  # with prompts, whose ids are of another type


@pytest.mark.timeout(COMPILE_S + 60)
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize(
    ("capability", "batch_invariant"),
    [(90, 0), pytest.param(90, 1, marks=pytest.mark.slow), pytest.param(89, 0, marks=pytest.mark.slow)],
)
def test_steps_need_few_binaries(capability: int, batch_invariant: int, tmp_path: Path) -> None:
    environment = os.environ | {
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, __file__, str(capability), str(batch_invariant)]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=COMPILE_S, check=False)
    assert child.returncode == 0, child.stderr[-4000:]
    found = json.loads(child.stdout)
    expected = KERNELS | ({"_linear_kernel"} if batch_invariant else set())
    assert found["captured"].keys() == found["all"].keys() == expected
    assert max(found["captured"].values()) <= MOST_CAPTURED, found
    assert max(found["all"].values()) <= MOST, found


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


def _binaries(launched: list[Compiled]) -> dict[str, int]:
    found: dict[str, set[str]] = defaultdict(set)
    for launch in launched:
        found[launch.name].add(launch.binary)
    return {name: len(binaries) for name, binaries in found.items()}


if __name__ == "__main__":
    main()
