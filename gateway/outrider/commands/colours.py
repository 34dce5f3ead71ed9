"""Tokens on a terminal: the colour says how a token came about."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import TextIO

from outrider.wire.sampling import TokenOrigin

RESET, BOLD, DIM = "\x1b[0m", "\x1b[1m", "\x1b[2m"
COLOURS = {
    TokenOrigin.ACCEPTED: "\x1b[32m",  # green
    TokenOrigin.RECOVERED: "\x1b[33m",  # yellow
    TokenOrigin.BONUS: "\x1b[36m",  # cyan
    TokenOrigin.PLAIN: "",
}
MEANINGS = {
    TokenOrigin.ACCEPTED: "drafted, and kept by the target",
    TokenOrigin.RECOVERED: "the target's own where it refused one",
    TokenOrigin.BONUS: "the target's own after a whole window",
    TokenOrigin.PLAIN: "decoded with no draft",
}
# A model may write escape sequences; a terminal must not obey them.
VISIBLE = {code: f"\\x{code:02x}" for code in [*range(0x20), *range(0x7F, 0xA0)] if chr(code) not in "\n\t"}


class Painter:
    """Writes a completion's text. Without colours it writes the text as it is."""

    def __init__(self, out: TextIO, colours: bool) -> None:
        self._out = out
        self.colours = colours

    def token(self, text: str, origin: TokenOrigin) -> None:
        """Writes at once."""
        self._out.write(self._paint(text.translate(VISIBLE), COLOURS.get(origin, "")) if self.colours else text)
        self._out.flush()

    def prompt(self, text: str) -> None:
        """What the completion continues."""
        self._out.write(self._paint(text, DIM) if self.colours else text)
        self._out.flush()

    def note(self, text: str) -> None:
        """A line of ours, which is no model's text."""
        self._out.write((self._paint(text, DIM) if self.colours else text) + "\n")
        self._out.flush()

    def title(self, text: str) -> None:
        """A heading."""
        self._out.write("\n" + (self._paint(text, BOLD) if self.colours else text) + "\n")
        self._out.flush()

    def lines(self, lines: Iterable[str]) -> None:
        """Lines as they are."""
        self._out.write("".join(f"{line}\n" for line in lines))
        self._out.flush()

    def legend(self) -> None:
        """What the colours mean."""
        if self.colours:
            self.lines(f"  {self._paint(f'{o.name.lower():<10}', COLOURS[o])} {MEANINGS[o]}" for o in TokenOrigin)

    def _paint(self, text: str, colour: str) -> str:
        return f"{colour}{text}{RESET}" if colour and text else text


def make_painter(plain: bool) -> Painter:
    """Colours on a terminal that wants them (https://no-color.org), unless `plain`."""
    wanted = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return Painter(sys.stdout, wanted and not plain)
