"""What a token-only drafting method offers. It needs no model, so the gateway can run it in process: this file and the
methods that implement it are pure Python and import no other root."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol


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
    """A drafting method that sees token ids alone. Its drafts are one-hot: they carry no weights."""

    @property
    def name(self) -> str:
        """The method's name, as in the protocol."""
        ...

    def open(self, tokens: Iterable[int]) -> ProposerState:
        """Starts a sequence."""
        ...

    def propose(self, tokens: Sequence[int], max_tokens: int) -> list[int]:
        """The next tokens of a sequence that is not kept."""
        ...
