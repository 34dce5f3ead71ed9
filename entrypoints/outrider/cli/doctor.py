"""`outrider doctor`: looks at a running deployment, generates a little with it, and says in words what is wrong."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field, field_validator

from outrider.cli.access import check_addresses
from outrider.cli.deployment import PROMPT, Deployment, DeploymentAccessSettings, GatewayProbe, Given, PairProbe, look
from outrider.cli.diagnosis import PROBLEM, Finding, Limits, diagnose
from outrider.cli.terminal import fail, load_tokenizer, make_painter, painted, parse
from outrider.cli.trace import Paint, Span, TracedRequest, TracedRound, legend, sums, unpainted, waterfall
from outrider.gateway.tracing import TimedSpan, spans_for
from outrider.planner.policy import Round
from outrider.rpc.errors import OutriderError
from outrider.rpc.messages import MAX_DRAFT_TOKENS, DraftInfo, ModelInfo, TargetInfo

DESCRIPTION = (
    "Check a running deployment: whether all answer, their versions, weights, tokenizers, kernels and round trips, the "
    "acceptance of a known prompt, and, with targets and drafts, where a probe's rounds spend their time. Addresses "
    "are as for outrider gateway: host:port, unix:path, dns:///name:port, ipv4:a:port,b:port, several with commas. "
    "Status 1: something is wrong."
)
GATEWAY = "127.0.0.1:50050"


class DoctorSettings(DeploymentAccessSettings):
    """What is looked at, and from where on a number is a problem."""

    section: ClassVar[str] = "doctor"

    gateway: list[str] = Field(
        default_factory=list,
        description=f"address of a gateway, or several (default: {GATEWAY}, where no target is given)",
    )
    target: list[str] = Field(default_factory=list, description="address of a target service, or several")
    draft: list[str] = Field(default_factory=list, description="address of a draft service, or several")
    prompt: str = Field(PROMPT, min_length=1, description="the known prompt")
    tokenizer: Path | None = Field(
        None, description="the target's folder, to ask targets the prompt where no gateway is given"
    )
    num_draft_tokens: int = Field(4, ge=1, le=MAX_DRAFT_TOKENS, description="tokens drafted a round of the probes")
    min_acceptance: float = Field(0.1, ge=0, le=1, description="share of drafted tokens that is to be accepted")
    max_round_trip_ms: float | None = Field(
        None, gt=0, description="longest round trip to a target or draft (default: the time of a verification)"
    )
    timeout: float = Field(10.0, gt=0, description="seconds until one that does not answer is given up")
    width: int | None = Field(None, ge=40, le=1000, description="columns (default: the terminal's, 120 on a pipe)")
    output: str = Field("text", pattern="^(text|json)$", description="json, or --json: all that was seen as one object")
    plain: bool = Field(False, description="no colours")

    _check_addresses = field_validator("gateway", "target", "draft")(check_addresses)

    def given(self) -> Given:
        """What is looked at. ValueError for a tokenizer that cannot be read."""
        ids = () if self.tokenizer is None else tuple(load_tokenizer(self.tokenizer, "--tokenizer").encode(self.prompt))
        return Given(
            self.gateway or ([] if self.target else [GATEWAY]),
            self.target,
            self.draft,
            prompt=self.prompt,
            prompt_ids=ids,
            num_draft_tokens=self.num_draft_tokens,
            timeout_s=self.timeout,
            access=self.deployment_access(),
        )

    def limits(self) -> Limits:
        """From where on a number is a problem."""
        return Limits(self.min_acceptance, self.max_round_trip_ms, self.num_draft_tokens)


def main(argv: Sequence[str] | None = None, prog: str = "outrider doctor") -> int:
    """Prints what was seen and found; 1 if anything is wrong."""
    arguments = sys.argv[1:] if argv is None else argv
    settings = parse(DoctorSettings, arguments, prog, DESCRIPTION, short={"--json": "--output=json"})
    logging.getLogger("outrider").addHandler(logging.NullHandler())  # what a peer lacks is a finding, no line of a log
    try:
        seen = asyncio.run(look(settings.given()))
    except (OutriderError, OSError, ValueError) as error:
        return fail(prog, error)
    found = diagnose(seen, settings.limits())
    if settings.output == "json":
        print(json.dumps(as_json(seen, found), indent=2, default=_name))
    else:
        print("\n".join(report(seen, found, settings)))
    return int(any(one.level == PROBLEM for one in found))


def report(seen: Deployment, found: Sequence[Finding], settings: DoctorSettings) -> Iterator[str]:
    """What was seen, the probes, and what was found, as lines."""
    paint: Paint = painted if make_painter(settings.plain).colours else unpainted
    width = settings.width or shutil.get_terminal_size((120, 24)).columns
    yield from _peers(seen)
    for asked in seen.gateway_probes:
        yield from _gateway_probe(asked)
    for probe in seen.pair_probes:
        yield from _pair_probe(probe, width, paint)
    yield ""
    for one in found:
        level = paint(f"{one.level:<8}", "red" if one.level == PROBLEM else "yellow")
        yield f"{level} {one.check:<13} {one.subject}: {one.message}"
    problems = sum(one.level == PROBLEM for one in found)
    yield f"{problems} problem{'' if problems == 1 else 's'}" if problems else paint("nothing is wrong", "green")


def _peers(seen: Deployment) -> Iterator[str]:
    wide = max((len(peer.address) for peer in seen.peers), default=0)
    for peer in seen.peers:
        state = peer.health.lower().replace("_", " ") if not peer.problem else "no answer"
        away = "" if peer.round_trip_ms is None else f"{peer.round_trip_ms:.1f} ms"
        yield f"{peer.kind:<8} {peer.address:<{wide}}  {state:<11} {away:>9}  {_what(peer.info)}".rstrip()


def _what(info: Any) -> str:
    if info is None:
        return ""
    release = info.version or "of an unknown release"
    if isinstance(info, TargetInfo | DraftInfo):
        heads = [method.name for method in info.methods] if isinstance(info, TargetInfo) else []
        adapters = [adapter.name for adapter in info.adapters] if isinstance(info, TargetInfo) else []
        beside = f", drafts by its {', '.join(heads)}" if heads else ""
        beside += f", adapters {', '.join(adapters)}" if adapters else ""
        return f"{release}, {_model(info.model)}{beside}"
    how = ", ".join(info.methods) or "no draft"
    return f"{release}, {info.target.name}, {how}, {info.num_draft_tokens} drafted tokens a round"


def _model(model: ModelInfo) -> str:
    if not model.digest:
        return f"{model.name}, without weights"
    invariant = ", batch-invariant" if model.batch_invariant else ""
    engine = f"{model.engine}, " if model.engine else ""
    return f"{model.name} {model.digest[:12]}, {model.dtype} on {model.device} by {engine}{model.kernels}{invariant}"


def _gateway_probe(probe: GatewayProbe) -> Iterator[str]:
    if probe.drafted is None or probe.plain is None:
        return
    drafted, plain = probe.drafted, probe.plain
    yield ""
    yield (
        f"known prompt at gateway {probe.address}: {len(drafted.token_ids)} tokens, "
        f"{_share(drafted.stats.num_accepted_tokens, drafted.stats.num_draft_tokens)}, {drafted.ms_a_token:.1f} ms a "
        f"token (without drafts {plain.ms_a_token:.1f})"
    )


def _pair_probe(probe: PairProbe, width: int, paint: Paint) -> Iterator[str]:
    if not probe.rounds:
        return
    tally, request = probe.tally, traced(probe.rounds)
    yield ""
    yield (
        f"probe of {probe}: {len(probe.token_ids)} tokens in {len(probe.rounds)} rounds, "
        f"{_share(tally.num_accepted_tokens, tally.num_draft_tokens)}"
    )
    yield legend(paint)
    yield ""
    yield from waterfall(request, width, paint)
    yield from sums(request)


def _share(accepted: int, drafted: int) -> str:
    return f"accepted {accepted / drafted:.0%} ({accepted}/{drafted})" if drafted else "nothing drafted"


def traced(rounds: Sequence[Round]) -> TracedRequest:
    """Rounds as `outrider trace` draws them. Times are the monotonic clock's."""
    drawn = [_traced_round(index, one) for index, one in enumerate(rounds)]
    return TracedRequest(None, tuple(drawn), (), (), (), trace_id="probe")


def _traced_round(index: int, closed: Round) -> TracedRound:
    whole, *parts = spans_for(closed)
    return TracedRound(_span(whole, f"{index}"), tuple(_span(part, f"{index}.{part.name}") for part in parts))


def _span(timed: TimedSpan, span_id: str) -> Span:
    start, end = (round(second * 1e9) for second in (timed.start, timed.end))
    return Span("probe", span_id, "", timed.name, start, end, dict(timed.attributes))


def as_json(seen: Deployment, found: Sequence[Finding]) -> dict[str, Any]:
    """The same for programs."""
    return {
        "ok": all(one.level != PROBLEM for one in found),
        "findings": [asdict(one) for one in found],
        "gateways": [asdict(peer) for peer in seen.gateways],
        "targets": [asdict(peer) for peer in seen.targets],
        "drafts": [asdict(peer) for peer in seen.drafts],
        "gateway_probes": [asdict(probe) for probe in seen.gateway_probes],
        "pair_probes": [_probe_json(probe) for probe in seen.pair_probes],
    }


def _name(value: Any) -> str:
    """Of an enumeration's member, the one thing in it that JSON does not know."""
    return str(value.name).lower()


def _probe_json(probe: PairProbe) -> dict[str, Any]:
    tally = probe.tally
    return {
        "target": probe.target,
        "draft": probe.draft,
        "head": probe.head,
        "problem": probe.problem,
        "token_ids": probe.token_ids,
        "num_draft_tokens": tally.num_draft_tokens,
        "num_accepted_tokens": tally.num_accepted_tokens,
        "rounds": [
            {
                "ms": one.span.ms,
                "drafted": closed.commit.num_drafted,
                "accepted": closed.commit.num_accepted,
                "emitted": len(closed.commit.ids),
            }
            | {f"{part.name.rpartition('.')[2]}_ms": part.ms for part in one.parts}
            for closed, one in zip(probe.rounds, traced(probe.rounds).rounds, strict=True)
        ],
    }


if __name__ == "__main__":
    sys.exit(main())
