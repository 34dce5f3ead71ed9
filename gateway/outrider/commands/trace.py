"""`outrider trace`: the rounds of a request as a waterfall, from a file of traces."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from outrider.commands.arguments import parse
from outrider.commands.colours import make_painter
from outrider.commands.trace_file import read_trace
from outrider.commands.trace_lanes import legend, painted, sums, unpainted, waterfall
from outrider.commands.trace_requests import TracedRequest, find_requests, pick
from outrider.wire import tracing_names as names
from outrider.wire.config import ServiceSettings

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
        if isinstance(error, BrokenPipeError):
            raise
        print(f"{prog}: error: {error}", file=sys.stderr)
        return 1
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
    if not request.rounds:
        yield "no rounds: it ended before its first token"
        return
    yield ""
    yield legend(paint)
    yield ""
    yield from waterfall(request, settings.width or shutil.get_terminal_size((120, 24)).columns, paint)
    yield from sums(request)


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
    if request.rounds:
        rule = "" if root is None else f", {root.attributes.get(names.REQUEST_ACCEPTANCE, '')} acceptance"
        policies = dict.fromkeys(str(one.span.attributes.get(names.ROUND_POLICY, "")) for one in request.rounds)
        yield (
            f"  {len(request.rounds)} rounds, {request.total(names.ROUND_EMITTED) / len(request.rounds):.2f} tokens a "
            f"round, {_accepted(request)}{rule}, mode {' then '.join(filter(None, policies)) or 'not known'}"
        )


def overview(requests: Sequence[TracedRequest]) -> Iterator[str]:
    """A line for each request."""
    width = max(len(request.id) for request in requests)
    yield f"{'request':<{width}}  {'began (UTC)':<23}  {'ms':>9}  {'tokens':>6}  {'rounds':>6}  accepted"
    for request in requests:
        tokens = request.total(names.ROUND_EMITTED)
        yield (
            f"{request.id:<{width}}  {_when(request):<23}  {request.ms:>9.1f}  {tokens:>6}  "
            f"{len(request.rounds):>6}  {_share(request)}{'' if request.root else '  (no end)'}"
        )


def _when(request: TracedRequest) -> str:
    return datetime.fromtimestamp(request.start_ns / 1e9, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]


def _share(request: TracedRequest) -> str:
    accepted, drafted = request.total(names.ROUND_ACCEPTED), request.total(names.ROUND_DRAFTED)
    return f"{accepted / drafted:.0%} ({accepted}/{drafted})" if drafted else NOT_DRAFTED


def _accepted(request: TracedRequest) -> str:
    share = _share(request)
    return share if share == NOT_DRAFTED else f"accepted {share}"


def _finish(attributes: dict[str, object]) -> str:
    error, reasons = attributes.get(names.ERROR_TYPE), attributes.get(names.GEN_AI_RESPONSE_FINISH_REASONS)
    if error:
        return f"an error: {error}"
    return ", ".join(map(str, reasons)) if isinstance(reasons, list) and reasons else "no end"


if __name__ == "__main__":
    sys.exit(main())
