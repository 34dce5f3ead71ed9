"""`outrider doctor`: looks at a running deployment, generates a little with it, and says in words what is wrong."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, ClassVar

from pydantic import Field, field_validator

from outrider.cli.access import GATEWAY, check_addresses
from outrider.cli.arguments import fail, parse
from outrider.cli.deployment import Deployment, look
from outrider.cli.diagnosis import PROBLEM, Finding, diagnose
from outrider.cli.probes import PairProbe, ProbeSettings
from outrider.cli.terminal import make_painter
from outrider.cli.trace import share, sums
from outrider.client import SpeculationStats
from outrider.rpc.errors import OutriderError
from outrider.rpc.messages import DraftInfo, ModelInfo, TargetInfo

DESCRIPTION = (
    "Check a running deployment: whether all answer, their versions, weights, tokenizers, kernels and round trips, the "
    "acceptance of a known prompt, and, with targets and drafts, where the time of a probe's rounds goes. Addresses "
    "are as for outrider gateway: host:port, unix:path, dns:///name:port, ipv4:a:port,b:port, several with commas. "
    "Status 1: something is wrong."
)


class DoctorSettings(ProbeSettings):
    """What is looked at, and from where on a number is a problem."""

    section: ClassVar[str] = "doctor"

    gateway: list[str] = Field(
        default_factory=list,
        description=f"address of a gateway, or several (default: {GATEWAY}, where no target is given)",
    )
    target: list[str] = Field(default_factory=list, description="address of a target service, or several")
    draft: list[str] = Field(default_factory=list, description="address of a draft service, or several")
    min_acceptance: float = Field(0.1, ge=0, le=1, description="share of drafted tokens that is to be accepted")
    max_round_trip_ms: float | None = Field(
        None, gt=0, description="longest round trip to a target or draft (default: the time of a verification)"
    )
    timeout: float = Field(10.0, gt=0, description="seconds until one that does not answer is given up")
    output: str = Field("text", pattern="^(text|json)$", description="json, or --json: all that was seen as one object")
    plain: bool = Field(False, description="no colours")

    _check_addresses = field_validator("gateway", "target", "draft")(check_addresses)


def main(argv: Sequence[str] | None = None, prog: str = "outrider doctor") -> int:
    """Prints what was seen and found; 1 if anything is wrong."""
    settings = parse(DoctorSettings, argv, prog, DESCRIPTION, short={"--json": "--output=json"})
    logging.getLogger("outrider").addHandler(logging.NullHandler())  # what a peer lacks is a finding, no line of a log
    try:
        given = settings.given(
            settings.timeout,
            gateways=settings.gateway or ([] if settings.target else [GATEWAY]),
            targets=settings.target,
            drafts=settings.draft,
            min_acceptance=settings.min_acceptance,
            max_round_trip_ms=settings.max_round_trip_ms,
        )
        seen = asyncio.run(look(given))
    except (OutriderError, OSError, ValueError) as error:
        return fail(prog, error)
    found = diagnose(seen, given)
    is_wrong = any(one.level == PROBLEM for one in found)
    if settings.output == "json":
        shown = {"ok": not is_wrong, "findings": [asdict(one) for one in found], **asdict(seen)}
        print(json.dumps(shown, indent=2, default=lambda member: str(member.name).lower()))
    else:
        make_painter(settings.plain).pieces(report(seen, found))
    return int(is_wrong)


def report(seen: Deployment, found: Sequence[Finding]) -> Iterator[tuple[str, str]]:
    """What was seen, the probes, and what was found: texts with the styles that they are shown in."""
    yield "\n".join([*_peers(seen), *_probes(seen), ""]) + "\n", ""
    for one in found:
        yield f"{one.level:<8}", "red" if one.level == PROBLEM else "yellow"
        yield f" {one.check:<13} {one.subject}: {one.message}\n", ""
    problems = sum(one.level == PROBLEM for one in found)
    yield (f"{problems} problem{'s' * (problems > 1)}\n", "") if problems else ("nothing is wrong\n", "green")


def _peers(seen: Deployment) -> Iterator[str]:
    wide = max((len(peer.address) for peer in seen.peers), default=0)
    for peer in seen.peers:
        state = peer.health.lower().replace("_", " ") if not peer.problem else "no answer"
        away = "" if peer.round_trip_ms is None else f"{peer.round_trip_ms:.1f} ms"
        yield f"{peer.kind:<8} {peer.address:<{wide}}  {state:<11} {away:>9}  {_what(peer.info)}".rstrip()


def _what(info: Any) -> str:
    if info is None:
        return ""
    said = [info.version or "of an unknown release"]
    if isinstance(info, TargetInfo | DraftInfo):
        said.append(_model(info.model))
        if isinstance(info, TargetInfo) and info.methods:
            said.append(f"drafts by its {', '.join(method.name for method in info.methods)}")
        if isinstance(info, TargetInfo) and info.adapters:
            said.append(f"adapters {', '.join(adapter.name for adapter in info.adapters)}")
        if info.learned:
            said.append(f"learned {', '.join(one.said for one in info.learned)}")
    else:
        how = ", ".join(info.methods) or "no draft"
        said += [info.target.name, how, f"{info.num_draft_tokens} drafted tokens a round"]
    return ", ".join(said)


def _model(model: ModelInfo) -> str:
    if not model.digest:
        return f"{model.name}, without weights"
    invariant = ", batch-invariant" if model.batch_invariant else ""
    engine = f"{model.engine}, " if model.engine else ""
    return f"{model.name} {model.digest[:12]}, {model.dtype} on {model.device} by {engine}{model.kernels}{invariant}"


def _probes(seen: Deployment) -> Iterator[str]:
    for one in seen.gateway_probes:
        if one.drafted is not None and one.plain is not None:
            tokens = f"{len(one.drafted.token_ids)} tokens, {_accepted(one.drafted.stats)}"
            speed = f"{one.drafted.ms_a_token:.1f} ms a token (without drafts {one.plain.ms_a_token:.1f})"
            yield f"\nknown prompt at {one}: {tokens}, {speed}"
    for probe in seen.pair_probes:
        if probe.rounds:
            tokens = f"{len(probe.token_ids)} tokens in {len(probe.rounds)} rounds"
            yield f"\nprobe of {probe}: {tokens}, {_accepted(probe)}"
            yield from sums([*enumerate(probe.rounds)])


def _accepted(counts: SpeculationStats | PairProbe) -> str:
    return "accepted " * bool(counts.num_draft_tokens) + share(counts.num_accepted_tokens, counts.num_draft_tokens)
