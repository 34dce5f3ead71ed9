"""What each token of a vocabulary stands for, by which the ids of two vocabularies are matched: read from
`tokenizer.json`, whatever its tokenizer writes bytes and spaces as."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer as Backend

from outrider.rpc.vocabulary import byte_level_bytes, fingerprint, token_bytes
from outrider.rpc.words.lexicon import Lexicon, Token


def lexicon_of(backend: Backend, special: Mapping[str, str]) -> Lexicon:
    """The lexicon of a loaded tokenizer, with the texts of its special tokens by name."""
    layout = json.loads(backend.to_str())
    if (unknown := layout["model"].get("unk_token")) is not None:
        special = {"unk_token": unknown, **special}
    ids = {name: backend.token_to_id(text) for name, text in special.items()}
    roles = {name: token_id for name, token_id in ids.items() if token_id is not None}
    read = _reader(_parts(layout.get("decoder")), bool(layout["model"].get("byte_fallback")))
    vocab: dict[str, int] = backend.get_vocab(with_added_tokens=True)
    tokens: list[Token | None] = [None] * (max(vocab.values(), default=-1) + 1)
    for text, token_id in vocab.items():
        tokens[token_id] = read(text)
    for token_id, added in backend.get_added_tokens_decoder().items():  # their texts are what they say
        tokens[token_id] = Token("special" if added.special else "text", added.content.encode())
    for name, token_id in roles.items():
        tokens[token_id] = Token("special", special[name].encode())
    return Lexicon(fingerprint(token_bytes(backend)), tuple(tokens), roles)


def _parts(component: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """The parts of a decoder in tokenizer.json, whose sequences may be nested."""
    if component is None:
        return []
    inner = component.get("decoders") if component["type"] == "Sequence" else None
    return [component] if inner is None else [part for nested in inner for part in _parts(nested)]


def _reader(decoder: Sequence[Mapping[str, Any]], byte_fallback: bool) -> Callable[[str], Token]:
    """From a token's name to what its decoder makes of it: letters of the byte-level alphabet, spaces written as
    another character, names of bytes, words and what goes on with them."""
    kinds = {part["type"] for part in decoder}
    if "ByteLevel" in kinds:
        return lambda name: Token("text", byte_level_bytes(name))
    if "WordPiece" in kinds:
        inside = next(part["prefix"] for part in decoder if part["type"] == "WordPiece")
        return lambda name: Token(
            "text", (name.removeprefix(inside) if name.startswith(inside) else f" {name}").encode()
        )
    bytes_by_name = {f"<0x{byte:02X}>": byte for byte in range(256)}
    if "ByteFallback" not in kinds and not byte_fallback:
        bytes_by_name.clear()
    marks = [part["replacement"] for part in decoder if part["type"] == "Metaspace"]
    marks += [
        part["pattern"]["String"]
        for part in decoder
        if part["type"] == "Replace" and part["content"] == " " and "String" in part["pattern"]
    ]

    def read(name: str) -> Token:
        if (byte := bytes_by_name.get(name)) is not None:
            return Token("byte", bytes([byte]))
        for mark in marks:
            name = name.replace(mark, " ")
        return Token("text", name.encode())

    return read
