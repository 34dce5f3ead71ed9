"""How the link's messages are written: the protocol's dataclasses as JSON arrays of their fields behind their name. It
makes nothing but values of whatever it reads, as a pickle would not, and takes a fraction of protobuf's time for
messages this short."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from enum import Enum
from operator import attrgetter
from typing import Any

from outrider.rpc.messages import (
    Close,
    Commit,
    Credit,
    DraftTokens,
    Failure,
    Load,
    PromptLogprobs,
    StepTimings,
    TokenWeights,
)
from outrider.rpc.words.answer import PositionLogprobs, TokenLogprob
from outrider.rpc.words.sampling_params import FinishReason, TokenOrigin
from outrider.vllm.source import StepReport

BYTES = "latin-1"  # in which every byte is a character, and JSON has no other way

LinkCommand = DraftTokens | Credit | Close
LinkEvent = StepReport | Commit  # one without ids, that names dropped chains


def write(messages: Sequence[LinkCommand | LinkEvent]) -> bytes:
    """As they travel."""
    return json.dumps(messages, default=_plain, separators=(",", ":")).encode()


def read(body: bytes | bytearray) -> Iterator[Any]:
    """The messages that were written. Raises ValueError, LookupError or TypeError for what is none."""
    return map(_message, json.loads(body))


def _plain(value: Any) -> Any:
    """What JSON has no word for."""
    if isinstance(value, bytes):
        return value.decode(BYTES)
    if isinstance(value, Enum):
        return value.value
    return _FIELDS[type(value)](value)


def _message(said: Sequence[Any]) -> Any:
    return _MESSAGES[said[0]](said)


def _weights(said: Sequence[Any]) -> tuple[TokenWeights | None, ...]:
    return tuple(one and TokenWeights(one[0].encode(BYTES), one[1].encode(BYTES)) for one in said)


def _logprobs(said: Sequence[Any]) -> tuple[PositionLogprobs, ...]:
    return tuple(tuple(TokenLogprob(*one) for one in position) for position in said)


# What JSON gives back as another kind of value, by the fields' names.
_READ: dict[str, Callable[[Any], Any]] = {
    "ids": tuple,
    "parents": tuple,
    "dropped": tuple,
    "waits": tuple,
    "weights": _weights,
    "logprobs": _logprobs,
    "origins": lambda said: tuple(map(TokenOrigin, said)),
    "finish_reason": lambda said: None if said is None else FinishReason(said),
    "timings": lambda said: StepTimings(*said),
    "load": lambda said: Load(*said),
    "events": lambda said: list(map(_message, said)),
}


def _names(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind) if field.init)


def _writer(kind: Any, name: str = "") -> Callable[[Any], tuple[Any, ...]]:
    """The fields, behind `name` if there is one."""
    fields_of = attrgetter(*_names(kind), "__class__")  # a second name, so that one field is a tuple, too
    return (lambda value: (name, *fields_of(value)[:-1])) if name else lambda value: fields_of(value)[:-1]


def _reader(kind: Any) -> Callable[[Sequence[Any]], Any]:
    """A message of its name and fields."""
    readers = [(place, _READ[name]) for place, name in enumerate(_names(kind), start=1) if name in _READ]

    def make(said: Sequence[Any]) -> Any:
        values = list(said)
        for place, reader in readers:
            values[place] = reader(values[place])
        return kind(*values[1:])

    return make


_KINDS = (DraftTokens, Credit, Close, StepReport, Commit, PromptLogprobs, Failure)
_MESSAGES = {kind.__name__: _reader(kind) for kind in _KINDS}
_FIELDS: dict[type[Any], Callable[[Any], tuple[Any, ...]]] = {
    **{kind: _writer(kind, kind.__name__) for kind in _KINDS},
    **{kind: _writer(kind) for kind in (TokenWeights, StepTimings, Load)},
}
