"""`outrider model convert --quantize`: a checkpoint with its products rounded to few bits, as compressed-tensors has
them, so that vLLM and others read it, too."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median

from safetensors.torch import save_file
from torch import Tensor

from outrider.cli.agreement import Agreement, compare_models
from outrider.cli.arguments import load_tokenizer
from outrider.engine import checkpoint
from outrider.engine.models.decoder_config import DecoderConfig, parse_config
from outrider.engine.models.weights import expected_shapes, with_its_head
from outrider.engine.quantized.rounding import Rounding, quantization_config, round_to_nearest, stored_parts
from outrider.engine.quantized.state import KEYS
from outrider.rpc.hub import TOKENIZER_FILES, locate

MOST_BYTES = 2 << 30  # of a file of weights
IGNORED = ["lm_head"]  # its rounding costs most, and where it is tied it is the embeddings


def quantize(source: Path, destination: Path, rounding: Rounding, group: int | None) -> Iterator[str]:
    """Writes the folder, complete or not at all, and tells meanwhile how far the numbers of each layer moved. Raises
    ValueError."""
    if destination.exists():
        raise ValueError(f"{destination} exists; nothing is overwritten")
    folder, partial = locate(source), destination.with_name(destination.name + ".partial")
    config = checkpoint.read_config(folder)
    parsed = parse_config(config)
    if parsed.mixture is not None and parsed.mixture.names.fused:
        raise ValueError(
            f"source: {config['model_type']} keeps a layer's experts in one tensor; allowed: one for each expert"
        )
    _, state = with_its_head(parsed, checkpoint.read_weights(folder, checkpoint.weight_files(folder)))
    partial.mkdir(parents=True)
    try:
        shards = _Shards(partial)
        yield from _written(state, rounded_modules(parsed), rounding, group, shards)
        shards.finish()
        _copy_rest(folder, partial)
        said = quantization_config(
            rounding, group, [*IGNORED, *(f"re:.*{re.escape(name)}$" for name in _routers(parsed))]
        )
        kept = {name: value for name, value in config.items() if name not in (*KEYS, "transformers_weights")}
        (partial / "config.json").write_text(json.dumps(kept | {"quantization_config": said}, indent=2) + "\n")
        partial.rename(destination)
    except BaseException:
        shutil.rmtree(partial)
        raise


def rounded_modules(config: DecoderConfig) -> frozenset[str]:
    """Every product of a layer but routers, whose few numbers decide most."""
    kept = tuple(f"{name}.weight" for name in _routers(config))
    products = (name for name, shape in expected_shapes(config).items() if len(shape) == 2)
    return frozenset(
        name.removesuffix(".weight")
        for name in products
        if name.startswith("model.layers.") and not name.endswith(kept)
    )


def _routers(config: DecoderConfig) -> list[str]:
    return [] if config.mixture is None else [f".{name}" for name in config.mixture.routers]


def change_of_loss(source: Path, destination: Path, text: Path) -> Agreement:
    """Both models on the tokens of a text. Raises ValueError."""
    folder = locate(source)
    ids = load_tokenizer(folder, "source").encode(text.read_text(encoding="utf-8"))
    if len(ids) < 2:
        raise ValueError(f"text: {text} has {len(ids)} tokens; allowed: at least 2")
    return compare_models(folder, destination, ids)


def _written(
    state: Mapping[str, Tensor], products: frozenset[str], rounding: Rounding, group: int | None, shards: _Shards
) -> Iterator[str]:
    """Puts every tensor into a file; says of each layer by how much of their root mean square its numbers moved."""
    moved: dict[str, list[float]] = {}
    for name in state:
        module = name.removesuffix(".weight")
        if module not in products:
            shards.put(name, state[name].contiguous())
            continue
        weight = state[name].float()  # [out, in]
        integers = round_to_nearest(weight, rounding, group)
        error = (integers.decode() - weight).square().mean().sqrt() / weight.square().mean().sqrt().clamp_min(1e-30)
        moved.setdefault(module.split(".")[2], []).append(float(error))
        for part, tensor in stored_parts(integers).items():
            shards.put(f"{module}.{part}", tensor)
    for layer in sorted(moved, key=int):
        yield f"layer {layer}: moved by {median(moved[layer]):.2%}, at most {max(moved[layer]):.2%} of their size"


class _Shards:
    """Files of weights, each written when it is full, and their index."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._files = folder, list[Path]()
        self._held: dict[str, Tensor] = {}
        self._num_bytes, self._total = 0, 0
        self._index: dict[str, int] = {}

    def put(self, name: str, tensor: Tensor) -> None:
        """Takes a tensor."""
        size = tensor.numel() * tensor.element_size()
        if self._held and self._num_bytes + size > MOST_BYTES:
            self._write()
        self._held[name] = tensor.clone()  # apart from a file's mapping, and from what shares its memory
        self._index[name] = len(self._files)
        self._num_bytes += size
        self._total += size

    def finish(self) -> None:
        """Writes the rest; gives all their names."""
        self._write()
        count = len(self._files)
        names = [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
        names = ["model.safetensors"] if count == 1 else names
        for file, name in zip(self._files, names, strict=True):
            file.rename(self._folder / name)
        if count > 1:
            weight_map = {tensor: names[number] for tensor, number in sorted(self._index.items())}
            content = {"metadata": {"total_size": self._total}, "weight_map": weight_map}
            (self._folder / checkpoint.INDEX_NAME).write_text(json.dumps(content, indent=2) + "\n")

    def _write(self) -> None:
        self._files.append(self._folder / f"part-{len(self._files)}")
        save_file(self._held, self._files[-1], {"format": "pt"})
        self._held, self._num_bytes = {}, 0


def _copy_rest(folder: Path, to: Path) -> None:
    for pattern in (*TOKENIZER_FILES, "LICENSE*"):
        for file in sorted(folder.glob(pattern)):
            if not file.name.endswith(".index.json") and file.name not in ("adapter_config.json", "source.json"):
                shutil.copyfile(file, to / file.name)
