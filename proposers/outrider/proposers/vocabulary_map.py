"""A draft of another vocabulary than the target's: its tokens matched with the target's by the bytes they stand for.

Drafts are drawn among the tokens that both have, from the draft's distribution renormalised on them, so that they are
the target's ids with exact weights. What the target commits is told to the draft token by token: as the counterpart
where there is one, else spelled by the draft's own tokens of the same bytes. After "token-level intersection" of Timor
et al., arXiv 2502.05202."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from outrider.rpc.words.lexicon import Lexicon, Token

ROLES = ("eos_token", "bos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")  # first the surest
STAND_INS = ("unk_token", "eos_token", "bos_token", "pad_token")  # for what cannot be spelled


@dataclass(frozen=True, slots=True)
class Speller:
    """Writes bytes in the tokens of a vocabulary that are text."""

    ids_of: Mapping[bytes, int]
    longest: int  # of them, in bytes

    @classmethod
    def of(cls, lexicon: Lexicon) -> Self:
        """Of several tokens of the same bytes the lowest."""
        found = _first_ids(lexicon, _letters)
        ids_of = {content: token_id for content, token_id in found.items() if isinstance(content, bytes)}
        return cls(ids_of, max(map(len, ids_of), default=0))

    def fewest_tokens(self, content: bytes) -> tuple[int, ...]:
        """The bytes in as few tokens as can be; empty where they cannot be spelled."""
        best: list[tuple[int, ...] | None] = [()]  # by length of the beginning that is spelled
        for end in range(1, len(content) + 1):
            candidates = [
                (*before, token_id)
                for start in range(max(0, end - self.longest), end)
                if (before := best[start]) is not None and (token_id := self.ids_of.get(content[start:end])) is not None
            ]
            best.append(min(candidates, key=len, default=None))
        return best[-1] or ()


@dataclass(frozen=True, slots=True, eq=False)
class VocabularyMap:
    """From the target's ids to the draft's and back. No two ids have the same counterpart."""

    target: Lexicon
    draft: Lexicon
    to_draft: Mapping[int, int]  # by rising target id
    to_target: Mapping[int, int]
    _speller: Speller  # of the draft
    _spelled: dict[int, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def between(cls, target: Lexicon, draft: Lexicon) -> Self:
        """Made once for a pair. Tokens of one kind are matched first, then bytes with texts of one byte, then special
        tokens by their roles."""
        pairs: dict[int, int] = {}
        _match(pairs, target, draft, lambda token: token)
        _match(pairs, target, draft, _letters)
        taken = set(pairs.values())
        for role in ROLES:
            mine, theirs = target.roles.get(role), draft.roles.get(role)
            if mine is not None and theirs is not None and mine not in pairs and theirs not in taken:
                pairs[mine] = theirs
                taken.add(theirs)
        to_draft = dict(sorted(pairs.items()))
        to_target = {own: token_id for token_id, own in to_draft.items()}
        return cls(target, draft, to_draft, to_target, Speller.of(draft))

    @property
    def target_tokens(self) -> Sequence[Token | None]:
        """The target's, by id."""
        return self.target.tokens

    @property
    def overlap(self) -> float:
        """The share of the target's tokens that have a counterpart."""
        return len(self.to_draft) / max(1, sum(token is not None for token in self.target.tokens))

    def overlap_in(self, ids: Sequence[int]) -> float:
        """The same of the target's tokens of a text."""
        return sum(token_id in self.to_draft for token_id in ids) / max(1, len(ids))

    def spell(self, token_id: int) -> tuple[int, ...]:
        """The draft's tokens, at least one, for an id of the target, which may lie outside its tokenizer."""
        own = self.to_draft.get(token_id)
        if own is not None:
            return (own,)
        if token_id not in self._spelled:
            self._spelled[token_id] = self._spell(token_id) or (self.stand_in,)
        return self._spelled[token_id]

    def spell_all(self, ids: Iterable[int]) -> list[int]:
        """The draft's tokens for several ids, each by itself: what follows never changes what came before."""
        return [own for token_id in ids for own in self.spell(token_id)]

    def targets_of(self, own_ids: Iterable[int]) -> tuple[int, ...]:
        """The counterparts of the draft's ids, as far as there are any."""
        return tuple(self.to_target[own] for own in own_ids if own in self.to_target)

    def _spell(self, token_id: int) -> tuple[int, ...]:
        """Empty where it cannot be done."""
        token = self.target.tokens[token_id] if token_id < len(self.target.tokens) else None
        if token is None:
            return ()
        if token.kind == "special":  # the draft may have one token for several roles
            names = [role for role in ROLES if self.target.roles.get(role) == token_id and role in self.draft.roles]
            if names:
                return (self.draft.roles[names[0]],)
        return self._speller.fewest_tokens(token.content)

    @property
    def stand_in(self) -> int:
        """The draft's token for what cannot be spelled."""
        return next((self.draft.roles[role] for role in STAND_INS if role in self.draft.roles), 0)


Key = Callable[[Token], Token | bytes | None]  # None: is not matched


def _letters(token: Token) -> bytes | None:
    """What can be spelled with, or has to be."""
    kind, content = token
    return None if kind == "special" else content or None


def _match(pairs: dict[int, int], target: Lexicon, draft: Lexicon, key: Key) -> None:
    """Adds to the pairs the ids of equal keys that have no counterpart yet; of several the lowest."""
    taken = set(pairs.values())
    theirs = _first_ids(draft, key, without=taken)
    for found, token_id in _first_ids(target, key, without=pairs.keys()).items():
        if found in theirs:
            pairs[token_id] = theirs[found]


def _first_ids(lexicon: Lexicon, key: Key, without: Iterable[int] = ()) -> dict[Token | bytes, int]:
    """The lowest id of every key."""
    left_out = set(without)
    first: dict[Token | bytes, int] = {}
    for token_id, token in enumerate(lexicon.tokens):
        if token is not None and token_id not in left_out and (found := key(token)) is not None:
            first.setdefault(found, token_id)
    return first
