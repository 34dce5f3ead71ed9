"""The one validator, for every entry point (gRPC, HTTP, in process): a function returns None or raises InvalidArgument,
which lists each field, what is wrong with it and what is allowed. Here are its bricks and what is of no single message;
what bounds a message or the sampling parameters stands beside them.

Each check adds to a list of violations, so that a caller learns of all at once. A violation shows a number's value, and
of texts and lists only the length: errors travel to logs. Types have JSON's names, whoever asks. Token ids are checked
against the number of logits."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Mapping, Sequence
from numbers import Integral, Real

from outrider.rpc.errors import InvalidArgument, Violation

MAX_SHOWN = 40  # characters of a value
_CONTROL = ("Cc", "Zl", "Zp")
_KINDS: tuple[tuple[type | tuple[type, ...], str], ...] = (
    (bool, "a truth value"),
    (Real, "a number"),
    (str, "a text"),
    (bytes, "bytes"),
    (Mapping, "an object"),
    ((Sequence, set, frozenset), "a list"),
)


class Violations:
    """Collects what is wrong; `prefix` is put before each field's name ("sampling.")."""

    def __init__(self, prefix: str = "") -> None:
        self._prefix = prefix
        self._found: list[Violation] = []

    def add(self, field: str, problem: str, allowed: str) -> None:
        """One violation."""
        self._found.append(Violation(self._prefix + field, f"{problem}; allowed: {allowed}"))

    def take(self, error: InvalidArgument) -> None:
        """Takes over what a check that raises has found."""
        self._found += error.violations

    def raise_if_any(self) -> None:
        """InvalidArgument that names every field."""
        if self._found:
            raise InvalidArgument.of(self._found)

    def hand_over(self, whole: Violations | None) -> None:
        """Adds these to those of the whole; raises them if this was all."""
        if whole is None:
            self.raise_if_any()
        else:
            whole._found += self._found

    def integer(self, field: str, value: object, low: int, high: int, also: int | None = None) -> bool:
        """A whole number in a closed range, or the one value `also`."""
        if isinstance(value, Integral) and not isinstance(value, bool) and (low <= int(value) <= high or value == also):
            return True
        allowed = f"{low} to {high}" if also is None else f"{also}, or {low} to {high}"
        self.add(field, f"is {shown(value)}", f"a whole number, {allowed}")
        return False

    def number(self, field: str, value: object, low: float, high: float, *, zero: bool = False, say: str = "") -> bool:
        """A finite number in a closed range; `zero` allows 0 below it; `say` words the range."""
        finite = isinstance(value, Real) and not isinstance(value, bool) and _is_finite(value)
        if finite and (low <= float(value) <= high or (zero and value == 0)):  # type: ignore[arg-type]
            return True
        self.add(field, f"is {shown(value)}", (say or f"{low:g} to {high:g}") if finite else "a finite number")
        return False

    def flag(self, field: str, value: object) -> None:
        """True or false."""
        if not isinstance(value, bool):
            self.add(field, f"is {shown(value)}", "true or false")

    def length(self, field: str, values: Sequence[object] | dict[int, float], high: int, unit: str = "entries") -> bool:
        """No more than so many entries."""
        if len(values) <= high:
            return True
        self.add(field, f"has {len(values)} {unit}", f"at most {high}")
        return False

    def text(self, field: str, value: object, high: int, *, empty: bool = True) -> None:
        """A text of bounded length."""
        if not isinstance(value, str):
            self.add(field, f"is {shown(value)}", "a text")
        elif len(value) > high:
            self.add(field, f"has {len(value)} characters", f"at most {high}")
        elif not value and not empty:
            self.add(field, "is empty", "at least one character")

    def name(self, field: str, value: object, high: int) -> None:
        """A text of bounded length that a line of a log can hold: without control characters and line ends."""
        self.text(field, value, high)
        if isinstance(value, str) and any(unicodedata.category(char) in _CONTROL for char in value[:high]):
            self.add(field, "has control characters", "printable ones")

    def ids(self, field: str, ids: Sequence[int], vocab_size: int) -> None:
        """Token ids below the number of logits; the first that is none is named by its place."""
        bad = _bad_id(ids, vocab_size)
        if bad is not None:
            self.add(f"{field}[{bad}]", f"is {shown(ids[bad])}", f"a token id, 0 to {vocab_size - 1}")

    def id_keys(self, field: str, values: Mapping[int, object], vocab_size: int) -> None:
        """Token ids as keys; the first that is none is named by itself."""
        keys = tuple(values)
        bad = _bad_id(keys, vocab_size)
        if bad is not None:
            self.add(f"{field}[{shown(keys[bad])}]", "is for no token id", f"token ids, 0 to {vocab_size - 1}")


def kind(value: object) -> str:
    """What JSON calls a value's type, with an article."""
    if value is None:
        return "null"
    for types, name in _KINDS:
        if isinstance(value, types):
            return name
    return "of an unknown type"


def shown(value: object) -> str:
    """A number, a truth value or null as it is; of anything else the type."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return _cut(str(value)) if isinstance(value, Real) else kind(value)


def quoted(value: object) -> str:
    """A name that was to be one of a list, as it may stand in an error."""
    return repr(_cut(value)) if isinstance(value, str) else shown(value)


def _cut(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."


def _bad_id(ids: Sequence[int], vocab_size: int) -> int | None:
    """The place of the first that is no token id. The extremes are found at C speed; a bad one is searched after."""
    if not ids:
        return None
    try:
        if min(ids) >= 0 and max(ids) < vocab_size and not _has_odd_type(ids):
            return None
    except TypeError:
        pass  # not all are numbers: found below
    for index, token in enumerate(ids):
        if not isinstance(token, Integral) or isinstance(token, bool) or not 0 <= token < vocab_size:
            return index
    return None


def _has_odd_type(ids: Sequence[int]) -> bool:
    return not {int}.issuperset(map(type, ids))


def _is_finite(value: Real) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond all floats, as JSON allows
        return False


MAX_N = 64
MAX_DRAFT_TOKENS = 128
MAX_METHODS = 1  # no service drafts one sequence by several
MAX_LOGPROBS = 20  # of a position, where no flag says another number
ALL_LOGPROBS = -1  # as many as the vocabulary has ids; as a bound: none
MAX_PATIENCE_MS = 60_000
SPECULATION_MODES = ("auto", "sequential", "chains", "branches")
MAX_NAME_CHARS = 128
_MAX_INT32, _MAX_UINT32 = 2**31 - 1, 2**32 - 1


def validate_length(prompt_len: int, max_tokens: int, max_model_len: int, prefix: str = "sampling.") -> None:
    """Prompt and max_tokens fit the model's context together."""
    found = Violations(prefix)
    if prompt_len + max_tokens > max_model_len:
        left = max_model_len - prompt_len
        if left >= 1:
            found.add("max_tokens", f"is {max_tokens} after a prompt of {prompt_len} tokens", f"at most {left}")
        else:
            found = Violations()
            found.add("prompt", f"has {prompt_len} tokens", f"at most {max_model_len - 1}")
    found.raise_if_any()


def validate_prompt_ids(ids: Sequence[int], vocab_size: int, max_model_len: int, field: str = "prompt_ids") -> None:
    """A prompt: not empty, shorter than the context, ids that exist."""
    found = Violations()
    check_prompt(found, field, ids, vocab_size, max_model_len)
    found.raise_if_any()


def check_prompt(found: Violations, field: str, ids: Sequence[int], vocab_size: int, max_model_len: int) -> None:
    """The same, among other checks."""
    if not ids:
        found.add(field, "is empty", f"1 to {max_model_len - 1} token ids")
    elif found.length(field, ids, max_model_len - 1, "tokens"):
        found.ids(field, ids, vocab_size)


def validate_generation(
    *,
    n: int = 1,
    num_draft_tokens: int | None = None,
    request_id: str = "",
    salt: str = "",
    method: str = "",
    methods: Sequence[str] = (),
    mode: str = "",
    priority: int = 0,
    output_ids: Sequence[Sequence[int]] = (),
    model_digest: str = "",
    vocab_size: int = _MAX_UINT32,
    found: Violations | None = None,
) -> None:
    """What a generation request holds beside prompt and sampling parameters. With `found` the violations go there, and
    nothing is raised."""
    here = Violations()
    if here.integer("n", n, 1, MAX_N) and output_ids and len(output_ids) != n:
        here.add("output_ids", f"has {len(output_ids)} entries", f"none, or as many as completions ({n})")
    if num_draft_tokens is not None:
        here.integer("speculation.num_draft_tokens", num_draft_tokens, 0, MAX_DRAFT_TOKENS)
    here.name("request_id", request_id, MAX_NAME_CHARS)
    here.text("salt", salt, MAX_NAME_CHARS)
    here.text("model_digest", model_digest, MAX_NAME_CHARS)
    here.text("speculation.method", method, MAX_NAME_CHARS)
    if here.length("speculation.methods", methods, MAX_METHODS):
        for index, name in enumerate(methods):
            here.text(f"speculation.methods[{index}]", name, MAX_NAME_CHARS, empty=False)
        if method and methods and methods[0] != method:
            here.add(
                "speculation.method",
                f"is {quoted(method)} beside speculation.methods",
                f"{quoted(methods[0])}, as there, or none",
            )
    if mode and mode not in SPECULATION_MODES:
        here.add("speculation.mode", f"is {quoted(mode)}", ", ".join(SPECULATION_MODES))
    here.integer("priority", priority, -_MAX_INT32 - 1, _MAX_INT32)
    for index, ids in enumerate(output_ids[:MAX_N]):
        here.ids(f"output_ids[{index}].ids", ids, vocab_size)
    here.hand_over(found)
