"""An engine takes another one's place. What was opened with the weights of before ends with them, on the engine of
before; what is of the new ones waits, and is the new engine's first work. A request is of one model to its end."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from outrider.rpc.messages import Open, TargetCommand, TargetEvent
from outrider.rpc.servicer import Deliver, Detach
from outrider.target_service.sequence import SequenceKey

Command = Deliver[TargetCommand, TargetEvent] | Detach


@dataclass(slots=True)
class Succession:
    """Told apart by the digests that Opens name. Belongs to the device thread."""

    digests: Collection[str]  # of the new weights, alone and with each adapter
    held: list[Command] = field(default_factory=list)
    _keys: set[SequenceKey] = field(default_factory=set)  # of sequences that are held

    def sift(self, command: Command) -> Command:
        """What is the present engine's of a command; the rest is held, in its order."""
        if isinstance(command, Detach):
            self.held.append(command)
            return command
        own: list[TargetCommand] = []
        later: list[TargetCommand] = []
        for message in command.messages:
            key = command.stream, message.sequence_id
            if isinstance(message, Open) and self._is_next(command.stream, message):
                self._keys.add(key)
            (later if key in self._keys else own).append(message)
        if later:
            self.held.append(replace(command, messages=later))
        return replace(command, messages=own)

    def _is_next(self, stream: int, message: Open) -> bool:
        parent = None if message.fork_of is None else (stream, message.fork_of)
        return message.model_digest in self.digests or parent in self._keys
