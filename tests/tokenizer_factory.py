"""Small tokenizers for tests, trained on a few lines."""

from __future__ import annotations

import json

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

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
