"""Writes a completion's text, each token in the colour of its origin."""

from __future__ import annotations

from outrider.client import Part
from outrider.commands.colours import Painter
from outrider.gateway.text import make_detokenizer
from outrider.gateway.tokenizer import Tokenizer
from outrider.wire.sampling import SamplingParams, TokenOrigin


class TokenWriter:
    """The gateway sends the text of a round as one. With the tokenizer each token's share of it is known; without, all
    of it has the colour of the round's first token."""

    def __init__(self, painter: Painter, tokenizer: Tokenizer | None, prompt: str = "") -> None:
        self._painter = painter
        self._detokenizer = None
        if tokenizer is not None:
            self._detokenizer = make_detokenizer(tokenizer, SamplingParams(), tokenizer.encode(prompt))

    def write(self, part: Part) -> None:
        """Writes what a part adds. Where its tokens do not make its text (a stop string cut it, or text waited), the
        text counts."""
        first = part.origins[0] if part.origins else TokenOrigin.PLAIN
        if self._detokenizer is None:
            self._painter.token(part.text, first)
            return
        pieces = [self._detokenizer.step(token_id) for token_id in part.token_ids]
        if "".join(pieces) != part.text:
            self._painter.token(part.text, first)
            return
        for text, origin in zip(pieces, part.origins, strict=True):
            self._painter.token(text, origin)
