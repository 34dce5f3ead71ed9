"""`outrider demo`: the services on this machine, a completion in colours, and what speculation is worth here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, ClassVar
from uuid import uuid4

from pydantic import Field, model_validator

from outrider.cli.arguments import fail, parse
from outrider.cli.generate import CollectedCompletion
from outrider.cli.local_services import LOOPBACK, ServiceFailed, Services, leave_on_signals
from outrider.cli.local_settings import LocalSettings
from outrider.cli.serve import connect, start, starting
from outrider.cli.terminal import Painter, TokenWriter, make_painter, steps
from outrider.client import Part, SpeculationStats, generate
from outrider.gateway.text.tokenizer import Tokenizer
from outrider.rpc.errors import OutriderError

DESCRIPTION = (
    "Start a draft (unless a head drafts), a target and a gateway on this machine with the embedded pair of models, "
    "stream a completion of the prompt (also a bare argument), and compare decoding with and without speculation on a "
    "target of about 300M parameters that computes the same function. Everything ends with the demo."
)
PROMPT = 'def parse_args(argv):\n    """'
WARM_UP_TOKENS = 8


class DemoSettings(LocalSettings):
    """What the demo generates, measures and shows."""

    section: ClassVar[str] = "demo"
    subjects: ClassVar[Mapping[str, str]] = {"prompt": "what is shown"}
    first: ClassVar[tuple[str, ...]] = (
        "prompt", "max_tokens", "temperature", "seed", "draft.method", "target.head", "gateway.num_draft_tokens",
        "target.threads", "expand", "plain",
    )  # fmt: skip
    decided: ClassVar[frozenset[str]] = LocalSettings.decided | {"target.model", "target.expand", "draft.model"}
    gateway_listen: ClassVar[str] = LOOPBACK

    prompt: str = Field(PROMPT, min_length=1, description="the text to continue; also the bare argument")
    max_tokens: int = Field(128, ge=1, le=900, description="tokens of the completion")
    temperature: float = Field(0.0, ge=0, le=100, description="temperature of the sampling; 0 is greedy")
    seed: int = Field(0, ge=0, description="seed of the sampling, above temperature 0")
    expand: bool = Field(True, description="compare with plain decoding, on a target that is made large")
    compare_tokens: int = Field(64, ge=2, le=900, description="tokens of each completion of the comparison")
    repeats: int = Field(
        3, ge=1, le=100, description="completions of the comparison, with and without speculation each"
    )
    start_timeout: float = Field(120.0, gt=0, description="seconds that a service may take to start")
    trace_file: Path | None = Field(Path("trace.jsonl"), description="where the trace goes, as OTLP JSON lines")

    @model_validator(mode="before")
    @classmethod
    def _trace(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """The services write the demo's trace, unless it is told another file."""
        return {"trace_file": cls.model_fields["trace_file"].default, **given}


@dataclass(frozen=True, slots=True)
class Comparison:
    """The same prompt with and without speculation, in turns."""

    drafted: tuple[CollectedCompletion, ...]
    plain: tuple[CollectedCompletion, ...]
    greedy: bool

    @property
    def same_tokens(self) -> bool:
        """Whether every completion has the same tokens."""
        return len({tuple(answer.token_ids) for answer in (*self.drafted, *self.plain)}) == 1

    @property
    def comparable(self) -> bool:
        """Whether they must have: the output then does not depend on the drafts."""
        return self.greedy or all(answer.acceptance == "coupled" for answer in self.drafted)


def summary(answer: CollectedCompletion) -> list[str]:
    """The completion that was shown."""
    return [
        _line("tokens", f"{len(answer.token_ids)} ({_origins(answer)}), then {answer.finish_reason}"),
        *rounds(answer),
        _line("speed", f"{answer.tokens_per_s:.1f} tokens/s"),
        _line("seed", str(answer.seed)),
    ]


def rounds(answer: CollectedCompletion) -> list[str]:
    """What speculation did for a completion."""
    stats = answer.speculation
    if stats is None or not stats.num_rounds:
        return [_line("rounds", "none")]
    return [
        _line("tokens per round", f"{len(answer.token_ids) / stats.num_rounds:.2f} in {stats.num_rounds} rounds"),
        _line("acceptance", _share(stats.num_accepted_tokens, stats.num_draft_tokens) + " of the drafted tokens"),
        *by_method(stats),
        *forced(stats),
        _line("  by position", by_position(stats.num_accepted_per_position, stats.num_tested_per_position)),
        _line("control overhead", f"{stats.overhead_us / 1000:.2f} ms a round (median, forward passes left out)"),
    ]


def by_method(stats: SpeculationStats) -> list[str]:
    """The acceptance of each method, where several drafted."""
    if len(stats.by_method) < 2:
        return []
    shares = (
        f"{name}: {_share(did.num_accepted_tokens, did.num_draft_tokens)}" for name, did in stats.by_method.items()
    )
    return [_line("  by method", ", ".join(shares))]


def forced(stats: SpeculationStats) -> list[str]:
    """What became of tokens that a constraint forced, where one did."""
    if not stats.num_forced_tokens:
        return []
    return [_line("forced tokens", _share(stats.num_accepted_forced_tokens, stats.num_forced_tokens) + " accepted")]


def comparison(compared: Comparison) -> list[str]:
    """With speculation and without, and whether the tokens are the same."""
    drafted = [answer.tokens_per_s for answer in compared.drafted]
    plain = [answer.tokens_per_s for answer in compared.plain]
    return [
        *rounds(compared.drafted[-1]),
        _line("with speculation", _speeds(drafted)),
        _line("without", _speeds(plain)),
        _line("ratio", f"{median(drafted) / median(plain):.2f} (of the medians)"),
        _line("same tokens", _same(compared)),
    ]


def by_position(accepted: Sequence[int], tested: Sequence[int]) -> str:
    """The share accepted at each position of the window, of those tested: a token after a refused one is not."""
    shares = (f"{position}: {_share(*pair)}" for position, pair in enumerate(zip(accepted, tested, strict=True), 1))
    return "  ".join(shares) or "nothing was drafted"


def _same(compared: Comparison) -> str:
    if not compared.comparable:
        return "not to be expected: they are sampled by rejection, so only the distribution is the same"
    if compared.same_tokens:
        return "yes, in every completion"
    ids = [answer.token_ids for answer in (*compared.drafted, *compared.plain)]
    shortest = min(map(len, ids))
    first = next((place for place in range(shortest) if len({row[place] for row in ids}) > 1), shortest)
    return (
        f"no, they part at token {first + 1}: two tokens so nearly tied that the number of rows in a step decides "
        "(batch-invariant mode rules this out)"
    )


def _origins(answer: CollectedCompletion) -> str:
    return ", ".join(f"{answer.origins.count(name)} {name}" for name in dict.fromkeys(answer.origins))


def _speeds(speeds: Sequence[float]) -> str:
    each = ", ".join(f"{speed:.1f}" for speed in speeds)
    return f"{median(speeds):.1f} tokens/s (median of {each})"


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%} ({part}/{whole})" if whole else "none (0/0)"


def _line(name: str, value: str) -> str:
    return f"  {name:<17} {value}"


def main(argv: Sequence[str] | None = None, prog: str = "outrider demo") -> int:
    """Runs the demo; 1 if a service does not start, dies, or refuses the request."""
    settings = parse(DemoSettings, argv, prog, DESCRIPTION, bare=("prompt",))
    leave_on_signals()
    try:
        run(settings, make_painter(settings.plain))
    except (ServiceFailed, OutriderError, OSError, ValueError) as error:
        return fail(f"\n{prog}", error)
    return 0


def run(settings: DemoSettings, painter: Painter) -> None:
    """The whole demo: start, stream, compare, report. The services end with it, whatever happens."""
    with Services() as services:
        try:
            _show(settings, painter, services)
        except OutriderError:
            services.check()  # a service that died says more than what its clients saw
            raise
    painter.note(f"\ntraces: appended to {settings.trace_file} (OTLP JSON: a trace a request, a span a round)")


def _show(settings: DemoSettings, painter: Painter, services: Services) -> None:
    tokenizer = Tokenizer.load(settings.target.model)
    with starting(painter, settings) as advance:
        running = start(services, settings, advance)
    _stream(settings, painter, running.gateway.address, tokenizer)
    if settings.expand:
        with steps(painter, "making the target large: the same function, about 300M parameters", total=2) as advance:
            services.stop(running.gateway, running.target)
            with large_target(settings) as arguments:
                large = services.start("target", arguments)
                running = connect(services, settings, running.draft, large, advance)
        _compare(settings, painter, running.gateway.address)


@contextmanager
def large_target(settings: LocalSettings) -> Iterator[list[str]]:
    """The command line of a target that computes the same function with about 300M parameters, made in memory; for
    vLLM, which reads it from a folder, in one that lasts until it has."""
    if settings.target.engine != "vllm":
        yield settings.target_arguments(expand=True)
        return
    from outrider.pairs.expansion import write_expanded

    with TemporaryDirectory(prefix="outrider-demo-") as folder:
        write_expanded(settings.target.model, Path(folder) / "target")
        yield settings.target_arguments(model=Path(folder) / "target")


def _stream(settings: DemoSettings, painter: Painter, address: str, tokenizer: Tokenizer) -> None:
    """One completion, token by token."""
    painter.title("A completion, as it is committed")
    painter.legend()
    painter.prompt(settings.prompt)
    writer = TokenWriter(painter, tokenizer, settings.prompt)
    answer = CollectedCompletion(0)
    for part in _parts(settings, address, max_tokens=settings.max_tokens):
        answer.add(part)
        writer.write(part)
    painter.title(f"\nThe embedded pair, {settings.gateway.num_draft_tokens} tokens drafted a round")
    painter.lines(summary(answer))


def _compare(settings: DemoSettings, painter: Painter, address: str) -> None:
    """The same prompt in turns with and without speculation; one of each before counts for nothing. Whatever drafts
    from earlier answers has this very one after the first turn, so none may see another's."""
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
    compared = Comparison(tuple(drafted), tuple(plain), greedy=settings.temperature == 0)
    painter.title(
        f"With and without speculation, {settings.compare_tokens} tokens on the large target; no turn remembers another"
    )
    painter.lines(comparison(compared))


def _complete(settings: DemoSettings, address: str, speculate: bool, max_tokens: int) -> CollectedCompletion:
    """A whole completion of the same length whatever the model says, with caches and memories of its own."""
    answer, own = CollectedCompletion(0), {"ignore_eos": True, "salt": uuid4().hex}
    for part in _parts(settings, address, max_tokens=max_tokens, speculate=speculate, **own):
        answer.add(part)
    return answer


def _parts(settings: DemoSettings, address: str, **more: Any) -> Iterator[Part]:
    """An answer to the demo's prompt."""
    common = {"temperature": settings.temperature, "seed": settings.seed}
    options: dict[str, Any] = {**common, "num_draft_tokens": settings.gateway.num_draft_tokens, **more}
    return generate(address, settings.prompt, **options)
