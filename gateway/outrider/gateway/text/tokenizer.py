"""A checkpoint's tokenizer: text to ids and back, its chat template applied, and what a pair check compares.

`tokenizer.json` is read by the `tokenizers` library alone. transformers' AutoTokenizer would give the same ids, but
importing it loads torch into the process (measured: 2 s and 250 MB, against 0.03 s and 15 MB), so it only serves
checkpoints that have no `tokenizer.json`.

Chat templates: sandboxed Jinja with the names and settings of transformers, which the templates are written for."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as Backend
from tokenizers import decoders

from outrider.rpc.vocabulary import complete_backend, fingerprint, read_json, special_tokens, token_bytes


class TemplateRefusal(Exception):
    """The template cannot be read, or it refused a conversation."""


class ChatTemplate:
    """One template; compiled at its first use."""

    def __init__(self, source: str) -> None:
        self.source = source

    def render(self, messages: Iterable[Mapping[str, Any]], **variables: Any) -> str:
        """The text of a conversation; keys that are None count as absent."""
        plain = [{key: value for key, value in message.items() if value is not None} for message in messages]
        if not plain:
            raise TemplateRefusal("it has no message")
        try:
            return self._compiled.render(messages=plain, **variables)
        except (jinja2.TemplateError, TypeError, ValueError) as error:  # what a template does to odd content
            raise TemplateRefusal(str(error)) from error

    @cached_property
    def _compiled(self) -> jinja2.Template:
        return _environment().from_string(self.source)


def find_chat_template(folder: Path, config: Mapping[str, Any]) -> ChatTemplate | None:
    """The template of a checkpoint's folder: its own file, else the one in tokenizer_config.json."""
    file = folder / "chat_template.jinja"
    source = file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template")
    if isinstance(source, list):  # several named ones
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    return ChatTemplate(source) if isinstance(source, str) else None


class _GenerationTag(Extension):
    """{% generation %} marks the assistant's text for training; here its content is plain text."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The content alone."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Jinja's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(style: str) -> str:
    return datetime.now().strftime(style)


LEAST_AGREEMENT = 0.99  # of the ids, for two models to be a pair


class Tokenizer:
    """Text to ids and back, as the checkpoint's own tokenizer does it; no whitespace is cleaned up on decoding."""

    def __init__(
        self, backend: Backend, name: str, config: Mapping[str, Any], chat_template: ChatTemplate | None
    ) -> None:
        self.backend = backend
        self.name = name
        self.chat_template = chat_template
        self._special_tokens = special_tokens(config)
        complete_backend(backend, self._special_tokens.values())
        added = backend.get_added_tokens_decoder()
        self.added_tokens: dict[int, str] = {token_id: token.content for token_id, token in added.items()}
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.num_tokens: int = backend.get_vocab_size(with_added_tokens=True)
        self.byte_level = isinstance(backend.decoder, decoders.ByteLevel)
        self.bos_id = self._named_id("bos_token")
        self.eos_id = self._named_id("eos_token")

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Loads the tokenizer in a checkpoint's folder."""
        folder = Path(path)
        if not folder.is_dir():
            raise FileNotFoundError(f"no tokenizer: {folder} is not a folder")
        config = read_json(folder / "tokenizer_config.json")
        file = folder / "tokenizer.json"
        backend = Backend.from_file(str(file)) if file.is_file() else _convert_with_transformers(folder)
        return cls(backend, str(folder), config, find_chat_template(folder, config))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The text's ids; special tokens such as BOS are added where the checkpoint says so."""
        ids: list[int] = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The whole text of ids; ids that have no token add nothing."""
        text: str = self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def render_chat(
        self, messages: Iterable[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The prompt's text of a conversation. A template's own complaint is a ValueError; it is told to clients."""
        if self.chat_template is None:
            raise ValueError("the tokenizer has no chat template; allowed: a text or token ids")
        try:
            return self.chat_template.render(
                messages, **{**self._special_tokens, **variables}, add_generation_prompt=add_generation_prompt
            )
        except TemplateRefusal as error:
            raise ValueError(f"the chat template refused the conversation: {error}") from error

    def encode_chat(
        self, messages: Iterable[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """The prompt's ids of a conversation; the template writes every special token itself."""
        return self.encode(self.render_chat(messages, add_generation_prompt, **variables), add_special_tokens=False)

    def bad_words_ids(self, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """The id sequences of words that must not be generated, at the start of a text and within it, as in vLLM: the
        form with a space before it counts where it is as long and starts with another token."""
        sequences: list[tuple[int, ...]] = []
        for word in words:
            bare = tuple(self.encode(word.lstrip(), add_special_tokens=False))
            if not bare:
                raise ValueError(f"bad_words: {word!r} has no tokens")
            spaced = tuple(self.encode(" " + word.lstrip(), add_special_tokens=False))
            sequences.append(bare)
            if spaced[0] != bare[0] and len(spaced) == len(bare):
                sequences.append(spaced)
        return tuple(sequences)

    @cached_property
    def token_bytes(self) -> tuple[bytes | None, ...]:
        """By id the token's bytes; None: no token."""
        return token_bytes(self.backend)

    @cached_property
    def fingerprint(self) -> str:
        """The hash of all ids and their tokens."""
        return fingerprint(self.token_bytes)

    def agreement(self, other: Tokenizer) -> float:
        """The share of ids, of the larger tokenizer's, that stand for the same token in both."""
        pairs = zip(self.token_bytes, other.token_bytes, strict=False)
        equal = sum(mine == theirs for mine, theirs in pairs if mine is not None)
        return equal / max(self.num_tokens, other.num_tokens, 1)

    def require_agreement(self, other: Tokenizer) -> float:
        """The agreement of a pair; below LEAST_AGREEMENT a ValueError that names both."""
        share = self.agreement(other)
        if share < LEAST_AGREEMENT:
            raise ValueError(
                f"not a pair: {share:.1%} of the token ids of {self.name} ({self.num_tokens} tokens) and {other.name} "
                f"({other.num_tokens} tokens) stand for the same token; at least {LEAST_AGREEMENT:.0%} must"
            )
        return share

    def _named_id(self, name: str) -> int | None:
        text = self._special_tokens.get(name)
        token_id: int | None = None if text is None else self.backend.token_to_id(text)
        return token_id


def _convert_with_transformers(folder: Path) -> Backend:
    """For checkpoints without tokenizer.json. Loads torch, if it is there: hence only here, and only when needed."""
    try:
        from transformers import AutoTokenizer
    except ModuleNotFoundError as error:
        raise ValueError(f"{folder} has no tokenizer.json; to convert what it has: pip install transformers") from error

    backend = getattr(AutoTokenizer.from_pretrained(str(folder)), "backend_tokenizer", None)
    if not isinstance(backend, Backend):
        raise ValueError(f"{folder} has no tokenizer.json, and its tokenizer cannot be converted into one")
    return backend
