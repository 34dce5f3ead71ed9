"""A request's guess at its output: how its text becomes ids, and what drafts from it where the draft does not."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from outrider.gateway.peers.local_drafts import LocalDrafter
from outrider.gateway.speculation.backends import Drafter
from outrider.gateway.speculation.schedule import ScheduledDrafter
from outrider.gateway.text.tokenizer import Tokenizer, encode_bounded
from outrider.proposers.prediction import PredictionProposer
from outrider.rpc.errors import InvalidArgument, Violations
from outrider.rpc.messages import ModelInfo

PREDICTION = PredictionProposer.name
NUM_DRAFT_TOKENS = 8  # a round, where nothing is drafted else
TAIL_TOKENS = 8  # of a prompt that decide how the text after it is tokenised


def encoder_after(tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> Callable[[str], Sequence[int]]:
    """Tokenises what follows a prompt as the model would write it: a text's first token may depend on what stands
    before it (a space, the marker of a beginning). Where the prompt's end does not come out as it is, by itself."""
    tail = list(prompt_ids[-TAIL_TOKENS:])

    def encode(text: str) -> Sequence[int]:
        joined = tokenizer.encode(tokenizer.decode(tail) + text, add_special_tokens=False)
        if joined[: len(tail)] == tail:
            return joined[len(tail) :]
        return tokenizer.encode(text, add_special_tokens=False)

    return encode


async def prediction_ids(
    found: Violations,
    given: str | tuple[int, ...],
    prompt_ids: tuple[int, ...],
    tokenizer: Tokenizer,
    model: ModelInfo,
) -> tuple[int, ...]:
    """The guess at the output; at most as many tokens as the context has."""
    most = model.max_model_len
    try:
        if isinstance(given, str):
            field = "prediction.text"
            ids = await encode_bounded(field, given, most, encoder_after(tokenizer, prompt_ids))
        else:
            field, ids = "prediction.token_ids.ids", given
    except InvalidArgument as error:
        found.take(error)
        return ()
    if not ids:
        found.add(field, "is empty", f"1 to {most} tokens, or no prediction")
    elif found.length(field, ids, most, "tokens"):
        found.ids(field, ids, model.vocab_size)
    return ids


def predictor(drafter: Drafter | None) -> Drafter:
    """Drafts from predictions in this process, within the bounds that hold for the drafter that there is."""
    local = LocalDrafter([PredictionProposer()])
    return drafter.bound(local) if isinstance(drafter, ScheduledDrafter) else local
