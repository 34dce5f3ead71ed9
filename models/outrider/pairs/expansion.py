"""The same function as a small Llama, computed by a large one that is built from it in memory.

No large checkpoint comes with the package, and speculation pays only where a step of the target is expensive. The
expansion has a large model's cost, shapes and weight traffic, and the small model's logits:

* The residual stream is padded with channels that stay exactly zero: nothing writes to them, so whatever reads them
  may be random. A norm's mean of squares shrinks by d/D; its weights and its epsilon are rescaled to undo it.
* Padding heads and MLP channels read the stream with random weights, and their outputs are multiplied by zero.
* Further layers are random up to their last products, which are zero.

Its tensors are made when they are asked for, a layer at a time: whoever packs them holds no second large model.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
NOISE_STD = 0.02
EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
WRITES_TO_STREAM = ("self_attn.o_proj.weight", "mlp.down_proj.weight")


@dataclass(frozen=True)
class _Sizes:
    """What a block's expansion needs to know of the large model."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    query_slots: tuple[int, ...]  # the large model's query head of each small one
    kv_sources: tuple[tuple[int, int], ...]  # (the large model's key/value head, the small one's that it copies)


class _Noise:
    """Random weights that every number format of half precision or more holds exactly."""

    def __init__(self, seed: int, part: int, dtype: torch.dtype, device: str) -> None:
        # Each layer has numbers of its own.
        self._generator = torch.Generator(device).manual_seed(seed * 65_536 + part)
        self.dtype = dtype

    def matrix(self, rows: int, columns: int) -> Tensor:
        return self._normal(rows, columns).bfloat16().cpu().to(self.dtype)

    def norm(self, size: int) -> Tensor:
        return 1.0 + self._normal(size).cpu()

    def _normal(self, *shape: int) -> Tensor:
        weights = torch.empty(shape, device=self._generator.device)
        return weights.normal_(0.0, NOISE_STD, generator=self._generator)


class ExpandedState(Mapping[str, Tensor]):
    """The tensors of an expansion. One layer is kept, the last that was asked for."""

    def __init__(
        self, small: Mapping[str, Tensor], sizes: _Sizes, num_layers: int, seed: int, noise_device: str
    ) -> None:
        self._small, self._sizes, self._seed, self._noise_device = small, sizes, seed, noise_device
        self._dtype = _common_type(small)
        self._layer: tuple[int, dict[str, Tensor]] = (-1, {})
        vocabulary = len(small[EMBEDDING])
        shapes: dict[str, tuple[int, ...]] = {
            EMBEDDING: (vocabulary, sizes.hidden), NORM: (sizes.hidden,), HEAD: (vocabulary, sizes.hidden),
        }  # fmt: skip
        for layer in range(num_layers):
            shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in _block_shapes(sizes).items()}
        # Norms are float32, because their rescaled weights are not exact in bfloat16.
        self.meta: Mapping[str, Tensor] = {  # shapes and types alone
            name: torch.empty(shape, dtype=self._dtype if len(shape) == 2 else torch.float32, device="meta")
            for name, shape in shapes.items()
        }

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.meta:
            raise KeyError(name)
        if name.startswith("model.layers."):
            _, _, layer, rest = name.split(".", 3)
            return self._block(int(layer))[rest]
        noise = _Noise(self._seed, list(self.meta).index(name), self._dtype, self._noise_device)
        if name == NORM:
            return _expand_norm(self._small[NORM], self._sizes, noise)
        small = self._small[EMBEDDING]
        if name == EMBEDDING:
            return _pad(small, torch.zeros(self.meta[name].shape, dtype=self._dtype))
        return _pad(self._small.get(HEAD, small), noise.matrix(len(small), self._sizes.hidden))

    def __iter__(self) -> Iterator[str]:
        return iter(self.meta)

    def __len__(self) -> int:
        return len(self.meta)

    def _block(self, layer: int) -> dict[str, Tensor]:
        if self._layer[0] != layer:
            self._layer = (-1, {})  # frees the one before
            noise = _Noise(self._seed, 3 + layer, self._dtype, self._noise_device)
            block = _random_block(self._sizes, noise)
            prefix = f"model.layers.{layer}."
            small = {name.removeprefix(prefix): self._small[name] for name in self._small if name.startswith(prefix)}
            if small:
                _write_block(block, small, self._sizes, noise)
            self._layer = (layer, block)
        return self._layer[1]


def expand_llama(
    config: dict[str, Any],
    state: Mapping[str, Tensor],
    *,
    hidden_size: int = 1024,
    intermediate_size: int = 4096,
    num_layers: int = 20,
    num_heads: int = 16,
    num_kv_heads: int = 8,
    seed: int = 0,
    noise_device: str = "cpu",
) -> tuple[dict[str, Any], ExpandedState]:
    """Config and state dict of a Llama of the given sizes whose logits are those of the given small one. Raises
    ValueError for sizes that cannot hold it. What is random is drawn on `noise_device`, other numbers on each: a GPU
    draws billions in seconds.

    Both sides have Hugging Face's names (LlamaForCausalLM). Matrices have the widest type of the small
    one's, norms are float32. The output matrix is no longer tied to the embedding.
    """
    sizes = _plan(config, hidden_size, intermediate_size, num_heads, num_kv_heads)
    if num_layers < config["num_hidden_layers"]:
        raise ValueError(f"num_layers is {num_layers}; the small model has {config['num_hidden_layers']}")
    return _expand_config(config, sizes, num_layers), ExpandedState(state, sizes, num_layers, seed, noise_device)


def write_expanded(source: Path, destination: Path, *, noise_device: str = "cpu", **sizes: int) -> None:
    """Save the expansion of the Hugging Face folder `source` as the folder `destination`, tokenizer included."""
    config = json.loads((source / CONFIG_FILE).read_text())
    new_config, new_state = expand_llama(config, load_file(source / WEIGHTS_FILE), noise_device=noise_device, **sizes)
    destination.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.glob("*.json")):
        if path.name != CONFIG_FILE:
            shutil.copyfile(path, destination / path.name)
    (destination / CONFIG_FILE).write_text(json.dumps(new_config, indent=2) + "\n")
    save_file(dict(new_state), destination / WEIGHTS_FILE, metadata={"format": "pt"})


def _common_type(small: Mapping[str, Tensor]) -> torch.dtype:
    """One that holds the numbers of all matrices: those that a quantised checkpoint decodes have more bits than its
    embeddings, and `meta` says so without them."""
    tensors: Mapping[str, Tensor] = getattr(small, "meta", small)
    return reduce(torch.promote_types, (tensor.dtype for tensor in tensors.values() if tensor.dim() == 2))


def _plan(config: dict[str, Any], hidden: int, intermediate: int, heads: int, kv_heads: int) -> _Sizes:
    """Give every small head its place in the large model; refuse sizes that cannot hold the small model."""
    small_heads, small_kv = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // small_heads
    if hidden < config["hidden_size"] or intermediate < config["intermediate_size"]:
        raise ValueError(f"sizes {hidden} and {intermediate} are smaller than the model's own")
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads do not divide into {kv_heads} groups")
    query_slots, kv_sources = _place_heads(small_heads // small_kv, small_kv, heads // kv_heads)
    if len(kv_sources) > kv_heads:
        raise ValueError(f"{small_heads} heads in {small_kv} groups do not fit {heads} heads in {kv_heads} groups")
    return _Sizes(hidden, intermediate, heads, kv_heads, head_dim, query_slots, kv_sources)


def _place_heads(small_group: int, small_kv: int, group: int) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
    """Fill the large model's groups with the query heads of one small group at a time, copying its key/value head."""
    query_slots: list[int] = []
    kv_sources: list[tuple[int, int]] = []
    for kv_head in range(small_kv):
        for member in range(small_group):
            if member % group == 0:
                kv_sources.append((len(kv_sources), kv_head))
            query_slots.append(kv_sources[-1][0] * group + member % group)
    return tuple(query_slots), tuple(kv_sources)


def _block_shapes(sizes: _Sizes) -> dict[str, tuple[int, ...]]:
    query, kv = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    return {
        "input_layernorm.weight": (sizes.hidden,),
        "post_attention_layernorm.weight": (sizes.hidden,),
        "self_attn.q_proj.weight": (query, sizes.hidden),
        "self_attn.k_proj.weight": (kv, sizes.hidden),
        "self_attn.v_proj.weight": (kv, sizes.hidden),
        "self_attn.o_proj.weight": (sizes.hidden, query),
        "mlp.gate_proj.weight": (sizes.intermediate, sizes.hidden),
        "mlp.up_proj.weight": (sizes.intermediate, sizes.hidden),
        "mlp.down_proj.weight": (sizes.hidden, sizes.intermediate),
    }


def _random_block(sizes: _Sizes, noise: _Noise) -> dict[str, Tensor]:
    """A layer that adds nothing to the stream: random, but for the products that write to it, which are zero."""
    block: dict[str, Tensor] = {}
    for name, shape in _block_shapes(sizes).items():
        if name in WRITES_TO_STREAM:
            block[name] = torch.zeros(shape, dtype=noise.dtype)
        else:
            block[name] = noise.matrix(*shape) if len(shape) == 2 else noise.norm(*shape)
    return block


def _write_block(block: dict[str, Tensor], small: dict[str, Tensor], sizes: _Sizes, noise: _Noise) -> None:
    """Write a small layer into a random block, its heads to their places."""
    for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
        block[name] = _expand_norm(small[name], sizes, noise)
    for name in ("mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight"):
        _pad(small[name], block[name])
    dim = sizes.head_dim
    width = small["self_attn.q_proj.weight"].shape[1]
    for head, slot in enumerate(sizes.query_slots):
        rows, place = slice(head * dim, (head + 1) * dim), slice(slot * dim, (slot + 1) * dim)
        block["self_attn.q_proj.weight"][place, :width] = small["self_attn.q_proj.weight"][rows]
        block["self_attn.o_proj.weight"][:width, place] = small["self_attn.o_proj.weight"][:, rows]
    for slot, head in sizes.kv_sources:
        rows, place = slice(head * dim, (head + 1) * dim), slice(slot * dim, (slot + 1) * dim)
        for name in ("self_attn.k_proj.weight", "self_attn.v_proj.weight"):
            block[name][place, :width] = small[name][rows]


def _expand_norm(weight: Tensor, sizes: _Sizes, noise: _Noise) -> Tensor:
    """The norm's weights for the padded stream; those of the padding meet zeros."""
    expanded = noise.norm(sizes.hidden)
    expanded[: len(weight)] = weight.float() * (len(weight) / sizes.hidden) ** 0.5
    return expanded


def _pad(small: Tensor, large: Tensor) -> Tensor:
    """Write the matrix `small` to the upper left corner of `large`, in place."""
    large[: small.shape[0], : small.shape[1]] = small
    return large


def _expand_config(config: dict[str, Any], sizes: _Sizes, num_layers: int) -> dict[str, Any]:
    expanded = config | {
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.intermediate,
        "num_hidden_layers": num_layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "rms_norm_eps": config["rms_norm_eps"] * config["hidden_size"] / sizes.hidden,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
    expanded.pop("torch_dtype", None)
    return expanded
