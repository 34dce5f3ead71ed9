"""Tokens and their log probabilities as OpenAI's answers name them."""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence
from typing import Any

from outrider.gateway.text.tokenizer import Tokenizer
from outrider.rpc.words.answer import PositionLogprobs, TokenLogprob

LEAST_LOGPROB = -9999.0  # JSON has no infinity


class TextPlace:
    """A place in a text that grows by tokens, some of which are half a character."""

    def __init__(self) -> None:
        self.offset = 0  # characters before it
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def advance(self, raw: bytes) -> None:
        """Steps over a token's bytes."""
        self.offset += len(self._decode(raw))


class TokenTexts:
    """Tokens as log probabilities name them: their text, or, where they are half a character, their bytes; with
    `as_ids` their ids."""

    def __init__(self, tokenizer: Tokenizer, as_ids: bool = False) -> None:
        self._bytes, self._special_ids, self._as_ids = tokenizer.token_bytes, tokenizer.special_ids, as_ids

    def is_special(self, token_id: int) -> bool:
        """Whether it is one of the tokenizer's special tokens."""
        return token_id in self._special_ids

    def raw(self, token_id: int) -> bytes:
        """A token's bytes; none for an id without a token."""
        return (self._bytes[token_id] or b"") if token_id < len(self._bytes) else b""

    def name(self, token_id: int) -> str:
        """A token as log probabilities name it."""
        return f"token_id:{token_id}" if self._as_ids else self.text(token_id)

    def text(self, token_id: int) -> str:
        """A token's text: no two tokens share one, but for ids without a token."""
        raw = self.raw(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def chat(self, positions: Sequence[PositionLogprobs], count: int) -> dict[str, Any]:
        """The chat endpoint's form; a `count` below 0 is all that there are."""
        content = []
        for candidates in positions:
            chosen, *_ = candidates
            top = sorted(candidates, key=lambda entry: entry.rank)[: count if count >= 0 else None]
            content.append({
                **self._entry(chosen.id, chosen.logprob),
                "top_logprobs": [self._entry(entry.id, entry.logprob) for entry in top],
            })  # fmt: skip
        return {"content": content, "refusal": None}

    def prompt(self, positions: Sequence[PositionLogprobs]) -> list[dict[str, Any] | None] | None:
        """vLLM's form of a prompt's: by position and id; the first token has none. None where nothing is known."""
        told = [{str(entry.id): self._ranked(entry) for entry in candidates} or None for candidates in positions]
        return [None, *told[1:]] if told else None

    def _ranked(self, entry: TokenLogprob) -> dict[str, Any]:
        return {"logprob": finite(entry.logprob), "rank": entry.rank, "decoded_token": self.text(entry.id)}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {"token": self.name(token_id), "logprob": finite(logprob), "bytes": list(self.raw(token_id))}

    def completion(self, positions: Sequence[PositionLogprobs], place: TextPlace) -> dict[str, Any]:
        """The completions endpoint's form; `place` is where in the text these tokens begin."""
        tokens, values, tops, offsets = [], [], [], []
        for candidates in positions:
            chosen, *_ = candidates
            tokens.append(self.name(chosen.id))
            values.append(finite(chosen.logprob))
            tops.append({self.name(entry.id): finite(entry.logprob) for entry in candidates})
            offsets.append(place.offset)
            place.advance(self.raw(chosen.id))
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


def finite(logprob: float) -> float:
    """A value that JSON can hold."""
    return logprob if math.isfinite(logprob) else LEAST_LOGPROB
