"""Whether a draft fits a target, by what both say of their tokenizers. A draft that does not fit is never lossy (the
target verifies every token), only useless, so a real mismatch is refused and a padded vocabulary is not."""

from __future__ import annotations

from outrider.gateway.text.tokenizer import LEAST_AGREEMENT, Tokenizer
from outrider.rpc.errors import FailedPrecondition
from outrider.rpc.messages import ModelInfo


def check_pair(target: ModelInfo, draft: ModelInfo, tokenizers: tuple[Tokenizer, Tokenizer] | None = None) -> str:
    """Returns a warning, empty if all is well. `tokenizers` (the target's and the draft's) let different fingerprints
    be judged by their agreement. Raises FailedPrecondition that names both models."""
    if draft.vocab_size == 0:
        return ""  # a token-only method
    if target.tokenizer_fingerprint and draft.tokenizer_fingerprint:
        if target.tokenizer_fingerprint in (draft.tokenizer_fingerprint, *draft.mapped_fingerprints):
            return ""
        return _check_agreement(target, draft, tokenizers)
    return _check_sizes(target, draft)


def check_tokenizer(tokenizer: Tokenizer, target: ModelInfo) -> str:
    """The same of the gateway's tokenizer and the target, of which one must have been made for the other."""
    if not target.tokenizer_fingerprint:
        if tokenizer.num_tokens > target.vocab_size:
            raise _mismatch(
                f"tokenizer {tokenizer.name} has {tokenizer.num_tokens} tokens, target {target.name} only "
                f"{target.vocab_size} logits"
            )
        return f"target {target.name} names no tokenizer: {tokenizer.name} is taken on trust"
    if tokenizer.fingerprint != target.tokenizer_fingerprint:
        raise _mismatch(
            f"tokenizer {tokenizer.name} ({tokenizer.num_tokens} tokens) is not that of target {target.name} "
            f"({target.num_tokens} tokens): their fingerprints differ"
        )
    return ""


def _check_agreement(target: ModelInfo, draft: ModelInfo, tokenizers: tuple[Tokenizer, Tokenizer] | None) -> str:
    names = f"target {target.name} ({target.num_tokens} tokens) and draft {draft.name} ({draft.num_tokens} tokens)"
    if tokenizers is None:
        raise _mismatch(
            f"not a pair: the tokenizers of {names} differ; a draft of another vocabulary is started with "
            "--target-tokenizer and the target's folder"
        )
    mine, other = tokenizers
    known = (target.tokenizer_fingerprint, draft.tokenizer_fingerprint)
    if (mine.fingerprint, other.fingerprint) != known:
        raise _mismatch(f"not a pair: the tokenizers of {names} differ, and those given are not theirs")
    share = mine.agreement(other)
    if share < LEAST_AGREEMENT:
        raise _mismatch(
            f"not a pair: {share:.1%} of the token ids of {names} stand for the same token; "
            f"at least {LEAST_AGREEMENT:.0%} must"
        )
    return f"the tokenizers of {names} agree on {share:.2%} of their ids"


def _check_sizes(target: ModelInfo, draft: ModelInfo) -> str:
    """Without fingerprints: the numbers of tokens where both are known, else of logits, which are padded."""
    mine, other = target.num_tokens, draft.num_tokens
    if not mine or not other:
        mine, other = target.vocab_size, draft.vocab_size
    names = f"target {target.name} ({mine}) and draft {draft.name} ({other})"
    if min(mine, other) < LEAST_AGREEMENT * max(mine, other):
        raise _mismatch(f"not a pair: the vocabularies of {names} differ in size")
    return f"{names} cannot be compared by their tokenizers: taken for a pair by the sizes of their vocabularies"


def _mismatch(message: str) -> FailedPrecondition:
    return FailedPrecondition(message, reason="NOT_A_PAIR")
