"""`outrider demo`: the three services on this machine, a completion in colours, and what speculation is worth here."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from types import FrameType

from outrider.client import generate
from outrider.commands import demo_report
from outrider.commands.answers import Answer
from outrider.commands.arguments import parse
from outrider.commands.colours import Painter, make_painter
from outrider.commands.demo_settings import DemoSettings
from outrider.commands.fleet import Fleet, Folders
from outrider.commands.processes import ServiceFailed, Services
from outrider.commands.progress import steps
from outrider.commands.token_writer import TokenWriter
from outrider.gateway.tokenizer import Tokenizer
from outrider.pairs import pair_path
from outrider.wire.errors import OutriderError

DESCRIPTION = (
    "Start a draft, a target and a gateway on this machine with the embedded pair of models, stream a completion of "
    "the prompt (also a bare argument), and compare decoding with and without speculation on a target of about 300M "
    "parameters that computes the same function. Everything ends with the demo."
)
WARM_UP_TOKENS = 8


def main(argv: Sequence[str] | None = None, prog: str = "outrider demo") -> int:
    """Runs the demo; 1 if a service does not start, dies, or refuses the request."""
    settings = parse(DemoSettings, sys.argv[1:] if argv is None else argv, prog, DESCRIPTION, bare=("prompt",))
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    try:
        run(settings, make_painter(settings.plain))
    except (ServiceFailed, OutriderError, OSError, ValueError) as error:
        if isinstance(error, BrokenPipeError):
            raise
        print(f"\n{prog}: error: {error}", file=sys.stderr)
        return 1
    return 0


def run(settings: DemoSettings, painter: Painter) -> None:
    """The whole demo: start, stream, compare, report. The services end with it, whatever happens."""
    pair = pair_path(settings.pair)
    with Services() as services:
        fleet = Fleet(services, settings, Folders(pair.target, pair.draft))
        try:
            _show(settings, painter, fleet, Tokenizer.load(pair.target))
        except OutriderError:
            services.check()  # a service that died says more than what its clients saw
            raise
    painter.note(f"\ntraces: appended to {settings.trace_file} (OTLP JSON: a trace a request, a span a round)")


def _show(settings: DemoSettings, painter: Painter, fleet: Fleet, tokenizer: Tokenizer) -> None:
    with steps(painter, "starting three services", total=3) as advance:
        address = fleet.start(advance)
    _stream(settings, painter, address, tokenizer)
    if settings.expand:
        with steps(painter, "making the target large: the same function, about 300M parameters", total=2) as advance:
            address = fleet.enlarge(advance)
        _compare(settings, painter, address)


def _stream(settings: DemoSettings, painter: Painter, address: str, tokenizer: Tokenizer) -> None:
    """One completion, token by token."""
    painter.title("A completion, as it is committed")
    painter.legend()
    painter.prompt(settings.prompt)
    writer = TokenWriter(painter, tokenizer, settings.prompt)
    answer = Answer(0)
    for part in generate(
        address,
        settings.prompt,
        max_tokens=settings.max_tokens,
        temperature=settings.temperature,
        seed=settings.seed,
        num_draft_tokens=settings.num_draft_tokens,
    ):
        answer.add(part)
        writer.write(part)
    painter.title(f"\nThe embedded pair, {settings.num_draft_tokens} tokens drafted a round")
    painter.lines(demo_report.summary(answer))


def _compare(settings: DemoSettings, painter: Painter, address: str) -> None:
    """The same prompt in turns with and without speculation; one of each before counts for nothing."""
    drafted, plain = [], []
    with steps(painter, "comparing", total=settings.repeats + 1) as advance:
        for speculate in (True, False):
            _complete(settings, address, speculate, min(WARM_UP_TOKENS, settings.compare_tokens))
        advance("warmed up")
        for turn in range(1, settings.repeats + 1):
            drafted.append(_complete(settings, address, True, settings.compare_tokens))
            plain.append(_complete(settings, address, False, settings.compare_tokens))
            speeds = f"{drafted[-1].tokens_per_s:.1f} tokens/s with speculation, {plain[-1].tokens_per_s:.1f} without"
            advance(f"turn {turn} of {settings.repeats}: {speeds}")
    compared = demo_report.Comparison(tuple(drafted), tuple(plain), greedy=settings.temperature == 0)
    painter.title(f"With and without speculation, {settings.compare_tokens} tokens on the large target")
    painter.lines(demo_report.comparison(compared))


def _complete(settings: DemoSettings, address: str, speculate: bool, max_tokens: int) -> Answer:
    """A whole completion of the same length whatever the model says."""
    answer = Answer(0)
    for part in generate(
        address,
        settings.prompt,
        max_tokens=max_tokens,
        temperature=settings.temperature,
        seed=settings.seed,
        ignore_eos=True,
        speculate=speculate,
        num_draft_tokens=settings.num_draft_tokens,
    ):
        answer.add(part)
    return answer


def _leave(number: int, frame: FrameType | None) -> None:
    """Ends as on Ctrl-C, with the services."""
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
