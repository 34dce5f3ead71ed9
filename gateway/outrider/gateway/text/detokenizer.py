"""Committed ids become text: incremental detokenisation, stop strings and the cut that they make.

Every id is a step of its own, so a window of many gives what one token at a time gives. The text delivered after n ids
depends on these n ids alone: a stream that resumes from them knows what the client has."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from outrider.gateway.text.tokenizer import Tokenizer
from outrider.rpc.sampling_params import FinishReason, SamplingParams

NUM_CONTEXT_IDS = 16  # of the prompt's last ids are decoded first: a character or a space may begin there
MAX_WAITING_IDS = 32  # without text yet: that many whose text ends in U+FFFD are no half character, but that itself


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What a window adds: text that will not be taken back, and how many of its ids count."""

    text: str
    num_ids: int
    finish_reason: FinishReason | None = None
    stop_string: str | None = None
    stop_token_id: int | None = None


class TextStream:
    """The text of one completion. `resumed` is what `output_ids`, generated before, add to nothing: text that was
    delivered then, and the finish, if a stop string is complete in them."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        sampling: SamplingParams,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int] = (),
    ) -> None:
        self._sampling = sampling
        self._detokenizer = make_detokenizer(tokenizer, sampling, prompt_ids) if sampling.detokenize else None
        self._stops = sampling.stop if sampling.detokenize else ()
        self._num_kept = max(map(len, self._stops), default=1) - 1  # characters before new text that a match can use
        self._text = ""  # what is not yet delivered, and at least that many characters before it
        self._num_delivered = 0  # characters of _text
        self._num_output = 0
        self._finished = False
        self.resumed = self.push(output_ids)

    @property
    def finished(self) -> bool:
        """Whether the completion has ended; what is pushed then does not count."""
        return self._finished

    def push(
        self, ids: Sequence[int], finish_reason: FinishReason | None = None, stop_token_id: int | None = None
    ) -> TextDelta:
        """Takes the next committed ids. A finish is of their last one: with STOP that is the stop token, or EOS where
        `stop_token_id` is None. A stop string that completes at or before it wins."""
        if self._finished:
            return TextDelta("", 0)
        new_text = ""
        for index, token_id in enumerate(ids):
            new_text = self._append(token_id)
            if stop := self._find_stop(len(new_text)):
                return self._finish(TextDelta("", index + 1, FinishReason.STOP, stop_string=stop))
        if finish_reason is None:
            return TextDelta(self._deliver(len(self._text) - self._num_held()), len(ids))
        if finish_reason is FinishReason.STOP and self._hides(stop_token_id):
            self._text = self._text[: len(self._text) - len(new_text)]
        return self._finish(TextDelta("", len(ids), finish_reason, stop_token_id=stop_token_id))

    def _append(self, token_id: int) -> str:
        self._num_output += 1
        if self._detokenizer is None:
            return ""
        new_text = self._detokenizer.step(token_id)
        self._text += new_text
        return new_text

    def _find_stop(self, num_new: int) -> str | None:
        """The stop string that completes first in the last `num_new` characters; the text is then cut at it."""
        if num_new == 0 or not self._stops or self._num_output <= self._sampling.min_tokens:
            return None
        found = earliest_stop(self._text, num_new, self._stops)
        if found is None:
            return None
        end, stop = found
        self._text = self._text[: end if self._sampling.include_stop_str_in_output else end - len(stop)]
        return stop

    def _hides(self, stop_token_id: int | None) -> bool:
        """Whether the token that ended the completion is left out of the text."""
        if not self._sampling.include_stop_str_in_output:
            return True
        return stop_token_id is None and self._sampling.skip_special_tokens

    def _num_held(self) -> int:
        if not self._stops or self._sampling.include_stop_str_in_output:
            return 0  # nothing is ever cut off the text's end
        return held_back(self._text, self._stops)

    def _deliver(self, end: int) -> str:
        text = self._text[self._num_delivered : end]
        num_dropped = max(0, min(end, len(self._text) - self._num_kept))
        self._text = self._text[num_dropped:]
        self._num_delivered = end - num_dropped
        return text

    def _finish(self, delta: TextDelta) -> TextDelta:
        self._finished = True
        return replace(delta, text=self._deliver(len(self._text)))


def earliest_stop(text: str, num_new: int, stops: Sequence[str]) -> tuple[int, str] | None:
    """The stop string that completes first within the last `num_new` characters, and its end. Of those that complete
    together the first listed."""
    before = len(text) - num_new
    best: tuple[int, str] | None = None
    for stop in stops:
        start = text.find(stop, max(0, before - len(stop) + 1))
        if start >= 0 and (best is None or start + len(stop) < best[0]):
            best = start + len(stop), stop
    return best


def held_back(text: str, stops: Sequence[str]) -> int:
    """The length of the longest end of the text that may still become a stop string."""
    longest = 0
    for stop in stops:
        start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
        while start >= 0 and not stop.startswith(text[start:]):
            start = text.find(stop[0], start + 1)
        if start >= 0:
            longest = max(longest, len(text) - start)
    return longest


class Detokenizer(Protocol):
    """Turns ids into text, one at a time."""

    def step(self, token_id: int) -> str:
        """The whole characters that this id completes."""
        ...


def make_detokenizer(tokenizer: Tokenizer, sampling: SamplingParams, prompt_ids: Sequence[int]) -> Detokenizer:
    """The detokenizer of a completion, with the prompt's end behind it."""
    skipped = tokenizer.special_ids if sampling.skip_special_tokens else frozenset[int]()
    detokenizer: Detokenizer
    if tokenizer.byte_level:
        detokenizer = _ByteDetokenizer(tokenizer.token_bytes, skipped)
    else:
        joined = {} if skipped or sampling.spaces_between_special_tokens else tokenizer.added_tokens
        detokenizer = _TextDetokenizer(tokenizer, sampling.skip_special_tokens, joined)
    for token_id in prompt_ids[-NUM_CONTEXT_IDS:]:
        detokenizer.step(token_id)
    return detokenizer


class _ByteDetokenizer:
    """Byte-level BPE: the tokens' bytes through an incremental UTF-8 decoder. Only an incomplete character waits; an
    invalid byte becomes U+FFFD at once, as in the whole text."""

    def __init__(self, token_bytes: Sequence[bytes | None], skipped: frozenset[int]) -> None:
        self._token_bytes = token_bytes
        self._skipped = skipped
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def step(self, token_id: int) -> str:
        """The whole characters that this id completes."""
        if token_id in self._skipped or token_id >= len(self._token_bytes):
            return ""
        return self._decode(self._token_bytes[token_id] or b"")


class _TextDetokenizer:
    """Any other decoder: what the ids since the last text add to the text of those just before them. However many ids
    give no text, one step decodes a bounded number of them."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool, joined: dict[int, str]) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._joined = joined  # tokens that follow one another without a space, which the decoder would put
        self._after_joined = False
        self._before: list[int] = []  # those that gave the last text
        self._text_before = ""
        self._waiting: list[int] = []  # since then: half a character, or tokens whose text is empty where they stand
        self._num_half = 0  # of them, since the text ends in U+FFFD

    def step(self, token_id: int) -> str:
        """The whole characters that this id completes."""
        joined = self._joined.get(token_id)
        after_joined, self._after_joined = self._after_joined, joined is not None
        if self._is_skipped(token_id):
            return ""
        self._waiting.append(token_id)
        text = self._decode([*self._before, *self._waiting])
        new_text = text[len(self._text_before) :]
        if not new_text:
            del self._waiting[:-MAX_WAITING_IDS]  # no decoder looks further back than a few tokens
            return ""
        self._num_half += 1
        if text.endswith("\ufffd") and self._num_half < MAX_WAITING_IDS:
            return ""
        self._before, self._waiting, self._num_half = self._waiting, [], 0
        self._text_before = self._decode(self._before)
        return joined if joined is not None and after_joined else new_text

    def _is_skipped(self, token_id: int) -> bool:
        """Whether the decoder never sees the id: text cannot depend on it."""
        tokenizer = self._tokenizer
        skipped = self._skip_special_tokens and token_id in tokenizer.special_ids
        return skipped or tokenizer.backend.id_to_token(token_id) is None

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, self._skip_special_tokens)
