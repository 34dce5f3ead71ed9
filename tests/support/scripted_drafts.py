"""A draft service that follows a script, whatever that makes it send."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from support.fakes import DraftSequence, DraftServicer, ToyDraft

from outrider.rpc.messages import Commit, Credit, DraftInfo, DraftTokens, Open

Send = Callable[[Any], None]


class Hostile(DraftSequence):
    """One sequence of a draft that answers every message by `script(sequence, send)`."""

    def __init__(self, request: Open, emit: Send, servicer: HostileServicer) -> None:
        super().__init__(request, emit, servicer.toy)
        self.servicer = servicer
        self.num_heard = 0

    def on(self, message: Any) -> None:
        if isinstance(message, Commit):
            self.tokens += message.ids
        elif isinstance(message, Credit):
            self.until, self.window = message.until, message.max_window
        self.num_heard += 1
        self.servicer.script(self, self.emit)

    def piece(self, ids: tuple[int, ...], position: int | None = None, **fields: Any) -> DraftTokens:
        """The next chain, at the end of what is committed."""
        self.chain += 1
        at = len(self.tokens) if position is None else position
        return DraftTokens(0, fields.pop("chain", self.chain), at, ids, **fields)


class HostileServicer(DraftServicer):
    """Serves a script."""

    def __init__(self, script: Callable[[Hostile, Send], None], info: DraftInfo) -> None:
        super().__init__(ToyDraft(info=info))
        self.script = script

    def start(self, request: Open, sequences: dict[int, Any], emit: Send) -> Any:
        return Hostile(request, emit, self)


def packed(*numbers: int) -> bytes:
    """As ids and weights travel."""
    return b"".join(number.to_bytes(4, "little") for number in numbers)
