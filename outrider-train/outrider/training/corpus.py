"""The training text: the Python sources of the running interpreter's standard library.

Files are taken in sorted order, duplicates (by hash) once; about 3 % of them, chosen by the hash of their relative
path, are held out. A quarter of the training files are framed as conversations, so that the special tokens of the
chat template mean something to the model; the others, and every held-out file, are plain text between end tokens.
"""

import hashlib
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from outrider.training.tokenizer import ASSISTANT, END_OF_TEXT, USER

SKIPPED_FOLDERS = frozenset({"site-packages", "idlelib", "lib2to3", "__pycache__"})
HELD_OUT_SHARE = 0.03
CONVERSATION_SHARE = 0.25
TURN_LINES = 48
USER_LINES = 8


@dataclass(frozen=True)
class SourceFile:
    """One file of the corpus: its path relative to the library's root, and its text."""

    name: str
    text: str

    @property
    def held_out(self) -> bool:
        return _hash_share(f"split:{self.name}") < HELD_OUT_SHARE

    @property
    def is_conversation(self) -> bool:
        return _hash_share(f"frame:{self.name}") < CONVERSATION_SHARE


@dataclass(frozen=True)
class Corpus:
    """Token ids of the training text in one stream, and of each held-out file by itself."""

    train: Tensor  # [tokens] int32
    held_out: tuple[Tensor, ...]  # each [tokens] int32

    @property
    def num_held_out_tokens(self) -> int:
        return sum(ids.numel() for ids in self.held_out)


def standard_library() -> Path:
    """Where the running interpreter keeps its library."""
    return Path(sysconfig.get_paths()["stdlib"])


def read_sources(root: Path) -> list[SourceFile]:
    """Every UTF-8 Python file below `root`, in sorted order, duplicates once."""
    files: list[SourceFile] = []
    seen: set[bytes] = set()
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        relative = path.relative_to(root)
        if SKIPPED_FOLDERS.intersection(relative.parts):
            continue
        data = path.read_bytes()
        digest = hashlib.sha256(data).digest()
        if not data or digest in seen:
            continue
        seen.add(digest)
        try:
            files.append(SourceFile(relative.as_posix(), data.decode("utf-8")))
        except UnicodeDecodeError:
            continue
    return files


def split_sources(files: Sequence[SourceFile]) -> tuple[list[SourceFile], list[SourceFile]]:
    """(training files, held-out files); a file's side depends on its name alone."""
    train = [file for file in files if not file.held_out]
    held_out = [file for file in files if file.held_out]
    return train, held_out


def frame(file: SourceFile) -> str:
    """The file as training text: plain, or as a run of short conversations; ends with the end token."""
    if not file.is_conversation:
        return file.text + END_OF_TEXT
    return "".join(_conversations(file.text))


def tokenize(tokenizer: Tokenizer, train: Sequence[SourceFile], held_out: Sequence[SourceFile]) -> Corpus:
    """Token ids of both sides; a held-out file starts with the end token, as it would follow another file."""
    framed = tokenizer.encode_batch([frame(file) for file in train])
    plain = tokenizer.encode_batch([END_OF_TEXT + file.text for file in held_out])
    return Corpus(
        train=torch.cat([torch.tensor(encoding.ids, dtype=torch.int32) for encoding in framed]),
        held_out=tuple(torch.tensor(encoding.ids, dtype=torch.int32) for encoding in plain),
    )


def split_line_breaks(tokenizer: Tokenizer, stream: Tensor, share: float, seed: int) -> Tensor:
    """The stream with some of its "line break and indentation" tokens written as two.

    The tokenizer makes one token of both, so a prompt that ends with a line break ends with a token that the text
    has before unindented lines and special tokens alone. From the split ones a model learns that indentation may
    follow.
    """
    tails = torch.zeros(tokenizer.get_vocab_size(), dtype=stream.dtype)
    heads = torch.arange(tokenizer.get_vocab_size(), dtype=stream.dtype)
    for token in range(tokenizer.get_vocab_size()):
        text = tokenizer.decode([token])
        breaks = text.rstrip(" \t")
        parts = [tokenizer.encode(part).ids for part in (breaks, text[len(breaks) :])]
        if breaks and not breaks.strip("\r\n") and [len(part) for part in parts] == [1, 1]:
            heads[token], tails[token] = parts[0][0], parts[1][0]
    chance = torch.rand(stream.numel(), generator=torch.Generator().manual_seed(seed))
    chosen = (tails[stream.long()] > 0) & (chance < share)
    first = torch.where(chosen, heads[stream.long()], stream)
    pairs = torch.stack([first, tails[stream.long()]], dim=1)
    return pairs[torch.stack([torch.ones_like(chosen), chosen], dim=1)]


class WindowSampler:
    """Batches of windows of the training stream, each a function of the step alone, so that a run can be resumed.

    An epoch cuts the stream into windows from a random offset and goes through them in a random order.
    """

    def __init__(self, stream: Tensor, context: int, batch_size: int, seed: int) -> None:
        self._stream = stream
        self._context = context
        self._batch_size = batch_size
        self._seed = seed
        self.batches_per_epoch = (stream.numel() - context - 1) // (context * batch_size)
        self._epoch = -1
        self._starts = torch.empty(0, dtype=torch.int64)

    def batch(self, step: int) -> Tensor:
        """The windows of one step: [batch_size, context + 1] int64; inputs and targets overlap."""
        epoch, index = divmod(step, self.batches_per_epoch)
        if epoch != self._epoch:
            self._shuffle(epoch)
        starts = self._starts[index * self._batch_size : (index + 1) * self._batch_size]
        positions = starts[:, None] + torch.arange(self._context + 1)
        return self._stream[positions].long()

    def _shuffle(self, epoch: int) -> None:
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
        offset = int(torch.randint(self._context, (1,), generator=generator))
        count = self.batches_per_epoch * self._batch_size
        self._starts = torch.randperm(count, generator=generator) * self._context + offset
        self._epoch = epoch


def _conversations(text: str) -> Iterator[str]:
    lines = text.splitlines(keepends=True)
    for start in range(0, len(lines), TURN_LINES):
        request = "".join(lines[start : start + USER_LINES])
        answer = "".join(lines[start + USER_LINES : start + TURN_LINES])
        yield USER + request + ASSISTANT + answer + END_OF_TEXT


def _hash_share(key: str) -> float:
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") / 2.0**64
