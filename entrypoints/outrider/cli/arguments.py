"""What commands are told, and what they say of it: bare arguments, lists and mappings among their settings, files that
flags name, and errors in one line with the flag, the file or the address."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from outrider.gateway.text.tokenizer import Tokenizer
from outrider.rpc.errors import Unavailable
from outrider.rpc.hub import locate
from outrider.rpc.settings import ServiceSettings, former_options, options, parse_settings

S = TypeVar("S", bound=ServiceSettings)

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
    """What went wrong with a gateway, in one line: where nobody listens at its address, that and no more."""
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


def parse(
    cls: type[S],
    argv: Sequence[str] | None,
    prog: str,
    description: str,
    bare: Sequence[str] = (),
    short: Mapping[str, str] | None = None,
) -> S:
    """The settings of a command line (None: this process's) whose bare arguments are the settings `bare`, in order:
    `generate "Hi"` is `generate --prompt=Hi`. `short` are flags that stand for others."""
    example = " ".join([prog, *(name.partition(".")[0].upper() for name in bare)])
    wanted = {name: f"give the {name}, as in {example}" for name in bare}
    arguments = sys.argv[1:] if argv is None else argv
    return parse_settings(cls, name_bare(cls, arguments, bare, short or {}), prog, description, wanted)


def name_bare(model: type[BaseModel], argv: Sequence[str], bare: Sequence[str], short: Mapping[str, str]) -> list[str]:
    """The command line with its bare arguments as flags. What follows `--` is bare, too; more than there are names
    stay as they are, for the parser to refuse; the last name takes all of them if it is a list's."""
    listed = {option.flag for option in options(model) if option.repeats}
    every = [*options(model), *former_options(model).values()]
    with_value = {"--config"} | {option.flag for option in every if option.kind is not bool}
    names = [f"--{name.replace('_', '-')}" for name in bare]

    def name(value: str) -> str:
        if not names:
            return value
        return f"{names[0] if len(names) == 1 and names[0] in listed else names.pop(0)}={value}"

    named: list[str] = []
    rest = iter(argv)
    for arg in rest:
        if arg == "--":
            named += map(name, rest)
        elif arg in with_value:
            named += [arg, *islice(rest, 1)]
        else:
            named.append(short.get(arg, arg) if arg.startswith("-") else name(arg))
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
