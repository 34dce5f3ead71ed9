"""What the commands say of what they were given: one line, which names the flag, the file or the address."""

from __future__ import annotations

from pathlib import Path

from outrider.gateway.tokenizer import Tokenizer
from outrider.wire.errors import Unavailable
from outrider.wire.hub import locate

# By any of these a folder may have a tokenizer; those without tokenizer.json are read by transformers.
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "spiece.model", "sentencepiece.bpe.model",
    "tiktoken.model", "vocab.json", "vocab.txt",
)  # fmt: skip
NOT_CONNECTED = "failed to connect to all addresses"  # how gRPC begins


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
