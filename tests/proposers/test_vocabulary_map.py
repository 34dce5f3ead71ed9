"""Two vocabularies matched by the bytes of their tokens, over real tokenizers of each kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.models import LINES, train_byte_fallback, train_byte_level, train_unigram
from tokenizers import Tokenizer as Backend

from outrider.proposers.vocabulary_map import VocabularyMap
from outrider.rpc.lexicon import lexicon_of
from outrider.rpc.words.lexicon import Lexicon, Token

KINDS: dict[str, tuple[Callable[[], Backend], dict[str, str]]] = {
    "byte_level": (train_byte_level, {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}),
    "larger": (lambda: train_byte_level(480), {"eos_token": "<|endoftext|>"}),
    "byte_fallback": (train_byte_fallback, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}),
    "unigram": (train_unigram, {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}),
}
SPELLS_ALL = ("byte_level", "larger", "byte_fallback")


@cache
def read(kind: str) -> tuple[Backend, Lexicon]:
    train, special = KINDS[kind]
    backend = train()
    return backend, lexicon_of(backend, special)


@cache
def mapped(target: str, draft: str) -> VocabularyMap:
    return VocabularyMap.between(read(target)[1], read(draft)[1])


def content(lexicon: Lexicon, ids: list[int]) -> bytes:
    return b"".join(token.content for own in ids if (token := lexicon.tokens[own]) is not None)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_the_bytes_that_they_stand_for(kind: str) -> None:
    backend, lexicon = read(kind)
    for line in LINES:
        said = content(lexicon, backend.encode(line, add_special_tokens=False).ids).decode()
        assert said.removeprefix(" ") == line if kind != "unigram" else set(said.split()) <= {*line.split(), "<unk>"}
    roles = [lexicon.tokens[own] for own in lexicon.roles.values()]
    assert roles and all(token is not None and token.kind == "special" for token in roles)


@pytest.mark.parametrize(("target", "draft"), list(permutations(KINDS, 2)))
def test_a_counterpart_stands_for_the_same_and_is_nobody_else_s(target: str, draft: str) -> None:
    found, mine, theirs = mapped(target, draft), read(target)[1], read(draft)[1]
    assert {own: token for token, own in found.to_draft.items()} == found.to_target
    assert len(found.to_target) == len(found.to_draft) > 30
    for token_id, own in found.to_draft.items():
        left, right = mine.tokens[token_id], theirs.tokens[own]
        assert left is not None and right is not None
        assert (left.kind == "special") == (right.kind == "special")
        assert left.content == right.content or left.kind == "special"
    assert found.overlap == len(found.to_draft) / sum(token is not None for token in mine.tokens)


@given(text=st.text(max_size=24), pair=st.sampled_from(list(permutations(SPELLS_ALL, 2))))
def test_what_has_no_counterpart_is_spelled_in_the_same_bytes(text: str, pair: tuple[str, str]) -> None:
    found, (backend, mine) = mapped(*pair), read(pair[0])
    ids = [own for own in backend.encode(text, add_special_tokens=False).ids if mine.tokens[own] is not None]
    letters = [own for own in ids if mine.tokens[own].kind != "special"]  # type: ignore[union-attr]
    assert content(read(pair[1])[1], found.spell_all(letters)) == content(mine, letters)
    assert found.spell_all(ids) == [own for token_id in ids for own in found.spell(token_id)]


def lexicon(*tokens: Token | None, **roles: int) -> Lexicon:
    return Lexicon("".join(str(token) for token in tokens), tokens, roles)


def text(letters: str) -> Token:
    return Token("text", letters.encode())


def named(name: str) -> Token:
    return Token("special", name.encode())


@pytest.mark.parametrize(
    ("target", "draft", "pairs", "spelled"),
    [
        pytest.param(
            lexicon(text("a"), Token("byte", b"a"), Token("byte", b"b")),
            lexicon(text("b"), text("a"), None),
            {0: 1, 2: 0},  # text with text; then a byte with what is left
            {1: (1,)},
            id="bytes",
        ),
        pytest.param(
            lexicon(named("<s>"), named("</s>"), named("<x>"), bos_token=0, eos_token=1),
            lexicon(named("<x>"), named("<end>"), text("<s>"), text("</s>"), bos_token=1, eos_token=1),
            {1: 1, 2: 0},  # the name, then the role: the end before the beginning
            {0: (1,)},
            id="roles",
        ),
        pytest.param(
            lexicon(text("abc"), text("ab"), named("<s>"), text(""), None, text("z")),
            lexicon(text("ab"), text("c"), text("a"), text("bc"), text("<s>"), named("<u>"), unk_token=5),
            {1: 0},
            {0: (2, 3), 2: (4,), 3: (5,), 4: (5,), 5: (5,), 99: (5,)},
            id="spelled",
        ),
        pytest.param(
            lexicon(text("abcd")), lexicon(text("abc"), text("ab"), text("cd")), {}, {0: (1, 2)}, id="no dead end"
        ),
        pytest.param(lexicon(text("a"), text("a")), lexicon(text("a")), {0: 0}, {1: (0,)}, id="twice the same"),
    ],
)
def test_matching(
    target: Lexicon, draft: Lexicon, pairs: Mapping[int, int], spelled: Mapping[int, tuple[int, ...]]
) -> None:
    found = VocabularyMap.between(target, draft)
    assert found.to_draft == pairs
    assert {token_id: found.spell(token_id) for token_id in spelled} == spelled


def test_overlap_counts_tokens_or_a_text_s() -> None:
    found = VocabularyMap.between(lexicon(text("a"), text("b"), None, text("c")), lexicon(text("a")))
    assert found.overlap == pytest.approx(1 / 3)
    assert found.overlap_in([0, 0, 0, 1]) == 0.75 and found.overlap_in([]) == 0
