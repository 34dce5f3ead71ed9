"""A checkpoint's vocabulary, read from `tokenizer.json` by the `tokenizers` library alone: how many tokens it names and
the fingerprint that a pair is checked by. transformers is never imported: it would load torch (2 s, 250 MB)."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders
from tokenizers import Tokenizer as Backend

from outrider.rpc.errors import Internal

MOST_IDS = 1 << 24
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a service says of its tokenizer."""

    num_tokens: int
    fingerprint: str


@dataclass(frozen=True, slots=True)
class TokenizerFile:
    """A tokenizer as it travels."""

    fingerprint: str
    special: Mapping[str, str]  # texts of special tokens by name
    layout: bytes  # tokenizer.json

    def pack(self) -> bytes:
        """All of it in one; `unpack` undoes it."""
        head = json.dumps({"fingerprint": self.fingerprint, "special": dict(self.special)})
        return head.encode() + b"\n" + self.layout

    @classmethod
    def unpack(cls, packed: bytes) -> TokenizerFile:
        """Raises ValueError."""
        head, _, layout = packed.partition(b"\n")
        return cls(**json.loads(head), layout=layout)


def has_tokenizer(*folders: Path) -> bool:
    """Whether all of these folders have a tokenizer.json."""
    return all((folder / "tokenizer.json").is_file() for folder in folders)


def read_vocabulary(folder: Path) -> Vocabulary | None:
    """The vocabulary of a checkpoint's folder; None where it has no tokenizer.json."""
    if not has_tokenizer(folder):
        return None
    backend, _ = load_backend(folder)
    num_tokens: int = backend.get_vocab_size(with_added_tokens=True)
    return Vocabulary(num_tokens, fingerprint(token_bytes(backend)))


def is_panic(error: BaseException) -> bool:
    """Whether a library in Rust has panicked, as at what its author held to be impossible. That is no Exception, and
    nothing that goes on after errors goes on after it; but its state is whole, and other calls are none the worse."""
    return type(error).__module__ == "pyo3_runtime"


@contextmanager
def panics_told() -> Iterator[None]:
    """In it a panic of the tokenizers library is an Internal error, of the one request whose text it is at."""
    try:
        yield
    except BaseException as error:
        if not is_panic(error):
            raise
        said = "the tokenizers library has panicked at what this request has; see the log"
        raise Internal(said, reason="TOKENIZER_PANIC") from error


def load_backend(folder: Path) -> tuple[Backend, dict[str, str]]:
    """The tokenizer as transformers would load it, and its special tokens' texts by name. ValueError for files that are
    none."""
    backend = read_backend(folder / "tokenizer.json")
    named = special_tokens(read_json(folder / "tokenizer_config.json"))
    with panics_told():
        complete_backend(backend, named.values())
    return backend, named


def read_backend(file: Path) -> Backend:
    """The tokenizer in a file. ValueError where there is none in it."""
    try:
        return Backend.from_str(file.read_text(encoding="utf-8"))
    except BaseException as error:  # the library's own are bare, and a panic of it is no Exception
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise ValueError(f"{file} holds no tokenizer: {error}") from error


def read_json(file: Path) -> dict[str, Any]:
    """A JSON file's mapping; empty where there is no file. ValueError where it holds none."""
    try:
        content = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} holds no JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} does not hold a JSON object")
    return content


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens' texts by name, which configurations write as a string or as a mapping."""
    contents = {name: config.get(name) for name in SPECIAL_NAMES}
    texts = {name: value.get("content") if isinstance(value, Mapping) else value for name, value in contents.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str) and text}


def complete_backend(backend: Backend, tokens: Iterable[str]) -> None:
    """Does what transformers does to a loaded backend: no truncation or padding, and every token that the configuration
    names is special. Where BOS and EOS go is the backend's own rule: beside tokenizer.json `add_bos_token` is void."""
    backend.no_truncation()
    backend.no_padding()
    known = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    missing = dict.fromkeys(text for text in tokens if text not in known)
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in missing])


def token_bytes(backend: Backend) -> tuple[bytes | None, ...]:
    """By id the token's bytes: the bytes of its text for byte-level BPE, else its name in UTF-8. None: no token.
    ValueError for ids that no vocabulary reaches, since the table has a place for each."""
    vocab: dict[str, int] = backend.get_vocab(with_added_tokens=True)
    byte_level = isinstance(backend.decoder, decoders.ByteLevel)
    highest = max(vocab.values(), default=-1)
    if highest >= MOST_IDS:
        raise ValueError(f"tokenizer.json: a token's id is {highest}; allowed: 0 to {MOST_IDS - 1}")
    table: list[bytes | None] = [None] * (highest + 1)
    for token, token_id in vocab.items():
        table[token_id] = byte_level_bytes(token) if byte_level else token.encode()
    return tuple(table)


def fingerprint(table: Sequence[bytes | None]) -> str:
    """SHA-256, in hex, over the tokens by ascending id: the id and the length of the token as 4 little-endian bytes
    each, then its bytes."""
    digest = hashlib.sha256()
    for token_id, token in enumerate(table):
        if token is not None:
            digest.update(struct.pack("<II", token_id, len(token)) + token)
    return digest.hexdigest()


def _byte_level_alphabet() -> dict[int, int | str]:
    """str.translate's table from byte-level letters to the characters of their bytes' numbers. Other characters below
    256 become one that Latin-1 lacks, which tells such tokens (added ones) from byte-level ones."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    table: dict[int, int | str] = dict.fromkeys(hidden, "\u0fff")
    table.update({256 + index: byte for index, byte in enumerate(hidden)})
    return table


_ALPHABET = _byte_level_alphabet()


def byte_level_bytes(token: str) -> bytes:
    """Of a token that is written in the byte-level alphabet; of another one the bytes of its name."""
    try:
        return token.translate(_ALPHABET).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode()
