"""Messages in channels, as gpt-oss writes its output (OpenAI's harmony format):

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>

A head says the channel; `analysis` is reasoning, `final` the answer, and so is `commentary`, what is said beside calls.
Heads and ends are told by their tokens' ids and belong to no text. Where the output begins without a head, as one that
is constrained from its first token does, it is the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.gateway.text.tokenizer import Tokenizer

CHANNELS = "openai_gptoss"  # vLLM's name of its parser
CHANNEL_TOKENS = START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
REASONS = f"{CHANNEL}analysis{MESSAGE}"
ANSWERS = f"{END}{START}assistant{CHANNEL}final{MESSAGE}"


@dataclass(frozen=True, slots=True)
class Channels:
    """What a tokenizer has for them."""

    start_ids: tuple[int, ...]  # of REASONS
    end_ids: tuple[int, ...]  # of ANSWERS
    start_id: int  # of START, and so on
    channel_id: int
    message_id: int
    end_id: int


def channels_of(tokenizer: Tokenizer) -> Channels:
    """The channels of a tokenizer that has all of CHANNEL_TOKENS."""
    ids = {text: token_id for token_id, text in tokenizer.added_tokens.items()}
    start_ids, end_ids = (tuple(tokenizer.encode(text, add_special_tokens=False)) for text in (REASONS, ANSWERS))
    return Channels(start_ids, end_ids, *(ids[text] for text in CHANNEL_TOKENS))


class ChannelBoundaries:
    """Where the messages of an output begin and end, from its first token on; `is_open`: the prompt ends inside
    reasoning."""

    def __init__(self, channels: Channels, is_open: bool) -> None:
        self.is_inside, self._channels = is_open, channels
        self._head: list[int] | None = None  # so far; None: in a text

    def find(self, ids: Sequence[int], begin: int) -> int:
        """The place from which a text goes on: every token of a head is a marker."""
        if self._head is not None:
            return begin
        markers = self._channels.start_id, self._channels.channel_id, self._channels.end_id
        return next((place for place in range(begin, len(ids)) if ids[place] in markers), len(ids))

    def take(self, token_id: int) -> None:
        """Steps over a marker: a token of a head, or the end of a text."""
        channels = self._channels
        if token_id == channels.end_id:
            self.is_inside, self._head = False, None
            return
        if self._head is None:
            self._head = []
        self._head.append(token_id)
        if token_id == channels.message_id:
            self.is_inside, self._head = self._is_reasoning(tuple(self._head)), None

    def _is_reasoning(self, head: tuple[int, ...]) -> bool:
        """Whether the channel's name is that of reasoning; the role before it, and what follows it, say nothing."""
        name = self._channels.start_ids[:-1]
        place = head.index(name[0]) if name[0] in head else len(head)
        return head[place : place + len(name)] == name
