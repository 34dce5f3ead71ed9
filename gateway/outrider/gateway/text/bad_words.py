"""Words that must not be generated, as the ids that the target knows."""

from __future__ import annotations

from dataclasses import replace

from outrider.gateway.text.tokenizer import Tokenizer
from outrider.rpc.errors import InvalidArgument, Violation
from outrider.rpc.words.sampling_params import SamplingParams


def with_bad_words(sampling: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    """The sampling with the ids of its bad words. InvalidArgument for one that has no tokens."""
    try:
        ids = tokenizer.bad_words_ids(sampling.bad_words)
    except ValueError as error:
        problem = str(error).removeprefix("bad_words: ")
        raise InvalidArgument.of([Violation("sampling.bad_words", problem)]) from error
    return replace(sampling, bad_words_ids=(*sampling.bad_words_ids, *ids))
