"""How much memory a run takes, told before it begins, and refused where there is none.

The figures are upper estimates from configurations. Lessons and losses are bounded whatever the vocabulary
(LOGITS_BYTES, CACHE_BYTES); what is trained has a gradient and AdamW's two states beside each weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from outrider.engine import checkpoint
from outrider.engine.loader import DTYPES, parsed_config
from outrider.engine.memory import free_bytes
from outrider.engine.models import decoder_cpu
from outrider.engine.models.decoder import KEEP_PLAIN_BYTES
from outrider.engine.models.weights import num_parameters
from outrider.training import language_head, teacher

FLOAT = torch.float32.itemsize
LOGITS_COPIES = 6  # of the logits that are there at once: of two types, their exponentials, gradients
MEGABYTE = 1_000_000


@dataclass(frozen=True)
class ModelSize:
    """What the configuration of a model says, and the bytes that it holds as the target."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    query_size: int  # heads * head_dim
    key_size: int  # kv_heads * head_dim
    num_heads: int
    num_parameters: int
    tied_embeddings: bool
    kept_itemsize: int  # of its numbers where they are kept as stored
    rotary_bytes: int  # of one table of cosines and one of sines
    num_bytes: int

    @classmethod
    def read(cls, folder: Path) -> ModelSize:
        """Of a folder."""
        config = checkpoint.read_config(folder)
        said: Any = AutoConfig.from_pretrained(folder).get_text_config()
        stored = DTYPES.get(checkpoint.stored_dtype(config) or "", torch.float32)
        parsed = parsed_config(config, None)
        files = sum(file.stat().st_size for file in checkpoint.weight_files(folder, lone=True))
        hidden, heads = said.hidden_size, said.num_attention_heads
        head_dim = getattr(said, "head_dim", None) or hidden // heads
        numbers = files // stored.itemsize if parsed is None else num_parameters(parsed)
        kept_itemsize = stored.itemsize if stored is torch.bfloat16 else FLOAT
        num_bytes = numbers * FLOAT
        if parsed is not None and decoder_cpu.can_run(parsed, torch.float32, torch.device("cpu")):
            num_bytes = (numbers + said.vocab_size * hidden) * kept_itemsize  # the embeddings are a head, too
        elif parsed is not None and num_bytes <= KEEP_PLAIN_BYTES:
            num_bytes *= 2
        rotary_bytes = 2 * FLOAT * (getattr(said, "max_position_embeddings", None) or 0) * head_dim
        kinds = 1 if parsed is None else len(set(parsed.rotary_types))
        return cls(
            vocab_size=said.vocab_size,
            hidden_size=hidden,
            intermediate_size=getattr(said, "intermediate_size", None) or 4 * hidden,
            num_layers=said.num_hidden_layers,
            query_size=heads * head_dim,
            key_size=(getattr(said, "num_key_value_heads", None) or heads) * head_dim,
            num_heads=heads,
            num_parameters=numbers,
            tied_embeddings=bool(getattr(said, "tie_word_embeddings", False)),
            kept_itemsize=kept_itemsize,
            rotary_bytes=rotary_bytes,
            num_bytes=num_bytes + kinds * rotary_bytes,
        )

    @property
    def layer_parameters(self) -> int:
        """Of one layer of that shape."""
        attention = 2 * self.query_size + 2 * self.key_size
        return self.hidden_size * (attention + 3 * self.intermediate_size)

    @property
    def row_bytes(self) -> int:
        """What a row keeps of one layer for its gradient, scores apart."""
        return FLOAT * (10 * self.hidden_size + 3 * self.query_size + 4 * self.intermediate_size)


@dataclass(frozen=True)
class Needs:
    """Bytes that a run takes at most. Lessons and losses are not there at the same time."""

    target: int  # its weights
    cache: int  # of keys and values
    lessons: int
    trained: int = 0  # what learns, with gradients and the optimizer's states, and what it shares with the target
    losses: int = 0

    @property
    def beside(self) -> int:
        """All but the target."""
        return self.trained + self.cache + max(self.lessons, self.losses)

    def describe(self) -> str:
        """In a line."""
        parts = (
            ("trained weights", self.trained), ("cache", self.cache), ("lessons", self.lessons), ("losses", self.losses)
        )  # fmt: skip
        listed = ", ".join(f"{name} {size // MEGABYTE:,}" for name, size in parts if size)
        return f"needs about {self.beside // MEGABYTE:,} MB beside the target's {self.target // MEGABYTE:,} ({listed})"


def require_memory(needs: Needs, others: Mapping[str, Needs]) -> None:
    """`others` are what the run would need with other flags. Raises ValueError where memory lacks, with those of them
    that would do."""
    free = free_bytes(torch.device("cpu"))
    if needs.target + needs.beside <= free:
        return
    doing = [
        f"{flag} ({each.beside // MEGABYTE:,} MB)" for flag, each in others.items() if each.target + each.beside <= free
    ]
    remedy = f"allowed: {', or '.join(doing)}" if doing else "no flag makes it fit"
    raise ValueError(f"{needs.describe()}, and {free // MEGABYTE:,} MB are free; {remedy}")


def lesson_needs(target: ModelSize, length: int, num_taps: int) -> Needs:
    """Of what the target writes or reads at once: its cache, a pass, and the states that are kept."""
    cache = 2 * FLOAT * length * target.num_layers * target.key_size  # of a window
    windows = teacher.windows_at_once(cache)
    rows = max(windows, min(teacher.MOST_ROWS, language_head.rows_at_once(target.vocab_size)))
    states = 3 * FLOAT * windows * length * num_taps * target.hidden_size
    passes = rows * target.row_bytes + logits_bytes(rows, target.vocab_size)
    return Needs(target=target.num_bytes, cache=windows * cache, lessons=states + passes)


def logits_bytes(num_rows: int, num_outputs: int) -> int:
    """Of a loss on so many rows."""
    rows = min(num_rows, language_head.rows_at_once(num_outputs))
    return LOGITS_COPIES * FLOAT * rows * num_outputs


def trained_bytes(num_parameters: int, output: int) -> int:
    """Of so many weights, `output` of which are of a trained language-model head, whose gradient is summed up in
    parts."""
    return 4 * FLOAT * num_parameters + (FLOAT + FLOAT // 2 + 2) * output
