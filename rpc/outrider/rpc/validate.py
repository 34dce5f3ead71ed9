"""The one validator: bounds every field of what a client, a gateway or a draft may send, for every entry point (gRPC,
HTTP, in process). A function returns None or raises InvalidArgument, which lists each field, what is wrong with it
and what is allowed. Token ids are checked against the number of logits.

The bricks of the validator: each check adds to a list of violations, so that a caller learns of all at once. A
violation shows a number's value, and of texts and lists only the length: errors travel to logs. Types have JSON's
names, whoever asks."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Mapping, Sequence
from numbers import Integral, Real

from outrider.rpc.errors import InvalidArgument, Violation
from outrider.rpc.messages import Commit, Credit, DraftTokens, Open
from outrider.rpc.sampling_params import LogprobsMode, SamplingParams, StructuredOutput

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

    def extend(self, other: Violations) -> None:
        """Takes over the violations of a part."""
        self._found += other._found

    def take(self, error: InvalidArgument) -> None:
        """Takes over what a check that raises has found."""
        self._found += error.violations

    def raise_if_any(self) -> None:
        """InvalidArgument that names every field."""
        if self._found:
            raise InvalidArgument.of(self._found)

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
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 128
MAX_BAD_WORDS_IDS = 4 * MAX_BAD_WORDS  # a text becomes several token sequences: with and without a space before
MAX_STOPS, MAX_STOP_CHARS = 16, 256
MAX_STOP_IDS = 128
MAX_CONSTRAINT_CHARS = 64 * 1024
MAX_CHOICES = 1024
MAX_PIECE_IDS = 1024  # a tree may hold more ids than a chain
MAX_WEIGHTS = 4096
MAX_PATIENCE_MS = 60_000
MAX_BRANCHES = 64
SPECULATION_MODES = ("auto", "sequential", "chains", "branches")
MAX_NAME_CHARS = 128
# Below this, logits divided by it leave float32's range; 0 alone is greedy.
MIN_DIVISOR = 1e-5
_MAX_INT32, _MAX_UINT32, _MAX_UINT64 = 2**31 - 1, 2**32 - 1, 2**64 - 1


def validate_sampling(
    params: SamplingParams,
    vocab_size: int,
    max_model_len: int,
    prompt_len: int = 0,
    prefix: str = "sampling.",
    found: Violations | None = None,
    max_logprobs: int = MAX_LOGPROBS,
) -> None:
    """Every field of the sampling parameters. With a prompt's length also that prompt and max_tokens fit. With `found`
    the violations go there, and nothing is raised."""
    here = Violations(prefix)
    _sampling(here, params, vocab_size, max_model_len, max_logprobs)
    _hand_over(here, found)
    if prompt_len and found is None:
        validate_length(prompt_len, params.max_tokens, max_model_len, prefix)


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
    _prompt(found, field, ids, vocab_size, max_model_len)
    found.raise_if_any()


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
    _hand_over(here, found)


def validate_open(message: Open, vocab_size: int, max_model_len: int, max_logprobs: int = MAX_LOGPROBS) -> None:
    """An Open, at a draft or target. A fork's prompt is its parent's, so its length is checked by the caller."""
    found = Violations("open.")
    if message.fork_of is not None:
        found.integer("fork_of", message.fork_of, 0, _MAX_UINT32)
        if message.prompt_ids:
            found.add("prompt_ids", f"has {len(message.prompt_ids)} entries beside fork_of", "none")
    else:
        _prompt(found, "prompt_ids", message.prompt_ids, vocab_size, max_model_len)
    found.ids("output_ids", message.output_ids, vocab_size)
    if len(message.output_ids) > message.sampling.max_tokens:
        allowed = f"at most max_tokens ({message.sampling.max_tokens})"
        found.add("output_ids", f"has {len(message.output_ids)} entries", allowed)
    found.integer("sequence_id", message.sequence_id, 0, _MAX_UINT32)
    found.integer("completion", message.completion, 0, MAX_N - 1)
    found.integer("seed", message.seed, 0, _MAX_UINT64)
    found.integer("timeout_ms", message.timeout_ms, 0, _MAX_UINT64)
    found.integer("first_chain", message.first_chain, 0, _MAX_UINT32)
    found.integer("priority", message.priority, -_MAX_INT32 - 1, _MAX_INT32)
    for field in ("salt", "traceparent", "method", "model_digest"):
        found.text(field, getattr(message, field), MAX_NAME_CHARS)
    sampling = Violations("open.sampling.")
    _sampling(sampling, message.sampling, vocab_size, max_model_len, max_logprobs)
    found.extend(sampling)
    found.raise_if_any()


def validate_piece(message: DraftTokens) -> None:
    """A piece's shape. Its ids and weights are not judged: an id that the target does not know ends the chain, and a
    broken distribution counts as one-hot; neither is an error."""
    found = Violations("piece.")
    count = len(message.ids)
    found.length("ids", message.ids, MAX_PIECE_IDS)
    if len(message.weights) > count:
        found.add("weights", f"has {len(message.weights)} entries", f"at most as many as ids ({count})")
    for index, weights in enumerate(message.weights):
        if weights is not None and max(len(weights.ids), len(weights.weights)) > 4 * MAX_WEIGHTS:
            found.add(f"weights[{index}]", f"has {len(weights.ids) // 4} ids", f"at most {MAX_WEIGHTS}")
            break
    if message.parents and len(message.parents) != count:
        found.add("parents", f"has {len(message.parents)} entries", f"none, or as many as ids ({count})")
    for index, parent in enumerate(message.parents):
        if not 0 <= parent <= index:  # 0 is the root, and i + 1 the id i: a parent stands before its children
            found.add(f"parents[{index}]", f"is {parent}", f"0 to {index}")
            break
    if message.parent is not None and message.parent >= message.chain:
        found.add("parent", f"is {message.parent}", f"a chain before this one ({message.chain})")
    found.integer("position", message.position, 0, _MAX_INT32)
    found.raise_if_any()


def validate_credit(message: Credit) -> None:
    """A credit's numbers."""
    found = Violations("credit.")
    found.integer("until", message.until, 0, _MAX_UINT32)
    found.integer("max_window", message.max_window, 0, MAX_DRAFT_TOKENS)
    found.integer("patience_ms", message.patience_ms, 0, MAX_PATIENCE_MS)
    found.integer("max_branches", message.max_branches, 0, MAX_BRANCHES)
    found.raise_if_any()


def validate_commit(message: Commit, vocab_size: int) -> None:
    """A commit's shape and ids, where a draft or a gateway receives it. `vocab_size` is the target's."""
    found = Violations("commit.")
    found.length("ids", message.ids, MAX_PIECE_IDS)
    found.ids("ids", message.ids, vocab_size)
    for field in ("origins", "logprobs"):
        size = len(getattr(message, field))
        if size and size != len(message.ids):
            found.add(field, f"has {size} entries", f"none, or as many as ids ({len(message.ids)})")
    if message.num_accepted > message.num_drafted:
        found.add("num_accepted", f"is {message.num_accepted}", f"at most num_drafted ({message.num_drafted})")
    found.integer("position", message.position, 0, _MAX_INT32)
    found.raise_if_any()


def _hand_over(here: Violations, found: Violations | None) -> None:
    if found is None:
        here.raise_if_any()
    else:
        found.extend(here)


def _prompt(found: Violations, field: str, ids: Sequence[int], vocab_size: int, max_model_len: int) -> None:
    if not ids:
        found.add(field, "is empty", f"1 to {max_model_len - 1} token ids")
    elif found.length(field, ids, max_model_len - 1, "tokens"):
        found.ids(field, ids, vocab_size)


def _sampling(
    found: Violations, params: SamplingParams, vocab_size: int, max_model_len: int, max_logprobs: int
) -> None:
    _distribution(found, params, vocab_size)
    _ends(found, params, vocab_size, max_model_len)
    _outputs(found, params, max_model_len)
    for field in ("logprobs", "prompt_logprobs"):
        value = getattr(params, field)
        if value is not None and max_logprobs == ALL_LOGPROBS:
            found.integer(field, value, 0, vocab_size, also=ALL_LOGPROBS)
        elif value is not None:
            found.integer(field, value, 0, max_logprobs)
    if params.structured_output is not None:
        _structured(found, params.structured_output)


def _distribution(found: Violations, params: SamplingParams, vocab_size: int) -> None:
    found.number(
        "temperature", params.temperature, MIN_DIVISOR, 100, zero=True, say=f"0 (greedy), or {MIN_DIVISOR:g} to 100"
    )
    found.number("top_p", params.top_p, 1e-9, 1, say="above 0 and at most 1")
    found.integer("top_k", params.top_k, -1, _MAX_INT32)
    found.number("min_p", params.min_p, 0, 1)
    found.number("repetition_penalty", params.repetition_penalty, MIN_DIVISOR, 100, say="above 0 and at most 100")
    found.number("presence_penalty", params.presence_penalty, -2, 2)
    found.number("frequency_penalty", params.frequency_penalty, -2, 2)
    if params.seed is not None:
        found.integer("seed", params.seed, 0, _MAX_UINT64)
    if found.length("logit_bias", params.logit_bias, MAX_LOGIT_BIAS):
        found.id_keys("logit_bias", params.logit_bias, vocab_size)
        for token, bias in params.logit_bias.items():
            if not found.number(f"logit_bias[{shown(token)}]", bias, -100, 100):
                break
    if found.length("allowed_token_ids", params.allowed_token_ids, vocab_size):
        found.ids("allowed_token_ids", params.allowed_token_ids, vocab_size)


def _ends(found: Violations, params: SamplingParams, vocab_size: int, max_model_len: int) -> None:
    if found.integer("max_tokens", params.max_tokens, 1, max_model_len):
        found.integer("min_tokens", params.min_tokens, 0, params.max_tokens)
    if found.length("stop", params.stop, MAX_STOPS):
        _texts(found, "stop", params.stop, MAX_STOP_CHARS)
    if params.stop and params.detokenize is False:
        found.add("stop", "needs text, and detokenize is false", "stop strings with detokenize true")
    if found.length("stop_token_ids", params.stop_token_ids, MAX_STOP_IDS):
        found.ids("stop_token_ids", params.stop_token_ids, vocab_size)
    if found.length("bad_words", params.bad_words, MAX_BAD_WORDS):
        _texts(found, "bad_words", params.bad_words, MAX_STOP_CHARS)
    if found.length("bad_words_ids", params.bad_words_ids, MAX_BAD_WORDS_IDS):
        for index, ids in enumerate(params.bad_words_ids):
            if not 1 <= len(ids) <= MAX_STOP_CHARS:
                found.add(f"bad_words_ids[{index}]", f"has {len(ids)} entries", f"1 to {MAX_STOP_CHARS}")
            found.ids(f"bad_words_ids[{index}]", ids, vocab_size)


def _outputs(found: Violations, params: SamplingParams, max_model_len: int) -> None:
    if not isinstance(params.logprobs_mode, LogprobsMode):
        found.add("logprobs_mode", "is unknown", ", ".join(mode.value for mode in LogprobsMode))
    if params.truncate_prompt_tokens is not None:
        found.integer("truncate_prompt_tokens", params.truncate_prompt_tokens, 1, max_model_len, also=-1)
    for field in (
        "ignore_eos",
        "include_stop_str_in_output",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "detokenize",
    ):
        found.flag(field, getattr(params, field))


def _structured(found: Violations, structured: StructuredOutput) -> None:
    texts = ("json_schema", "regex", "grammar")
    given = [field for field in (*texts, "choice") if getattr(structured, field) is not None]
    if len(given) + bool(structured.json_object) != 1:
        found.add("structured_output", f"sets {len(given) + bool(structured.json_object)} constraints", "exactly one")
    for field in texts:
        if getattr(structured, field) is not None:
            found.text(f"structured_output.{field}", getattr(structured, field), MAX_CONSTRAINT_CHARS, empty=False)
    choice = structured.choice
    if choice is not None and found.length("structured_output.choice", choice, MAX_CHOICES):
        if not choice:
            found.add("structured_output.choice", "is empty", f"1 to {MAX_CHOICES} texts")
        _texts(found, "structured_output.choice", choice, MAX_CONSTRAINT_CHARS)


def _texts(found: Violations, field: str, texts: Sequence[str], high: int) -> None:
    for index, text in enumerate(texts):
        found.text(f"{field}[{index}]", text, high, empty=False)
