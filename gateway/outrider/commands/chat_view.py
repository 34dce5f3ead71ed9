"""What a chat looks like: on a terminal the answer's last line and its numbers are drawn anew as tokens come, elsewhere
there is the text alone."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from outrider.client import Part
from outrider.commands.answers import Answer
from outrider.commands.colours import VISIBLE, Painter
from outrider.commands.token_writer import TokenWriter
from outrider.gateway.tokenizer import Tokenizer
from outrider.wire.sampling import TokenOrigin

STYLES = {
    TokenOrigin.ACCEPTED: "green",
    TokenOrigin.RECOVERED: "yellow",
    TokenOrigin.BONUS: "cyan",
    TokenOrigin.PLAIN: "",
}
PROMPT = "> "
FRAMES_PER_S = 15


class View(Protocol):
    """Where a chat is shown."""

    def show(self, parts: Iterator[Part], answer: Answer) -> None:
        """Takes all parts into the answer and shows them as they come."""

    def question(self, text: str) -> None:
        """A question that was not typed here."""

    def note(self, text: str) -> None:
        """A line of ours."""


class PlainView:
    """The text of the answers, a line of numbers on standard error."""

    def __init__(self, stats: bool) -> None:
        self._stats = stats

    def show(self, parts: Iterator[Part], answer: Answer) -> None:
        """The text as it comes, and an end of line."""
        writer = TokenWriter(Painter(sys.stdout, colours=False), None)
        try:
            for part in parts:
                answer.add(part)
                writer.write(part)
        finally:
            if answer.text:
                print(flush=True)
        if self._stats:
            self.note(summary(answer))

    def question(self, text: str) -> None:
        """Not shown: the output is the answers."""

    def note(self, text: str) -> None:
        """On standard error."""
        print(text, file=sys.stderr, flush=True)


class LiveView:
    """Colours by origin, and under the answer what speculation has done for it so far."""

    def __init__(self, stats: bool, tokenizer: Tokenizer | None) -> None:
        self._console = Console(highlight=False)
        self._stats = stats
        self._tokenizer = tokenizer

    def show(self, parts: Iterator[Part], answer: Answer) -> None:
        """Whole lines are printed once; the last one and the numbers are drawn again and again below them."""
        lines = _LastLine(self._console)
        writer = TokenWriter(lines, self._tokenizer)
        num_rounds = 0
        try:
            with Live(lines, console=self._console, refresh_per_second=FRAMES_PER_S, transient=True):
                for part in parts:
                    answer.add(part)
                    num_rounds += bool(part.token_ids)
                    if self._stats:
                        lines.status = progress(answer, num_rounds)
                    writer.write(part)
        finally:
            if answer.text:
                self._console.print(lines.text)
        if self._stats:
            self.note(summary(answer))

    def question(self, text: str) -> None:
        """As if it had been typed."""
        self._console.print(Text(PROMPT + text.translate(VISIBLE), style="bold"))

    def note(self, text: str) -> None:
        """In grey."""
        self._console.print(Text(text, style="dim"))


class _LastLine(Painter):
    """Takes tokens, prints the lines that are full, and keeps the one that may still grow."""

    def __init__(self, console: Console) -> None:
        super().__init__(sys.stdout, colours=True)
        self._console = console
        self.text = Text()
        self.status = "..."

    def __rich__(self) -> Group:
        """What is drawn anew."""
        return Group(self.text, Text(self.status, style="dim"))

    def token(self, text: str, origin: TokenOrigin) -> None:
        """A line is full at its end or where the terminal's is: a region that is drawn anew must fit on it."""
        self.text.append(text.translate(VISIBLE), style=STYLES.get(origin, ""))
        *full, self.text = self.text.split("\n", allow_blank=True)
        *wrapped, self.text = self.text.wrap(self._console, self._console.width) or [Text()]
        for line in (*full, *wrapped):
            self._console.print(line)


def make_view(plain: bool, stats: bool, tokenizer: Tokenizer | None) -> View:
    """The live one on a terminal that can do it. NO_COLOR leaves the colours out."""
    if plain or not sys.stdout.isatty() or Console().is_dumb_terminal:
        return PlainView(stats)
    return LiveView(stats, tokenizer)


def make_editable() -> None:
    """Line editing and history at the prompt, where Python has them."""
    with suppress(ImportError):
        import readline  # noqa: F401  # input() uses it once it is imported


def progress(answer: Answer, num_rounds: int) -> str:
    """The numbers while an answer grows: how many tokens were drafted is known at its end."""
    count, accepted = len(answer.token_ids), answer.origins.count("accepted")
    return (
        f"{count} tokens, {accepted / count if count else 0:.0%} of them drafted and accepted, "
        f"{count / max(1, num_rounds):.2f} a round, {answer.tokens_per_s:.0f} tokens/s"
    )


def summary(answer: Answer) -> str:
    """The numbers of an answer that has ended."""
    stats, usage = answer.speculation, answer.usage
    words = [f"{len(answer.token_ids)} tokens"]
    if stats is not None and stats.num_rounds:
        words[0] += f" in {stats.num_rounds} rounds ({len(answer.token_ids) / stats.num_rounds:.2f} a round)"
        drafted = stats.num_draft_tokens
        share = f"{stats.acceptance_rate:.0%} ({stats.num_accepted_tokens}/{drafted})" if drafted else "none drafted"
        words.append(f"acceptance {share}")
    words.append(f"{answer.tokens_per_s:.1f} tokens/s")
    if usage is not None:
        words.append(f"prompt {usage.prompt_tokens} tokens ({usage.cached_tokens} cached)")
    return f"[{', '.join(words)}, then {answer.finish_reason}]"
