"""Text written again in another vocabulary's tokens, over real tokenizers of each kind: what is proposed says what was
drafted, whatever is drafted and committed, and the draft reads what was committed."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from itertools import permutations

from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.models import LINES, train_byte_fallback, train_byte_level, train_unigram, train_wordpiece
from tokenizers import Tokenizer as Backend

from outrider.engine.kv_cache_manager import BlockPool, CachedSequence, KVCacheManager
from outrider.proposers.reencoded_text import ReencodedText
from outrider.proposers.reencoding import MARK, Reencoding, Writer
from outrider.proposers.vocabulary_map import VocabularyMap
from outrider.rpc.lexicon import lexicon_of

KINDS: dict[str, tuple[Callable[[], Backend], dict[str, str]]] = {
    "byte_level": (train_byte_level, {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}),
    "smaller": (lambda: train_byte_level(280), {"eos_token": "<|endoftext|>"}),
    "byte_fallback": (train_byte_fallback, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}),
    "unigram": (train_unigram, {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}),
    "wordpiece": (train_wordpiece, {"sep_token": "[SEP]", "unk_token": "[UNK]"}),
}
SAYS_ALL = ("byte_level", "smaller", "byte_fallback")
PAIRS = list(permutations(KINDS, 2))
EXACT = [pair for pair in PAIRS if set(pair) <= set(SAYS_ALL)]


@cache
def backend(kind: str) -> Backend:
    return KINDS[kind][0]()


@cache
def writer(kind: str) -> Writer:
    tokenizer = KINDS[kind][0]()
    lexicon = lexicon_of(tokenizer, KINDS[kind][1])
    tokenizer.encode_special_tokens = True
    return Writer(lexicon, partial(tokenizer.encode, add_special_tokens=False))


@cache
def joined(target: str, draft: str) -> Reencoding:
    one, other = writer(target), writer(draft)
    return Reencoding(one, other, VocabularyMap.between(one.lexicon, other.lexicon))


def ids_of(kind: str, text: str) -> list[int]:
    return list(backend(kind).encode(text, add_special_tokens=False).ids)


class Drafting:
    """A text, and what is known of it without looking."""

    def __init__(self, target: str, draft: str, prompt: str) -> None:
        self.pair = joined(target, draft)
        self.cache = KVCacheManager(BlockPool(256))
        self.committed = ids_of(target, prompt)
        self.text = ReencodedText(CachedSequence([]), self.pair, self.committed)

    def draw(self, own_ids: list[int], limit: int = 1 << 30) -> None:
        """As the engine does it: what is drawn is computed."""
        for own in own_ids:
            self.cache.extend(self.text.sequence)
            before = len(self.text)
            settled = self.text.draw(own, max(limit, before + 1))
            assert self.text.tokens[before:] == settled
            self.text.sequence.num_computed_tokens = len(self.text.sequence) - 1

    def commit(self, num_accepted: int, ids: list[int]) -> None:
        """A round's: some of what was drafted, and others."""
        drafted = self.text.tokens[len(self.committed) :]
        kept = min(num_accepted, len(drafted))
        self.text.replace(len(self.committed) + kept, ids, self.cache)
        self.committed += [*drafted[:kept], *ids]
        self.check()

    def said(self, ids: list[int]) -> bytes:
        text, at_start = b"", True
        for token_id in ids:
            part = self.pair.told(token_id, at_start)
            text, at_start = text + part, part.startswith(MARK)
        return text

    def read(self) -> bytes:
        own_ids = self.text.sequence.tokens[self.text._num_start :]
        return b"".join(self.pair.drawn(own, place == 0) or b"" for place, own in enumerate(own_ids))

    def check(self) -> None:
        text = self.text
        assert text.tokens[: len(self.committed)] == self.committed
        assert self.read().startswith(self.said(text.tokens))  # the rest is not settled
        assert text.sequence.num_computed_tokens < max(1, len(text.sequence))
        assert 0 <= text.num_own(len(self.committed)) <= len(text.sequence)
        self.cache.pool.check_integrity([text.sequence.block_table])


texts = st.one_of(
    st.text(max_size=20), st.sampled_from([part for line in LINES for part in (line, line[7:], line[:9])])
)
rounds = st.lists(st.tuples(texts, st.integers(1, 8), st.integers(0, 6), texts), max_size=4)


@settings(max_examples=300)
@given(pair=st.sampled_from(EXACT), prompt=texts, rounds=rounds)
@example(pair=("byte_fallback", "byte_level"), prompt="", rounds=[(" 0", 2, 0, "")])  # begins with two lone spaces
@example(pair=("byte_fallback", "byte_level"), prompt="", rounds=[(" 0", 2, 3, " 1")])
@example(pair=("byte_level", "byte_fallback"), prompt=" ", rounds=[])  # whose first token says nothing
@example(pair=("byte_level", "byte_fallback"), prompt="\x80\x80", rounds=[("", 1, 0, "the quick brown fox")])
@example(pair=("byte_fallback", "byte_level"), prompt="", rounds=[("00", 1, 0, "")])  # cut behind such a token
def test_what_is_proposed_says_what_was_drafted(
    pair: tuple[str, str], prompt: str, rounds: list[tuple[str, int, int, str]]
) -> None:
    target, draft = pair
    drafting = Drafting(target, draft, prompt)
    drafting.check()
    for drafted, num_wanted, num_accepted, other in rounds:
        drafting.draw(ids_of(draft, drafted), len(drafting.committed) + num_wanted)
        drafting.check()
        drafting.commit(num_accepted, ids_of(target, other)[:3])
    assert drafting.said(drafting.text.tokens) == drafting.said(drafting.committed)
