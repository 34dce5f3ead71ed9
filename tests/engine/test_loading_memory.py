"""What loading needs beside the weights that are kept: no more than a layer, or the largest tensor.

Loads checkpoints one after another, and prints what anonymous memory each needed: a line of JSON each, in bytes.
python test_loading_memory.py WAY FOLDER [WAY FOLDER ...]; a way is c, pytorch, int8, int4, expand or registry."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.models import cpu_kernels, tiny_config

from outrider.engine.loader import Quantization, load_model
from outrider.engine.models.decoder_config import parse_config
from outrider.engine.models.weights import expected_shapes
from outrider.kernels.cpu.library import cpu_library
from outrider.pairs import pair_path
from outrider.pairs.expansion import expand_llama

SHAPE = {
    "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 12_000,
}  # fmt: skip
SLACK = 8 << 20  # of the interpreter
NUMBERS = {"layer": 3_934_208, "tensor": 12_000 * 512, "all": 35_900_000}  # of that shape, rounded up
ROUNDINGS: tuple[Quantization, ...] = ("int8", "int4")
EXPANSION = {"layer": 15_740_000, "tensor": 8_400_000}

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux tells anonymous memory")


def save(folder: Path, family: str = "llama", dtype: torch.dtype = torch.bfloat16, **options: object) -> Path:
    """A checkpoint of SHAPE."""
    config = tiny_config(family, **SHAPE)
    state = {
        name: torch.full(shape, 0.01, dtype=dtype) for name, shape in expected_shapes(parse_config(config)).items()
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | options))
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def measure(*cases: tuple[str, Path]) -> list[dict[str, int]]:
    """Bytes `held` and at the `peak` of each way and checkpoint, in a process of their own whose allocator keeps
    nothing that is freed."""
    arguments = [str(part) for case in cases for part in case]
    child = subprocess.run(
        [sys.executable, __file__, *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "MALLOC_MMAP_THRESHOLD_": str(64 << 10)},
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert child.returncode == 0, child.stderr[-4000:]
    return [json.loads(line) for line in child.stdout.splitlines()]


def check(found: dict[str, int], *, beside: int, held: int | None = None) -> None:
    """Bytes: `beside` the larger of a layer and the largest tensor, `held` at most what is kept."""
    assert found["peak"] <= 1.1 * (found["held"] + beside) + SLACK, found
    assert held is None or 0.9 * held <= found["held"] <= held + SLACK, found


def test_loading_needs_little_beside_the_packed_weights(tmp_path: Path) -> None:
    """In the checkpoint's 16 bits by the C kernels, as 32 bits by PyTorch's."""
    if cpu_library() is None:
        pytest.skip("no C compiler")
    folder = save(tmp_path / "halves")
    native, pytorch = measure(("c", folder), ("pytorch", folder))
    check(native, beside=2 * NUMBERS["tensor"], held=2 * NUMBERS["all"])
    check(pytorch, beside=4 * NUMBERS["tensor"])


def test_rounding_needs_little_beside_the_packed_weights(tmp_path: Path) -> None:
    """No second copy of a layer: 8 bits a number with a scale an output, beside embeddings of 16; 4 bits with one for
    32 inputs, of embeddings and head 8."""
    if cpu_library() is None:
        pytest.skip("no C compiler")
    folder = save(tmp_path / "halves")
    int8, int4 = measure(("int8", folder), ("int4", folder))
    products, tensor = NUMBERS["all"] - 2 * NUMBERS["tensor"], NUMBERS["tensor"]
    check(int8, beside=tensor, held=products + 3 * tensor)
    check(int4, beside=tensor, held=int(0.5625 * products) + int(1.0625 * 2 * tensor))


@pytest.mark.slow
def test_loading_needs_little_in_every_way(tmp_path: Path) -> None:
    """Numbers that 16 bits do not hold, transformers' models, and the embedded pair's expansion."""
    if cpu_library() is None:
        pytest.skip("no C compiler")
    wide, half = save(tmp_path / "wide", dtype=torch.float32), save(tmp_path / "half", dtype=torch.float16)
    registry = save(tmp_path / "registry", "gemma2", hidden_activation="gelu")
    cases = (("c", wide), ("c", half), ("registry", registry), ("expand", pair_path().target))
    *floats, transformers, expansion = measure(*cases)
    for found, num_bytes in zip(floats, (4, 2), strict=True):
        check(found, beside=num_bytes * NUMBERS["tensor"], held=num_bytes * NUMBERS["all"])
    check(transformers, beside=4 * NUMBERS["tensor"])
    check(expansion, beside=2 * EXPANSION["layer"])


STATUS = Path("/proc/self/status")


def anonymous_bytes() -> int:
    """Resident memory of this process that is no file's."""
    found = re.search(r"^RssAnon:\s+(\d+) kB", STATUS.read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


class Watch(threading.Thread):
    """Remembers the most."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most = 0
        self.over = threading.Event()

    def run(self) -> None:
        while not self.over.is_set():
            self.most = max(self.most, anonymous_bytes())
            time.sleep(0.0005)


def main() -> None:
    arguments = sys.argv[1:]
    load_model(pair_path().draft)  # what is imported and compiled at the first use
    kept = []
    for way, folder in zip(arguments[::2], arguments[1::2], strict=True):
        before = anonymous_bytes()
        watch = Watch()
        watch.start()
        with cpu_kernels("pytorch") if way == "pytorch" else nullcontext():
            quantization = next((name for name in ROUNDINGS if name == way), None)
            expand = expand_llama if way == "expand" else None
            kept.append(load_model(folder, quantization=quantization, expand=expand))
        watch.over.set()
        watch.join()
        print(json.dumps({"way": way, "held": anonymous_bytes() - before, "peak": watch.most - before}), flush=True)


if __name__ == "__main__":
    main()
