"""The requests of a trace: each with its rounds, their parts, and the steps of draft and target that served it."""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from outrider.commands.trace_file import Span
from outrider.wire import tracing_names as names

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
        return sum(one.span.number(name) for one in self.rounds)

    @property
    def _spans(self) -> list[Span]:
        rounds = [one.span for one in self.rounds]
        return rounds if self.root is None else [self.root, *rounds]


def find_requests(spans: Sequence[Span]) -> list[TracedRequest]:
    """All requests, oldest first. A trace may hold several: the clients decide."""
    parts, rounds, steps = defaultdict(list), defaultdict(list), defaultdict(list)
    roots: dict[str, Span] = {}
    for span in spans:
        if span.name in PARTS:
            parts[span.parent_id].append(span)
        elif span.name == names.SPAN_ROUND:
            rounds[span.parent_id].append(span)
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
