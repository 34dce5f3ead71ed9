"""Text to ids and back: a checkpoint's tokenizer, what a pair check compares of it; and committed ids that become text:
incremental detokenisation, stop strings and the cut that they make.

`tokenizer.json` is read by the `tokenizers` library alone. transformers' AutoTokenizer would give the same ids, but
importing it loads torch into the process (measured: 2 s and 250 MB, against 0.03 s and 15 MB), so it only serves
checkpoints that have no `tokenizer.json`. A TextStream steps id by id, so a window of many gives what one token at a
time gives: the text delivered after n ids depends on these alone, and one that resumes knows what was delivered."""

from __future__ import annotations

import asyncio
import codecs
import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from tokenizers import Tokenizer as Backend
from tokenizers import decoders

from outrider.gateway.text.chat_template import ChatTemplate, TemplateRefusal, find_chat_template
from outrider.rpc.errors import TOO_LONG, InvalidArgument, Violation
from outrider.rpc.vocabulary import (
    TokenizerFile,
    complete_backend,
    fingerprint,
    panics_told,
    read_backend,
    read_json,
    special_tokens,
    token_bytes,
)
from outrider.rpc.words.answer import ToolCallDelta
from outrider.rpc.words.sampling_params import FinishReason, SamplingParams

LONG_TEXT = 16_384  # characters, or tokens; what is longer takes a thread of its own
MAX_CHARS_PER_TOKEN = 512  # more than any tokenizer's longest token: what is longer need not be tokenised to be refused
MAX_TOKENISED = 4  # long texts at once, beside conversations; others wait
_TOKENIZERS = ThreadPoolExecutor(16, "tokenizer")  # for these, and for as many conversations as are made at once
T = TypeVar("T")
NUM_CONTEXT_IDS = 16  # of the prompt's last ids are decoded first: a character or a space may begin there
MAX_TEXT_CHARS = 4096  # of a push that are delivered only at its end
MAX_WAITING_IDS = 32  # without text yet: that many whose text ends in U+FFFD are no half character, but that itself


class Tokenizer:
    """Text to ids and back, as the checkpoint's own tokenizer does it; no whitespace is cleaned up on decoding."""

    def __init__(
        self, backend: Backend, name: str, config: Mapping[str, Any], chat_template: ChatTemplate | None
    ) -> None:
        self.backend = backend
        self.name = name
        self.chat_template = chat_template
        self._special_tokens = special_tokens(config)
        complete_backend(backend, self._special_tokens.values())
        added = backend.get_added_tokens_decoder()
        self.added_tokens: dict[int, str] = {token_id: token.content for token_id, token in added.items()}
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.num_tokens: int = backend.get_vocab_size(with_added_tokens=True)
        self.byte_level = isinstance(backend.decoder, decoders.ByteLevel)
        self.bos_id = self._named_id("bos_token")
        self.tool_parser = "auto"  # how the model writes calls of tools: a name of FORMATS, or by the chat template
        self.eos_id = self._named_id("eos_token")

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Loads the tokenizer in a checkpoint's folder."""
        folder = Path(path)
        if not folder.is_dir():
            raise FileNotFoundError(f"no tokenizer: {folder} is not a folder")
        config = read_json(folder / "tokenizer_config.json")
        file = folder / "tokenizer.json"
        backend = read_backend(file) if file.is_file() else _convert_with_transformers(folder)
        return cls(backend, str(folder), config, find_chat_template(folder, config))

    @panics_told()
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The text's ids; special tokens such as BOS are added where the checkpoint says so. Of a long text other
        threads run meanwhile: the library lets them for batches alone."""
        if len(text) > LONG_TEXT:
            (encoded,) = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        else:
            encoded = self.backend.encode(text, add_special_tokens=add_special_tokens)
        ids: list[int] = encoded.ids
        return ids

    @panics_told()
    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The whole text of ids; ids that have no token add nothing. Of many other threads run meanwhile."""
        text: str
        if len(ids) > LONG_TEXT:
            (text,) = self.backend.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)
        else:
            text = self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def render_chat(
        self, messages: Iterable[Mapping[str, Any]], /, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The prompt's text of a conversation, with every special token in it. A template's own complaint is a
        ValueError; it is told to clients."""
        if self.chat_template is None:
            raise ValueError("the tokenizer has no chat template; allowed: a text or token ids")
        try:
            return self.chat_template.render(
                messages, **{**self._special_tokens, **variables}, add_generation_prompt=add_generation_prompt
            )
        except TemplateRefusal as error:
            raise ValueError(f"the chat template refused the conversation: {error}") from error

    def with_template(self, template: ChatTemplate) -> Tokenizer:
        """This tokenizer with another chat template."""
        other = copy.copy(self)
        other.chat_template = template
        return other

    def bad_words_ids(self, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """The id sequences of words that must not be generated, at the start of a text and within it, as in vLLM: the
        form with a space before it counts where it is as long and starts with another token. InvalidArgument for a word
        that has no tokens."""
        sequences: list[tuple[int, ...]] = []
        for word in words:
            bare = tuple(self.encode(word.lstrip(), add_special_tokens=False))
            if not bare:
                raise InvalidArgument.of([Violation("sampling.bad_words", f"{word!r} has no tokens")])
            spaced = tuple(self.encode(" " + word.lstrip(), add_special_tokens=False))
            sequences.append(bare)
            if spaced[0] != bare[0] and len(spaced) == len(bare):
                sequences.append(spaced)
        return tuple(sequences)

    @cached_property
    def token_bytes(self) -> tuple[bytes | None, ...]:
        """The bytes of each token, by id; None: no token."""
        return token_bytes(self.backend)

    @cached_property
    def fingerprint(self) -> str:
        """The hash of all ids and their tokens."""
        return fingerprint(self.token_bytes)

    @property
    def file(self) -> TokenizerFile:
        """The tokenizer as it travels to a draft."""
        return TokenizerFile(self.fingerprint, self._special_tokens, self.backend.to_str().encode())

    def _named_id(self, name: str) -> int | None:
        text = self._special_tokens.get(name)
        token_id: int | None = None if text is None else self.backend.token_to_id(text)
        return token_id


def _convert_with_transformers(folder: Path) -> Backend:
    """Converts a checkpoint's files where it has no tokenizer.json. Loads torch, if it is there: hence only here, and
    only when needed."""
    try:
        from transformers import AutoTokenizer
    except ModuleNotFoundError as error:
        raise ValueError(f"{folder} has no tokenizer.json; to convert what it has: pip install transformers") from error

    backend = getattr(AutoTokenizer.from_pretrained(str(folder)), "backend_tokenizer", None)
    if not isinstance(backend, Backend):
        raise ValueError(f"{folder} has no tokenizer.json, and its tokenizer cannot be converted into one")
    return backend


async def encode_bounded(
    field: str, text: str, max_model_len: int, encode: Callable[[str], Sequence[int]], among_long: bool = False
) -> tuple[int, ...]:
    """A text's ids. InvalidArgument, which names the field, for one that is more than the context anyhow. `among_long`:
    with others that come in the same turn of the event loop it is long."""
    require_fit(field, len(text), max_model_len)
    return tuple(await in_thread(among_long or len(text) > LONG_TEXT, encode, text))


async def in_thread(is_long: bool, work: Callable[..., T], *arguments: Any) -> T:
    """What the work comes to; where it is long, beside the event loop, on no thread that anything else waits for."""
    if is_long:
        return await asyncio.get_running_loop().run_in_executor(_TOKENIZERS, partial(work, *arguments))
    return work(*arguments)


def require_fit(field: str, num_chars: int, max_model_len: int) -> None:
    """InvalidArgument, which names the field, for so many characters as no context holds."""
    if num_chars > MAX_CHARS_PER_TOKEN * max_model_len:
        allowed = f"a text of at most {max_model_len - 1} tokens"
        raise InvalidArgument.of([Violation(field, f"has {num_chars} characters; allowed: {allowed}", TOO_LONG)])


@dataclass(slots=True)
class TextDelta:
    """What a window adds: text that will not be taken back, and how many of its ids count."""

    text: str
    num_ids: int
    finish_reason: FinishReason | None = None
    stop_string: str | None = None
    stop_token_id: int | None = None
    tool_calls: tuple[ToolCallDelta, ...] = ()
    reasoning: str = ""  # before the answer, where the two are told apart; and how many of the ids it takes
    num_reasoning: int = 0


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

    @property
    def num_held(self) -> int:
        """Characters that a push may have to look through beside its own: a few."""
        return len(self._text)

    def push(
        self, ids: Sequence[int], finish_reason: FinishReason | None = None, stop_token_id: int | None = None
    ) -> TextDelta:
        """Takes the next committed ids. A finish is of their last one: with STOP that is the stop token, or EOS where
        `stop_token_id` is None. A stop string that completes at or before it wins."""
        if self._finished:
            return TextDelta("", 0)
        new_text, told = "", list[str]()
        for index, token_id in enumerate(ids):
            if len(self._text) > MAX_TEXT_CHARS:  # else each token of a long push would copy what came before it
                told.append(self._deliver(len(self._text) - self._num_held()))
            new_text = self._append(token_id)
            if stop := self._find_stop(len(new_text)):
                return self._finish(told, TextDelta("", index + 1, FinishReason.STOP, stop_string=stop))
        if finish_reason is None:
            told.append(self._deliver(len(self._text) - self._num_held()))
            return TextDelta("".join(told), len(ids))
        if finish_reason is FinishReason.STOP and self._hides(stop_token_id):
            self._text = self._text[: len(self._text) - len(new_text)]
        return self._finish(told, TextDelta("", len(ids), finish_reason, stop_token_id=stop_token_id))

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

    def _finish(self, told: list[str], delta: TextDelta) -> TextDelta:
        self._finished = True
        return replace(delta, text="".join([*told, self._deliver(len(self._text))]))


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
