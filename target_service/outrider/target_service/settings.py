"""The settings of `outrider target`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Self

from pydantic import AfterValidator, Field, model_validator

from outrider.engine.token_tree import TokenTree
from outrider.rpc.sampling_params import ALL_LOGPROBS, MAX_LOGPROBS
from outrider.rpc.settings import CHECKPOINT, Address, ModelSettings, ServerSettings, VllmMetrics


class TargetSettings(ServerSettings, ModelSettings):
    """What a target service is told at start, besides what all services are."""

    section: ClassVar[str] = "target"

    model: Annotated[Path, CHECKPOINT]
    listen: Address = "127.0.0.1:50051"
    head: Path | None = Field(
        None,
        description="folder of a head that drafts beside the model, or its hub id: EAGLE, EAGLE-3, MTP, MLP speculator "
        "or Medusa (of a model with MTP layers: the model's own)",
    )
    speculative_token_tree: Annotated[str, AfterValidator(TokenTree.checked)] | None = Field(
        None,
        description='what the head drafts for greedy and coupled requests in place of chains: paths as "[(0,), (1,), '
        '(0, 0)]", whose numbers are ranks among the likeliest tokens',
    )
    prefix_cache: bool = Field(True, description="reuse the blocks of known prompts")
    batch_invariant: bool = Field(False, description="one reduction order for any number of rows: bit-identical rows")
    max_window: int = Field(32, ge=0, le=128, description="most drafted tokens of one verification")
    cut_windows: bool = Field(True, description="verify fewer drafted tokens where sequences share a step and it pays")
    max_logprobs: int = Field(
        MAX_LOGPROBS,
        ge=ALL_LOGPROBS,
        description="most log probabilities of a position that a request may ask for; -1: the whole vocabulary's",
    )
    untrusted_draft: bool = Field(False, description="ignore the draft's weights: every drafted token is one-hot")
    vllm_metrics: VllmMetrics = False
    trust_remote_code: bool = Field(False, description="run code that comes with the checkpoint")
    expand: bool = Field(
        False, description="compute the same function by a network of about 300M parameters (Llama; for demonstrations)"
    )

    @property
    def tree(self) -> TokenTree | None:
        """What the head drafts; None: chains."""
        return None if self.speculative_token_tree is None else TokenTree.parse(self.speculative_token_tree)

    @model_validator(mode="after")
    def _check_tree(self) -> Self:
        if self.speculative_token_tree is not None and self.head is None:
            raise ValueError("speculative_token_tree (--speculative-token-tree) is for a head; give --head DIR, too")
        return self
