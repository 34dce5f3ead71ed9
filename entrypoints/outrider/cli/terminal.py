"""What commands show: on a terminal the colour of a token says how it came about, and bars show a wait; a pipe gets
the text alone."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TextIO

from rich import progress as bars
from rich.color import ColorSystem
from rich.console import Console
from rich.style import Style

from outrider.client import Part
from outrider.gateway.text.tokenizer import Tokenizer, make_detokenizer
from outrider.rpc.words.sampling_params import SamplingParams, TokenOrigin

PLAIN = "", "decoded with no draft"
ORIGINS = {  # with the style, as rich names it, and the meaning
    TokenOrigin.ACCEPTED: ("green", "drafted, and kept by the target"),
    TokenOrigin.RECOVERED: ("yellow", "the target's own where it refused one"),
    TokenOrigin.BONUS: ("cyan", "the target's own after a whole window"),
    TokenOrigin.PLAIN: PLAIN,
}
# A model may write escape sequences; a terminal must not obey them.
VISIBLE = {code: f"\\x{code:02x}" for code in [*range(0x20), *range(0x7F, 0xA0)] if chr(code) not in "\n\t"}
Advance = Callable[[str], None]


class Painter:
    """Writes each text at once: with colours in a style of rich's, without them as it is."""

    def __init__(self, out: TextIO, colours: bool) -> None:
        self._out = out
        self.colours = colours

    def write(self, text: str, style: str = "") -> None:
        """Writes a text that no model wrote."""
        painted = Style.parse(style).render(text, color_system=ColorSystem.STANDARD)
        self._out.write(painted if self.colours and style else text)
        self._out.flush()

    def token(self, text: str, origin: TokenOrigin) -> None:
        """Writes what a token adds to an answer, in its origin's colour."""
        self.write(text.translate(VISIBLE) if self.colours else text, ORIGINS.get(origin, PLAIN)[0])

    def prompt(self, text: str) -> None:
        """Writes the text that a completion continues."""
        self.write(text, "dim")

    def reasoning(self, text: str) -> None:
        """Writes what comes before an answer; where there are no colours to tell it by, it is left out."""
        if self.colours:
            self.write(text.translate(VISIBLE), "dim")

    def note(self, text: str) -> None:
        """Writes a line in grey."""
        self.pieces([(text, "dim"), ("\n", "")])

    def title(self, text: str) -> None:
        """Writes a heading."""
        self.pieces([("\n", ""), (text, "bold"), ("\n", "")])

    def lines(self, lines: Iterable[str]) -> None:
        """Writes lines as they are."""
        self.write("".join(f"{line}\n" for line in lines))

    def pieces(self, pieces: Iterable[tuple[str, str]]) -> None:
        """Writes texts, each in its style."""
        for text, style in pieces:
            self.write(text, style)

    def legend(self) -> None:
        """Writes what the colours mean."""
        if self.colours:
            for origin, (style, meaning) in ORIGINS.items():
                self.pieces([("  ", ""), (f"{origin.name.lower():<10}", style), (f" {meaning}\n", "")])


def make_painter(plain: bool) -> Painter:
    """Colours on a terminal that wants them (https://no-color.org), unless `plain`."""
    wanted = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return Painter(sys.stdout, wanted and not plain)


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
        if part.reasoning:
            self._painter.reasoning(part.reasoning)
        pieces = [] if self._detokenizer is None else [self._detokenizer.step(token_id) for token_id in part.token_ids]
        if pieces and "".join(pieces) == part.text:
            for text, origin in zip(pieces, part.origins, strict=True):
                self._painter.token(text, origin)
        else:
            self._painter.token(part.text, part.origins[0] if part.origins else TokenOrigin.PLAIN)


@contextmanager
def steps(painter: Painter, title: str, total: int) -> Iterator[Advance]:
    """A bar of `total` steps; what is yielded advances it by one, with a word on what was done."""
    if not painter.colours:
        painter.note(f"{title} ...")
        yield painter.note
        return
    columns = (bars.SpinnerColumn(), bars.TextColumn("{task.description}"), bars.BarColumn(), bars.TimeElapsedColumn())
    with bars.Progress(*columns, console=Console(highlight=False), transient=True) as bar:
        task = bar.add_task(title, total=total)

        def advance(done: str) -> None:
            bar.console.print(done, style="dim", markup=False)
            bar.advance(task)

        yield advance


@contextmanager
def progress(painter: Painter, unit: str, every: int = 1) -> Iterator[Callable[[int, int, str], None]]:
    """A bar of steps; what is yielded takes how many are done, of how many, and a word on the last. Without colours a
    line says so before and after the first, after as many as `every`, and at the end."""
    if not painter.colours:

        def note(done: int, total: int, said: str) -> None:
            if done % every == 0 or done in (1, total):
                painter.note(f"{unit} {done} of {total}: {said}")

        yield note
        return
    columns = (
        bars.TextColumn("{task.description}"), bars.BarColumn(), bars.MofNCompleteColumn(),
        bars.TextColumn("{task.fields[said]}"), bars.TimeElapsedColumn(), bars.TextColumn("left"),
        bars.TimeRemainingColumn(),
    )  # fmt: skip
    with bars.Progress(*columns, console=Console(highlight=False), transient=True) as bar:
        task = bar.add_task(unit, total=None, said="")
        yield lambda done, total, said: bar.update(task, completed=done, total=total, said=said)
