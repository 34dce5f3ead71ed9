"""`outrider trace`: where the time of requests went, summed up from a file of traces (OTLP JSON lines, as --trace-file
of the services writes them). Jaeger draws such traces on a time axis."""

from __future__ import annotations

import difflib
import math
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from outrider.cli.arguments import fail, parse
from outrider.cli.otlp_file import Span, read_trace
from outrider.rpc import telemetry as names
from outrider.rpc.settings import ServiceSettings

DESCRIPTION = (
    "Sum up where the time of a request's rounds went, from the file (the bare argument) that the services' "
    "--trace-file wrote: draft, wire, queue, verify and sample, with shares and with percentiles a round. Of a file "
    "with several requests, without --request or --last, these are listed, and all their rounds summed up."
)
STAGES = {
    "draft_ms": names.SPAN_DRAFT,
    "wire_ms": names.SPAN_WIRE,
    "queue_ms": names.SPAN_QUEUE,
    "verify_ms": names.SPAN_VERIFY,
    "sample_ms": names.SPAN_SAMPLE,
    "ms": names.SPAN_ROUND,
}
PERCENTILES = {"p50": 50, "p90": 90, "p99": 99, "max": 100}
RoundMs = tuple[int, Mapping[str, float]]  # a round's number; its time and those of its stages


class TraceSettings(ServiceSettings):
    """The file, and which of its requests is shown."""

    section: ClassVar[str] = "trace"

    file: Path = Field(description="OTLP JSON lines; also the bare argument")
    request: str = Field("", description="the request to show: its id, the id's beginning, or its trace id")
    last: bool = Field(False, description="show the request that began last")


def main(argv: Sequence[str] | None = None, prog: str = "outrider trace") -> int:
    """Prints; 1 if the file or the request cannot be shown."""
    settings = parse(TraceSettings, argv, prog, DESCRIPTION, bare=("file",))
    try:
        spans, is_cut = read_trace(settings.file)
        if is_cut:
            print(f"{prog}: warning: the last line of {settings.file} is cut, and left out", file=sys.stderr)
        requests = find_requests(spans)
        if not requests:
            raise ValueError(f"{settings.file} has no request: the gateway writes them, so give it a --trace-file, too")
        chosen = [pick(requests, settings.request)] if settings.request else requests[-1 if settings.last else 0 :]
        print("\n".join(overview(chosen) if len(chosen) > 1 else show(chosen[0])))
    except (OSError, ValueError) as error:
        return fail(prog, error)
    return 0


class TracedRequest:
    """One request. It has no root while it has not ended: that span is written at its end."""

    def __init__(
        self, root: Span | None, rounds: list[Span], summed: list[Span], ms: list[Mapping[str, float]]
    ) -> None:
        spans = rounds if root is None else [root, *rounds]
        self.start_ns = min(span.start_ns for span in spans)
        self.root, self.rounds = root, rounds
        self.timed: list[RoundMs] = [(one.number(names.ROUND_INDEX), own) for one, own in zip(rounds, ms, strict=True)]
        self.num_rounds = len(rounds) + sum(one.number(names.ROUNDS_COUNT) for one in summed)
        self.trace_id = spans[0].trace_id
        self.id = str(spans[0].attributes.get(names.REQUEST_ID, self.trace_id))
        self.began = datetime.fromtimestamp(self.start_ns / 1e9, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
        self.ms = (max(span.end_ns for span in spans) - self.start_ns) / 1e6
        self._counted = [*rounds, *summed]  # rounds of long completions are summed up, many in a span

    def total(self, name: str) -> int:
        """The sum of an attribute over the rounds."""
        return sum(one.number(name) for one in self._counted)

    @property
    def accepted(self) -> str:
        """The share of its drafted tokens that was accepted."""
        return share(self.total(names.ROUND_ACCEPTED), self.total(names.ROUND_DRAFTED))


def share(accepted: int, drafted: int) -> str:
    """The share of drafted tokens that was accepted."""
    return f"{accepted / drafted:.0%} ({accepted}/{drafted})" if drafted else "nothing drafted"


def find_requests(spans: Sequence[Span]) -> list[TracedRequest]:
    """All requests, oldest first. A trace may hold several: the clients decide."""
    roots = {span.span_id: span for span in spans if names.REQUEST_ID in span.attributes}
    named = {span: name for name, span in STAGES.items()}
    times: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    children: dict[tuple[str, str], list[Span]] = defaultdict(list)
    for span in sorted(spans, key=lambda span: span.start_ns):
        children[span.name, span.parent_id].append(span)
        if span.name in named:
            of_round = span.span_id if span.name == names.SPAN_ROUND else span.parent_id
            times[of_round][named[span.name]] += (span.end_ns - span.start_ns) / 1e6
    found = []
    for root_id in dict.fromkeys([*roots, *(parent for name, parent in children if name == names.SPAN_ROUND)]):
        rounds, summed = (children[name, root_id] for name in (names.SPAN_ROUND, names.SPAN_ROUNDS))
        found.append(TracedRequest(roots.get(root_id), rounds, summed, [times[one.span_id] for one in rounds]))
    return sorted(found, key=lambda request: request.start_ns)


def pick(requests: Sequence[TracedRequest], wanted: str) -> TracedRequest:
    """The request of this name, or of a trace id, or of a beginning that only one has. ValueError says what there
    is."""
    exact = [request for request in requests if wanted in (request.id, request.trace_id)]
    alike = exact or [request for request in requests if request.id.startswith(wanted)]
    if len(alike) == 1:
        return alike[0]
    known = [request.id for request in alike or requests]
    if alike:
        raise ValueError(
            f"{len(known)} requests are called {wanted}: {', '.join(known[:3])}{', ...' * (len(known) > 3)}"
        )
    close = difflib.get_close_matches(wanted, known, n=1)
    meant = f"did you mean {close[0]}?" if close else f"the last one is {known[-1]}, of {len(known)}"
    raise ValueError(f"no request {wanted}: {meant}")


def sums(rounds: Sequence[RoundMs]) -> Iterator[str]:
    """The whole time of each stage, its share of the rounds', and percentiles of the rounds but the first, which holds
    the prompt and counts in the sums alone."""
    total = sum(ms["ms"] for _, ms in rounds)
    steady = [ms for index, ms in rounds if index] or [ms for _, ms in rounds]
    if not rounds:
        return
    yield f"{'stage':<7} {'ms':>10} {'share':>6} " + "".join(f"{name:>9}" for name in PERCENTILES)
    for name, span in STAGES.items():
        whole = sum(ms.get(name, 0.0) for _, ms in rounds)
        ordered = sorted(ms.get(name, 0.0) for ms in steady)
        tail = (ordered[math.ceil(len(ordered) * percent / 100) - 1] for percent in PERCENTILES.values())
        part = whole / total if total else 0
        yield f"{span.rpartition('.')[2]:<7} {whole:>10.2f} {part:>6.0%} " + "".join(f"{ms:>9.2f}" for ms in tail)


def show(request: TracedRequest) -> Iterator[str]:
    """One request: what it was, what became of it, and where its time went."""
    root, drafted, forced = request.root, request.total(names.ROUND_DRAFTED), request.total(names.ROUND_FORCED)
    yield f"request {request.id}, {request.began}, {request.ms:.1f} ms"
    yield from ["  its end is not in the file: it ran on, or the gateway was killed"] if root is None else _end(root)
    if root is not None and (kind := root.attributes.get(names.REQUEST_CONSTRAINT)) is not None:
        compiled, masked = root.number(names.REQUEST_COMPILE_US), request.total(names.ROUND_MASK_US)
        yield f"  constraint {kind}, compiled in {compiled / 1e3:.1f} ms; steps waited {masked / 1e3:.1f} ms for masks"
    if not request.num_rounds:
        yield "no rounds: it ended before its first token"
        return
    modes = dict.fromkeys(str(one.attributes.get(names.ROUND_POLICY, "")) for one in request.rounds)
    a_round = request.total(names.ROUND_EMITTED) / request.num_rounds
    yield "  " + ", ".join([
        f"{request.num_rounds} rounds, {a_round:.2f} tokens a round, {'accepted ' * bool(drafted)}{request.accepted}",
        *([f"forced {request.total(names.ROUND_FORCED_ACCEPTED)}/{forced}"] if forced else []),
        *([] if root is None else [f"{root.attributes.get(names.REQUEST_ACCEPTANCE, '')} acceptance"]),
        f"mode {' then '.join(filter(None, modes)) or 'not known'}",
    ])  # fmt: skip
    yield from ["", *sums(request.timed)]
    if (left := request.num_rounds - len(request.rounds)) > 0:
        yield f"{left} more rounds are in the trace as one span for each completion (outrider gateway --trace-rounds)"


def _end(root: Span) -> Iterator[str]:
    first = root.attributes.get(names.GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK)
    error, reasons = (root.attributes.get(key) for key in (names.ERROR_TYPE, names.GEN_AI_RESPONSE_FINISH_REASONS))
    yield (
        f"  {root.name}: {root.number(names.GEN_AI_USAGE_INPUT_TOKENS)} prompt tokens "
        f"({root.number(names.GEN_AI_USAGE_CACHED_TOKENS)} cached), "
        f"{root.number(names.GEN_AI_USAGE_OUTPUT_TOKENS)} tokens"
        + (f", the first after {first * 1e3:.1f} ms" if isinstance(first, float) else "")
        + f", then {f'an error: {error}' if error else ', '.join(map(str, reasons or ['no end']))}"
    )


def overview(requests: Sequence[TracedRequest]) -> Iterator[str]:
    """A line for each request, and where the time of all went."""
    width = max(len(request.id) for request in requests)
    yield f"{'request':<{width}}  {'began (UTC)':<23}  {'ms':>9}  {'tokens':>6}  {'rounds':>6}  accepted"
    for one in requests:
        yield (
            f"{one.id:<{width}}  {one.began:<23}  {one.ms:>9.1f}  {one.total(names.ROUND_EMITTED):>6}  "
            f"{one.num_rounds:>6}  {one.accepted}{'' if one.root else '  (no end)'}"
        )
    yield from ["", *sums([timed for request in requests for timed in request.timed])]
    yield f"\n{len(requests)} requests; show one with --request ID, or the last with --last"
