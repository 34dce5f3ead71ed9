"""Refusals in the words of whoever calls an LLM: the gateway names fields as the protocol does."""

from __future__ import annotations

from outrider.gateway.field_names import renamed
from outrider.rpc.errors import InvalidArgument, NotFound, OutriderError
from outrider.rpc.words.request import DRAFT_OPTIONS

NAMES = {
    "token_ids.ids": "prompt", "prompt_ids": "prompt", "text": "prompt", "input": "prompt", "chat": "messages",
    "reasoning.max_tokens": "thinking_token_budget", "structured_output": "structured_outputs",
    "structured_output.json_schema": "structured_outputs.json", "prediction.text": "prediction",
    "prediction.token_ids.ids": "prediction", "salt": "cache_salt", "adapter": "lora_request",
    "media": "multi_modal_data",
    "speculation.acceptance": "acceptance", "speculation.mode": "mode",
    "speculation.num_draft_tokens": "speculative_config['num_speculative_tokens']",
    **{f"speculation.{name}": f"speculative_config[{name!r}]" for name in DRAFT_OPTIONS},
    "speculation.methods": "speculative_config['method']", "speculation.method": "speculative_config['method']",
}  # fmt: skip


def told(error: OutriderError, max_model_len: int = 0) -> Exception:
    """What is raised in its place: a ValueError for what was asked wrongly, or of what is not there (an adapter)."""
    own = renamed(error, NAMES, max_model_len)
    return ValueError(own.message) if isinstance(own, InvalidArgument | NotFound) else own
