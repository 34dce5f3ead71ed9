"""Small random Hugging Face checkpoints and tokenizers, for tests of every part."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from outrider.engine.batch import BatchEntry
from outrider.engine.checkpoint import eos_ids
from outrider.engine.loader import Activations, LoadedModel, Quantization, compute_dtype, find_device, new_decoder
from outrider.engine.model_runner import ModelRunner
from outrider.engine.models.decoder_config import parse_config
from outrider.kernels.cpu.library import cpu_library

TINY: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "mistral": {"model_type": "mistral", "sliding_window": 24},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3"},
    "gemma": {"model_type": "gemma"},
    "gemma2": {
        "model_type": "gemma2",
        "sliding_window": 24,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 2.0,  # low enough to show
        "final_logit_softcapping": 3.0,
    },
    "gemma3_text": {
        "model_type": "gemma3_text",
        "sliding_window": 24,
        "query_pre_attn_scalar": 24,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "phi3": {"model_type": "phi3", "sliding_window": 24},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 5},
    "qwen2_moe": {
        "model_type": "qwen2_moe", "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 80,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48,
        "norm_topk_prob": True,
    },
    "gpt_oss": {
        "model_type": "gpt_oss", "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "olmoe": {"model_type": "olmoe", "num_experts": 7, "num_experts_per_tok": 2},
}  # fmt: skip
MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss")


SMALLEST: dict[str, Any] = {  # for what is interpreted
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1,
}  # fmt: skip
KERNELS = ("c", "pytorch")  # what computes on the CPU


@contextmanager
def cpu_kernels(which: str) -> Iterator[None]:
    """Decoders built meanwhile compute by C kernels where they take the model, or by PyTorch's."""
    with pytest.MonkeyPatch.context() as patch:
        if which == "pytorch":
            patch.setattr("outrider.kernels.cpu.decoder.cpu_library", lambda: None)
        elif cpu_library() is None:
            pytest.skip("no C compiler")
        yield


def tiny_config(family: str = "llama", **options: Any) -> dict[str, Any]:
    """The contents of a config.json; options override any key."""
    sizes = {name: value for name, value in TINY.items() if (family, name) != ("olmoe", "head_dim")}  # it has no own
    found = {**sizes, **FAMILIES[family], **options}
    if family == "gpt_oss":  # a type for each layer
        found["layer_types"] = found["layer_types"][: found["num_hidden_layers"]]
    return found


def tiny_hf_model(family: str = "llama", seed: int = 0, **options: Any) -> Any:
    """A random transformers model (float32, eager attention) whose norms and biases are no identities."""
    config = tiny_config(family, **options)
    hf = AutoConfig.for_model(config.pop("model_type"), **config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(hf, attn_implementation="eager", dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("norm.weight"):
                    parameter.uniform_(0.5, 1.5)
                elif name.endswith("bias"):
                    parameter.normal_(0.0, 0.3)
                else:
                    parameter.normal_(0.0, 0.12)
    return model.eval()


def tiny_state(model: Any) -> dict[str, Tensor]:
    """The state dict as a checkpoint would hold it: without a tied head, and each expert's tensors by themselves."""
    if model.config.model_type in MIXTURES:
        with TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            return dict(load_file(Path(folder) / "model.safetensors"))
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    return state


def build_decoder(
    config: Mapping[str, Any],
    state: Mapping[str, Tensor],
    *,
    dtype: str = "auto",
    device: str | torch.device = "cpu",
    max_model_len: int | None = None,
    batch_invariant: bool = False,
    activations: Activations = "int16",
    quantization: Quantization | None = None,
) -> LoadedModel:
    """Our own decoder from the contents of a config.json and tensors in memory; it has no digest."""
    place, parsed = find_device(device), parse_config(dict(config), max_model_len)
    computed = compute_dtype(dtype, place, config)
    model = new_decoder(parsed, state, computed, place, batch_invariant, quantization, activations)
    return LoadedModel(model, str(config["model_type"]), eos_ids(config, {}), {}, digest="")


def save_tiny(
    folder: Path,
    family: str = "llama",
    seed: int = 0,
    shard_size: str = "5GB",
    generation: dict[str, Any] | None = None,
    **options: Any,
) -> Path:
    """Writes a checkpoint (config.json, safetensors, generation_config.json) and returns its folder."""
    model = tiny_hf_model(family, seed, **options)
    model.save_pretrained(folder, max_shard_size=shard_size)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def other_weights(source: Path, folder: Path, noise: float = 0.6) -> Path:
    """Writes a checkpoint like another one, each tensor with noise of that share of its standard deviation."""
    shutil.copytree(source, folder)
    state, generator = load_file(source / "model.safetensors"), torch.Generator().manual_seed(1)
    noisy = {name: w + noise * w.float().std() * torch.randn(w.shape, generator=generator) for name, w in state.items()}
    save_file(
        {name: w.to(state[name].dtype) for name, w in noisy.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    return folder


def hf_logits(model: Any, token_ids: list[int]) -> Tensor:  # [tokens, vocab] float32
    """What transformers itself computes for one whole sequence."""
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([token_ids]), use_cache=False).logits[0]
    return logits.float()


def logits_of(loaded: LoadedModel, ids: list[int]) -> Tensor:  # [tokens, vocab] float32
    """What a loaded model computes for one whole sequence, of up to 48 tokens."""
    return ModelRunner(loaded.model, 4).forward([BatchEntry(ids, 0, [2, 0, 1], len(ids))])


LINES = [
    "the quick brown fox jumps over the lazy dog",
    "def main(): return 42  # naïve café, 你好世界 🙂",
    "stop words, stop signs; the end.\n\nUser: hello",
] * 3
SPECIAL = ["<|endoftext|>", "<|user|>", "<|assistant|>"]


def train_byte_level(vocab_size: int = 400) -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator(LINES, trainer)
    return backend


def save_with_tokenizer(folder: Path, vocab_size: int, **options: Any) -> Path:
    """Writes a checkpoint with a byte-level tokenizer of all its ids, and returns its folder."""
    save_tiny(folder, vocab_size=vocab_size, **options)
    train_byte_level(vocab_size).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


def train_byte_fallback() -> Backend:
    """In the style of Llama 2: spaces as ▁, unknown characters as bytes, the first space stripped."""
    backend = Backend(models.BPE(byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=tokens, show_progress=False)
    backend.train_from_iterator([line.replace("🙂", "").replace("世", "") for line in LINES], trainer)
    data = json.loads(backend.to_str())
    data["added_tokens"] = [token for token in data["added_tokens"] if token["id"] < 3]  # the bytes are plain tokens
    return Backend.from_str(json.dumps(data))


def train_wordpiece() -> Backend:
    """In the style of BERT: words, which ## goes on with; of spaces nothing is left."""
    backend = Backend(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    trainer = trainers.WordPieceTrainer(vocab_size=160, special_tokens=["[UNK]", "[SEP]"], show_progress=False)
    backend.train_from_iterator(LINES, trainer)
    return backend


def save_words(folder: Path, words: list[str]) -> None:
    """A tokenizer whose ids stand for these words."""
    backend = Backend(models.WordLevel({word: token_id for token_id, word in enumerate(words)}))
    backend.save(str(folder / "tokenizer.json"))


def letters_backend(tokens: Sequence[str]) -> Backend:
    """A tokenizer whose ids stand for these: single letters, and pairs of them."""
    merges = [(token[0], token[1]) for token in tokens if len(token) == 2]
    return Backend(models.BPE({token: token_id for token_id, token in enumerate(tokens)}, merges))


def ascii_backend(vocab_size: int, eos_id: int) -> Backend:
    """A byte-level tokenizer of characters: printable ASCII, a line's end, and an end of sequence at `eos_id`."""
    characters = [*(chr(code) for code in range(33, 127)), "Ġ", "Ċ"]
    ids = [token_id for token_id in range(vocab_size) if token_id != eos_id]
    tokens = dict(zip(characters, ids, strict=False)) | {"<|endoftext|>": eos_id}
    backend = Backend(models.BPE(tokens, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|endoftext|>"])
    return backend


def train_unigram() -> Backend:
    """In the style of T5: spaces as ▁, no bytes."""
    backend = Backend(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=160, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(LINES, trainer)
    return backend
