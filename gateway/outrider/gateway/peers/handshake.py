"""Whether the gateway's tokenizer is the target's, and what a draft of another vocabulary is given. Whether a draft
fits a target: see rpc/pair.py."""

from __future__ import annotations

from outrider.gateway.text.tokenizer import Tokenizer
from outrider.rpc.messages import DraftInfo, ModelInfo
from outrider.rpc.pair import not_a_pair
from outrider.rpc.vocabulary import TokenizerFile


def check_tokenizer(tokenizer: Tokenizer, target: ModelInfo) -> str:
    """Returns a warning, empty if the gateway's tokenizer and the target were made for one another. Raises
    FailedPrecondition that names both."""
    if not target.tokenizer_fingerprint:
        if tokenizer.num_tokens > target.vocab_size:
            raise not_a_pair(
                f"tokenizer {tokenizer.name} has {tokenizer.num_tokens} tokens, target {target.name} only "
                f"{target.vocab_size} logits"
            )
        return f"target {target.name} names no tokenizer: {tokenizer.name} is taken on trust"
    if tokenizer.fingerprint != target.tokenizer_fingerprint:
        raise not_a_pair(
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
