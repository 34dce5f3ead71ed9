"""What is wrong with a deployment, in words: every check takes what was seen and yields findings. A problem costs
requests, speed or reproducibility; a note is worth knowing, and may be meant."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from outrider.cli.deployment import SERVING, Deployment, GatewayProbe, PairProbe, Peer
from outrider.gateway.peers.replicas import PROTOCOL_MAJOR
from outrider.rpc.errors import FailedPrecondition
from outrider.rpc.messages import Arithmetic, DraftInfo, ModelInfo, TargetInfo
from outrider.rpc.pair import check_pair
from outrider.rpc.settings import is_loopback

PROBLEM: Literal["problem"] = "problem"
NOTE: Literal["note"] = "note"
SHOWN_DIGEST = 12  # characters, as in the services' logs
Level = Literal["problem", "note"]
Service = Peer[TargetInfo] | Peer[DraftInfo]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was found: by which check, with whom, and what to make of it."""

    level: Level
    check: str
    subject: str
    message: str


@dataclass(frozen=True, slots=True)
class Limits:
    """From where on a number is a problem."""

    min_acceptance: float = 0.1  # of drafted tokens
    max_round_trip_ms: float | None = None  # None: the time of a verification, where the target has measured it
    num_draft_tokens: int = 4  # of the verification that a round trip is held against


def diagnose(seen: Deployment, limits: Limits) -> list[Finding]:
    """All findings, problems first."""
    found = [
        *_reached(seen),
        *_versions(seen),
        *_weights(seen),
        *_adapters(seen.targets),
        *_arithmetic(seen.targets),
        *_kernels(seen),
        *_pairs(seen),
        *_capabilities(seen),
        *_round_trips(seen, limits),
        *_gateways(seen, limits.min_acceptance),
        *_generated(seen, limits.min_acceptance),
        *_not_looked_at(seen),
    ]
    return sorted(dict.fromkeys(found), key=lambda one: one.level != PROBLEM)


def _reached(seen: Deployment) -> Iterator[Finding]:
    """Who answers, and serves."""
    for peer in seen.peers:
        if peer.problem:
            yield Finding(PROBLEM, "reachable", str(peer), peer.problem)
        elif peer.health != SERVING:
            why = "it loads, drains, or waits for what it needs: its log says which"
            yield Finding(PROBLEM, "health", str(peer), f"is {peer.health} and gets no new requests; {why}")


def _versions(seen: Deployment) -> Iterator[Finding]:
    """One release everywhere; one protocol at least."""
    for peer, model in _models(seen):
        if model.protocol_major != PROTOCOL_MAJOR:
            message = f"speaks protocol {model.protocol_major}, this is {PROTOCOL_MAJOR}: gateways will refuse it"
            yield Finding(PROBLEM, "version", str(peer), message)
    versions: dict[str, list[str]] = defaultdict(list)
    for one in seen.peers:
        if one.info is not None:
            versions[one.info.version or "older than 0.1.0"].append(str(one))
    if len(versions) > 1:
        message = f"releases differ: {_by_value(versions)}; finish the roll-out"
        yield Finding(PROBLEM, "version", "deployment", message)


def _weights(seen: Deployment) -> Iterator[Finding]:
    """Replicas are replicas only with the same weights; and the gateway's are those of the targets."""
    for kind, services in (("targets", seen.targets), ("drafts", seen.drafts)):
        digests: dict[str, list[str]] = defaultdict(list)
        for peer, model in _models_of(services):
            digests[model.digest].append(f"{peer.address} ({model.name})")
        if len(digests) > 1:
            rest = "a gateway serves one model, the others idle" if kind == "targets" else "acceptance depends on which"
            message = f"serve different weights: {_by_value(digests, _short)}; {rest}"
            yield Finding(PROBLEM, "digest", kind, message)
    known = {model.digest for _, model in _models_of(seen.targets)}
    for gateway in seen.gateways:
        if gateway.info is not None and known and gateway.info.target.digest not in known:
            message = f"serves {_named(gateway.info.target)}, which none of the targets given has: it uses others"
            yield Finding(PROBLEM, "digest", str(gateway), message)
    drafts = {model.digest for _, model in _models_of(seen.drafts)}
    for gateway in seen.gateways:
        draft = None if gateway.info is None else gateway.info.draft
        if draft is not None and drafts and draft.digest not in drafts:
            message = f"drafts with {_named(draft)}, which none of the drafts given has: it uses others"
            yield Finding(PROBLEM, "digest", str(gateway), message)


def _adapters(targets: Sequence[Peer[TargetInfo]]) -> Iterator[Finding]:
    """A name is one adapter, and where every target of a model has it any of them can go on with a request."""
    replicas: dict[str, list[Peer[TargetInfo]]] = defaultdict(list)
    for peer, model in _models_of(targets):
        replicas[model.digest].append(peer)
    for peers in replicas.values():
        for name in dict.fromkeys(one.name for peer in peers if peer.info is not None for one in peer.info.adapters):
            where: dict[str, list[str]] = defaultdict(list)
            for peer in peers:
                where[(peer.info and peer.info.digest_of(name)) or ""].append(peer.address)
            lacking = where.pop("", [])
            if len(where) > 1:
                message = (
                    f"{name!r} is not the same everywhere: {_by_value(where, _short)}; new requests get one of them"
                )
                yield Finding(PROBLEM, "adapters", "targets", message)
            if lacking:
                message = f"{name!r} is not at {', '.join(lacking)}: its requests go to the others alone"
                yield Finding(NOTE, "adapters", "targets", message)


def _arithmetic(targets: Sequence[Peer[TargetInfo]]) -> Iterator[Finding]:
    """What goes on at another target shall go on with the same bits."""
    by_digest: dict[str, list[tuple[Peer[Any], Arithmetic]]] = defaultdict(list)
    for peer, model in _models_of(targets):
        by_digest[model.digest].append((peer, model.arithmetic))
    for replicas in by_digest.values():
        for name in (field.name for field in fields(Arithmetic)):
            values: dict[str, list[str]] = defaultdict(list)
            for peer, arithmetic in replicas:
                values[str(getattr(arithmetic, name))].append(peer.address)
            if len(values) > 1:
                message = (
                    f"compute the same weights differently, {name} is {_by_value(values)}: a request that goes on at "
                    "another replica may differ where two tokens are nearly equally likely"
                )
                yield Finding(PROBLEM, "arithmetic", "targets", message)


def _kernels(seen: Deployment) -> Iterator[Finding]:
    """PyTorch's own kernels are the fallback of everything, but for vLLM, which brings its own."""
    for peer, model in _models(seen):
        if not model.kernels.startswith("torch-") or model.engine.startswith("vllm-"):
            continue
        if model.device.startswith("cpu") and model.engine.startswith("outrider"):
            why = "no C compiler, other types than float32, or sizes that are no multiple of 16: its log says which"
            meant = f"not by the C kernels ({why})"
        else:
            meant = f"with the layers of {model.engine or 'another library'}"
        message = f"computes by PyTorch ({model.kernels}), {meant}, which is slower"
        yield Finding(PROBLEM, "kernels", str(peer), message)


def _pairs(seen: Deployment) -> Iterator[Finding]:
    """Tokenizers and vocabularies, as a gateway judges them."""
    for peer, model in _models(seen):
        if model.num_tokens > model.vocab_size > 0:
            message = f"its tokenizer names {model.num_tokens} tokens, and it has only {model.vocab_size} logits"
            yield Finding(PROBLEM, "vocabulary", str(peer), message)
    for _, target in _models_of(seen.targets):
        for peer, draft in _models_of(seen.drafts):
            try:
                warning = check_pair(target, draft) or _way(target, peer.info)
            except FailedPrecondition as error:
                if peer.info is not None and peer.info.max_vocabulary_bytes and target.tokenizer_fingerprint:
                    message = f"does not know the vocabulary of {target.name} yet: a gateway that has it brings it"
                    yield Finding(NOTE, "pair", str(peer), message)
                    continue
                message = f"{error.message}; its tokens would be refused (outrider model check compares two folders)"
                yield Finding(PROBLEM, "pair", str(peer), message)
                continue
            if warning:
                yield Finding(NOTE, "pair", str(peer), warning)
            if 0 < draft.max_model_len < target.max_model_len:
                message = (
                    f"its context has {draft.max_model_len} tokens, the target's {target.max_model_len}: "
                    "what is longer is decoded plainly"
                )
                yield Finding(NOTE, "context", str(peer), message)
    fingerprints: dict[str, list[str]] = defaultdict(list)
    for peer, model in _models_of(seen.targets):
        fingerprints[model.tokenizer_fingerprint].append(peer.address)
    if len(fingerprints) > 1:
        message = (
            f"have different tokenizers: {_by_value(fingerprints, _short)}; a gateway has one, and refuses the rest"
        )
        yield Finding(PROBLEM, "pair", "targets", message)


def _way(target: ModelInfo, draft: DraftInfo | None) -> str:
    """How a draft of another vocabulary drafts for a target; empty for one of the same."""
    rows = () if draft is None else draft.vocabularies
    for row in rows:
        if row.tokenizer_fingerprint == target.tokenizer_fingerprint:
            ways = f"{row.greedy}-level for greedy requests, {row.sampled}-level for sampled ones"
            return f"has {row.overlap:.1%} of the tokens of {target.name}, and drafts {ways}"
    return ""


def _capabilities(seen: Deployment) -> Iterator[Finding]:
    """What one peer lacks that another has: requests that need it go elsewhere, or without a draft."""
    targets = {name for peer in seen.targets if peer.info for name in peer.info.capabilities}
    for peers, otherwise in (
        (seen.targets, "requests that need it are refused there, though other targets serve them"),
        (seen.drafts, "requests that need it are decoded without this draft"),
    ):
        for peer in peers:
            if peer.info is not None and (lacks := _lacking(targets, peer.info.capabilities)):
                message = f"does not know {lacks}, as its targets do: {otherwise}"
                yield Finding(PROBLEM, "capabilities", str(peer), message)


def _round_trips(seen: Deployment, limits: Limits) -> Iterator[Finding]:
    """The loop hides a round trip behind a verification, not more."""
    costs = [peer.info.step_costs for peer in seen.targets if peer.info is not None and peer.info.step_costs]
    verification_ms = min((_step_ms(one, limits.num_draft_tokens + 1) for one in costs), default=None)
    allowed = verification_ms if limits.max_round_trip_ms is None else limits.max_round_trip_ms
    services: Iterable[Peer[Any]] = (*seen.targets, *seen.drafts)
    for peer in services:
        if allowed is None or peer.round_trip_ms is None or peer.round_trip_ms <= allowed:
            continue
        what = "a verification takes" if limits.max_round_trip_ms is None else "--max-round-trip-ms allows"
        message = f"a round trip from here takes {peer.round_trip_ms:.1f} ms, longer than {what} ({allowed:.1f} ms): "
        if is_loopback(peer.address):  # nothing is closer: the target is small, or the machine has other work
            message += "drafting does not hide behind verifying, and on this machine only a larger target changes that"
            yield Finding(NOTE if limits.max_round_trip_ms is None else PROBLEM, "round trip", str(peer), message)
            continue
        message += "if so from the gateway, too, drafting does not hide behind verifying; move them closer"
        yield Finding(PROBLEM, "round trip", str(peer), message)


def _gateways(seen: Deployment, min_acceptance: float) -> Iterator[Finding]:
    """What clients get."""
    for gateway in seen.gateways:
        if gateway.info is not None and gateway.info.draft is None and not gateway.info.methods:
            level = PROBLEM if seen.drafts else NOTE
            yield Finding(level, "draft", str(gateway), "uses no draft: everything is decoded plainly")
    infos = {peer.address: peer.info for peer in seen.gateways if peer.info is not None}
    targets = {peer.address: peer.info.target for peer in seen.gateways if peer.info is not None}
    for probe in seen.gateway_probes:
        subject = f"gateway {probe.address}"
        if probe.problem:
            yield Finding(PROBLEM, "probe", subject, probe.problem)
        info = infos[probe.address]
        if probe.drafted is not None and (info.draft is not None or info.methods):  # else of the target's head
            stats, judged = probe.drafted.stats, info.draft is None or info.draft.vocab_size > 0
            yield from _acceptance(
                subject, stats.num_draft_tokens, stats.num_accepted_tokens, min_acceptance if judged else 0.0
            )
        yield from _differs(subject, probe, targets[probe.address])


def _generated(seen: Deployment, min_acceptance: float) -> Iterator[Finding]:
    """What the services do without a gateway."""
    models = {peer.address: model for peer, model in _models(seen)}
    for probe in seen.pair_probes:
        if probe.problem:
            yield Finding(PROBLEM, "probe", str(probe), probe.problem)
        elif probe.drafts:
            tally, judged = probe.tally, seen.is_text and (not probe.draft or models[probe.draft].vocab_size > 0)
            yield from _acceptance(
                str(probe), tally.num_draft_tokens, tally.num_accepted_tokens, min_acceptance if judged else 0.0,
                probe.lost_draft,
            )  # fmt: skip
    yield from _agree([probe for probe in seen.pair_probes if not probe.problem], models)


def _acceptance(subject: str, drafted: int, accepted: int, least: float, lost: str = "") -> Iterator[Finding]:
    if not drafted:
        why = lost or "the draft proposes nothing in time"
        yield Finding(PROBLEM, "acceptance", subject, f"no token of the known prompt was drafted: {why}")
    elif accepted < least * drafted:
        message = (
            f"{accepted} of {drafted} drafted tokens of the known prompt were accepted, less than {least:.0%}: was "
            "this draft made for this target?"
        )
        yield Finding(PROBLEM, "acceptance", subject, message)


def _differs(subject: str, probe: GatewayProbe, model: ModelInfo) -> Iterator[Finding]:
    """Greedy output is plain decoding's, to the bit where the target says that its rows do not depend on the batch."""
    if probe.drafted is None or probe.plain is None or probe.drafted.token_ids == probe.plain.token_ids:
        return
    place = _first_difference(probe.drafted.token_ids, probe.plain.token_ids)
    message = f"greedy output differs with drafted tokens and without, from token {place} on"
    if model.batch_invariant:
        yield Finding(PROBLEM, "lossless", subject, f"{message}, and the target is batch-invariant: this is a defect")
    else:
        yield Finding(NOTE, "lossless", subject, f"{message}: a near-tie, unless it always does (--batch-invariant)")


def _agree(probes: Sequence[PairProbe], models: dict[str, ModelInfo]) -> Iterator[Finding]:
    """Targets of one model give one greedy completion."""
    first: dict[str, PairProbe] = {}
    for probe in probes:
        model = models[probe.target]
        other = first.setdefault(model.digest, probe)
        if other.token_ids == probe.token_ids:
            continue
        place = _first_difference(other.token_ids, probe.token_ids)
        message = f"completes the known prompt otherwise than target {other.target}, from token {place} on"
        if model.batch_invariant and model.arithmetic == models[other.target].arithmetic:
            message += ", though both say that they compute the same bits: one of them is broken"
            yield Finding(PROBLEM, "lossless", f"target {probe.target}", message)
        else:
            yield Finding(NOTE, "lossless", f"target {probe.target}", f"{message}: a near-tie, unless it always does")


def _not_looked_at(seen: Deployment) -> Iterator[Finding]:
    """What no address was given for."""
    missing = {"--gateway": seen.gateways, "--target": seen.targets, "--draft": seen.drafts}
    if any(peer.info is not None and peer.info.methods for peer in seen.targets):
        del missing["--draft"]  # they draft themselves
    flags = [flag for flag, peers in missing.items() if not peers]
    if flags:
        message = f"without {' and '.join(flags)}: what these would show was not checked"
        yield Finding(NOTE, "coverage", "deployment", message)


def _models(seen: Deployment) -> Iterator[tuple[Peer[Any], ModelInfo]]:
    yield from _models_of(seen.targets)
    yield from _models_of(seen.drafts)


def _models_of(peers: Iterable[Service]) -> Iterator[tuple[Peer[Any], ModelInfo]]:
    for peer in peers:
        if peer.info is not None:
            yield peer, peer.info.model


def _lacking(wanted: Collection[str], there: Collection[str]) -> str:
    return ", ".join(sorted(set(wanted) - set(there)))


def _step_ms(costs: Sequence[tuple[int, int]], rows: int) -> float:
    """The time of the smallest step measured that holds so many rows, else of the largest."""
    return next((us for size, us in costs if size >= rows), costs[-1][1]) / 1e3


def _by_value(groups: dict[str, list[str]], show: Callable[[str], str] = str) -> str:
    return "; ".join(f"{show(value)} at {', '.join(places)}" for value, places in groups.items())


def _short(digest: str) -> str:
    return digest[:SHOWN_DIGEST] or "none"


def _named(model: ModelInfo) -> str:
    return f"{model.name} ({_short(model.digest)})"


def _first_difference(one: Sequence[int], other: Sequence[int]) -> int:
    """Counted from 1."""
    same = (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(same, min(len(one), len(other))) + 1
