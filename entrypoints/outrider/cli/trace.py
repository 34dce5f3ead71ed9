"""`outrider trace`: the rounds of a request as a waterfall, from a file of traces (OTLP JSON lines, as --trace-file of
the services writes them). A round is a line: numbers on the left, on the right time, in which every column is a slice
and its letter says what most of the slice went to."""

from __future__ import annotations

import difflib
import json
import shutil
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

from pydantic import Field

from outrider.cli.terminal import fail, make_painter, painted, parse
from outrider.rpc import telemetry as names
from outrider.rpc.settings import ServiceSettings

MAX_SHOWN = 60  # characters of a line that is wrong


class BadTrace(ValueError):
    """The file holds something else than traces; the message names the line."""


@dataclass(frozen=True, slots=True)
class Span:
    """One span. Times are nanoseconds since 1970, by the clock of the machine that made it."""

    trace_id: str
    span_id: str
    parent_id: str  # empty: none
    name: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any] = field(default_factory=dict)
    links: tuple[str, ...] = ()  # span ids
    service: str = ""

    @property
    def ms(self) -> float:
        """Its duration."""
        return (self.end_ns - self.start_ns) / 1e6

    def number(self, name: str) -> int:
        """A whole number; 0 where it is absent or something else."""
        value = self.attributes.get(name)
        return value if isinstance(value, int) else 0


@dataclass(frozen=True, slots=True)
class Trace:
    """All spans of a file."""

    spans: tuple[Span, ...]
    cut: bool  # the last line has no end: a process was killed, or the disk was full


def read_trace(path: Path) -> Trace:
    """Raises BadTrace, and OSError for a file that cannot be read. A last line that was cut is left out."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise BadTrace(f"{path} is no text: expected OTLP JSON lines, as --trace-file writes them") from error
    spans: list[Span] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            spans += _spans(json.loads(line))
        except json.JSONDecodeError as error:
            if number == len(lines) and spans:
                return Trace(tuple(spans), cut=True)
            raise BadTrace(f"{path}, line {number}: no JSON ({error.msg}): {_start_of(line)}") from error
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            wrong = f"lacks {error}" if isinstance(error, KeyError) else f"has a value that it may not have ({error})"
            raise BadTrace(f"{path}, line {number}: no OTLP trace, {wrong}: {_start_of(line)}") from error
    if not spans:
        raise BadTrace(f"{path} holds no spans: nothing was traced, or not yet written (services write every second)")
    return Trace(tuple(spans), cut=False)


def _spans(request: dict[str, Any]) -> Iterator[Span]:
    for resource in request["resourceSpans"]:
        named = _attributes(resource.get("resource", {}).get("attributes", ()))
        service = str(named.get("service.name", ""))
        for scope in resource.get("scopeSpans", ()):
            for span in scope.get("spans", ()):
                yield _span(span, service)


def _span(span: dict[str, Any], service: str) -> Span:
    return Span(
        trace_id=str(span["traceId"]),
        span_id=str(span["spanId"]),
        parent_id=str(span.get("parentSpanId", "")),
        name=str(span["name"]),
        start_ns=int(span["startTimeUnixNano"]),
        end_ns=int(span["endTimeUnixNano"]),
        attributes=_attributes(span.get("attributes", ())),
        links=tuple(str(link["spanId"]) for link in span.get("links", ())),
        service=service,
    )


def _attributes(entries: Iterable[dict[str, Any]]) -> dict[str, Any]:
    return {entry["key"]: _value(entry["value"]) for entry in entries}


def _value(value: dict[str, Any]) -> Any:
    """A plain value: OTLP says its type, and writes whole numbers as texts."""
    for kind, inner in value.items():
        if kind == "intValue":
            return int(inner)
        if kind == "doubleValue":
            return float(inner)
        if kind == "arrayValue":
            return [_value(item) for item in inner.get("values", ())]
        return inner
    return None


def _start_of(line: str) -> str:
    return repr(line if len(line) <= MAX_SHOWN else line[:MAX_SHOWN] + "...")


PARTS = (names.SPAN_DRAFT, names.SPAN_WIRE, names.SPAN_QUEUE, names.SPAN_VERIFY, names.SPAN_SAMPLE)
DRAFT_SERVICE, TARGET_SERVICE = "outrider-draft", "outrider-target"


@dataclass(frozen=True, slots=True)
class TracedRound:
    """One round and what its time went to, in the order of time."""

    span: Span
    parts: tuple[Span, ...]

    @property
    def completion(self) -> int:
        """Which of the request's completions it belongs to."""
        return self.span.number(names.REQUEST_COMPLETION)

    def part_ms(self, name: str) -> float:
        """The time of one part."""
        return sum(part.ms for part in self.parts if part.name == name)


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One request. `root` is None while it has not ended: its span is written at its end."""

    root: Span | None
    rounds: tuple[TracedRound, ...]
    summed: tuple[Span, ...]  # rounds of long completions, many as one
    draft_steps: tuple[Span, ...]  # of the services, by their own clocks
    target_steps: tuple[Span, ...]
    trace_id: str

    @property
    def id(self) -> str:
        """The request's name; its trace's where it has not ended."""
        return self.trace_id if self.root is None else str(self.root.attributes.get(names.REQUEST_ID, self.trace_id))

    @property
    def start_ns(self) -> int:
        """When it began."""
        return min(span.start_ns for span in self._spans)

    @property
    def end_ns(self) -> int:
        """When it ended, or the last round that was written did."""
        return max(span.end_ns for span in self._spans)

    @property
    def ms(self) -> float:
        """How long it took."""
        return (self.end_ns - self.start_ns) / 1e6

    def total(self, name: str) -> int:
        """The sum of an attribute over the rounds."""
        return sum(one.span.number(name) for one in self.rounds) + sum(one.number(name) for one in self.summed)

    @property
    def num_rounds(self) -> int:
        """With those that are summed up."""
        return len(self.rounds) + sum(one.number(names.ROUNDS_COUNT) for one in self.summed)

    @property
    def _spans(self) -> list[Span]:
        rounds = [one.span for one in self.rounds]
        return rounds if self.root is None else [self.root, *rounds]


def find_requests(spans: Sequence[Span]) -> list[TracedRequest]:
    """All requests, oldest first. A trace may hold several: the clients decide."""
    parts, rounds, summed, steps = defaultdict(list), defaultdict(list), defaultdict(list), defaultdict(list)
    roots: dict[str, Span] = {}
    for span in spans:
        if span.name in PARTS:
            parts[span.parent_id].append(span)
        elif span.name == names.SPAN_ROUND:
            rounds[span.parent_id].append(span)
        elif span.name == names.SPAN_ROUNDS:
            summed[span.parent_id].append(span)
        elif names.REQUEST_ID in span.attributes:
            roots[span.span_id] = span
        for linked in span.links:
            steps[linked].append(span)
    found = []
    for root_id in {**roots, **rounds}:
        root, own = roots.get(root_id), sorted(rounds[root_id], key=lambda span: span.start_ns)
        found.append(
            TracedRequest(
                root=root,
                rounds=tuple(TracedRound(span, tuple(sorted(parts[span.span_id], key=_start))) for span in own),
                summed=tuple(summed[root_id]),
                draft_steps=_of_service(steps[root_id], DRAFT_SERVICE),
                target_steps=_of_service(steps[root_id], TARGET_SERVICE),
                trace_id=(root or own[0]).trace_id,
            )
        )
    return sorted(found, key=lambda request: request.start_ns)


def pick(requests: Sequence[TracedRequest], wanted: str) -> TracedRequest:
    """The request of this name, or of a trace id, or of a beginning that only one has. ValueError says what there
    is."""
    exact = [request for request in requests if wanted in (request.id, request.trace_id)]
    alike = exact or [request for request in requests if request.id.startswith(wanted)]
    if len(alike) == 1:
        return alike[0]
    if alike:
        shown = ", ".join(request.id for request in alike[:3])
        raise ValueError(f"{len(alike)} requests are called {wanted}: {shown}{', ...' if len(alike) > 3 else ''}")
    known = [request.id for request in requests]
    close = difflib.get_close_matches(wanted, known, n=1)
    meant = f"did you mean {close[0]}?" if close else f"the last one is {known[-1]}, of {len(known)}"
    raise ValueError(f"no request {wanted}: {meant}")


def _of_service(steps: Iterable[Span], service: str) -> tuple[Span, ...]:
    return tuple(sorted((span for span in steps if span.service == service), key=_start))


def _start(span: Span) -> int:
    return span.start_ns


Paint = Callable[[str, str], str]

# Part to letter and colour. Letters alone must do: a pipe has no colours, and not everybody sees them.
LETTERS = {
    names.SPAN_DRAFT: ("d", "cyan"),
    names.SPAN_WIRE: (".", "dim"),
    names.SPAN_QUEUE: ("q", "red"),
    names.SPAN_VERIFY: ("V", "green"),
    names.SPAN_SAMPLE: ("s", "yellow"),
}
STEP = ("#", "dim")
ROUNDS_A_BLOCK = 12  # that share a time axis: with more, a round would be too narrow to show its parts
HEAD = f"{'round':>5} {'at ms':>8} {'ms':>7} {'k':>3} {'drafted':>7} {'accepted':>8} {'emitted':>7} {'chain':>6}  "
LEAST_WIDTH = 24  # columns of time


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of a lane."""

    start_ns: int
    end_ns: int
    letter: str
    colour: str


@dataclass(frozen=True, slots=True)
class Axis:
    """A stretch of time on some columns."""

    start_ns: int
    end_ns: int
    width: int

    def draw(self, segments: Sequence[Segment], paint: Paint) -> str:
        """A lane: each column has the letter of the segment with the largest share of it."""
        cells = [" "] * self.width
        colours = [""] * self.width
        best = [0.0] * self.width
        scale = self.width / max(1, self.end_ns - self.start_ns)
        for segment in segments:
            start, end = ((ns - self.start_ns) * scale for ns in (segment.start_ns, segment.end_ns))
            for cell in range(max(0, int(start)), min(self.width, int(end) + 1)):
                share = min(end, cell + 1) - max(start, cell)
                if share > best[cell]:
                    best[cell], cells[cell], colours[cell] = share, segment.letter, segment.colour
        runs = groupby(zip(colours, cells, strict=True), key=itemgetter(0))
        return "".join(paint("".join(cell for _, cell in run), colour) for colour, run in runs).rstrip()


def waterfall(request: TracedRequest, width: int, paint: Paint) -> Iterator[str]:
    """All rounds, in blocks that have a time axis each; then what the services did in that time."""
    numbers = {one.completion for one in request.rounds}
    for completion in sorted(numbers):
        if len(numbers) > 1:
            yield f"completion {completion}"
        own = [one for one in request.rounds if one.completion == completion]
        for first in range(0, len(own), ROUNDS_A_BLOCK):
            yield from _block(request, own[first : first + ROUNDS_A_BLOCK], width, paint)
            yield ""


def legend(paint: Paint) -> str:
    """What the letters mean."""
    words = (f"{paint(letter, colour)} {part.rpartition('.')[2]}" for part, (letter, colour) in LETTERS.items())
    return "   ".join(words)


def sums(request: TracedRequest) -> Iterator[str]:
    """By part the whole time, its share, and the median of a round. The first round, which holds the prompt, counts in
    the sums alone."""
    total = sum(one.span.ms for one in request.rounds)
    rounds = [one for one in request.rounds if one.span.number(names.ROUND_INDEX) > 0] or list(request.rounds)
    yield f"{'part':<8} {'ms':>9} {'share':>6} {'median ms a round':>18}"
    for part in PARTS:
        ms = sum(one.part_ms(part) for one in request.rounds)
        middle = median(one.part_ms(part) for one in rounds)
        yield f"{part.rpartition('.')[2]:<8} {ms:>9.2f} {ms / total if total else 0:>6.0%} {middle:>18.2f}"
    yield f"{'rounds':<8} {total:>9.2f} {1:>6.0%} {median(one.span.ms for one in rounds):>18.2f}"


def _block(request: TracedRequest, rounds: Sequence[TracedRound], width: int, paint: Paint) -> Iterator[str]:
    axis = Axis(rounds[0].span.start_ns, max(one.span.end_ns for one in rounds), max(LEAST_WIDTH, width - len(HEAD)))
    start, end = (f"{(ns - request.start_ns) / 1e6:.1f}" for ns in (axis.start_ns, axis.end_ns))
    yield HEAD + start + f"{end} ms".rjust(axis.width - len(start))
    for one in rounds:
        yield (_numbers(one, request.start_ns) + axis.draw([_segment(part) for part in one.parts], paint)).rstrip()
    for name, steps in (("draft steps", request.draft_steps), ("target steps", request.target_steps)):
        if lane := axis.draw([Segment(step.start_ns, step.end_ns, *STEP) for step in steps], paint):
            yield name.rjust(len(HEAD) - 2) + "  " + lane


def _numbers(one: TracedRound, start_ns: int) -> str:
    span = one.span
    chain = span.attributes.get(names.ROUND_CHAIN, "-")
    return (
        f"{span.number(names.ROUND_INDEX):>5} {(span.start_ns - start_ns) / 1e6:>8.1f} {span.ms:>7.1f} "
        f"{span.number(names.ROUND_K):>3} {span.number(names.ROUND_DRAFTED):>7} {span.number(names.ROUND_ACCEPTED):>8} "
        f"{span.number(names.ROUND_EMITTED):>7} {chain:>6}  "
    )


def _segment(part: Span) -> Segment:
    return Segment(part.start_ns, part.end_ns, *LETTERS[part.name])


def unpainted(text: str, colour: str) -> str:
    """Without its colour."""
    return text


DESCRIPTION = (
    "Show where a request's rounds spent their time, from the file (the bare argument) that the services' --trace-file "
    "wrote: for each round its k, the tokens drafted, accepted and emitted, its chain, and draft, wire, queue, verify "
    "and sample on a time axis, with the steps of draft and target below where the file has them. Of a file with "
    "several requests, without --request or --last, they are listed."
)
NOT_DRAFTED = "nothing drafted"


class TraceSettings(ServiceSettings):
    """What is shown, and how wide."""

    section: ClassVar[str] = "trace"

    file: Path = Field(description="OTLP JSON lines; also the bare argument")
    request: str = Field("", description="the request to show: its id, the id's beginning, or its trace id")
    last: bool = Field(False, description="show the request that began last")
    width: int | None = Field(None, ge=40, le=1000, description="columns (default: the terminal's, 120 on a pipe)")
    plain: bool = Field(False, description="no colours")


def main(argv: Sequence[str] | None = None, prog: str = "outrider trace") -> int:
    """Prints; 1 if the file or the request cannot be shown."""
    settings = parse(TraceSettings, sys.argv[1:] if argv is None else argv, prog, DESCRIPTION, bare=("file",))
    try:
        trace = read_trace(settings.file)
        if trace.cut:
            print(f"{prog}: warning: the last line of {settings.file} is cut, and left out", file=sys.stderr)
        requests = find_requests(trace.spans)
        if not requests:
            raise ValueError(f"{settings.file} has no request: the gateway writes them, so give it a --trace-file, too")
        print("\n".join(_lines(settings, requests)))
    except (OSError, ValueError) as error:
        return fail(prog, error)
    return 0


def _lines(settings: TraceSettings, requests: Sequence[TracedRequest]) -> Iterator[str]:
    if settings.request:
        yield from show(settings, pick(requests, settings.request))
    elif settings.last or len(requests) == 1:
        yield from show(settings, requests[-1])
    else:
        yield from overview(requests)
        yield f"\n{len(requests)} requests; show one with --request ID, or the last with --last"


def show(settings: TraceSettings, request: TracedRequest) -> Iterator[str]:
    """One request."""
    paint = painted if make_painter(settings.plain).colours else unpainted
    yield from heading(request)
    if not request.num_rounds:
        yield "no rounds: it ended before its first token"
    if request.rounds:
        yield ""
        yield legend(paint)
        yield ""
        yield from waterfall(request, settings.width or shutil.get_terminal_size((120, 24)).columns, paint)
        yield from sums(request)
    if (left := request.num_rounds - len(request.rounds)) > 0:
        yield f"{left} more rounds are in the trace as one span for each completion (outrider gateway --trace-rounds)"


def heading(request: TracedRequest) -> Iterator[str]:
    """What the request was, and what became of it."""
    root = request.root
    yield f"request {request.id}, {_when(request)}, {request.ms:.1f} ms"
    if root is None:
        yield "  its end is not in the file: it was still running, or the gateway was killed"
    else:
        shown = root.attributes
        first = shown.get(names.GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK)
        yield (
            f"  {root.name}: {root.number(names.GEN_AI_USAGE_INPUT_TOKENS)} prompt tokens "
            f"({root.number(names.GEN_AI_USAGE_CACHED_TOKENS)} cached), "
            f"{root.number(names.GEN_AI_USAGE_OUTPUT_TOKENS)} tokens"
            + (f", the first after {first * 1e3:.1f} ms" if isinstance(first, float) else "")
            + f", then {_finish(root.attributes)}"
        )
        yield from _constraint(request, root)
    if request.num_rounds:
        rule = "" if root is None else f", {root.attributes.get(names.REQUEST_ACCEPTANCE, '')} acceptance"
        policies = dict.fromkeys(str(one.span.attributes.get(names.ROUND_POLICY, "")) for one in request.rounds)
        yield (
            f"  {request.num_rounds} rounds, {request.total(names.ROUND_EMITTED) / request.num_rounds:.2f} tokens a "
            f"round, {_accepted(request)}{rule}, mode {' then '.join(filter(None, policies)) or 'not known'}"
        )


def _constraint(request: TracedRequest, root: Span) -> Iterator[str]:
    """Which constraint the output had, and what that took; nothing without one."""
    kind = root.attributes.get(names.REQUEST_CONSTRAINT)
    if kind is not None:
        compiled, masked = root.number(names.REQUEST_COMPILE_US), request.total(names.ROUND_MASK_US)
        yield f"  constraint {kind}, compiled in {compiled / 1e3:.1f} ms; steps waited {masked / 1e3:.1f} ms for masks"


def overview(requests: Sequence[TracedRequest]) -> Iterator[str]:
    """A line for each request."""
    width = max(len(request.id) for request in requests)
    yield f"{'request':<{width}}  {'began (UTC)':<23}  {'ms':>9}  {'tokens':>6}  {'rounds':>6}  accepted"
    for request in requests:
        tokens = request.total(names.ROUND_EMITTED)
        yield (
            f"{request.id:<{width}}  {_when(request):<23}  {request.ms:>9.1f}  {tokens:>6}  "
            f"{request.num_rounds:>6}  {_share(request)}{'' if request.root else '  (no end)'}"
        )


def _when(request: TracedRequest) -> str:
    return datetime.fromtimestamp(request.start_ns / 1e9, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]


def _share(request: TracedRequest) -> str:
    accepted, drafted = request.total(names.ROUND_ACCEPTED), request.total(names.ROUND_DRAFTED)
    return f"{accepted / drafted:.0%} ({accepted}/{drafted})" if drafted else NOT_DRAFTED


def _accepted(request: TracedRequest) -> str:
    share, forced = _share(request), request.total(names.ROUND_FORCED)
    accepted = f", forced {request.total(names.ROUND_FORCED_ACCEPTED)}/{forced}" if forced else ""
    return (share if share == NOT_DRAFTED else f"accepted {share}") + accepted


def _finish(attributes: dict[str, object]) -> str:
    error, reasons = attributes.get(names.ERROR_TYPE), attributes.get(names.GEN_AI_RESPONSE_FINISH_REASONS)
    if error:
        return f"an error: {error}"
    return ", ".join(map(str, reasons)) if isinstance(reasons, list) and reasons else "no end"


if __name__ == "__main__":
    sys.exit(main())
