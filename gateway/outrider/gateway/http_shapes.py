"""Pieces of answers that both endpoints share: log probabilities, usage, what speculation did."""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from outrider.gateway.generation import GenerationDelta
from outrider.gateway.rounds import SpeculationTally
from outrider.gateway.tokenizer import Tokenizer
from outrider.wire.messages import PositionLogprobs

LEAST_LOGPROB = -9999.0  # JSON has no infinity


@dataclass(slots=True)
class UsageSum:
    """Tokens of a whole answer."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0

    def add(self, delta: GenerationDelta, n: int) -> None:
        """Counts a completion that ended; a prompt counts once, whatever its completions."""
        if delta.usage is None:
            return
        self.completion += delta.usage.completion_tokens
        if delta.index % n == 0:
            self.prompt += delta.usage.prompt_tokens
            self.cached += delta.usage.cached_tokens

    def shape(self) -> dict[str, Any]:
        """OpenAI's usage object."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


def join(deltas: Sequence[GenerationDelta]) -> GenerationDelta:
    """One completion, whole; its last delta has the finish."""
    return replace(
        deltas[-1],
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(chain.from_iterable(delta.token_ids for delta in deltas)),
        origins=tuple(chain.from_iterable(delta.origins for delta in deltas)),
        logprobs=tuple(chain.from_iterable(delta.logprobs for delta in deltas)),
    )


def finish_shape(delta: GenerationDelta) -> dict[str, Any]:
    """Why a completion ended; nulls while it goes on."""
    reason = None if delta.finish_reason is None else delta.finish_reason.name.lower()
    stop = delta.stop_string if delta.stop_string is not None else delta.stop_token_id
    return {"finish_reason": reason, "stop_reason": stop}


def extension_shape(delta: GenerationDelta, speculation: bool, token_ids: bool) -> dict[str, Any]:
    """What goes beyond OpenAI, where it was asked for, and what nobody can ask for."""
    out: dict[str, Any] = {"near_ties": True} if delta.near_ties else {}
    if token_ids:
        out["token_ids"] = list(delta.token_ids)
        out["token_origins"] = [origin.name.lower() for origin in delta.origins]
    if speculation and delta.tally is not None:
        out["speculation"] = tally_shape(delta.tally) | {"acceptance": delta.acceptance.name.lower()}
    return out


def tally_shape(tally: SpeculationTally) -> dict[str, Any]:
    """What the rounds of a completion came to."""
    drafts, drafted = tally.num_drafts, tally.num_draft_tokens
    return {
        "num_rounds": tally.num_rounds,
        "num_drafts": drafts,
        "num_draft_tokens": drafted,
        "num_accepted_tokens": tally.num_accepted_tokens,
        "num_accepted_per_position": tally.accepted_per_position,
        "num_tested_per_position": tally.tested_per_position,
        "acceptance_rate": tally.num_accepted_tokens / drafted if drafted else 0.0,
        "mean_acceptance_length": 1 + tally.num_accepted_tokens / drafts if drafts else 1.0,
        "overhead_us": tally.overhead_us,
        "mode": tally.mode,
        "num_rounds_by_mode": tally.rounds_by_mode,
    }


class TextPlace:
    """A place in a text that grows by tokens, some of which are half a character."""

    def __init__(self) -> None:
        self.offset = 0  # characters before it
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def advance(self, raw: bytes) -> None:
        """Steps over a token's bytes."""
        self.offset += len(self._decode(raw))


class TokenTexts:
    """Tokens as log probabilities name them: their text, or, where they are half a character, their bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._bytes = tokenizer.token_bytes

    def raw(self, token_id: int) -> bytes:
        """A token's bytes; none for an id without a token."""
        return (self._bytes[token_id] or b"") if token_id < len(self._bytes) else b""

    def text(self, token_id: int) -> str:
        """A token's name: no two tokens share one, but for ids without a token."""
        raw = self.raw(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def chat(self, positions: Sequence[PositionLogprobs], count: int) -> dict[str, Any]:
        """The chat endpoint's form."""
        content = []
        for candidates in positions:
            chosen, *_ = candidates
            top = sorted(candidates, key=lambda entry: entry.rank)[:count]
            content.append({
                **self._entry(chosen.id, chosen.logprob),
                "top_logprobs": [self._entry(entry.id, entry.logprob) for entry in top],
            })  # fmt: skip
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {"token": self.text(token_id), "logprob": finite(logprob), "bytes": list(self.raw(token_id))}

    def completion(self, positions: Sequence[PositionLogprobs], place: TextPlace, count: int) -> dict[str, Any]:
        """The completions endpoint's form; `place` is where in the text these tokens begin."""
        tokens, values, tops, offsets = [], [], [], []
        for candidates in positions:
            chosen, *_ = candidates
            tokens.append(self.text(chosen.id))
            values.append(finite(chosen.logprob))
            tops.append({self.text(entry.id): finite(entry.logprob) for entry in candidates} if count else None)
            offsets.append(place.offset)
            place.advance(self.raw(chosen.id))
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


def finite(logprob: float) -> float:
    """A value that JSON can hold."""
    return logprob if math.isfinite(logprob) else LEAST_LOGPROB
