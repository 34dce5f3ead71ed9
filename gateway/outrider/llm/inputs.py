"""Prompts as vLLM takes them: text, token ids, and dicts of either."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import index
from typing import Any, NotRequired, TypedDict

from outrider.llm.checks import is_int
from outrider.llm.errors import Unsupported, unknown_keyword

BYTES = bytes | bytearray | memoryview  # sequences of integers for Python, but no token ids
ALLOWED = ("prompt", "prompt_token_ids", "cache_salt")
REFUSED = {
    "multi_modal_data": "models take text alone",
    "multi_modal_uuids": "models take text alone",
    "mm_processor_kwargs": "models take text alone",
    "prompt_embeds": "prompts are text or token ids",
    "token_type_ids": "prompts are text or token ids",
    "encoder_prompt": "models are decoders",
    "decoder_prompt": "models are decoders",
}


class TextPrompt(TypedDict):
    """A prompt to tokenise. Prompts of different `cache_salt` share no cached blocks."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt that is tokenised already; `prompt` is only shown."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


PromptType = str | list[int] | TextPrompt | TokensPrompt


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: token ids win over text, which is then only shown."""

    text: str | None
    token_ids: tuple[int, ...] | None = None
    salt: str = ""


def parse_prompts(prompts: Any) -> list[Prompt]:
    """One prompt or many."""
    if isinstance(prompts, str | Mapping) or _is_ids(prompts):
        return [_parse(prompts)]
    if not isinstance(prompts, Sequence) or isinstance(prompts, BYTES):
        raise TypeError(f"a prompt is a str, a list of token ids or a dict, not {type(prompts).__name__}")
    return [_parse(prompt) for prompt in prompts]


def with_ids(prompts: Any, prompt_token_ids: Any) -> list[Prompt]:
    """Prompts of the old keyword: their ids, and beside them the texts to show, if those are given, too."""
    ids = parse_prompts(prompt_token_ids)
    if prompts is None:
        return ids
    shown = parse_prompts(prompts)
    if len(shown) != len(ids):
        raise ValueError("The lengths of prompts and prompt_token_ids must be the same.")
    return [replace(prompt, text=text.text) for prompt, text in zip(ids, shown, strict=True)]


def _parse(prompt: Any) -> Prompt:
    if isinstance(prompt, str):
        return Prompt(checked_text(prompt))
    if _is_ids(prompt) or prompt == []:  # an empty one is refused as every other that is too short or too long
        return Prompt(None, tuple(map(int, prompt)))
    if not isinstance(prompt, Mapping):
        raise TypeError(f"a prompt is a str, a list of token ids or a dict, not {prompt!r:.60}")
    for name, value in prompt.items():
        if name in REFUSED and value is not None:
            raise Unsupported(f"a prompt's {name!r} is not supported: {REFUSED[name]}")
        if name not in ALLOWED and name not in REFUSED:
            raise unknown_keyword(str(name), ALLOWED, "a prompt")
    text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if text is None and ids is None:
        raise ValueError("a prompt needs 'prompt' or 'prompt_token_ids'")
    salt = prompt.get("cache_salt")
    for name, value in (("prompt", text), ("cache_salt", salt)):
        if value is not None and not isinstance(value, str):
            raise TypeError(f"a prompt's {name!r} must be a str, got {value!r:.60}")
    text = None if text is None else checked_text(text)
    return Prompt(text, None if ids is None else _ids_of(ids), salt or "")


def checked_text(text: str) -> str:
    """The text. Raises ValueError where a half of a surrogate pair stands alone, which no tokenizer can read."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"a prompt must be Unicode; {text[error.start]!r} at {error.start} is no character") from error
    return text


def _ids_of(given: Any) -> tuple[int, ...]:
    """Token ids of a list, an array or a tensor."""
    try:
        if isinstance(given, str | BYTES):
            raise TypeError("a text is no list of ids")
        return tuple(map(index, given))
    except TypeError as error:
        raise TypeError(f"a prompt's 'prompt_token_ids' must be a list of token ids, got {given!r:.60}") from error


def _is_ids(prompt: Any) -> bool:
    """Whether it is one prompt of token ids; numpy's integers are integers."""
    return (
        isinstance(prompt, Sequence)
        and not isinstance(prompt, str | BYTES)
        and len(prompt) > 0
        and all(map(is_int, prompt))
    )
