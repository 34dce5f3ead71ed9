"""A request's rounds as lines of text: numbers on the left, on the right time, in which every column is a slice and its
letter says what most of the slice went to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from outrider.commands.colours import RESET
from outrider.commands.trace_file import Span
from outrider.commands.trace_requests import PARTS, TracedRequest, TracedRound
from outrider.wire import tracing_names as names

Paint = Callable[[str, str], str]

# Part to letter and colour. Letters alone must do: a pipe has no colours, and not everybody sees them.
LETTERS = {
    names.SPAN_DRAFT: ("d", "\x1b[36m"),
    names.SPAN_WIRE: (".", "\x1b[2m"),
    names.SPAN_QUEUE: ("q", "\x1b[31m"),
    names.SPAN_VERIFY: ("V", "\x1b[32m"),
    names.SPAN_SAMPLE: ("s", "\x1b[33m"),
}
STEP = ("#", "\x1b[2m")
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
        return _join(cells, colours, paint).rstrip()


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


def _join(cells: Sequence[str], colours: Sequence[str], paint: Paint) -> str:
    """Runs of one colour together."""
    out, start = "", 0
    for place in range(1, len(cells) + 1):
        if place == len(cells) or (cells[place], colours[place]) != (cells[start], colours[start]):
            out += paint("".join(cells[start:place]), colours[start])
            start = place
    return out


def painted(text: str, colour: str) -> str:
    """With its colour."""
    return f"{colour}{text}{RESET}" if colour else text


def unpainted(text: str, colour: str) -> str:
    """Without."""
    return text
