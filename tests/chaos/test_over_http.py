"""The reader over HTTP: what it takes for a lost stream, and how it goes on with one that a fault has ended."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Callable, Mapping
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from chaos import over_http
from chaos.asks import Answer, Ask, all_asks
from chaos.over_http import Asker, Choices, askable
from chaos.streams import Stream, judge

from outrider.rpc.words.sampling_params import FinishReason

TOKENS, CUT_AT = tuple(range(3, 13)), 4
ASKS = askable(all_asks(0, len(TOKENS)))
ONE = next(ask for ask in ASKS if ask.shape == "plain text")
TWO = next(ask for ask in ASKS if ask.shape == "two completions")
LENGTH = FinishReason.LENGTH


def text_of(ids: tuple[int, ...]) -> str:
    return "".join(f"<{token}>" for token in ids)


def whole(ask: Ask) -> Answer:
    others = tuple(Answer(TOKENS[::-1], text_of(TOKENS[::-1]), LENGTH) for _ in range(ask.options.get("n", 1) - 1))
    return Answer(TOKENS, text_of(TOKENS), LENGTH, others=others)


class Gateway(httpx.AsyncBaseTransport):
    """All of a fleet: the first answer ends in its own way in the middle of its last completion; the next one goes on
    from what it is given, and says once more of the others that they have ended."""

    def __init__(self, end: Callable[[], bytes], ask: Ask, changes: Mapping[int, int] | None = None) -> None:
        self._end, self._answer, self._changes = end, whole(ask), dict(changes or {})
        self.bodies: list[dict[str, Any]] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/readyz":
            return httpx.Response(200)
        body = json.loads(await request.aread())
        self.bodies.append(body)
        return httpx.Response(200, stream=Events(self._said(body)))

    async def _said(self, body: dict[str, Any]) -> AsyncIterator[bytes]:
        had = body.get("output_ids") or []
        lists = had if had and isinstance(had[0], list) else [had]
        is_first = len(self.bodies) == 1
        for place, one in enumerate(self._answer.completions):
            start = len(lists[place]) if place < len(lists) else 0
            is_last = place + 1 == len(self._answer.completions)
            stop = CUT_AT if is_first and is_last else len(one.ids)
            if start == stop:
                yield event(
                    {"choices": [{"index": place, "text": "again", "token_ids": [], "finish_reason": "length"}]}
                )
            for number in range(start, stop):
                token = one.ids[number]
                told = token if is_first else self._changes.get(token, token)
                finish = "length" if number + 1 == len(one.ids) else None
                choice = {"index": place, "text": f"<{told}>", "token_ids": [told], "finish_reason": finish}
                yield event({"choices": [choice], "system_fingerprint": "fp_abc"})
        yield self._end() if is_first else b"data: [DONE]\n\n"


class Events(httpx.AsyncByteStream):
    def __init__(self, said: AsyncIterator[bytes]) -> None:
        self._said = said

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._said:
            yield part


def event(content: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(content)}\n\n".encode()


def with_an_error() -> bytes:
    return event({"error": {"message": "no target can go on"}}) + b"data: [DONE]\n\n"


def cut() -> bytes:
    raise httpx.ReadError("reset")


def in_silence() -> bytes:
    return b""


ENDS = pytest.mark.parametrize("end", [with_an_error, cut, in_silence])


class Fleet:
    """What a reader needs of one."""

    def __init__(self, *victims: str) -> None:
        self.gateways, self.targets = ([self._member(f"{role} {n}", victims) for n in range(2)] for role in ROLES)

    def _member(self, name: str, victims: tuple[str, ...]) -> Any:
        until = math.inf if name in victims else 0.0
        counts = SimpleNamespace(refused=0)
        proxies = [SimpleNamespace(counts=counts)]
        return SimpleNamespace(name=name, proxies=proxies, was_victim=lambda since: until > since)

    def http_address(self, gateway: Any) -> str:
        return f"{gateway.name.replace(' ', '')}:80"


ROLES = ("gateway", "target")


async def read(monkeypatch: pytest.MonkeyPatch, gateway: Gateway, fleet: Fleet, ask: Ask) -> tuple[Stream, Asker]:
    """One request, judged."""
    monkeypatch.setattr(over_http, "unpooled", lambda: httpx.AsyncClient(transport=gateway))
    monkeypatch.setattr(over_http, "WAIT_S", 0.0)
    asker, choices, stream = Asker(fleet), Choices(ask), Stream(ask, "http", 0.0)  # type: ignore[arg-type]
    stream.error = await asker.ask(choices, stream.arrivals)
    if not stream.error:
        judge(stream, choices.answer(), {ask.key: whole(ask)}, left=False)
    return stream, asker


FIRST = "gateway 1"  # is asked first


@ENDS
@pytest.mark.parametrize("ask", [ONE, TWO], ids=["one", "two completions"])
@pytest.mark.parametrize("victims", [(FIRST,), ("target 0", "target 1")], ids=["its gateway", "all targets"])
async def test_who_is_cut_by_a_fault_goes_on_with_what_has_come(
    end: Any, ask: Ask, victims: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = Gateway(end, ask)
    stream, asker = await read(monkeypatch, gateway, Fleet(*victims), ask)
    assert stream.error == stream.change == ""
    assert len(gateway.bodies) == 2 and asker.num_resumed == 1
    assert (len(asker.errors_told), asker.broken_off) == ((1, 0) if end is with_an_error else (0, 1))
    again, had = gateway.bodies[1], list(TOKENS[:CUT_AT])
    assert again["output_ids"] == (had if ask is ONE else [list(TOKENS), list(TOKENS[::-1][:CUT_AT])])
    assert again["system_fingerprint"] == "fp_abc" and again["seed"] == ask.options["seed"]
    assert len(stream.arrivals) == len(TOKENS) * ask.options.get("n", 1)


@ENDS
@pytest.mark.parametrize("victims", [(), ("gateway 0",), ("target 0",)], ids=["nobody", "the other", "one target"])
async def test_who_is_cut_without_a_fault_is_lost(
    end: Any, victims: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = Gateway(end, ONE)
    stream, _ = await read(monkeypatch, gateway, Fleet(*victims), ONE)
    assert "which nothing befell" in stream.error and len(gateway.bodies) == 1


async def test_another_answer_behind_the_cut_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, _ = await read(monkeypatch, Gateway(cut, ONE, {TOKENS[7]: 99}), Fleet(FIRST), ONE)
    assert stream.change.startswith("token 7 is 99")
