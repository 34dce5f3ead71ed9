"""Whether a draft fits a target, by what both say of their tokenizers. A draft that does not fit is never lossy (the
target verifies every token), only useless: its vocabulary is the target's, or one that it maps."""

from __future__ import annotations

from outrider.gateway.text.tokenizer import Tokenizer
from outrider.rpc.errors import FailedPrecondition
from outrider.rpc.messages import DraftInfo, ModelInfo
from outrider.rpc.vocabulary import TokenizerFile

LEAST_SIZE = 0.99  # of the larger vocabulary, for a pair of which no more is known


def check_pair(target: ModelInfo, draft: ModelInfo) -> str:
    """Returns a warning, empty if all is well. Raises FailedPrecondition that names both models."""
    if draft.vocab_size == 0:
        return ""  # a token-only method
    if target.tokenizer_fingerprint and draft.tokenizer_fingerprint:
        if target.tokenizer_fingerprint in (draft.tokenizer_fingerprint, *draft.mapped_fingerprints):
            return ""
        raise _mismatch(
            f"not a pair: the tokenizers of target {target.name} ({target.num_tokens} tokens) and draft {draft.name} "
            f"({draft.num_tokens} tokens) differ; a draft of another vocabulary gets it from a gateway with the "
            "target's tokenizer, or is started with --target-tokenizer and the target's folder"
        )
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


def vocabulary_for(draft: DraftInfo, target: ModelInfo, tokenizer: Tokenizer) -> TokenizerFile | None:
    """What a draft is to be given so that it can draft for the target; None where it needs nothing, or takes
    nothing."""
    own, wanted = draft.model.tokenizer_fingerprint, target.tokenizer_fingerprint
    if not own or wanted != tokenizer.fingerprint or wanted in (own, *draft.model.mapped_fingerprints):
        return None
    file = tokenizer.file
    return file if len(file.layout) <= draft.max_vocabulary_bytes else None


def _check_sizes(target: ModelInfo, draft: ModelInfo) -> str:
    """Without fingerprints: the numbers of tokens where both are known, else of logits, which are padded."""
    mine, other = target.num_tokens, draft.num_tokens
    if not mine or not other:
        mine, other = target.vocab_size, draft.vocab_size
    names = f"target {target.name} ({mine}) and draft {draft.name} ({other})"
    if min(mine, other) < LEAST_SIZE * max(mine, other):
        raise _mismatch(f"not a pair: the vocabularies of {names} differ in size")
    return f"{names} cannot be compared by their tokenizers: taken for a pair by the sizes of their vocabularies"


def _mismatch(message: str) -> FailedPrecondition:
    return FailedPrecondition(message, reason="NOT_A_PAIR")
