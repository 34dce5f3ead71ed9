"""What clients hold before admission knows of them, connections and bodies under way: bounded in all, and for each of
them, so that one leaves room for others."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from starlette.requests import Request
from starlette.responses import Response

from outrider.gateway.auth import CALLER
from outrider.rpc.errors import ResourceExhausted

PARTS = 4  # one client has one of them
BACK_MS = 1000  # when who found no room may come back
LOCAL = ""  # who asks in this process


class Shares:
    """Counts `what` is held, in all and by whom. This machine may hold all of it: a proxy may stand here."""

    def __init__(self, what: str, most: int) -> None:
        self._what, self._most, self._held = what, most, 0
        self._of: Counter[str] = Counter()

    def take(self, who: str, amount: int = 1) -> None:
        """ResourceExhausted where it is too much."""
        share = self._most if is_local(who) else max(1, self._most // PARTS)
        if self._held + amount > self._most or self._of[who] + amount > share:
            message = f"too many {self._what}; allowed: at most {self._most} in all, {share} of one client"
            raise ResourceExhausted(message, reason="CLIENT_SHARE", retry_after_ms=BACK_MS)
        self._held += amount
        self._of[who] += amount

    def give(self, who: str, amount: int = 1) -> None:
        self._held -= amount
        self._of[who] -= amount
        if not self._of[who]:
            del self._of[who]

    @contextmanager
    def holding(self, who: str) -> Iterator[Callable[[int], None]]:
        """Takes what the function within is told, and gives all of it back at the end."""
        held = 0

        def take(amount: int) -> None:
            nonlocal held
            self.take(who, amount)
            held += amount

        try:
            yield take
        finally:
            self.give(who, held)


def is_local(who: str) -> bool:
    """Whether it is an address of this machine's own."""
    try:
        return who == LOCAL or ipaddress.ip_address(who).is_loopback
    except ValueError:
        return False


def client_of(request: Request) -> str:
    """Whose share it takes: its credential's, else its host's."""
    caller, host = CALLER.get(), request.client
    if caller is not None:
        return f"caller {caller.name}"
    return LOCAL if host is None else host.host


def account_of(request: Request) -> str:
    """Whose share of threads it takes, by the name that what it generates would have."""
    return client_of(request) if CALLER.get() is not None else f"peer {client_of(request)}"


def last_words(response: Response) -> bytes:
    """An answer to whatever is asked on a connection that ends with it."""
    headers = (*response.raw_headers, (b"connection", b"close"))
    head = b"".join(b"%b: %b\r\n" % header for header in headers)
    return b"HTTP/1.1 %d \r\n%b\r\n%b" % (response.status_code, head, bytes(response.body))
