"""The tokens that a GGUF file's metadata list, once all of it was held against itself: their texts, scores and kinds,
which of them have a role, and which end an answer.

Files say less than their models know, so llama.cpp tells roles and kinds by texts, too (src/llama-vocab.cpp); what it
tells is told here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from math import isnan
from typing import Any

from outrider.gguf.header import GgufHeader, WrongGguf

MOST_TOKENS = 1 << 20  # four times the largest vocabulary that is known
PREFIX = "tokenizer.ggml."
TOKENS, SCORES, KINDS = (PREFIX + name for name in ("tokens", "scores", "token_type"))

ENDS = frozenset({
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>",
    "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~[",  # noqa: RUF001 (theirs)
})  # fmt: skip
ALWAYS_SHOWN = frozenset({"<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"})  # the harmony format's
ENDING_ROLES = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
_ROLE_KEYS = {"unk": "unknown", "pad": "padding"}  # of those that are not called so in keys
_ROLES_BY_TEXT: Mapping[str, tuple[str, ...]] = {  # where no key names the token
    "eom": ("<|eom_id|>",),
    "fim_pre": ("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>",  # noqa: RUF001 (theirs)
                "<|code_prefix|>", "<|prefix|>"),
    "fim_suf": ("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>",  # noqa: RUF001 (theirs)
                "<|code_suffix|>", "<|suffix|>"),
    "fim_mid": ("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>",  # noqa: RUF001 (theirs)
                "<|code_middle|>", "<|middle|>"),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}  # fmt: skip
_ROLES = ("bos", "eos", "eot", "unk", "pad", *_ROLES_BY_TEXT)
_SENTENCEPIECE_ROLES = {"unk": 0, "bos": 1, "eos": 2}  # where no key says otherwise


class TokenKind(IntEnum):
    """What `tokenizer.ggml.token_type` says of a token."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class GgufVocabulary:
    """A vocabulary whose parts fit one another; the position of a text is its token's id."""

    ids: Mapping[str, int]  # by text, in the order of ids
    scores: Sequence[float]  # empty where the file has none
    kinds: Sequence[int]
    roles: Mapping[str, int]
    ends: tuple[int, ...]


def wrong_key(header: GgufHeader, key: str, said: str) -> WrongGguf:
    """The error that names a key of a file."""
    return WrongGguf(f"{header.files[0]}: {key}: {said}")


def read_vocabulary(header: GgufHeader, sentencepiece: bool) -> GgufVocabulary:
    """Raises WrongGguf, which names the key that is wrong."""
    ids = _ids(header)
    scores, kinds = _numbers(header, SCORES, len(ids)), list(_numbers(header, KINDS, len(ids)))
    if any(map(isnan, scores)):
        raise wrong_key(header, SCORES, "holds what is no number")
    if sentencepiece and not scores:
        raise WrongGguf(f"{header.files[0]} has no {SCORES}")
    kinds = kinds or [int(TokenKind.NORMAL)] * len(ids)
    named = _named_roles(header, len(ids), _SENTENCEPIECE_ROLES if sentencepiece else {})
    told = _told_roles(ids, named)
    ends = sorted(_ends(ids, named | told))
    _tell_kinds(kinds, ids, told.values(), ends)
    return GgufVocabulary(ids, scores, kinds, named | told, tuple(ends))


def _ids(header: GgufHeader) -> dict[str, int]:
    texts = header.metadata.get(TOKENS)
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise wrong_key(header, TOKENS, "allowed: an array of texts")
    if len(texts) > MOST_TOKENS:
        raise wrong_key(header, TOKENS, f"has {len(texts)} tokens; allowed: at most {MOST_TOKENS}")
    ids: dict[str, int] = {}
    for token_id, text in enumerate(texts):
        text = text or f"[EMPTY_{token_id}]"  # as llama.cpp calls it
        if text in ids:
            raise wrong_key(header, TOKENS, f"has {text!r:.60} twice: {ids[text]} and {token_id}")
        if not text.isascii() and not _is_unicode(text):
            raise wrong_key(header, TOKENS, f"has a token that is not UTF-8: {token_id}")
        ids[text] = token_id
    return ids


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= char <= "\udfff" for char in text)


def _numbers(header: GgufHeader, key: str, count: int) -> tuple[Any, ...]:
    """An array of a number for each token; empty where there is none."""
    values = header.metadata.get(key, ())
    if not isinstance(values, tuple) or (values and isinstance(values[0], bool)):
        raise wrong_key(header, key, "allowed: an array of numbers")
    if key in header.metadata and len(values) != count:
        raise wrong_key(header, key, f"has {len(values)} entries for {count} tokens")
    return values


def _named_roles(header: GgufHeader, num_tokens: int, usual: Mapping[str, int]) -> dict[str, int]:
    found = {role: token_id for role, token_id in usual.items() if token_id < num_tokens}
    for role in _ROLES:
        key = f"{PREFIX}{_ROLE_KEYS.get(role, role)}_token_id"
        if (token_id := header.metadata.get(key)) is None:
            continue
        if type(token_id) is not int or not 0 <= token_id < num_tokens:
            raise wrong_key(header, key, f"is {token_id!r:.40}; allowed: 0 to {num_tokens - 1}")
        found[role] = token_id
    return found


def _told_roles(ids: Mapping[str, int], named: Mapping[str, int]) -> dict[str, int]:
    """Those that no key names; of several texts for one role the first that is a token."""
    absent = ((role, texts) for role, texts in _ROLES_BY_TEXT.items() if role not in named)
    told = {role: next((ids[text] for text in texts if text in ids), None) for role, texts in absent}
    return {role: token_id for role, token_id in told.items() if token_id is not None}


def _ends(ids: Mapping[str, int], roles: Mapping[str, int]) -> set[int]:
    """The tokens after which nothing more is generated, by role and by text."""
    ends = {roles[role] for role in ENDING_ROLES if role in roles} | {ids[text] for text in ENDS if text in ids}
    return ends - {ids[text] for text in _no_ends(ids)}


def _no_ends(ids: Mapping[str, int]) -> Iterator[str]:
    """Texts that end answers of other models, and not of one that has these tokens beside them."""
    calls = "<|call|>" in ids or "<|calls|>" in ids
    if "<|end|>" in ids and calls and ("<|return|>" in ids or "<|flush|>" in ids):
        yield "<|end|>"
    if "</s>" in ids and "<|tool_response>" in ids:
        yield "</s>"


def _tell_kinds(kinds: list[int], ids: Mapping[str, int], told: Any, ends: Sequence[int]) -> None:
    """Sets the kinds that are told by texts, whatever the file says."""
    for token_id in (*told, *(ids[text] for text in ENDS if text in ids)):
        kinds[token_id] = TokenKind.CONTROL
    for text in ALWAYS_SHOWN:
        if text in ids:
            kinds[ids[text]] = TokenKind.USER_DEFINED
    for text in _no_ends(ids):
        kinds[ids[text]] = TokenKind.USER_DEFINED if text == "<|end|>" else TokenKind.NORMAL
