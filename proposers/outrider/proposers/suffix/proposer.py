"""Suffix decoding (Oliaro et al., arXiv 2411.04975): finds the longest context that occurred before, in the sequence's
own text or in the store, and drafts the likeliest path of what followed it.

At every token the most frequent continuation is taken, of equals the latest; the share of those that go on with the
whole path estimates its probability. The longer the context, the longer the draft."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from outrider.proposers.base import SequenceContext
from outrider.proposers.suffix.index import SEPARATOR, TOKEN_BYTES, ContextIndex, Place
from outrider.proposers.suffix.store import SuffixStore, digest_of
from outrider.proposers.suffix.store_file import StoreFile

_SEPARATOR = array("I", [SEPARATOR]).tobytes()
MAX_SAMPLED = 16  # of the places where a context occurred


class SuffixProposer:
    """Drafts from each sequence's own text and from the outputs that it learned. The settings are vLLM's, but for the
    store's bound and file."""

    name = "suffix"

    def __init__(
        self,
        suffix_decoding_max_tree_depth: int = 24,  # tokens of a context, and of a draft
        suffix_decoding_max_cached_requests: int = 10_000,  # 0: a sequence's own text alone
        suffix_decoding_max_spec_factor: float = 1.0,  # drafted tokens for a token of context
        suffix_decoding_min_token_prob: float = 0.1,  # of the path from the context to a drafted token
        suffix_store_mb: int = 64,
        suffix_store_file: str | Path | None = None,  # where the store is kept between two processes
        suffix_store_minutes: float = 5.0,  # between two writes of that file
    ) -> None:
        self.max_spec_factor = suffix_decoding_max_spec_factor
        self.min_token_prob = suffix_decoding_min_token_prob
        self.store = SuffixStore(
            suffix_decoding_max_tree_depth, suffix_store_mb << 20, suffix_decoding_max_cached_requests
        )
        self._file: StoreFile | None = None
        if suffix_store_file is not None:
            self._file = StoreFile(self.store, Path(suffix_store_file), 60 * suffix_store_minutes)

    def open(self, tokens: Iterable[int], context: SequenceContext | None = None) -> SuffixState:
        """Starts a sequence, which sees what was learned under its salt."""
        state = SuffixState(self, context.salt if context else "")
        state.append(tokens)
        return state

    def learn(self, tokens: Sequence[int], context: SequenceContext) -> None:
        """Takes what a sequence was answered."""
        self.store.add(tokens[: context.prompt_len], tokens[context.prompt_len :], context.salt)
        self.store.index_next()

    def held(self) -> dict[str, int]:
        """What the store holds."""
        store = self.store
        return {"bytes": store.num_bytes, "sequences": store.num_sequences, "generations": store.num_generations}

    def close(self) -> None:
        """Writes the store to its file."""
        if self._file is not None:
            self._file.close()


class SuffixState:
    """A sequence's own text and its view of the store. What is appended is indexed by the next proposal: refused drafts
    are gone by then, and a sequence that is never drafted for costs nothing."""

    def __init__(self, proposer: SuffixProposer, salt: str) -> None:
        self._proposer = proposer
        self._salt = digest_of(salt)
        self._text = ContextIndex(proposer.store.depth)
        self._new: list[int] = []  # tokens behind the indexed ones

    @property
    def num_tokens(self) -> int:
        """Tokens held."""
        return len(self._text) + len(self._new)

    def append(self, ids: Iterable[int]) -> None:
        """Adds tokens at the end."""
        self._new.extend(ids)

    def truncate(self, length: int) -> None:
        """Keeps the first `length` tokens, as if the others had never been there."""
        if not 0 <= length <= self.num_tokens:
            raise ValueError(f"cannot truncate {self.num_tokens} tokens to {length}")
        self._text.truncate(min(length, len(self._text)))
        del self._new[length - len(self._text) :]

    def propose(self, max_tokens: int) -> list[int]:
        """The likeliest path after the longest context that occurred; empty where none did."""
        store = self._proposer.store
        store.index_next()
        self._text.append(self._new)
        self._new.clear()
        context = self._text.context()
        longest, matching = 1, list[tuple[ContextIndex, Place]]()
        for index in (self._text, *store.indices(self._salt)):
            place = index.locate(context)
            length = index.longest_match(context, longest, place)
            if length > longest:
                longest, matching = length, []
            if length == longest:
                matching.append((index, place))
        count = min(max_tokens, int(longest * self._proposer.max_spec_factor), store.depth)
        if count < 1 or not matching:
            return []
        share = MAX_SAMPLED // len(matching)
        continuations = [
            tokens
            for index, place in matching
            for tokens in index.following(index.occurrences(context, longest, share, place), count)
        ]
        return likeliest_path(continuations, self._proposer.min_token_prob)


def likeliest_path(continuations: Sequence[bytes], min_probability: float) -> list[int]:
    """The tokens that most of the continuations, given backwards and of one length, go on with one by one, for as long
    as the share of those that agree with all of them is at least `min_probability`."""
    live, length = continuations, len(continuations[0])
    end = length  # of what the path has not taken yet
    while end > 0:
        if live.count(live[0]) == len(live):
            end = 0 if len(live) >= min_probability * len(continuations) else end
            break
        counts = Counter([tokens[end - TOKEN_BYTES : end] for tokens in live])
        counts.pop(_SEPARATOR, None)
        if not counts:
            break  # all of them end here
        best = max(counts, key=counts.__getitem__)
        if counts[best] < min_probability * len(continuations):
            break
        live = [tokens for tokens in live if tokens[end - TOKEN_BYTES : end] == best]
        end -= TOKEN_BYTES
    path = array("I", live[0][end:])
    path.reverse()
    return path[: path.index(SEPARATOR)].tolist() if SEPARATOR in path else path.tolist()
