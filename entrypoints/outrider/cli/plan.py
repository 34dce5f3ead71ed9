"""`outrider plan`: how many machines a number of streams needs, what a token takes on them, and whether the draft
belongs on devices of its own: by closed forms, and by the gateway's own loop over virtual machines in virtual time."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from outrider.cli.access import ServicesAccessSettings
from outrider.cli.arguments import fail, one_line, parse, split_ids
from outrider.cli.virtual_loop import gateway_loop, new_crowd
from outrider.planner.crowd import Machines
from outrider.planner.policy import Mode, Plan
from outrider.planner.sizing import (
    DRAFT_PRICE,
    Fleet,
    Memory,
    Pair,
    StepCosts,
    fastest,
    fastest_together,
    ms_per_token,
    ms_together,
    separate,
    together,
)
from outrider.planner.virtual_services import MAX_ROWS, DraftQuality
from outrider.rpc.errors import OutriderError

DESCRIPTION = (
    "Say what a token takes, which mode is best and how many targets, drafts and gateways a number of streams needs, "
    "with the draft on devices of its own or beside the target. The pair is described by --target-ms, --draft-ms, "
    "--rtt-ms and --acceptance; what is not given is measured where --target and --draft name services that run."
)
PROFILE = re.compile(r"(\d+):(\d+(?:\.\d+)?)")
SHORT = {"--json": "--output=json", "--no-json": "--output=text"}
MEASURED = ("target_ms", "draft_ms", "rtt_ms", "acceptance")  # of services that run, where nothing else is given
AUTO = "auto"
MOST_SIMULATED = 256  # streams: more only repeat what these show


def read_costs(value: Any) -> Any:
    """Step costs from `25` (milliseconds, whatever the rows), or from `1:22,64:30,512:81` (by rows)."""
    if not isinstance(value, str | int | float):
        return value
    text = str(value)
    points = [PROFILE.fullmatch(part.strip()) for part in text.split(",")]
    if all(points):
        found = {int(point[1]): 1e3 * float(point[2]) for point in points if point is not None}
    else:
        try:
            step_us = 1e3 * float(text)
        except ValueError:
            raise ValueError("must be milliseconds, as 25, or ROWS:MS points, as 1:22,64:30,512:81") from None
        found = {1: step_us, MAX_ROWS: step_us}
    if min(found) < 1 or not all(0 < step_us < math.inf for step_us in found.values()):
        raise ValueError("must have rows of 1 or more, and times above 0 ms")
    return tuple(sorted(found.items()))


Costs = Annotated[StepCosts, BeforeValidator(read_costs)]
Shares = Annotated[tuple[Annotated[float, Field(ge=0, le=1)], ...], BeforeValidator(split_ids)]


class PlanSettings(ServicesAccessSettings):
    """The pair of models, the machines and the streams that are planned for."""

    section: ClassVar[str] = "plan"

    target_ms: Costs | None = Field(None, description="a target's step: milliseconds, or by rows: 1:22,64:30,512:81")
    draft_ms: Costs | None = Field(None, description="a draft's pass: milliseconds, or by rows (chains and branches)")
    rtt_ms: float | None = Field(None, ge=0, le=10_000, description="round trip between a gateway and a service")
    acceptance: float | None = Field(None, ge=0, lt=1, description="chance that a drafted token is the target's")
    streams: int = Field(1, ge=1, le=10_000_000, description="completions that run at once")
    max_ms: float | None = Field(
        None, gt=0, description="most milliseconds a token may take (default: plain decoding of one stream alone)"
    )
    corrections: Shares = Field(
        DraftQuality(0).corrections,
        min_length=1,
        max_length=4,
        description="where the draft is wrong, the chances that its next guesses are right",
    )
    max_draft_tokens: int = Field(8, ge=1, le=32, description="tokens drafted a round, at most")
    context: int = Field(2048, ge=1, description="tokens of a stream, its prompt included")
    kv_gb: float = Field(0, ge=0, description="a target's memory for keys and values, without a draft beside it")
    target_kv_kb: float = Field(0, ge=0, description="keys and values of a token in the target")
    draft_kv_kb: float = Field(0, ge=0, description="keys and values of a token in the draft")
    draft_gb: float = Field(0, ge=0, description="the draft's weights")
    draft_price: float = Field(DRAFT_PRICE, ge=0, description="of a draft's device over a target's; the cheapest wins")
    gateway_us: float = Field(400, gt=0, description="of a core, that a round takes a gateway")
    seconds: float = Field(2, ge=0, le=600, description="virtual seconds that are simulated; 0: closed forms alone")
    target: str | None = Field(None, description="address of a target to measure")
    draft: str | None = Field(None, description="address of a draft to measure")
    tokenizer: Path | None = Field(None, description="tokenizer of the prompt that is measured with")
    prompt: str = Field("def parse_args(argv):", min_length=1, description="that acceptance is measured on")
    output: Literal["text", "json"] = Field("text", description="json, or --json: all figures as one object")

    @model_validator(mode="after")
    def _check_enough(self) -> Self:
        if (self.target is None) != (self.draft is None):
            raise ValueError("--target and --draft are measured together: give both, or neither")
        if self.target is not None and self.acceptance is None and self.tokenizer is None:
            raise ValueError("give --tokenizer, to measure acceptance on --prompt, or --acceptance")
        if self.target is None and (self.peer_ca is not None or self.target_tls_name or self.draft_tls_name):
            raise ValueError("--peer-ca and the names of certificates are for --target and --draft that run; give both")
        missing = ["--" + name.replace("_", "-") for name in MEASURED if getattr(self, name) is None]
        if self.target is None and missing:
            raise ValueError(f"give {', '.join(missing)}, or --target and --draft to measure them")
        if sum(self.corrections) > 1:
            raise ValueError("--corrections sum up to more than 1")
        return self


def main(argv: Sequence[str] | None = None, prog: str = "outrider plan") -> int:
    """Prints the plan; 1 where services cannot be measured, or nothing keeps to what is asked."""
    settings = parse(PlanSettings, argv, prog, DESCRIPTION, short=SHORT)
    try:
        if settings.target is not None:
            settings = measured(settings)
        report = make_report(settings)
    except (OSError, ValueError, OutriderError) as error:
        return fail(prog, error, one_line(error))
    print(json.dumps(report, indent=2) if settings.output == "json" else "\n".join(render(report)))
    return 0


def measured(settings: PlanSettings) -> PlanSettings:
    """The settings with what running services say and show where nothing else was given. Raises OutriderError and
    ValueError."""
    import asyncio

    from outrider.cli.arguments import load_tokenizer
    from outrider.cli.plan_measure import measure

    ids: Sequence[int] = (1, 2, 3, 4)  # where acceptance is given, any tokens will do
    if settings.tokenizer is not None:
        ids = load_tokenizer(settings.tokenizer, "--tokenizer").encode(settings.prompt)
    found = asyncio.run(
        measure(str(settings.target), str(settings.draft), ids, settings.target_tls(), settings.draft_tls())
    )
    if found.cache_tokens and settings.target_kv_kb and not settings.kv_gb:
        settings = settings.model_copy(update={"kv_gb": found.cache_tokens * settings.target_kv_kb * 1e3 / 1e9})
    unknown = [name for name in MEASURED if getattr(settings, name) is None]
    return settings.model_copy(update={name: getattr(found, name) for name in unknown})


def make_report(settings: PlanSettings) -> dict[str, Any]:
    """Every figure. Raises ValueError where no plan keeps to what is asked."""
    target_costs, draft_costs = settings.target_ms, settings.draft_ms
    rtt_ms, acceptance = settings.rtt_ms, settings.acceptance
    if target_costs is None or draft_costs is None or rtt_ms is None or acceptance is None:
        raise ValueError("the pair is not described")
    pair = Pair(
        target_costs, draft_costs, DraftQuality(acceptance, settings.corrections), rtt_ms, settings.max_draft_tokens
    )
    memory = Memory(
        settings.context,
        1e9 * settings.kv_gb,
        1e3 * settings.target_kv_kb,
        1e3 * settings.draft_kv_kb,
        1e9 * settings.draft_gb,
    )
    max_ms = settings.max_ms or pair.verify.at(1) / 1e3
    fleets = {
        "separate": separate(pair, settings.streams, max_ms, memory, settings.draft_price),
        "colocated": together(pair, settings.streams, max_ms, memory),
    }
    report: dict[str, Any] = {
        "pair": {
            "target_ms": [[rows, step_us / 1e3] for rows, step_us in target_costs],
            "draft_ms": [[rows, pass_us / 1e3] for rows, pass_us in draft_costs],
            "rtt_ms": rtt_ms,
            "acceptance": acceptance,
        },
        "one_stream": list(_alone(pair, settings.seconds)),
        "streams": settings.streams,
        "max_ms": max_ms,
        "context": settings.context,
        "draft_cache_share": memory.draft_share if memory.is_known else None,
    }
    for name, fleet in fleets.items():
        report[name] = _described(fleet, settings, memory.tokens(with_draft=name == "colocated"))
        if name == "separate" and settings.seconds:
            report[name] |= _under_load(pair, fleet, settings.seconds)
    return report


def _alone(pair: Pair, seconds: float) -> Iterator[dict[str, Any]]:
    """Each mode's best plan for one stream that has the machines to itself."""

    def row(mode: str, plan: Plan | None, foreseen_ms: float | None, simulated_ms: float | None) -> dict[str, Any]:
        k = None if plan is None else plan.num_draft_tokens
        return {"mode": mode, "num_draft_tokens": k, "foreseen_ms": foreseen_ms, "simulated_ms": simulated_ms}

    for mode in Mode:
        plan = fastest(pair, (mode,))
        simulated_ms = simulate(pair, 1, 1, 1, seconds, plan) if seconds else None
        yield row(mode.value, plan, ms_per_token(pair, plan, 1, 1), simulated_ms)
    yield row(AUTO, None, None, simulate(pair, 1, 1, 1, seconds) if seconds else None)
    plan = fastest_together(pair)
    yield row("colocated", plan, ms_together(pair, plan, 1), None)


def _described(fleet: Fleet, settings: PlanSettings, cache_tokens: float) -> dict[str, Any]:
    return {
        "mode": fleet.plan.mode.value,
        "num_draft_tokens": fleet.plan.num_draft_tokens,
        "targets": fleet.targets,
        "drafts": fleet.drafts,
        "gateways": fleet.gateways(settings.streams, settings.gateway_us),
        "streams_per_target": fleet.streams_per_target,
        "bound": fleet.bound,
        "foreseen_ms": fleet.ms_per_token,
        "tokens_per_s": fleet.tokens_per_s(settings.streams),
        "cache_tokens_per_target": round(cache_tokens) if math.isfinite(cache_tokens) else None,
    }


def _under_load(pair: Pair, fleet: Fleet, seconds: float) -> dict[str, Any]:
    """A part of the fleet: a draft and its targets, or a target and its drafts, with their streams."""
    targets = max(1, round(fleet.targets / max(1, fleet.drafts)))
    targets = max(1, min(targets, MOST_SIMULATED // fleet.streams_per_target))
    drafts = max(1, round(fleet.drafts / fleet.targets))
    streams = targets * fleet.streams_per_target
    return {
        "simulated_ms": simulate(pair, streams, targets, drafts, seconds, fleet.plan),
        "simulated_auto_ms": simulate(pair, streams, targets, drafts, seconds),
    }


def simulate(pair: Pair, streams: int, targets: int, drafts: int, seconds: float, plan: Plan | None = None) -> float:
    """Milliseconds a token in virtual time, after as long a time in which the controller learns: with the plan's mode
    and number of tokens, or as the controller chooses."""
    machines = Machines(pair.target_costs, pair.draft_costs, pair.quality, pair.round_trip_ms / 2e3, targets, drafts)
    crowd = new_crowd(machines)
    modes, k = (tuple(Mode), None) if plan is None else ((plan.mode,), plan.num_draft_tokens)
    crowd.add(gateway_loop(pair.target_costs, modes, k, pair.draft_costs), streams, spread_s=pair.verify.at(1) / 1e6)
    crowd.run(seconds)
    crowd.settle()
    crowd.run(seconds)
    return crowd.ms_per_token()


def render(report: dict[str, Any]) -> Iterator[str]:
    """The report as text."""
    given = report["pair"]
    yield (
        f"target {_curve(given['target_ms'])}, draft {_curve(given['draft_ms'])}, round trip {given['rtt_ms']:.4g} ms, "
        f"acceptance {given['acceptance']:.2f}"
    )
    yield ""
    yield from _table(
        ("one stream, ms a token", "k", "closed form", "simulated"),
        [
            (row["mode"], _number(row["num_draft_tokens"]), _ms(row["foreseen_ms"]), _ms(row["simulated_ms"]))
            for row in report["one_stream"]
        ],
    )
    yield ""
    apart, beside = report["separate"], report["colocated"]
    yield from _table(
        (f"streams: {report['streams']:,}, at most {report['max_ms']:.4g} ms a token", "separate", "co-located"),
        [
            ("best mode", *(f"{fleet['mode']}, k={fleet['num_draft_tokens']}" for fleet in (apart, beside))),
            ("ms a token", *(_ms(fleet["foreseen_ms"]) for fleet in (apart, beside))),
            ("  simulated", _ms(apart.get("simulated_ms")), ""),
            ("  simulated, auto", _ms(apart.get("simulated_auto_ms")), ""),
            ("tokens a second, all streams", *(f"{fleet['tokens_per_s']:,.0f}" for fleet in (apart, beside))),
            ("targets", *(f"{fleet['targets']:,}" for fleet in (apart, beside))),
            ("  streams on each", *(str(fleet["streams_per_target"]) for fleet in (apart, beside))),
            ("  bound by", *(fleet["bound"] for fleet in (apart, beside))),
            ("  tokens in its cache", *(_number(fleet["cache_tokens_per_target"]) for fleet in (apart, beside))),
            ("drafts", f"{apart['drafts']:,}", "on the targets"),
            ("gateways, a core each", *(f"{fleet['gateways']:,}" for fleet in (apart, beside))),
        ],
    )
    yield ""
    yield from _verdict(report)


def _verdict(report: dict[str, Any]) -> Iterator[str]:
    apart, beside = report["separate"], report["colocated"]
    saved, less = beside["targets"] - apart["targets"], 1 - apart["foreseen_ms"] / beside["foreseen_ms"]
    pace = f"a token takes {abs(less):.0%} {'less' if less >= 0 else 'more'} time"
    if saved > 0:
        yield f"Separate drafts ({apart['drafts']:,}) save {saved:,} of {beside['targets']:,} targets; {pace}."
    else:
        yield f"Separate drafts ({apart['drafts']:,}) save no target; {pace}."
    if report["draft_cache_share"] is None:
        yield "What a co-located draft costs of the cache is not known: give --kv-gb, --target-kv-kb and --draft-kv-kb."
    else:
        yield f"A co-located draft costs {report['draft_cache_share']:.1%} of the tokens in a target's cache."


def _curve(points: Sequence[Sequence[float]]) -> str:
    first, last = points[0], points[-1]
    if first[1] == last[1]:
        return f"{first[1]:.4g} ms"
    return f"{first[1]:.4g} ms at {first[0]:.0f} row{'s' * (first[0] > 1)} to {last[1]:.4g} at {last[0]:.0f}"


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _number(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Columns: the first to the left, all others to the right."""
    lines = [head, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for first, *others in lines:
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))]
        yield "  ".join(cells).rstrip()
