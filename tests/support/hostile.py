"""What hostile callers send: values at and beyond the bounds of every field that a descriptor or a model of bodies
names, and peers that write their frames by hand."""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast, get_args, get_origin

import grpc.aio
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from pydantic import BaseModel

from outrider.rpc.errors import OutriderError
from outrider.rpc.status import from_rpc_error
from outrider.v1 import draft_pb2, target_pb2

NAN, INF = float("nan"), float("inf")
TEXTS = (
    "", "a", "\0", "\ud7ff\ue000🙂\u202e", "x" * 129, "x" * 9000, "{", "[" * 3000, '{"a": NaN}', '{"type": "function"}',
    "a.b.C", "../../etc/passwd", "%s%n", "draft_model,ngram",
)  # fmt: skip
VALUES: dict[int, tuple[Any, ...]] = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), -2, -1, 0, 1, 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), -1, 0, 1, 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 1, 3, 129, 2**31, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 1, 2**63, 2**64 - 1),
    FieldDescriptor.CPPTYPE_DOUBLE: (NAN, INF, -INF, -1.0, -0.0, 5e-324, 0.5, 1.0, 1e308),
    FieldDescriptor.CPPTYPE_FLOAT: (NAN, INF, -INF, -101.0, 1e-45, 1.0, 3e38),
    FieldDescriptor.CPPTYPE_BOOL: (False, True),
    FieldDescriptor.CPPTYPE_ENUM: (0, 1, 2, 3, 99, 2**31 - 1, -1),
}
BYTES = (b"", b"\0", b"\xff" * 3, b"\0" * 20_000)
MANY = 4000  # entries of a list; of short ones a frame holds so many

Fields = tuple[FieldDescriptor, ...]


def leaves(descriptor: Any, before: Fields = ()) -> Iterator[Fields]:
    """Every field of a message that holds no message, with those that it is in."""
    for field in descriptor.fields:
        inner = field.message_type
        if inner is None or inner.GetOptions().map_entry:
            yield (*before, field)
        else:
            yield from leaves(inner, (*before, field))


def name_of(path: Fields) -> str:
    return ".".join(field.name for field in path)


def values_of(field: FieldDescriptor) -> Iterator[Any]:
    """What a leaf is set to; of a list or a map whole ones."""
    if field.message_type is not None:
        keys, values = (list(_scalars(inner)) for inner in field.message_type.fields)
        yield from ({key: values[0]} for key in keys)
        yield from ({keys[0]: value} for value in values)
        if len(keys) > 2 and isinstance(keys[0], int):
            yield dict.fromkeys(range(2000), values[0])
    elif field.is_repeated:
        yield []
        scalars = list(_scalars(field))
        yield from ([value] for value in scalars)
        yield [scalars[1]] * MANY
    else:
        yield from _scalars(field)


def _scalars(field: FieldDescriptor) -> Sequence[Any]:
    if field.type == FieldDescriptor.TYPE_BYTES:
        return BYTES
    return TEXTS if field.type == FieldDescriptor.TYPE_STRING else VALUES[field.cpp_type]


def with_leaf(base: Message, path: Fields, value: Any) -> Message:
    """A copy in which one leaf has another value. Of lists of messages it is the first one's."""
    changed: Any = type(base)()
    changed.CopyFrom(base)
    inner = changed
    for field in path[:-1]:
        inner = getattr(inner, field.name)
        if field.is_repeated:
            inner = inner[0] if len(inner) else inner.add()
    _set(inner, path[-1], value)
    return cast(Message, changed)


def _set(message: Any, field: FieldDescriptor, value: Any) -> None:
    held = getattr(message, field.name)
    if field.message_type is not None:
        held.clear()
        held.update(value)
    elif field.is_repeated:
        del held[:]
        held.extend(value)
    else:
        setattr(message, field.name, value)


def messages(kind: type[Message], depth: int = 4) -> SearchStrategy:
    """Messages with any fields set, to values at the bounds or between them."""
    fields = {field.name: _values(field, depth) for field in kind.DESCRIPTOR.fields}
    some = st.lists(st.sampled_from(sorted(fields)), max_size=6, unique=True)
    drawn = some.flatmap(lambda names: st.fixed_dictionaries({name: fields[name] for name in names}))
    return drawn.map(lambda values: kind(**values))


def _values(field: Any, depth: int) -> SearchStrategy:
    inner = field.message_type
    if inner is not None and inner.GetOptions().map_entry:
        keys, values = (st.sampled_from(_scalars(one)) for one in inner.fields)
        return st.dictionaries(keys, values, max_size=3)
    if inner is not None and not depth:
        return st.none()
    one = _scalar(field) if inner is None else messages(inner._concrete_class, depth - 1)
    return st.lists(one, max_size=3) if field.is_repeated else one


def _scalar(field: FieldDescriptor) -> SearchStrategy:
    bounds = st.sampled_from(_scalars(field))
    if field.type == FieldDescriptor.TYPE_STRING:
        return bounds | st.text(st.characters(codec="utf-8"), max_size=30)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return bounds | st.binary(max_size=60)
    if field.cpp_type == FieldDescriptor.CPPTYPE_DOUBLE:
        return bounds | st.floats()
    if field.cpp_type == FieldDescriptor.CPPTYPE_FLOAT:
        return bounds | st.floats(width=32)
    whole = [value for value in _scalars(field) if not isinstance(value, bool)]
    return bounds | st.integers(min(whole), max(whole)) if whole else bounds


def drawn(strategy: SearchStrategy, count: int) -> list[Any]:
    """So many examples, the same ones each time."""
    found: list[Any] = []

    @settings(
        max_examples=count, derandomize=True, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(strategy)
    def collect(value: Any) -> None:
        found.append(value)

    collect()
    return found


# Values of JSON as texts: what Python's own writer would not write is among them.
JSON_VALUES = (
    "null", "true", "0", "-1", "1", "2147483648", "18446744073709551616", "1" + "0" * 400, "1" + "0" * 5000, "0.5",
    "-0.0", "1e308", "1e400", "NaN", "-Infinity", '""', '"a"', '"\\u0000"', '"\\ud800"', f'"{"x" * 9000}"', "[]",
    "[[]]", "[null]", "[true]", "[1, 2]", "[1.5]", '["a", "b"]', '[""]', '[{"type": "text", "text": "x"}]', "{}",
    '{"": {}}', '{"a": {"b": [1, {}]}}', '{"1": 1, "2": "x"}', '{"type": "json_object"}', "[" * 90 + "]" * 90,
    '{"a": ' * 99 + "1" + "}" * 99, "[" * 150 + "]" * 150, "[" * 20_000,
)  # fmt: skip
Place = tuple[str | int, ...]


def places_in(model: type[BaseModel], before: Place = ()) -> Iterator[Place]:
    """Every field of a body, and of the objects and lists of objects in it."""
    for name, field in model.model_fields.items():
        place = (*before, field.alias or name)
        yield place
        for inner, is_listed in _models_in(field.annotation):
            yield from places_in(inner, (*place, 0) if is_listed else place)


def _models_in(annotation: Any, is_listed: bool = False) -> Iterator[tuple[type[BaseModel], bool]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, is_listed
    for inner in get_args(annotation):
        yield from _models_in(inner, is_listed or get_origin(annotation) is list)


_MARK = "@value@"


def with_value(base: dict[str, Any], place: Place, value: str) -> bytes:
    """A body in which one place holds a value that is given as JSON text."""
    body: Any = copy.deepcopy(base)
    inner = body
    for part, after in itertools.pairwise(place):
        empty: Any = [{}] if isinstance(after, int) else {}
        if isinstance(inner, dict) and not isinstance(inner.get(part), type(empty)):
            inner[part] = empty
        inner = inner[part]
    inner[place[-1]] = _MARK
    return json.dumps(body).replace(json.dumps(_MARK), value).encode()


JSON = st.recursive(
    st.sampled_from(JSON_VALUES).filter(lambda text: len(text) < 100)
    | st.integers().map(str)
    | st.text().map(json.dumps),
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda parts: f"[{','.join(parts)}]")
        | st.lists(st.tuples(st.text(max_size=5).map(json.dumps), inner), max_size=3).map(
            lambda pairs: "{" + ",".join(f"{key}:{value}" for key, value in pairs) + "}"
        )
    ),
    max_leaves=5,
)


BEAT_S = 0.8  # a peer that says nothing for longer than 1.8 s is given up


class HandWriter:
    """A peer on one stream that writes what it wants: frames with any header, or bytes that are none."""

    def __init__(self, channel: grpc.aio.Channel, method: str, frame: type[Any], answer: type[Any]) -> None:
        self._frame = frame
        self._call = channel.stream_stream(
            method,
            request_serializer=lambda given: given if isinstance(given, bytes) else given.SerializeToString(),
            response_deserializer=answer.FromString,
        )(timeout=120)
        self.number = 0
        self.heard: list[Any] = []  # entries
        self.error: OutriderError | None = None
        self.ended = False
        self._writing = asyncio.Lock()
        self._beats = asyncio.create_task(self._beat())

    async def send(self, *entries: Any, **header: Any) -> None:
        """The next frame; fields of its header may be other ones."""
        async with self._writing:
            self.number += 1
            await self._write(self._frame(header={"number": self.number, **header}, messages=entries))

    async def write(self, raw: bytes) -> None:
        """Bytes in a frame's place."""
        async with self._writing:
            await self._write(raw)

    async def listen(self, until: Callable[[list[Any]], object], timeout_s: float = 60.0) -> None:
        """Reads until what was heard is enough, or the stream has ended."""
        async with asyncio.timeout(timeout_s):
            while not self.ended and not until(self.heard):
                try:
                    frame = await self._call.read()
                except grpc.aio.AioRpcError as error:
                    self.error, self.ended = from_rpc_error(error), True
                    return
                if frame is grpc.aio.EOF:
                    self.ended = True
                    return
                self.heard += frame.messages

    def close(self) -> None:
        self._beats.cancel()
        self._call.cancel()

    async def _write(self, frame: Any) -> None:
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # it has ended: reading says how
            await self._call.write(frame)

    async def _beat(self) -> None:
        while not self._call.done():
            await asyncio.sleep(BEAT_S)
            await self.send()


@dataclass(frozen=True)
class HandStream:
    """A kind of stream, as peers that write by hand see it."""

    method: str
    channel: str  # of a deployment
    frame: type[Any]
    answer: type[Any]
    entry: type[Any]

    def peer(self, served: Any) -> HandWriter:
        """One that has sent nothing yet."""
        return HandWriter(getattr(served, self.channel), f"/outrider.v1.{self.method}", self.frame, self.answer)


VERIFY = HandStream(
    "TargetService/Verify", "to_target", target_pb2.VerifyRequest, target_pb2.VerifyResponse, target_pb2.TargetCommand
)
PROPOSE = HandStream(
    "DraftService/Propose", "to_draft", draft_pb2.ProposeRequest, draft_pb2.ProposeResponse, draft_pb2.DraftCommand
)
