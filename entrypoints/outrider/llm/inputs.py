"""Prompts as vLLM takes them: text, token ids, dicts of either, and conversations, which become prompts by the
checkpoint's chat template or the caller's; and the tokenizer in the form that vLLM's users know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import index
from typing import Any, NotRequired, TypedDict

from tokenizers import Tokenizer as Backend

from outrider.gateway.text.chat_template import ChatTemplate, ContinuedTemplate
from outrider.gateway.text.tokenizer import Tokenizer
from outrider.llm.pictures import parts_of, pictures_of
from outrider.llm.validation import Fixed, is_int, require_fixed, require_known
from outrider.rpc.words.request import MediaSource

BYTES = bytes | bytearray | memoryview  # sequences of integers for Python, but no token ids
ALLOWED = ("prompt", "prompt_token_ids", "cache_salt", "prediction", "multi_modal_data")
REFUSED: Fixed = {
    "multi_modal_uuids": ((None,), "pictures are known by their contents"),
    "mm_processor_kwargs": ((None,), "the checkpoint's own processor holds, for all prompts"),
    "prompt_embeds": ((None,), "prompts are text or token ids"),
    "token_type_ids": ((None,), "prompts are text or token ids"),
    "encoder_prompt": ((None,), "models are decoders"),
    "decoder_prompt": ((None,), "models are decoders"),
}


class TextPrompt(TypedDict):
    """A prompt to tokenise. Prompts of different `cache_salt` share no cached blocks. `prediction` is a guess at the
    output, as text or token ids: where it holds, tokens come sooner. `multi_modal_data` has an image or several under
    "image"; the prompt holds the model's placeholder once for each."""

    prompt: str
    multi_modal_data: NotRequired[Mapping[str, Any] | None]
    cache_salt: NotRequired[str]
    prediction: NotRequired[str | list[int]]


class TokensPrompt(TypedDict):
    """A prompt that is tokenised already; `prompt` is only shown."""

    prompt_token_ids: list[int]
    multi_modal_data: NotRequired[Mapping[str, Any] | None]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]
    prediction: NotRequired[str | list[int]]


PromptType = str | list[int] | TextPrompt | TokensPrompt


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: token ids win over text, which is then only shown."""

    text: str | None
    token_ids: tuple[int, ...] | None = None
    salt: str = ""
    prediction: str | tuple[int, ...] | None = None
    media: tuple[MediaSource, ...] = ()  # its pictures, in its order


def parse_prompts(prompts: Any) -> list[Prompt]:
    """The prompts of what is one prompt or many."""
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
    require_fixed(REFUSED, prompt, "a prompt's {!r}")
    require_known(prompt.keys() - REFUSED.keys(), ALLOWED, "a prompt")
    text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if text is None and ids is None:
        raise ValueError("a prompt needs 'prompt' or 'prompt_token_ids'")
    salt = prompt.get("cache_salt")
    for name, value in (("prompt", text), ("cache_salt", salt)):
        if value is not None and not isinstance(value, str):
            raise TypeError(f"a prompt's {name!r} must be a str, got {value!r:.60}")
    text = None if text is None else checked_text(text)
    guess = prompt.get("prediction")
    if guess is not None:
        guess = checked_text(guess) if isinstance(guess, str) else _ids_of(guess, "prediction")
    media = pictures_of(prompt.get("multi_modal_data"))
    return Prompt(text, None if ids is None else _ids_of(ids), salt or "", guess, media)


def checked_text(text: str) -> str:
    """The text. Raises ValueError where a half of a surrogate pair stands alone, which no tokenizer can read."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"a prompt must be Unicode; {text[error.start]!r} at {error.start} is no character") from error
    return text


def _ids_of(given: Any, name: str = "prompt_token_ids") -> tuple[int, ...]:
    """Token ids of a list, an array or a tensor."""
    try:
        if isinstance(given, str | BYTES):
            raise TypeError("a text is no list of ids")
        return tuple(map(index, given))
    except TypeError as error:
        raise TypeError(f"a prompt's {name!r} must be a list of token ids, got {given!r:.60}") from error


def _is_ids(prompt: Any) -> bool:
    """Whether it is one prompt of token ids; numpy's integers are integers."""
    return (
        isinstance(prompt, Sequence)
        and not isinstance(prompt, str | BYTES)
        and len(prompt) > 0
        and all(map(is_int, prompt))
    )


Message = Mapping[str, Any]
SHAPE = "messages are a list of {'role': ..., 'content': ...}, or a list of such lists"


def chat_prompts(
    tokenizer: Tokenizer,
    messages: Any,
    *,
    chat_template: str | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    variables: Mapping[str, Any] | None = None,
) -> list[Prompt]:
    """The prompts of one conversation or many."""
    if add_generation_prompt and continue_final_message:
        raise ValueError("continue_final_message goes on with the last message: set add_generation_prompt=False")
    template = tokenizer.chat_template if chat_template is None else ChatTemplate(chat_template)
    if template is not None:
        tokenizer = tokenizer.with_template(ContinuedTemplate(template) if continue_final_message else template)
    prompts = []
    for conversation, media in conversations_of(messages):
        text = tokenizer.render_chat(conversation, add_generation_prompt, **(variables or {}))
        checked_text(text)
        prompts.append(Prompt(text, tuple(tokenizer.encode(text, add_special_tokens=False)), media=media))
    return prompts


def conversations_of(messages: Any) -> list[tuple[list[Message], tuple[MediaSource, ...]]]:
    """One conversation or many, each with its pictures."""
    if not _is_list(messages) or not messages:
        raise TypeError(f"{SHAPE}, got {messages!r:.60}")
    many = [messages] if isinstance(messages[0], Mapping) else messages
    for conversation in many:
        if not _is_list(conversation) or not all(isinstance(message, Mapping) for message in conversation):
            raise TypeError(f"{SHAPE}, got {conversation!r:.60}")
    return [_with_pictures(conversation) for conversation in many]


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _with_pictures(conversation: Sequence[Message]) -> tuple[list[Message], tuple[MediaSource, ...]]:
    each = [_with_parts(message) for message in conversation]
    return [message for message, _ in each], tuple(chain.from_iterable(pictures for _, pictures in each))


def _with_parts(message: Message) -> tuple[Message, tuple[MediaSource, ...]]:
    """Parts of text are joined by newlines; with pictures they stay apart, and any other part is refused."""
    if not isinstance(message.get("role"), str):
        raise ValueError(f"a message needs a 'role', such as 'user', got {dict(message)!r:.100}")
    content = message.get("content")
    if content is None or isinstance(content, str):
        return message, ()
    if not _is_list(content):
        raise TypeError(f"a message's 'content' is a str or a list of parts, got {content!r:.60}")
    parts, pictures = parts_of(content)
    return {**message, "content": parts}, pictures


def as_transformers(tokenizer: Tokenizer) -> Any:
    """A copy as transformers' class, which adds what an application expects: calls, padding, chat templates."""
    from transformers import PreTrainedTokenizerFast

    names = {
        name: tokenizer.added_tokens.get(token_id) if token_id is not None else None
        for name, token_id in (("bos_token", tokenizer.bos_id), ("eos_token", tokenizer.eos_id))
    }
    copied = PreTrainedTokenizerFast(tokenizer_object=Backend.from_str(tokenizer.backend.to_str()), **names)
    copied.chat_template = None if tokenizer.chat_template is None else tokenizer.chat_template.source
    return copied
