"""What the commands share: bare arguments and lists among their settings, errors in one line that names the flag, the
file or the address, and a terminal on which the colour of a token says how it came about and bars show a wait."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO, TypeVar

from pydantic import BaseModel
from rich.color import ColorSystem
from rich.style import Style

from outrider.client import Part
from outrider.gateway.text.tokenizer import Tokenizer, make_detokenizer
from outrider.rpc.errors import Unavailable
from outrider.rpc.hub import locate
from outrider.rpc.sampling_params import SamplingParams, TokenOrigin
from outrider.rpc.settings import ServiceSettings, former_options, options, parse_settings

STYLES = {  # as rich names them
    TokenOrigin.ACCEPTED: "green",
    TokenOrigin.RECOVERED: "yellow",
    TokenOrigin.BONUS: "cyan",
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


def painted(text: str, style: str) -> str:
    """The text in a style of rich's, by escape sequences."""
    return Style.parse(style).render(text, color_system=ColorSystem.STANDARD)


class Painter:
    """Writes a completion's text, each piece at once. Without colours it writes the text as it is."""

    def __init__(self, out: TextIO, colours: bool) -> None:
        self._out = out
        self.colours = colours

    def token(self, text: str, origin: TokenOrigin) -> None:
        """What a token adds."""
        self._write(text.translate(VISIBLE) if self.colours else text, STYLES.get(origin, ""))

    def prompt(self, text: str) -> None:
        """What the completion continues."""
        self._write(text, "dim")

    def reasoning(self, text: str) -> None:
        """What comes before an answer: where there are no colours to tell it by, it is left out."""
        if self.colours:
            self._write(text.translate(VISIBLE), "dim")

    def note(self, text: str) -> None:
        """A line of ours, which is no model's text."""
        self._write(text, "dim", after="\n")

    def title(self, text: str) -> None:
        """A heading."""
        self._write(text, "bold", before="\n", after="\n")

    def lines(self, lines: Iterable[str]) -> None:
        """Lines as they are."""
        self._write("".join(f"{line}\n" for line in lines))

    def legend(self) -> None:
        """What the colours mean."""
        if self.colours:
            self.lines(f"  {painted(f'{o.name.lower():<10}', STYLES[o])} {MEANINGS[o]}" for o in TokenOrigin)

    def _write(self, text: str, style: str = "", before: str = "", after: str = "") -> None:
        self._out.write(before + (painted(text, style) if self.colours else text) + after)
        self._out.flush()


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
        first = part.origins[0] if part.origins else TokenOrigin.PLAIN
        if part.reasoning:
            self._painter.reasoning(part.reasoning)
        if self._detokenizer is None:
            self._painter.token(part.text, first)
            return
        pieces = [self._detokenizer.step(token_id) for token_id in part.token_ids]
        if "".join(pieces) != part.text:
            self._painter.token(part.text, first)
            return
        for text, origin in zip(pieces, part.origins, strict=True):
            self._painter.token(text, origin)


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


@contextmanager
def progress(painter: Painter, unit: str, every: int = 1) -> Iterator[Callable[[int, int, str], None]]:
    """A bar of steps; what is yielded takes how many are done, of how many, and a word on the last. Without colours a
    line says so after as many as `every`, and at the end."""
    if not painter.colours:

        def note(done: int, total: int, said: str) -> None:
            if done % every == 0 or done == total:
                painter.note(f"{unit} {done} of {total}: {said}")

        yield note
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[said]}"),
        TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(highlight=False), transient=True) as bar:
        task = bar.add_task(unit, total=None, said="")
        yield lambda done, total, said: bar.update(task, completed=done, total=total, said=said)


# By any of these a folder may have a tokenizer; those without tokenizer.json are read by transformers.
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "spiece.model", "sentencepiece.bpe.model",
    "tiktoken.model", "vocab.json", "vocab.txt",
)  # fmt: skip
NOT_CONNECTED = "failed to connect to all addresses"  # how gRPC begins


def fail(prog: str, error: Exception, message: str = "") -> int:
    """Says what was wrong, and returns a command's status for it. A reader that went away is no error of its own."""
    if isinstance(error, BrokenPipeError):
        raise error
    if isinstance(error, OSError) and error.filename:
        message = f"{error.filename}: {(error.strerror or str(error)).lower()}"
    print(f"{prog}: error: {message or error}", file=sys.stderr)
    return 1


def one_line(error: Exception) -> str:
    """The message of an error, whatever its lines."""
    return " ".join(str(error).split())


def of_gateway(error: Exception, address: str) -> str:
    """The same; where nobody listens at the gateway's address, it says that and no more."""
    text = one_line(error)
    if isinstance(error, Unavailable) and text.startswith(NOT_CONNECTED):
        return f"no gateway answers at {address} ({text.rpartition(': ')[2].lower()})"
    return text


def load_tokenizer(folder: Path, flag: str) -> Tokenizer:
    """The tokenizer of a folder, or a hub's model, that a flag names. Raises ValueError."""
    folder = locate(folder, weights=False)
    _require_folder(folder, flag)
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ValueError(f"{flag}: {folder} has no tokenizer: expected tokenizer.json, or tokenizer.model")
    try:
        return Tokenizer.load(folder)
    except Exception as error:  # the library raises bare Exception for a file that it cannot read
        raise ValueError(f"{flag}: cannot load a tokenizer from {folder}: {one_line(error)}") from error


def require_config(folder: Path, flag: str) -> None:
    """Raises ValueError for a folder that holds no model's config.json."""
    _require_folder(folder, flag)
    if not (folder / "config.json").is_file():
        raise ValueError(f"{flag}: {folder} has no config.json: expected a checkpoint's folder")


def read_text(path: Path, flag: str) -> str:
    """The text of a file that a flag names. Raises OSError, and ValueError where it is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{flag}: {path} is not UTF-8 ({error.reason} at byte {error.start})") from error


def _require_folder(folder: Path, flag: str) -> None:
    if not folder.is_dir():
        raise ValueError(f"{flag}: {folder} is not a folder")


S = TypeVar("S", bound=ServiceSettings)


def parse(
    cls: type[S],
    argv: Sequence[str],
    prog: str,
    description: str,
    bare: Sequence[str] = (),
    short: Mapping[str, str] | None = None,
) -> S:
    """The settings of a command line whose bare arguments are the settings `bare`, in order: `generate "Hi"` is
    `generate --prompt=Hi`. `short` are flags that stand for others."""
    example = " ".join([prog, *(name.partition(".")[0].upper() for name in bare)])
    wanted = {name: f"give the {name}, as in {example}" for name in bare}
    return parse_settings(cls, name_bare(cls, argv, bare, short or {}), prog, description, wanted)


def name_bare(model: type[BaseModel], argv: Sequence[str], bare: Sequence[str], short: Mapping[str, str]) -> list[str]:
    """The command line with its bare arguments as flags. What follows `--` is bare, too; more than there are names
    stay as they are, for the parser to refuse; the last name takes all of them if it is a list's."""
    listed = {option.flag for option in options(model) if option.repeats}
    every = [*options(model), *former_options(model).values()]
    with_value = {"--config"} | {option.flag for option in every if option.kind is not bool}
    named: list[str] = []
    names = [f"--{name.replace('_', '-')}" for name in bare]
    rest = list(argv)

    def bare_name() -> str:
        return names[0] if len(names) == 1 and names[0] in listed else names.pop(0)

    while rest:
        arg = rest.pop(0)
        if arg == "--":
            named += [f"{bare_name()}={value}" if names else value for value in rest]
            break
        if arg in short:
            named.append(short[arg])
        elif arg in with_value:
            named += [arg, *rest[:1]]
            del rest[:1]
        elif arg.startswith("-") or not names:
            named.append(arg)
        else:
            named.append(f"{bare_name()}={arg}")
    return named


def split_ids(value: Any) -> Any:
    """Ids from "1,2,3", or from several of these; what is no text is left to the model."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",")]
    if isinstance(value, list | tuple):
        return [part for item in value for part in (split_ids(item) if isinstance(item, str) else [item])]
    return value


def split_each(value: Any) -> Any:
    """Lists of ids, one from each text."""
    if isinstance(value, list | tuple):
        return [split_ids(item) if isinstance(item, str) else item for item in value]
    return value


def read_json(value: Any) -> Any:
    """What a JSON text holds."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise ValueError(f"must be JSON ({error})") from error
