"""Tools as a request names them, and calls as an answer has them."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from outrider.rpc.words.answer import ToolCallDelta

NUM_SHORT = 9  # characters of an id that Mistral's templates accept


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    parameters: Mapping[str, Any]  # a JSON schema of an object
    strict: bool  # the arguments must satisfy it


def join_calls(deltas: Iterable[ToolCallDelta]) -> tuple[ToolCallDelta, ...]:
    """Whole calls of their pieces, in order."""
    calls: dict[int, list[ToolCallDelta]] = {}
    for delta in deltas:
        calls.setdefault(delta.index, []).append(delta)
    return tuple(replace(pieces[0], arguments="".join(each.arguments for each in pieces)) for pieces in calls.values())


def call_ids(
    request_id: str, seed: int, prompt_ids: Sequence[int], completion: int, short: bool = False
) -> Callable[[int], str]:
    """The ids of a completion's calls, by number. They depend on the request alone, so that one that is resumed
    elsewhere goes on with the same."""
    digest = hashlib.sha256(f"{request_id}\0{seed}\0{completion}\0".encode())
    digest.update(array("Q", prompt_ids).tobytes())

    def call_id(index: int) -> str:
        own = digest.copy()
        own.update(str(index).encode())
        return own.hexdigest()[:NUM_SHORT] if short else f"call_{own.hexdigest()[:24]}"

    return call_id
