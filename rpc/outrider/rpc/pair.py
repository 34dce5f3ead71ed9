"""Whether a draft fits a target, by what both say of their tokenizers. A draft that does not fit is never lossy (the
target verifies every token), only useless: its vocabulary is the target's, or one that it maps."""

from __future__ import annotations

from outrider.rpc.errors import FailedPrecondition
from outrider.rpc.messages import ModelInfo

LEAST_SIZE = 0.99  # of the larger vocabulary, for a pair of which no more is known


def check_pair(target: ModelInfo, draft: ModelInfo) -> str:
    """Returns a warning, empty if all is well. Raises FailedPrecondition that names both models."""
    if draft.vocab_size == 0:
        return ""  # a token-only method
    if target.tokenizer_fingerprint and draft.tokenizer_fingerprint:
        if target.tokenizer_fingerprint in (draft.tokenizer_fingerprint, *draft.mapped_fingerprints):
            return ""
        raise not_a_pair(
            f"not a pair: the tokenizers of target {target.name} ({target.num_tokens} tokens) and draft {draft.name} "
            f"({draft.num_tokens} tokens) differ; a draft of another vocabulary gets it from a gateway with the "
            "target's tokenizer, or is started with --target-tokenizer and the target's folder"
        )
    return _check_sizes(target, draft)


def _check_sizes(target: ModelInfo, draft: ModelInfo) -> str:
    """Without fingerprints: the numbers of tokens where both are known, else of logits, which are padded."""
    mine, other = target.num_tokens, draft.num_tokens
    if not mine or not other:
        mine, other = target.vocab_size, draft.vocab_size
    names = f"target {target.name} ({mine}) and draft {draft.name} ({other})"
    if min(mine, other) < LEAST_SIZE * max(mine, other):
        raise not_a_pair(f"not a pair: the vocabularies of {names} differ in size")
    return f"{names} cannot be compared by their tokenizers: taken for a pair by the sizes of their vocabularies"


def not_a_pair(message: str) -> FailedPrecondition:
    """The error that says so."""
    return FailedPrecondition(message, reason="NOT_A_PAIR")
