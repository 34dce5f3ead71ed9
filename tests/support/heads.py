"""Heads of random weights for a tiny target, and one that can only be right."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from support.models import save_tiny, tiny_hf_model
from torch import Tensor

from outrider.engine.loader import LoadedModel
from outrider.proposers.heads.block import BlockHead
from outrider.proposers.heads.head import Head, TargetWeights
from outrider.proposers.heads.loading import AnyHead, load_head

METHODS = ("eagle", "eagle3", "medusa", "mlp_speculator", "mtp")
BLOCKS = ("dflash", "dflash2", "dspark", "dspark-rnn")
LAYOUTS = (*METHODS, "p-eagle", *BLOCKS)
METHOD_OF = {layout: layout for layout in LAYOUTS} | {"p-eagle": "eagle3", "dflash2": "dflash", "dspark-rnn": "dspark"}


def target_weights(hf: Any, loaded: LoadedModel) -> TargetWeights:
    """Of the transformers model that the target was built from."""
    modules = hf.get_input_embeddings(), hf.get_output_embeddings()
    embeddings, output = (module.weight.detach().to(loaded.model.device) for module in modules)
    return TargetWeights(embeddings, output, len(loaded.model.layers), loaded.max_model_len)


def passes_of(head: AnyHead) -> tuple[str, ...]:
    """The names of what is given the target's states: the first that drafts, if one does."""
    return ("fill",) if isinstance(head, BlockHead) else ("first", "fill")


def load_in_turn(folder: Path, target: TargetWeights, dtype: torch.dtype, device: torch.device) -> Head:
    """A head that is no block drafter."""
    head = load_head(folder, target, dtype, device)
    assert not isinstance(head, BlockHead)
    return head


def save_head(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    """A checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()}, folder / "model.safetensors"
    )
    return folder


def random_head(method: str, folder: Path, hf: Any, loaded: LoadedModel, seed: int = 0, scale: float = 0.2) -> AnyHead:
    """As small as the target."""
    weights = target_weights(hf, loaded)
    config, shapes = SHAPES[method](hf.config)
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: scale * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    save_head(folder, config, tensors)
    return load_head(folder, weights, loaded.model.dtype, loaded.model.device)


def random_head_of(target: Path, method: str, folder: Path, seed: int = 0) -> Path:
    """For a target's folder."""
    config = SimpleNamespace(**json.loads((target / "config.json").read_text()))
    said, shapes = SHAPES[method](config)
    generator = torch.Generator().manual_seed(seed)
    return save_head(
        folder, said, {name: 0.2 * torch.randn(size, generator=generator) for name, size in shapes.items()}
    )


def in_speculators(folder: Path, kind: str, k: int) -> Path:
    """An EAGLE-3 or P-EAGLE head's folder, with its config.json as the library of that name writes it."""
    said = json.loads((folder / "config.json").read_text())
    own = {"eagle_aux_hidden_state_layer_ids": said.pop("eagle_aux_hidden_state_layer_ids")}
    if said.pop("parallel_drafting", False):
        own["mask_token_id"] = said.pop("ptd_token_id")
    said.pop("architectures")
    own |= {
        "speculators_model_type": kind,
        "transformer_layer_config": said,
        "speculators_config": {"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": k}]},
    }
    (folder / "config.json").write_text(json.dumps(own))
    return folder


def save_mimo(folder: Path, tokenizer_of: Path, **options: Any) -> Path:
    """A tiny target whose checkpoint brings an MTP layer, as MiMo's do; options override its configuration."""
    own = save_tiny(folder, family="qwen2", vocab_size=4096, **options)
    config = json.loads((own / "config.json").read_text()) | {"model_type": "mimo", "num_nextn_predict_layers": 1}
    _, shapes = SHAPES["mtp"](SimpleNamespace(**config))
    layer = {name: 0.2 * torch.randn(size, generator=torch.Generator().manual_seed(0)) for name, size in shapes.items()}
    save_head(own, config, load_file(own / "model.safetensors") | layer)
    shutil.copyfile(tokenizer_of / "tokenizer.json", own / "tokenizer.json")
    return own


def perfect_head(folder: Path, hf: Any, loaded: LoadedModel) -> AnyHead:
    """EAGLE's for a target of one layer whose last norm has no factors: its state is the token's embedding, its layer
    is the target's, with the norm before it folded into the products, which holds for embeddings of RMS 1."""
    config = hf.config.to_dict() | {"architectures": ["EagleLlamaForCausalLM"]}
    hidden = hf.config.hidden_size
    state = {name.removeprefix("model."): tensor for name, tensor in hf.state_dict().items()}
    tensors = {name: tensor for name, tensor in state.items() if name.startswith("layers.0.")}
    factors = tensors.pop("layers.0.input_layernorm.weight")
    for part in "qkv":
        tensors[f"layers.0.self_attn.{part}_proj.weight"] = tensors[f"layers.0.self_attn.{part}_proj.weight"] * factors
    tensors["fc.weight"] = torch.cat([torch.eye(hidden), torch.zeros(hidden, hidden)], dim=1)
    save_head(folder, config, tensors)
    return load_head(folder, target_weights(hf, loaded), loaded.model.dtype, loaded.model.device)


def save_guess(folder: Path, hf: Any, seed: int = 0) -> Path:
    """EAGLE's that says of a token nearly what the target said of the one before: it is often right, and often not."""
    config, shapes = _eagle(hf.config)
    generator, hidden = torch.Generator().manual_seed(seed), hf.config.hidden_size
    tensors = {name: 0.05 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    tensors["fc.weight"][:, hidden:] += torch.eye(hidden)
    return save_head(folder, config, tensors)


def forgetful_model(**options: Any) -> Any:
    """A target whose layers add nothing: its next token's law is the last token's."""
    hf = tiny_hf_model("llama", **options)
    with torch.no_grad():
        for layer in hf.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return hf


def knowing_head(layout: str, folder: Path, hf: Any, loaded: LoadedModel) -> BlockHead:
    """A head that says that law: DFlash of the first token alone, whose row has the token; DSpark of all, by a Markov
    head that is the target's own, beside layers that add nothing."""
    config, shapes = SHAPES[layout](hf.config)
    generator = torch.Generator().manual_seed(0)
    tensors = {name: 0.2 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name].zero_()
    norm, embeddings = hf.model.norm.weight.detach(), hf.get_input_embeddings().weight.detach()
    if layout == "dspark":
        tensors["norm.weight"].zero_()
        tensors["markov_head.markov_w1.weight"] = torch.nn.functional.rms_norm(
            embeddings, norm.shape, norm, hf.config.rms_norm_eps
        )
        tensors["markov_head.markov_w2.weight"] = hf.get_output_embeddings().weight.detach()
        config |= {"markov_rank": norm.shape[0]}
        for name in [name for name in tensors if name.startswith("confidence_head")]:
            tensors.pop(name)
    else:
        tensors["norm.weight"] = norm
        config["dflash_config"] |= {"sample_from_anchor": True}
    config |= {"rms_norm_eps": hf.config.rms_norm_eps}
    save_head(folder, config, tensors)
    head = load_head(folder, target_weights(hf, loaded), loaded.model.dtype, torch.device("cpu"))
    assert isinstance(head, BlockHead)
    return head


Shapes = dict[str, tuple[int, ...]]


def _llama(config: Any) -> dict[str, Any]:
    names = (
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
        "rms_norm_eps",
    )
    return {name: getattr(config, name) for name in names} | {"model_type": "llama", "num_hidden_layers": 1}


def _layer(config: Any, prefix: str, inputs: int, norms: tuple[str, ...] = ()) -> Shapes:
    hidden, width = config.hidden_size, config.intermediate_size
    dim = hidden // config.num_attention_heads
    heads, kv_heads = config.num_attention_heads * dim, config.num_key_value_heads * dim
    shapes: Shapes = {
        "self_attn.q_proj": (heads, inputs), "self_attn.k_proj": (kv_heads, inputs),
        "self_attn.v_proj": (kv_heads, inputs), "self_attn.o_proj": (hidden, heads),
        "mlp.gate_proj": (width, hidden), "mlp.up_proj": (width, hidden), "mlp.down_proj": (hidden, width),
    }  # fmt: skip
    shapes |= dict.fromkeys(("post_attention_layernorm", *norms), (hidden,))
    return {f"{prefix}{name}.weight": shape for name, shape in shapes.items()}


def _eagle(config: Any) -> tuple[dict[str, Any], Shapes]:
    hidden = config.hidden_size
    shapes = _layer(config, "layers.0.", hidden) | {"fc.weight": (hidden, 2 * hidden)}
    return _llama(config) | {"architectures": ["EagleLlamaForCausalLM"]}, shapes


def _eagle3(config: Any) -> tuple[dict[str, Any], Shapes]:
    hidden, vocab = config.hidden_size, config.vocab_size
    shapes = _layer(config, "midlayer.", 2 * hidden, ("input_layernorm", "hidden_norm"))
    shapes |= {"fc.weight": (hidden, 3 * hidden), "norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}
    taps = {"eagle_aux_hidden_state_layer_ids": [0, 1, config.num_hidden_layers]}
    return _llama(config) | {"architectures": ["LlamaForCausalLMEagle3"]} | taps, shapes


def _p_eagle(config: Any) -> tuple[dict[str, Any], Shapes]:
    """Two layers, and a mask."""
    fields, shapes = _eagle3(config)
    shapes = {name.replace("midlayer.", "layers.0."): shape for name, shape in shapes.items()}
    shapes |= _layer(config, "layers.1.", config.hidden_size, ("input_layernorm",))
    shapes["mask_hidden"] = (1, 1, 3 * config.hidden_size)
    return fields | {"num_hidden_layers": 2, "parallel_drafting": True, "ptd_token_id": 1}, shapes


def _mtp(config: Any) -> tuple[dict[str, Any], Shapes]:
    prefix, hidden = "model.mtp_layers.0.", config.hidden_size
    norms = ("input_layernorm", "token_layernorm", "hidden_layernorm", "final_layernorm")
    shapes = _layer(config, prefix, hidden, norms) | {f"{prefix}input_proj.weight": (hidden, 2 * hidden)}
    shapes |= {
        f"{prefix}self_attn.{part}_proj.bias": (shapes[f"{prefix}self_attn.{part}_proj.weight"][0],) for part in "qkv"
    }
    return _llama(config) | {"model_type": "mimo", "num_nextn_predict_layers": 1}, shapes


def _medusa(config: Any) -> tuple[dict[str, Any], Shapes]:
    hidden, vocab = config.hidden_size, config.vocab_size
    shapes: Shapes = {f"blocks.{head}.layers.0.weight": (hidden, hidden) for head in range(5)}
    shapes |= {f"lm_heads.{head}.weight": (vocab, hidden) for head in range(5)}
    return {"model_type": "medusa", "num_heads": 5, "num_hidden_layers": 1}, shapes


def _mlp_speculator(config: Any) -> tuple[dict[str, Any], Shapes]:
    hidden, vocab, inner = config.hidden_size, config.vocab_size, 24
    shapes: Shapes = {"proj.0.weight": (inner, hidden), "proj.1.weight": (inner, inner)}
    shapes |= {"emb.0.weight": (vocab, inner), "head.0.weight": (vocab, inner)}
    shapes |= {"ln.0.weight": (inner,), "ln.0.bias": (inner,)}
    sizes = {"n_predict": 4, "emb_dim": hidden, "inner_dim": inner, "vocab_size": vocab, "tie_weights": True}
    return {"model_type": "mlp_speculator"} | sizes, shapes


BLOCK_ROWS, CANDIDATES, RANK = 6, 5, 8


def _dflash(config: Any) -> tuple[dict[str, Any], Shapes]:
    """Two layers, of which the first sees a few tokens alone, in z-lab's layout."""
    hidden, dim = config.hidden_size, config.hidden_size // config.num_attention_heads
    shapes: Shapes = {"fc.weight": (hidden, 2 * hidden)} | {
        f"{name}.weight": (hidden,) for name in ("norm", "hidden_norm")
    }
    for index in range(2):
        shapes |= _layer(config, f"layers.{index}.", hidden, ("input_layernorm",))
        shapes |= {f"layers.{index}.self_attn.{part}_norm.weight": (dim,) for part in "qk"}
    own = {"target_layer_ids": [0, config.num_hidden_layers - 1], "mask_token_id": 1}
    fields = _llama(config) | {"model_type": "qwen3", "num_hidden_layers": 2, "block_size": BLOCK_ROWS, "head_dim": dim}
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 11}
    return fields | kinds | {"architectures": ["DFlashDraftModel"], "dflash_config": own}, shapes


def _dflash2(config: Any) -> tuple[dict[str, Any], Shapes]:
    """With convolutions of two rows and groups of four channels."""
    (fields, shapes), hidden = _dflash(config), config.hidden_size
    for index in range(2):
        for name in ("attention_conv", "mlp_conv"):
            shapes[f"layers.{index}.{name}.base_kernel"] = (2, 2, hidden)
            shapes[f"layers.{index}.{name}.kernel_projection.weight"] = (hidden, hidden)
    shapes["candidate_selector.hidden_projection.weight"] = (RANK, hidden)
    for side in ("predecessor", "successor"):
        shapes[f"candidate_selector.{side}_codebook"] = (config.vocab_size, RANK)
    sizes = {"conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": RANK, "selector_top_k": CANDIDATES}
    own = fields["dflash_config"] | sizes
    return fields | {"architectures": ["DFlash2DraftModel"], "dflash_config": own}, shapes


def _dspark(config: Any) -> tuple[dict[str, Any], Shapes]:
    fields, shapes = _dflash(config)
    shapes |= {f"markov_head.markov_w{side}.weight": (config.vocab_size, RANK) for side in (1, 2)}
    shapes |= {"confidence_head.proj.weight": (1, config.hidden_size + RANK), "confidence_head.proj.bias": (1,)}
    markov = {"markov_rank": RANK, "markov_head_type": "vanilla", "confidence_head_with_markov": True}
    return fields | {"architectures": ["Qwen3DSparkModel"], **markov}, shapes


def _dspark_rnn(config: Any) -> tuple[dict[str, Any], Shapes]:
    fields, shapes = _dspark(config)
    shapes["markov_head.joint_proj.weight"] = (3 * RANK, 2 * RANK + config.hidden_size)
    shapes["markov_head.joint_proj.bias"] = (3 * RANK,)
    return fields | {"markov_head_type": "rnn"}, shapes


SHAPES = {
    "dflash": _dflash,
    "dflash2": _dflash2,
    "dspark": _dspark,
    "dspark-rnn": _dspark_rnn,
    "eagle": _eagle,
    "eagle3": _eagle3,
    "p-eagle": _p_eagle,
    "medusa": _medusa,
    "mlp_speculator": _mlp_speculator,
    "mtp": _mtp,
}
