"""Calls out of a text that grows: the machine that all formats share.

A format's parser is a coroutine over characters, so that the same text gives the same calls however it is split. What
may become a marker is held back. A call is told as soon as its name is known and its arguments begin, and these as they
come. What turns out to be no call is plain text: all of it where nothing of the call was told, else what follows the
last valid character of its arguments; but behind a call the beginning of a mark, or of another call, which the end has
cut, is dropped. White space around calls is dropped, where there is no other text.

What is read costs in proportion to its length, whatever stands in it: no text is copied or looked through once more for
each marker in it, or for each piece in which it comes."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from outrider.gateway.text.tokenizer import held_back
from outrider.gateway.text.tools.calls import join_calls
from outrider.rpc.words.answer import ToolCallDelta

MAX_CALLS = 128  # of a completion; further ones are text
MAX_HEAD_CHARS = 16 * 1024  # of a call before it is told
MAX_NAME_CHARS = 128
NAME = re.compile(rf"[A-Za-z0-9_.:/-]{{1,{MAX_NAME_CHARS}}}")  # of a function
MAX_DEPTH = 64  # of JSON
SPACES = " \t\r\n"

Reading = Generator[None, None, None]  # a step that waits for characters
ReadingText = Generator[None, None, str]
_HEX = frozenset("0123456789abcdefABCDEF")


class NoCall(Exception):
    """What was read is no call of this format."""


@dataclass(slots=True)
class Parsed:
    """What some characters added."""

    text: str = ""
    calls: list[ToolCallDelta] = field(default_factory=list)


class ToolParser(ABC):
    """The calls in the text of one completion."""

    markers: ClassVar[tuple[str, ...]] = ()  # a call begins at one of them
    inner: ClassVar[tuple[str, ...]] = ()  # further texts that may be special tokens
    short_ids: ClassVar[bool] = False  # its templates take no others
    bare: ClassVar[str] = ""  # or at the text's first character, where that is one of these brackets

    def __init__(self, call_id: Callable[[int], str], functions: Mapping[str, Mapping[str, Any]]) -> None:
        self._call_id, self.functions = call_id, functions  # these by name, with the schemas of their parameters
        self._marker = re.compile("|".join(map(re.escape, self.markers)) or "(?!)")
        self._buffer = ""
        self._at = self._told = 0  # how far it is read, and how far it is text or of a call
        self._num_apart = 0  # characters of a long element, which are not in the buffer until it ends
        self._ended = self._is_unclosed = False  # unclosed: an element goes on to the end
        self._said, self._pieces = list[str](), list[ToolCallDelta]()  # since the last push
        self.num_calls = self._num_said = 0
        self._in_arguments = False
        self._blank = True  # no text since the beginning or the last call
        self._spaces = list[str]()  # white space alone since then: of no use if a call follows
        self._reader = self._read()
        next(self._reader)

    @property
    def num_held(self) -> int:
        """Characters of which it isn't known yet what they are: what comes next may have them all looked through."""
        return self._num_apart + len(self._buffer)

    def push(self, text: str) -> Parsed:
        """Takes further text, and gives what it adds."""
        self._buffer += text
        return self._advance()

    def finish(self) -> Parsed:
        """What was held back, once nothing follows."""
        self._ended = True
        return self._advance()

    @abstractmethod
    def calls(self, marker: str) -> Reading:
        """Reads what follows a marker, the empty one before the text, to the end of its calls. Raises NoCall."""
        yield

    def _advance(self) -> Parsed:
        next(self._reader, None)
        parsed = Parsed("".join(self._said), list(join_calls(self._pieces)))
        self._said, self._pieces = [], []
        return parsed

    def _read(self) -> Reading:
        bare = bool(self.bare) and (yield from self._is_bare())
        while True:
            marker = ""
            if not bare:
                self._at = self._told
                marker = yield from self._next_marker()
                if not marker:
                    return
            bare, num_before = False, self.num_calls
            try:
                yield from self.calls(marker)
                self.end_call()
            except NoCall:
                self._stop_arguments()
                if self._blank and self.num_calls and self._is_at_end():  # it has cut a call's mark, or another call
                    self._told = self._at
                elif self.num_calls == num_before:  # its beginning is text; in the rest may be others
                    self._say_to(self._told + max(1, len(marker)))
            self._spaces.clear()

    def _is_bare(self) -> Generator[None, None, bool]:
        """Whether the text begins as a call without a marker."""
        try:
            yield from self.skip_spaces()
            char = yield from self.peek()
        except NoCall:
            return False
        return bool(char) and char in self.bare

    def _next_marker(self) -> ReadingText:
        """Tells text up to the next marker, which is read, too; empty at the end."""
        while True:
            knows_more = self.num_calls < MAX_CALLS
            found = self._marker.search(self._buffer, self._told) if knows_more else None
            if found is not None:
                self._say_to(found.start(), may_wait=True)
                self._at = found.end()
                if 2 * self._told > len(self._buffer):  # so that what is copied is less than what is forgotten
                    self._forget()
                return found[0]
            if self._ended and self._blank and self.num_calls:
                rest = self._buffer[self._told :].lstrip(SPACES)
                if any(marker.startswith(rest) for marker in self.markers):  # the end has cut the next call's
                    return ""
            num_held = held_back(self._buffer, self.markers) if knows_more and not self._ended else 0
            self._say_to(max(self._told, len(self._buffer) - num_held), may_wait=not self._ended)
            if self._ended:
                return ""
            self._forget()
            yield

    def _say_to(self, end: int, may_wait: bool = False) -> None:
        """Tells text up to a place. White space alone waits for what follows, if it may; behind a call none is told."""
        text, self._told = self._buffer[self._told : end], end
        is_blank = self._blank and not text.strip(SPACES)
        self._spaces.append(text)
        if is_blank and (may_wait or (self._ended and self.num_calls)):
            return
        text = "".join(self._spaces)
        self._spaces.clear()
        self._said.append(text)
        self._num_said += len(text)
        self._blank = is_blank

    def _is_at_end(self) -> bool:
        """Whether all is read, and nothing follows."""
        return self._ended and self._at >= len(self._buffer)

    def _forget(self) -> None:
        """What is told; nothing keeps a place in the buffer here."""
        self._buffer, self._at, self._told = self._buffer[self._told :], self._at - self._told, 0

    # What the formats' coroutines are made of.

    def peek(self) -> ReadingText:
        """The next character, which stays; empty at the end."""
        while self._at >= len(self._buffer):
            if self._ended:
                return ""
            if self._in_arguments:
                self._tell_arguments()
                self._forget()
            yield
        if not self._in_arguments and self._at - self._told > MAX_HEAD_CHARS:
            raise NoCall
        return self._buffer[self._at]

    def skip_spaces(self) -> Reading:
        """White space, if there is any."""
        while (char := (yield from self.peek())) and char in SPACES:
            self._at += 1

    def literal(self, text: str) -> Reading:
        """Matches exactly this text."""
        for expected in text:
            if (yield from self.peek()) != expected:
                raise NoCall
            self._at += 1

    def step_back(self) -> None:
        """The last character is not read."""
        self._at -= 1

    def follows(self, text: str) -> Generator[None, None, bool]:
        """Whether this text is next, after white space; it is read then, else nothing is. NoCall where the end has cut
        it."""
        before = self._at
        try:
            yield from self.skip_spaces()
            yield from self.literal(text)
        except NoCall:
            if self._is_at_end():
                raise
            self._at = before
            return False
        return True

    def until(self, ends: tuple[str, ...]) -> Generator[None, None, tuple[str, str]]:
        """The text up to the first of some ends, and that end; both are read. It is a name's, and as short."""
        begin, most = self._at, MAX_NAME_CHARS + max(map(len, ends)) + 1
        while True:
            text = self._buffer[begin : begin + most]
            found = [(place + len(end), end) for end in ends if (place := text.find(end)) >= 0]
            if found:
                break
            if self._ended or len(text) == most:
                self._at += len(text)
                raise NoCall
            yield
        length, end = min(found)
        self._at = begin + length
        if self._at - 1 - self._told > MAX_HEAD_CHARS:
            raise NoCall
        return text[: length - len(end)], end

    def call_object(self, known: bool = False) -> Reading:
        """One call as an object with `name`, and `arguments` or `parameters`, also inside `function`. `known`: of the
        request's functions alone."""
        call = _Call()
        yield from self._members(call, known)
        if not call.name or (known and call.name not in self.functions):
            raise NoCall
        if not call.told:
            self.tell_call(call.name, call.arguments or "{}")
        self.end_call()

    def call_list(self, known: bool = False) -> Reading:
        """Several as a list, from its first bracket; not empty."""
        yield from self.literal("[")
        while True:
            yield from self.skip_spaces()
            yield from self.call_object(known)
            if not (yield from self.follows(",")):
                break
        yield from self.skip_spaces()
        yield from self.literal("]")

    def call_arguments(self, name: str) -> Reading:
        """The arguments of a call whose name was read."""
        if not NAME.fullmatch(name):
            raise NoCall
        yield from self.skip_spaces()
        if (yield from self.peek()) != "{":
            raise NoCall
        self.tell_call(name)
        yield from self._tell_value()

    def through(self, end: str) -> ReadingText:
        """The text up to an end, of any length; both are read."""
        begin, apart = self._at, list[str]()
        while (found := -1 if self._is_unclosed else self._buffer.find(end, self._at)) < 0 and not self._ended:
            num_read = max(self._at, len(self._buffer) - len(end) + 1)
            apart.append(self._buffer[:num_read])
            self._buffer, self._at, self._num_apart = self._buffer[num_read:], 0, self._num_apart + num_read
            yield
        before, self._num_apart = "".join(apart), 0
        if before:
            self._buffer = before + self._buffer
        if found < 0:
            self._is_unclosed = True  # nor does one end that begins later
            raise NoCall
        self._at = len(before) + found + len(end)
        return self._buffer[begin : self._at - len(end)]

    def tell_call(self, name: str, arguments: str = "") -> None:
        """A call begins; with arguments it is whole."""
        if self.num_calls >= MAX_CALLS:
            raise NoCall
        number = self.num_calls
        self._pieces.append(ToolCallDelta(number, self._call_id(number), name, arguments, self._num_said))
        self.num_calls += 1
        self._blank = True
        self.end_call()

    def tell_more(self, arguments: str) -> None:
        """A further piece of the last call's arguments, in JSON, of what was read up to here."""
        self._pieces.append(ToolCallDelta(self.num_calls - 1, "", "", arguments, self._num_said))
        self.end_call()

    def end_call(self) -> None:
        """What was read up to here is no text, whatever follows."""
        self._told = self._at

    def _tell_value(self) -> Reading:
        """A JSON value, told as the last call's arguments while it comes."""
        self._told, self._in_arguments = self._at, True
        yield from self._value(0)
        self._stop_arguments()

    def _stop_arguments(self) -> None:
        self._tell_arguments()
        self._in_arguments = False

    def _tell_arguments(self) -> None:
        """Gives the arguments as far as they are read."""
        if not self._in_arguments or self._told == self._at:
            return
        self.tell_more(self._buffer[self._told : self._at])

    def _members(self, call: _Call, known: bool) -> Reading:
        yield from self.literal("{")
        while True:
            yield from self.skip_spaces()
            key = yield from self._string()
            yield from self.skip_spaces()
            yield from self.literal(":")
            yield from self.skip_spaces()
            yield from self._member(key, call, known)
            if not (yield from self.follows(",")):
                break
        yield from self.skip_spaces()
        yield from self.literal("}")

    def _member(self, key: str, call: _Call, known: bool) -> Reading:
        char = yield from self.peek()
        if key in ("name", "function") and char == '"':
            call.name = yield from self._string()
            if not NAME.fullmatch(call.name):
                raise NoCall
        elif key == "function" and char == "{":
            yield from self._members(call, known)
        elif key not in ("arguments", "parameters") or call.told:
            yield from self._value(0)
        elif char == "{" and call.name and not (known and call.name not in self.functions):
            self.tell_call(call.name)
            call.told = True
            yield from self._tell_value()
        else:
            call.arguments = yield from self._arguments_text(char)

    def _arguments_text(self, char: str) -> ReadingText:
        """Arguments that cannot be told yet, or are a text that holds them; null is none."""
        begin = self._at
        yield from self._value(0)
        value = self._buffer[begin : self._at]
        if char == '"':
            value = json.loads(value)
            try:
                is_object = isinstance(json.loads(value), dict)
            except (ValueError, RecursionError):
                is_object = False
        else:
            value, is_object = ("{}", True) if value == "null" else (value, char == "{")
        if not is_object:
            raise NoCall
        return value

    def _string(self) -> ReadingText:
        begin = self._at
        if (yield from self.peek()) != '"':
            raise NoCall
        yield from self._value(0)
        text: str = json.loads(self._buffer[begin : self._at])
        return text

    def _value(self, depth: int) -> Reading:
        """Reads a JSON value, a character at a time, and stops before the first that is wrong."""
        char = yield from self.peek()
        if char == '"':
            yield from self._string_value()
        elif char in ("{", "[") and char and depth < MAX_DEPTH:
            yield from self._container(char, depth)
        elif char and char in "tfn":
            yield from self.literal({"t": "true", "f": "false", "n": "null"}[char])
        elif char and char in "-0123456789":
            yield from self._number()
        else:
            raise NoCall

    def _string_value(self) -> Reading:
        yield from self.literal('"')
        while True:
            char = yield from self.peek()
            if not char or char < " ":
                raise NoCall
            self._at += 1
            if char == '"':
                return
            if char == "\\":
                kind = yield from self.peek()
                if not kind or kind not in '"\\/bfnrtu':
                    raise NoCall
                self._at += 1
                for _ in range(4 if kind == "u" else 0):
                    if (yield from self.peek()) not in _HEX:
                        raise NoCall
                    self._at += 1

    def _container(self, opening: str, depth: int) -> Reading:
        self._at += 1
        closing = "}" if opening == "{" else "]"
        yield from self.skip_spaces()
        if (yield from self.peek()) == closing:
            self._at += 1
            return
        while True:
            if opening == "{":
                yield from self._string_value()
                yield from self.skip_spaces()
                yield from self.literal(":")
                yield from self.skip_spaces()
            yield from self._value(depth + 1)
            yield from self.skip_spaces()
            if (yield from self.peek()) != ",":
                yield from self.literal(closing)
                return
            self._at += 1
            yield from self.skip_spaces()

    def _number(self) -> Reading:
        if (yield from self.peek()) == "-":
            self._at += 1
        if (yield from self.peek()) == "0":
            self._at += 1
        else:
            yield from self._digits()
        if (yield from self.peek()) == ".":
            self._at += 1
            yield from self._digits()
        if (yield from self.peek()) in ("e", "E"):
            self._at += 1
            if (yield from self.peek()) in ("+", "-"):
                self._at += 1
            yield from self._digits()

    def _digits(self) -> Reading:
        num_digits = 0
        while (char := (yield from self.peek())) and char in "0123456789":
            self._at += 1
            num_digits += 1
        if not num_digits:
            raise NoCall


@dataclass(slots=True)
class _Call:
    """What is known of a call while its object is read."""

    name: str = ""
    arguments: str = ""
    told: bool = False
