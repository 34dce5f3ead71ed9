"""What takes bytes from others, each as a function of them that returns, or refuses by an error of its own kind.
Nothing here waits or listens: `fuzz.py` calls them with what reaches new code, `test_fuzz.py` with altered seeds."""

from __future__ import annotations

import asyncio
import json
import random
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
from google.protobuf.message import DecodeError
from safetensors.torch import save
from starlette.requests import Request
from support.engines import new_open
from support.fakes import ToyTarget
from support.gateways import TEMPLATE, save_toy_tokenizer, toy_tokenizer
from support.gguf_models import as_gguf
from support.models import SMALLEST, save_tiny

from outrider.draft_service import trial
from outrider.draft_service.vocabularies import LoadedTokenizer, join
from outrider.engine.checkpoint import read_config, read_tensors
from outrider.engine.gguf_state import GgufState
from outrider.engine.grammar.lark import GrammarError
from outrider.engine.grammar.source import KINDS, GrammarSpec, source_of
from outrider.engine.models.base import UnsupportedModel
from outrider.gateway.engine import EngineConfig, GenerationEngine
from outrider.gateway.http.protocol import HttpOptions, parse_body, read_chat, read_completion
from outrider.gateway.http.responses_input import read_responses
from outrider.gateway.http.shares import Shares
from outrider.gateway.http.tokenize import TokenizeEndpoints
from outrider.gateway.text.chat_template import ChatTemplate, TemplateRefusal
from outrider.gateway.text.tokenizer import Tokenizer
from outrider.gguf.config import config_of
from outrider.gguf.header import WrongGguf, read_gguf
from outrider.gguf.tokenizer import generation_config, tokenizer_files
from outrider.rpc.codec import DRAFT_STREAM, TARGET_STREAM, StreamKind
from outrider.rpc.errors import InvalidArgument, NotFound, ProtocolError
from outrider.rpc.frames import FrameAssembler, FramePacker, SequenceTable
from outrider.rpc.messages import Close, Closed, Commit, Credit, DraftTokens, Failure, FrameHeader, PromptLogprobs
from outrider.rpc.vocabulary import TokenizerFile, read_vocabulary
from outrider.rpc.words.answer import TokenLogprob

MESSAGES = ({"role": "user", "content": "the quick"}, {"role": "assistant", "content": "brown", "tool_calls": []})


@dataclass(frozen=True)
class Entry:
    """One of them, inputs to begin with, and the errors that are refusals."""

    take: Callable[[bytes], object]
    seeds: tuple[bytes, ...]
    refusals: tuple[type[Exception], ...]

    def tried(self, raw: bytes) -> bool:
        """Whether these bytes were taken; False: refused, in words. Any other error is a fault of ours."""
        try:
            self.take(raw)
        except self.refusals as error:
            if not str(error) and not isinstance(error, DecodeError):
                raise AssertionError("a refusal without a word") from error
            return False
        return True


def packed(frames: Sequence[Any]) -> bytes:
    """Several frames as one input."""
    raws = [frame.SerializeToString() for frame in frames]
    return b"".join(struct.pack("<H", len(raw)) + raw for raw in raws)


def unpacked(raw: bytes) -> Iterator[bytes]:
    while len(raw) > 2:
        length = int.from_bytes(raw[:2], "little")
        yield raw[2 : 2 + length]
        raw = raw[2 + length :]


def take_frames(kind: StreamKind, commands: bool, raw: bytes) -> None:
    """The frames of a peer, numbered as they have to be; towards a gateway for two sequences that it has opened."""
    table, direction = SequenceTable(), kind.commands if commands else kind.events
    if not commands:
        packer = FramePacker(kind.commands, table)
        for number in (1, 2):
            packer.push(new_open(number, [4, 5, 6]))
        while packer.next_frame() is not None:
            pass
    assembler = FrameAssembler(direction, table)
    for number, piece in enumerate(unpacked(raw), 1):
        frame = direction.frame.FromString(piece)
        frame.header.number = number
        assembler.accept(frame)


def frame_seeds(kind: StreamKind, commands: bool) -> tuple[bytes, ...]:
    """A life of a sequence, a frame a message; and the same in one frame."""
    direction = kind.commands if commands else kind.events
    short = [message for message in LIFE if type(message) in direction.rows]
    entries = [direction.encode(message) for message in short]
    header = FrameHeader(1)
    apart = packed([direction.build(header, [entry]) for entry in entries])
    long = [] if not commands else list(direction.slices(new_open(3, range(9000))) or ())
    return apart, packed([direction.build(header, entries)]), packed([direction.build(header, long[:1])])


LIFE: tuple[Any, ...] = (
    new_open(1, [4, 5, 6]),
    DraftTokens(1, 0, 4, (7, 8)),
    Credit(1, 9, 4),
    Commit(1, 4, (5, 6)),
    PromptLogprobs(1, 1, ((TokenLogprob(5, -1.0, 1),),)),
    Failure(2, 3, "no", "DOES_NOT_FIT", 7),
    Close(1),
    Closed(1),
)


@cache
def toy_engine() -> GenerationEngine:
    return GenerationEngine(toy_tokenizer(), ToyTarget(), None, EngineConfig())


def take_body(read: Callable[..., object], raw: bytes) -> None:
    read(parse_body(raw), None, toy_engine())


def take_text(name: str, raw: bytes) -> None:
    """A body of /tokenize or /detokenize: these take a whole request."""

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": raw, "more_body": False}

    state = SimpleNamespace(options=HttpOptions(), bodies=Shares("bytes", 1 << 30))
    app = SimpleNamespace(state=state)
    headers = [(b"content-type", b"application/json")]
    request = Request({"type": "http", "method": "POST", "headers": headers, "app": app}, receive)
    asyncio.run(getattr(TokenizeEndpoints(toy_engine()), name)(request))


COMMON: dict[str, Any] = {
    "max_tokens": 4, "temperature": 0.5, "n": 2, "seed": 3, "stop": ["x"], "logit_bias": {"5": 1.5}, "stream": True,
    "speculation": {"num_draft_tokens": 3, "mode": "chains"}, "cache_salt": "s", "priority": 1,
}  # fmt: skip
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}


def as_json(*values: Any) -> tuple[bytes, ...]:
    return tuple(json.dumps(value).encode() for value in values)


def take_file(reading: Callable[[Path], object], name: str, raw: bytes) -> None:
    """A checkpoint's folder, one of whose files is this."""
    folder = whole_folder()
    (folder / name).write_bytes(raw)
    reading(folder)


_kept: list[TemporaryDirectory[str]] = []


@cache
def whole_folder() -> Path:
    _kept.append(TemporaryDirectory())
    folder = save_tiny(Path(_kept[-1].name), vocab_size=400, **SMALLEST)
    return save_toy_tokenizer(folder)


def take_constraint(raw: bytes) -> None:
    """As what is compiled in another process; its kind is the first byte's."""
    kind, text = KINDS[(raw[:1] or b"\0")[0] % len(KINDS)], raw[1:].decode(errors="replace")
    choices = tuple(text.splitlines()) if kind == "choice" else ()
    source_of(GrammarSpec(kind, "" if choices else text, choices), {"<|endoftext|>": 0})


CONSTRAINTS = {
    "json_schema": {"type": "object", "properties": {"a": {"enum": [1, "b"]}}, "required": ["a"]},
    "regex": "([a-z]{3,9} ){3}",
    "grammar": 'start: "a" | /b+/ start',
    "choice": "yes\nno",
    "structural_tag": {
        "format": {
            "type": "triggered_tags", "triggers": ["<f"],
            "tags": [{"begin": "<f>", "content": {"type": "regex", "pattern": "a+"}, "end": "</f>"}],
        },
    },
}  # fmt: skip


def constraint_seeds() -> tuple[bytes, ...]:
    """One of each kind that has a text."""
    texts = ((kind, text if isinstance(text, str) else json.dumps(text)) for kind, text in CONSTRAINTS.items())
    return tuple(bytes([KINDS.index(kind)]) + text.encode() for kind, text in texts)


class NotTaken(ValueError):
    """A vocabulary that ends the process that tries it."""


def take_vocabulary(raw: bytes) -> None:
    """A tokenizer as a gateway sends it to a draft: what the process that tries it takes is joined with the draft's."""
    file = TokenizerFile("", {"eos_token": "<|endoftext|>"}, raw)
    try:
        try:
            trial.check(file)
        except ValueError as error:
            if "those of its fingerprint" not in str(error):
                raise
        file = TokenizerFile(LoadedTokenizer.of(file).lexicon.fingerprint, file.special, raw)
        trial.check(file)
    except BaseException as error:  # a library's panic is none of Exception, and ends that process, too
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise NotTaken(f"{type(error).__name__}: {error}") from error
    join(LoadedTokenizer.of(file), own_tokenizer())


@cache
def own_tokenizer() -> LoadedTokenizer:
    return LoadedTokenizer.of(toy_tokenizer().file)


FEW = {"a": torch.zeros(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}


def read_weights(folder: Path) -> None:
    read_tensors((folder / "model.safetensors",))


def gguf_seed() -> bytes:
    """A whole model in a small file."""
    with TemporaryDirectory() as folder:
        return as_gguf(Path(folder) / "a.gguf", "llama", **SMALLEST, vocab_size=8)[0].read_bytes()


def read_gguf_file(folder: Path) -> None:
    """All that is made of one: configuration, tokenizer, the names of its tensors."""
    header = read_gguf(folder / "a.gguf")
    _ = config_of(header), generation_config(header), tokenizer_files(header)
    for tensor in GgufState(header).values():
        _ = tensor.shape


def read_tokenizer(folder: Path) -> None:
    read_vocabulary(folder)
    tokenizer = Tokenizer.load(folder)
    _ = tokenizer.fingerprint, tokenizer.encode("the quick"), tokenizer.decode([1, 2])


MADE: dict[str, Callable[[], bytes]] = {"weights": lambda: save(FEW), "gguf": gguf_seed}


def render(raw: bytes) -> None:
    template = ChatTemplate(raw.decode(errors="replace"))
    _ = template.variables, template.render(MESSAGES, add_generation_prompt=True)


@cache
def entries() -> dict[str, Entry]:
    """All of them, by name."""
    found: dict[str, Entry] = {}
    for kind in (DRAFT_STREAM, TARGET_STREAM):
        for commands, towards in ((True, "service"), (False, "gateway")):
            name = f"{kind.service.rpartition('.')[2]} frames to the {towards}"
            take = partial(take_frames, kind, commands)
            found[name] = Entry(take, frame_seeds(kind, commands), (ProtocolError, DecodeError))
    chat = {**COMMON, "messages": list(MESSAGES), "tools": [TOOL], "tool_choice": "auto", "response_format": FORMAT}
    bodies: dict[str, tuple[Callable[..., object], tuple[bytes, ...]]] = {
        "completions": (read_completion, as_json({**COMMON, "prompt": "a"}, {"prompt": [[1, 2], [3]], "echo": True})),
        "chat": (read_chat, as_json(chat)),
        "responses": (read_responses, as_json({"input": "a", "tools": [], "reasoning": {"effort": "low"}})),
    }
    for name, (read, seeds) in bodies.items():
        found[name] = Entry(partial(take_body, read), seeds, (InvalidArgument,))
    texts = {
        "tokenize": as_json(
            {"prompt": "the quick", "add_special_tokens": False, "return_token_strs": True, "model": "toy"},
            {"messages": list(MESSAGES), "tools": [TOOL]},
        ),
        "detokenize": as_json({"tokens": [*range(30), 300], "model": "toy"}),
    }
    for name, seeds in texts.items():
        found[name] = Entry(partial(take_text, name), seeds, (InvalidArgument, NotFound))
    files: dict[str, tuple[str, Callable[[Path], object], type[Exception]]] = {
        "weights": ("model.safetensors", read_weights, UnsupportedModel),
        "configuration": ("config.json", read_config, UnsupportedModel),
        "tokenizer": ("tokenizer.json", read_tokenizer, ValueError),
        "gguf": ("a.gguf", read_gguf_file, WrongGguf),
    }
    for name, (file, reading, refusal) in files.items():
        seed = MADE[name]() if name in MADE else (whole_folder() / file).read_bytes()
        found[name] = Entry(partial(take_file, reading, file), (seed,), (refusal,))
    found["template"] = Entry(render, (TEMPLATE.encode(),), (TemplateRefusal,))
    found["constraint"] = Entry(take_constraint, constraint_seeds(), (GrammarError,))
    found["vocabulary"] = Entry(take_vocabulary, (toy_tokenizer().file.layout,), (ValueError,))
    return found


def altered(raw: bytes, dice: random.Random) -> bytes:
    """The bytes with some of them changed, taken out, said twice, or put elsewhere."""
    new = bytearray(raw)
    for _ in range(dice.choice((1, 1, 2, 4, 8))):
        place, length = dice.randrange(len(new) + 1), dice.choice((1, 1, 2, 4, 16))
        match dice.randrange(5):
            case 0:
                new[place : place + length] = dice.randbytes(length)
            case 1:
                del new[place : place + length]
            case 2:
                new[place:place] = new[place : place + length]
            case 3:
                new[place:place] = dice.choice(MARKS)
            case _:
                new[place : place + 1] = bytes([dice.choice((0, 1, 0x7F, 0x80, 0xFF))])
    return bytes(new)


MARKS = (
    b"null",
    b"-1",
    b"1e999",
    b"[]",
    b"{}",
    b'"',
    b"\\ud800",
    b"{{",
    b"%}",
    b"99999999999999999999",
    b"\xff\xff\x7f",
)
