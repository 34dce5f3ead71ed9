"""What a token-only drafting method offers. It needs no model, so the gateway can run it in process: this file and the
methods that implement it are pure Python and import no other root."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

logger = logging.getLogger(__name__)

MAX_ID = 2**32 - 1  # that the protocol holds


@dataclass(frozen=True, slots=True)
class SequenceContext:
    """What is known of a sequence beside its tokens."""

    prompt_len: int = 0  # tokens of the prompt; those after it were generated
    salt: str = ""  # sequences of different salts shall not learn of one another
    prediction: tuple[int, ...] = ()  # the caller's guess at what follows the prompt

    def alone(self) -> SequenceContext:
        """The same under a salt that nobody has: whatever the method, it finds nothing that other sequences said."""
        return replace(self, salt=secrets.token_hex(16))


class ProposerState(Protocol):
    """One sequence's tokens and what the method remembers of them."""

    @property
    def num_tokens(self) -> int:
        """Tokens held."""
        ...

    def append(self, ids: Iterable[int]) -> None:
        """Adds tokens at the end."""
        ...

    def truncate(self, length: int) -> None:
        """Keeps the first `length` tokens, as if the others had never been there."""
        ...

    def propose(self, max_tokens: int) -> list[int]:
        """At most `max_tokens` likely next tokens; empty where the method has no guess. The state stays as it is."""
        ...


class TokenProposer(Protocol):
    """A drafting method that sees token ids alone. Its drafts are one-hot: they carry no weights. It lives as long as
    the process that drafts with it, and one thread calls it."""

    @property
    def name(self) -> str:
        """The method's name, as in the protocol."""
        ...

    def open(self, tokens: Iterable[int], context: SequenceContext) -> ProposerState:
        """Starts a sequence."""
        ...


@runtime_checkable
class LearningProposer(TokenProposer, Protocol):
    """A method that drafts from what other sequences of the same salt said, too. The law rests on that: a sequence that
    must not see what its own seed said before is opened under a salt of its own."""

    def learn(self, tokens: Sequence[int], context: SequenceContext) -> None:
        """A sequence has ended, whatever drafted for it: its prompt and all that was committed."""
        ...

    def held(self) -> Mapping[str, int]:
        """How much of it is kept, by what is counted, such as bytes."""
        ...

    def close(self) -> None:
        """The process ends: what was learned may be written to disk."""
        ...


@dataclass(slots=True)
class Lookup:
    """A token-only method at work on one sequence. It reads the tokens when it is asked, so that one which is seldom
    asked costs nothing."""

    method: str
    state: ProposerState
    num_agreed: int = 0  # of the state's tokens: the sequence has the same

    @classmethod
    def of(cls, proposer: TokenProposer, tokens: Sequence[int], context: SequenceContext) -> Lookup:
        """Starts a sequence."""
        return cls(proposer.name, proposer.open(tokens, context), len(tokens))

    def truncate(self, length: int) -> None:
        """The sequence's tokens past the first `length` are others from now on."""
        self.num_agreed = min(self.num_agreed, length)

    def propose(self, tokens: Sequence[int], max_tokens: int) -> list[int]:
        """What goes on from the sequence's tokens. ValueError as `drafted_ids`."""
        if self.num_agreed < self.state.num_tokens:
            self.state.truncate(self.num_agreed)
        self.state.append(tokens[self.num_agreed :])
        self.num_agreed = len(tokens)
        return drafted_ids(self.state, max_tokens)


def drafted_ids(state: ProposerState, max_tokens: int) -> list[int]:
    """What a state proposes. ValueError where that is more than it may, or no token ids."""
    ids = state.propose(max_tokens)
    if len(ids) > max_tokens or (ids and not 0 <= min(ids) <= max(ids) <= MAX_ID):
        raise ValueError(f"a method proposed {len(ids)} tokens, {ids[:8]}; allowed: at most {max_tokens} token ids")
    return ids


def teach(learners: Iterable[LearningProposer], tokens: Sequence[int], context: SequenceContext) -> None:
    """Lets methods learn from what was committed, whichever of them drafted it."""
    for learner in learners:
        try:
            learner.learn(tokens, context)
        except Exception:  # it may be a user's own, and the sequence has ended well
            logger.exception("%s could not learn", learner.name)
