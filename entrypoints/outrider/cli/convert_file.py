"""One .bin file to one .safetensors file, in this process alone: `python -m outrider.cli.convert_file SRC DST`."""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor


def main(source: Path, destination: Path) -> int:
    """Converts a file and prints its tensors' names and bytes as JSON; 1, with a line why, if it holds no tensors."""
    try:
        tensors = owned(read(source))
    except (ValueError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        lines = str(error).splitlines() or [type(error).__name__]
        print(lines[0], file=sys.stderr)
        return 1
    save_file(tensors, destination, metadata={"format": "pt"})
    size = sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())
    print(json.dumps({"tensors": list(tensors), "bytes": size}))
    return 0


def read(source: Path) -> Mapping[str, Tensor]:
    """The state dict of a pickle, which may hold nothing but tensors."""
    state = torch.load(source, map_location="cpu", weights_only=True)
    if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ValueError("it holds something else than a mapping of names to tensors")
    return state


def owned(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors that share no memory, as safetensors wants them: tied ones become copies."""
    return {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in state.items()}


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
