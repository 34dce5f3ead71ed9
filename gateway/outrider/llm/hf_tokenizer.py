"""The tokenizer in the form that vLLM's users know."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer as Backend

from outrider.gateway.tokenizer import Tokenizer


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
