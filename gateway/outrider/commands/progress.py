"""Bars where a command waits: on a terminal by rich, elsewhere a line for each step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from outrider.commands.colours import Painter

Advance = Callable[[str], None]


@contextmanager
def steps(painter: Painter, title: str, total: int) -> Iterator[Advance]:
    """A bar of `total` steps; what is yielded advances it by one, with a word on what was done."""
    if not painter.colours:
        painter.note(f"{title} ...")
        yield painter.note
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(highlight=False), transient=True) as progress:
        task = progress.add_task(title, total=total)

        def advance(done: str) -> None:
            progress.console.print(done, style="dim", markup=False)
            progress.advance(task)

        yield advance
