"""Losslessness under a constraint by enumeration: with masks that production makes along a window, acceptance,
summed over every draft and coin, is the constrained target's law exactly. The language is known a second time, by
spelling it out."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import cache
from itertools import product

import pytest
from lossless.law import PARTS, VOCAB_SIZE, Tokens, context_index, distance, endings_of, law_of, proposals_of
from lossless.test_law import HONEST_DRAFTS
from lossless.test_law_blocks import accept_by_block, with_coins
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from outrider.engine.grammar.compiler import GrammarCompiler, Matcher
from outrider.engine.grammar.masks import allowed_ids
from outrider.engine.grammar.source import GrammarSpec

REGEX, LETTERS, END = "(ab*c|ba?)+", "abc", 3
PATTERNS = {1: (16,), 2: (4, 12), 3: (4, 8, 4), 4: (8, 4, 2, 2)}  # sixteenths of what is allowed
FORBIDDEN = 5  # sixteenths: the model's own law does not care
Masks = Callable[[Tokens], set[int]]  # what may follow


@cache
def language() -> frozenset[str]:
    """All its words of up to 8 letters."""
    words = ("".join(letters) for length in range(9) for letters in product(LETTERS, repeat=length))
    return frozenset(word for word in words if re.fullmatch(REGEX, word))


@cache
def may_follow(context: Tokens) -> frozenset[int]:
    """By the language alone. Behind what it forbids, or the end, everything."""
    everything = frozenset(range(VOCAB_SIZE))
    if END in context or any(context[place] not in may_follow(context[:place]) for place in range(len(context))):
        return everything
    text = "".join(LETTERS[token] for token in context)
    found = {token for token, letter in enumerate(LETTERS) if any(w.startswith(text + letter) for w in language())}
    return frozenset(found | ({END} if text in language() else set()))


def model_law(context: Tokens) -> list[int]:
    """The model's own, unconstrained."""
    allowed = sorted(may_follow(context))
    shift = context_index(context, len(allowed))
    shares = dict(zip(allowed[shift:] + allowed[:shift], PATTERNS[len(allowed)], strict=True))
    return [shares.get(token, FORBIDDEN) for token in range(VOCAB_SIZE)]


def masked(masks: Masks) -> Callable[[Tokens], list[Fraction]]:
    """The model's law under masks, as fractions."""

    @cache
    def law(context: Tokens) -> tuple[Fraction, ...]:
        kept = masks(context)
        shares = [share if token in kept else 0 for token, share in enumerate(model_law(context))]
        return tuple(Fraction(share, sum(shares) or 1) for share in shares)

    return lambda context: list(law(context))


CONSTRAINED = masked(lambda context: set(may_follow(context)))  # what plain decoding draws from


@pytest.fixture(scope="module")
def matcher() -> Iterator[Matcher]:
    backend = Backend(models.BPE({"a": 0, "b": 1, "c": 2, "<end>": END}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    compiler = GrammarCompiler(backend.to_str().encode(), VOCAB_SIZE, (END,))
    yield compiler.compile(GrammarSpec("regex", REGEX)).matcher()
    compiler.close()


def along_the_window(matcher: Matcher) -> Masks:
    """The row behind a context is one of the window that drafted it."""
    return lambda context: allowed_ids(matcher.masks(context)[len(context)], VOCAB_SIZE)


DRAFTS = {name: proposals_of(*draft) for name, draft in HONEST_DRAFTS.items() if "no power" not in name}


@pytest.mark.parametrize("draft", DRAFTS)
def test_token_by_token(draft: str, matcher: Matcher) -> None:
    law = masked(along_the_window(matcher))
    found = law_of(endings_of(DRAFTS[draft], target=law), target=law)
    assert distance(found, CONSTRAINED) == 0


@pytest.mark.parametrize("draft", DRAFTS)
def test_by_blocks(draft: str, matcher: Matcher) -> None:
    law = masked(along_the_window(matcher))
    chains = with_coins(DRAFTS[draft], target=law)
    found = law_of(endings_of(chains, accept_by_block, law), target=law)
    assert distance(found, CONSTRAINED) == 0


def test_it_forbids_something() -> None:
    """Else these proofs say nothing."""
    plain = masked(lambda context: set(range(VOCAB_SIZE)))
    assert sum(CONSTRAINED(())[token] > 0 for token in range(VOCAB_SIZE)) == 2
    assert distance(law_of(endings_of(DRAFTS["one-hot"], target=plain), target=plain), CONSTRAINED) > Fraction(1, PARTS)
