"""A conversation with a gateway: its messages, and what happens to them when an answer ends early."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterator
from typing import Any

from outrider.client import Part, SyncClient
from outrider.commands.answers import Answer
from outrider.wire.errors import InvalidArgument

Show = Callable[[Iterator[Part], Answer], None]

# What a refusal of the request's length says of max_tokens.
_ROOM = re.compile(r"allowed: at most (\d+)")


class Conversation:
    """The messages so far. Every question is sent with all of them; the target's prefix cache knows the old ones."""

    def __init__(self, client: SyncClient, system: str, max_tokens: int, options: dict[str, Any]) -> None:
        self._client = client
        self._opening = [{"role": "system", "content": system}] if system else []
        self._max_tokens = max_tokens
        self._options = options
        self.messages: list[dict[str, str]] = []
        self.speculate = True
        self.restart()

    def restart(self) -> None:
        """Forgets everything but the system message."""
        self.messages = list(self._opening)

    def ask(self, text: str, show: Show) -> Answer:
        """Puts a question and hands the parts of the answer to `show` as they come. What came of an answer that was
        interrupted stays in the conversation; a question without any answer does not."""
        self.messages.append({"role": "user", "content": text})
        answer, parts = Answer(0), self._parts()
        try:
            show(parts, answer)
        finally:
            parts.close()
            if answer.text:
                self.messages.append({"role": "assistant", "content": answer.text})
            else:
                self.messages.pop()
        return answer

    def _parts(self) -> Generator[Part, None, None]:
        """The gateway is the one that counts tokens: where it says that the context has less room, that is asked
        for."""
        try:
            yield from self._request(self._max_tokens)
        except InvalidArgument as error:
            room = _room(error)
            if room is None:
                raise
            yield from self._request(room)

    def _request(self, max_tokens: int) -> Iterator[Part]:
        return self._client.generate(
            messages=self.messages,
            max_tokens=max_tokens,
            speculate=None if self.speculate else False,
            **self._options,
        )


def _room(error: InvalidArgument) -> int | None:
    """The tokens that are left for an answer, if that is what the gateway complained of."""
    for violation in error.violations:
        found = _ROOM.search(violation.problem)
        if violation.field == "sampling.max_tokens" and found and int(found[1]) > 0:
            return int(found[1])
    return None
