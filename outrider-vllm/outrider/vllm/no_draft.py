"""The proposer that vLLM asks for drafts: it has none. Drafts come to the scheduler; that there is a proposer makes the
runner verify them."""

from __future__ import annotations

from typing import Any


class NoDraft:
    """As `speculative_config.model` names it."""

    def __init__(self, vllm_config: Any) -> None:
        pass

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to load."""

    def propose(self, *args: Any, **kwargs: Any) -> list[list[int]]:
        """No drafts of its own."""
        return []
