"""Between dataclasses and protobuf messages whose fields have the same names: what is plain follows from the names;
what is not has a codec of its own. What a field cannot hold is named (`BadField`): protobuf's own words often leave the
name out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, MutableSequence
from dataclasses import MISSING, dataclass, fields
from operator import attrgetter
from typing import Any, Generic, TypeVar

from google.protobuf.descriptor import FieldDescriptor

from outrider.rpc.words.checks import quoted, shown

M = TypeVar("M")
P = TypeVar("P")

NUMBERS = {
    FieldDescriptor.CPPTYPE_INT32: "a whole number of 32 bits",
    FieldDescriptor.CPPTYPE_INT64: "a whole number of 64 bits",
    FieldDescriptor.CPPTYPE_UINT32: "a whole number, 0 to 2**32 - 1",
    FieldDescriptor.CPPTYPE_UINT64: "a whole number, 0 to 2**64 - 1",
    FieldDescriptor.CPPTYPE_FLOAT: "a number",
    FieldDescriptor.CPPTYPE_DOUBLE: "a number",
    FieldDescriptor.CPPTYPE_BOOL: "true or false",
    FieldDescriptor.CPPTYPE_STRING: "a text of whole characters",
}


class BadField(ValueError):
    """A value that its field cannot hold."""

    def __init__(self, field: str, problem: str, allowed: str) -> None:
        super().__init__(f"{field}: {problem}; allowed: {allowed}")
        self.field, self.problem, self.allowed = field, problem, allowed


_ERRORS = (TypeError, ValueError, AttributeError, KeyError)  # what encoding a value of another type may raise


@dataclass(frozen=True, slots=True)
class Codec(Generic[M, P]):
    """Both ways between a dataclass and its protobuf message, or between two forms of one field."""

    encode: Callable[[M], P]
    decode: Callable[[P], M]
    allowed: str = ""  # what may be given, in words; empty: what the field's type says
    is_name: bool = False  # one of a list, which an error may show


def by_fields(kind: type[M], proto: type[P], without: Collection[str] = (), **others: Codec[Any, Any]) -> Codec[M, P]:
    """The codec of a dataclass whose message has fields of the same names, but for those `without`, which do not travel
    or are written beside. Lists are tuples; an optional field that is absent has the dataclass's default, and a field
    that is None is absent. Those in `others` have codecs of their own."""
    sent = [one for one in fields(kind) if one.init and one.name not in without]  # type: ignore[arg-type]  # a dataclass
    names = [one.name for one in sent]
    in_order = not without and not any(one.kw_only for one in sent)
    readers = [_reader(proto, one.name, others.get(one.name), one.default) for one in sent]
    # What a field holds that is not written: most fields of most messages hold it.
    unwritten = [_unwritten(proto, name, one.default) for name, one in zip(names, sent, strict=True)]
    get = attrgetter(*names, "__class__")  # with one more, so that it is a tuple where there is one field
    writers = [others[name].encode if name in others else None for name in names]

    def encode(message: M) -> P:
        try:
            return proto(
                **{
                    name: value if write is None or value is None else write(value)
                    for name, value, default, write in zip(names, get(message), unwritten, writers, strict=False)
                    if value is not default
                }
            )
        except _ERRORS as error:
            raise _bad_field(proto, dict(zip(names, get(message), strict=False)), others) or error from None

    def decode(message: P) -> M:
        if in_order:
            return kind(*[read(message) for read in readers])
        return kind(**{name: read(message) for name, read in zip(names, readers, strict=True)})

    return Codec(encode, decode)


def message_of(proto: type[P], values: dict[str, Any], codecs: Mapping[str, Codec[Any, Any]]) -> P:
    """A message of these values, those that are None left out. BadField names the first that its field cannot hold."""
    try:
        coded = [(name, value) for name in values.keys() & codecs.keys() if (value := values[name]) is not None]
        return proto(**(values | {name: codecs[name].encode(value) for name, value in coded}))
    except _ERRORS as error:
        raise _bad_field(proto, values, codecs) or error from None


def _bad_field(proto: type[Any], values: Mapping[str, Any], codecs: Mapping[str, Codec[Any, Any]]) -> BadField | None:
    for name, value in values.items():
        codec = codecs.get(name, PLAIN)
        try:
            proto(**{name: None if value is None else codec.encode(value)})
        except BadField as inner:
            return BadField(f"{name}.{inner.field}" if inner.field else name, inner.problem, inner.allowed)
        except _ERRORS:
            given = quoted(value) if codec.is_name else shown(value)
            return BadField(name, f"is {given}", codec.allowed or _words(proto, name))
    return None


def _words(proto: type[Any], name: str) -> str:
    """What the protocol says that a field takes."""
    one = NUMBERS.get(proto.DESCRIPTOR.fields_by_name[name].cpp_type, "a message")
    return f"a list, each entry {one}" if isinstance(getattr(proto(), name), MutableSequence) else one


def _unwritten(proto: type[Any], name: str, default: Any) -> Any:
    """The default that an absent field stands for; MISSING where none does."""
    return default if _has_presence(proto, name) or not default else MISSING


def _has_presence(proto: type[Any], name: str) -> bool:
    return bool(proto.DESCRIPTOR.fields_by_name[name].has_presence)


def _reader(proto: type[Any], name: str, codec: Codec[Any, Any] | None, default: Any) -> Callable[[Any], Any]:
    get = attrgetter(name)
    if codec is not None:
        decode = codec.decode
        if default is None and _has_presence(proto, name):
            return lambda message: decode(get(message)) if message.HasField(name) else None
        return lambda message: decode(get(message))
    if isinstance(get(proto()), MutableSequence):
        return lambda message: tuple(get(message))
    if _has_presence(proto, name):
        absent = None if default is MISSING else default
        return lambda message: get(message) if message.HasField(name) else absent
    return get


def each(codec: Codec[M, P], allowed: str = "") -> Codec[tuple[M, ...], Iterable[P]]:
    """Of every entry of a list."""
    return Codec(lambda values: map(codec.encode, values), lambda entries: tuple(map(codec.decode, entries)), allowed)


def unless(default: M, codec: Codec[M, Any]) -> Codec[M, Any]:
    """A field that is absent where it holds the default."""
    return Codec(lambda value: None if value == default else codec.encode(value), codec.decode)


PLAIN: Codec[Any, Any] = Codec(lambda value: value, lambda value: value)
