"""What is wrong with a deployment, in words. A problem costs requests, speed or reproducibility; a note is worth
knowing, and may be meant. Two tables say what is to be so of each process and what is to be the same at several; what
takes two processes or a probe to see is a function below them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from outrider.cli.deployment import SERVING, Deployment, Peer
from outrider.cli.probes import Given, PairProbe
from outrider.client import SpeculationStats
from outrider.gateway.peers.replicas import PROTOCOL_MAJOR
from outrider.rpc.errors import FailedPrecondition
from outrider.rpc.messages import DraftInfo, ModelInfo
from outrider.rpc.pair import check_pair
from outrider.rpc.settings import is_loopback

PROBLEM: Literal["problem"] = "problem"
NOTE: Literal["note"] = "note"
SHOWN_DIGEST = 12  # characters, as in the services' logs


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was found: by which check, with whom, and what to make of it."""

    level: Literal["problem", "note"]
    check: str
    subject: str
    message: str


# What is to be so of each process: the check, the kinds of processes, when it is not (by a process's info), and what
# that means (a format of the info, and of what the process lacks that targets know).
OF_EACH: tuple[tuple[str, str, Callable[[Any, Deployment], object], str], ...] = (
    ("version", "target draft", lambda info, seen: info.model.protocol_major != PROTOCOL_MAJOR,
     f"speaks protocol {{info.model.protocol_major}}, this is {PROTOCOL_MAJOR}: gateways will refuse it"),
    ("digest", "gateway", lambda info, seen: _is_none_of(info.target, seen.targets),
     "serves {info.target.name} ({info.target.digest:.12}), which none of the targets given has: it uses others"),
    ("digest", "gateway", lambda info, seen: info.draft and _is_none_of(info.draft, seen.drafts),
     "drafts with {info.draft.name} ({info.draft.digest:.12}), which no draft given has: it uses others"),
    ("kernels", "target draft", lambda info, seen: _is_fallback(info.model) and _could_be_c(info.model),
     "computes by PyTorch ({info.model.kernels}), not by the C kernels (no C compiler, other types than float32, "
     "or sizes that are no multiple of 16: its log says which), which is slower"),
    ("kernels", "target draft", lambda info, seen: _is_fallback(info.model) and not _could_be_c(info.model),
     "computes by PyTorch ({info.model.kernels}), with the layers of {info.model.engine}, which is slower"),
    ("vocabulary", "target draft", lambda info, seen: info.model.num_tokens > info.model.vocab_size > 0,
     "its tokenizer names {info.model.num_tokens} tokens, and it has only {info.model.vocab_size} logits"),
    ("capabilities", "target", lambda info, seen: _lacks(info, seen), "does not know {lacks}, as its targets do: "
     "requests that need it are refused there, though other targets serve them"),
    ("capabilities", "draft", lambda info, seen: _lacks(info, seen), "does not know {lacks}, as its targets do: "
     "requests that need it are decoded without this draft"),
    ("draft", "gateway", lambda info, seen: info.draft is None and not info.methods,
     "uses no draft: everything is decoded plainly"),
)  # fmt: skip
# What is to be the same at all of some groups: the check, whom it is said of, the groups, values under the names of
# what has them, and what it means that there is more than one.
Groups = Callable[[Deployment], Iterable[Iterable[Peer]]]
OF_ALL: tuple[tuple[str, str, Groups, Callable[[Any], dict[str, object]], str], ...] = (
    ("version", "deployment", lambda seen: [seen.peers], lambda info: {"": info.version or "older than 0.1.0"},
     "releases differ: {values}; finish the roll-out"),
    ("digest", "targets", lambda seen: [seen.targets], lambda info: {"": _short(info.model.digest)},
     "serve different weights: {values}; a gateway serves one model, the others idle"),
    ("digest", "drafts", lambda seen: [seen.drafts], lambda info: {"": _short(info.model.digest)},
     "serve different weights: {values}; acceptance depends on which"),
    ("pair", "targets", lambda seen: [seen.targets], lambda info: {"": _short(info.model.tokenizer_fingerprint)},
     "have different tokenizers: {values}; a gateway has one, and refuses the rest"),
    ("adapters", "targets", lambda seen: _replicas(seen),
     lambda info: {adapter.name: _short(adapter.digest) for adapter in info.adapters},
     "{name!r} is not the same everywhere: {values}; new requests get one of them"),
    ("arithmetic", "targets", lambda seen: _replicas(seen), lambda info: asdict(info.model.arithmetic),
     "compute the same weights differently, {name} is {values}: a request that goes on at another replica may "
     "differ where two tokens are nearly equally likely"),
)  # fmt: skip
ABSENT = "{name!r} is not at {places}: its requests go to the others alone"  # of what only some of OF_ALL have


def diagnose(seen: Deployment, limits: Given) -> list[Finding]:
    """What was found wrong or worth knowing, problems first."""
    found = [*_of_each(seen), *_of_all(seen), *_pairs(seen), *_round_trips(seen, limits)]
    found += [*_trials(seen), *_probes(seen, limits.min_acceptance), *_lossless(seen), *_not_looked_at(seen)]
    return sorted(dict.fromkeys(found), key=lambda one: one.level != PROBLEM)


def _of_each(seen: Deployment) -> Iterator[Finding]:
    for peer in seen.peers:
        if peer.problem:
            yield Finding(PROBLEM, "reachable", str(peer), peer.problem)
        elif peer.health != SERVING:
            why = "it loads, drains, or waits for what it needs: its log says which"
            yield Finding(PROBLEM, "health", str(peer), f"is {peer.health} and gets no new requests; {why}")
        for check, kinds, is_wrong, meaning in OF_EACH:
            if peer.info is not None and peer.kind in kinds.split() and is_wrong(peer.info, seen):
                level = NOTE if check == "draft" and not seen.drafts else PROBLEM
                message = meaning.format(info=peer.info, lacks=", ".join(_lacks(peer.info, seen)))
                yield Finding(level, check, str(peer), message)


def _of_all(seen: Deployment) -> Iterator[Finding]:
    for check, subject, groups, named, meaning in OF_ALL:
        for peers in map(_answering, groups(seen)):
            found = [(str(peer) if check == "version" else peer.address, named(peer.info)) for peer in peers]
            for name in dict.fromkeys(name for _, values in found for name in values):
                where: dict[object, list[str]] = defaultdict(list)
                for place, values in found:
                    where[values.get(name)].append(place)
                if lacking := where.pop(None, None):
                    yield Finding(NOTE, check, subject, ABSENT.format(name=name, places=", ".join(lacking)))
                if len(where) > 1:
                    shown = "; ".join(f"{value} at {', '.join(places)}" for value, places in where.items())
                    yield Finding(PROBLEM, check, subject, meaning.format(name=name, values=shown))


def _answering(peers: Iterable[Peer]) -> list[Peer]:
    """The peers that have an info."""
    return [peer for peer in peers if peer.info is not None]


def _models(peers: Iterable[Peer]) -> list[tuple[str, ModelInfo]]:
    return [(peer.address, peer.info.model) for peer in _answering(peers)]


def _short(digest: str) -> str:
    return digest[:SHOWN_DIGEST] or "none"


def _is_none_of(model: ModelInfo, peers: Iterable[Peer]) -> bool:
    known = {there.digest for _, there in _models(peers)}
    return bool(known) and model.digest not in known


def _is_fallback(model: ModelInfo) -> bool:
    """PyTorch's own kernels are the fallback of everything, but for vLLM, which brings its own."""
    return model.kernels.startswith("torch-") and not model.engine.startswith("vllm-")


def _could_be_c(model: ModelInfo) -> bool:
    return model.device.startswith("cpu") and model.engine.startswith("outrider")


def _lacks(info: Any, seen: Deployment) -> list[str]:
    known = {name for target in _answering(seen.targets) for name in target.info.capabilities}
    return sorted(known - {*getattr(info, "capabilities", known)})


def _replicas(seen: Deployment) -> Iterable[list[Peer]]:
    """Targets of one model: any of them is to be able to go on with a request, and with the same bits."""
    by_digest: dict[str, list[Peer]] = defaultdict(list)
    for peer in _answering(seen.targets):
        by_digest[peer.info.model.digest].append(peer)
    return by_digest.values()


def _pairs(seen: Deployment) -> Iterator[Finding]:
    """Each draft beside each target, as a gateway judges them."""
    for _, target in _models(seen.targets):
        for peer in _answering(seen.drafts):
            draft = peer.info.model
            try:
                warning = check_pair(target, draft) or _way(target, peer.info)
            except FailedPrecondition as error:
                message = f"{error.message}; its tokens would be refused (outrider model check compares folders)"
                if learns := bool(peer.info.max_vocabulary_bytes and target.tokenizer_fingerprint):
                    message = f"does not know the vocabulary of {target.name} yet: a gateway that has it brings it"
                yield Finding(NOTE if learns else PROBLEM, "pair", str(peer), message)
                continue
            if warning:
                yield Finding(NOTE, "pair", str(peer), warning)
            if 0 < draft.max_model_len < target.max_model_len:
                lengths = f"{draft.max_model_len} tokens, the target's {target.max_model_len}"
                message = f"its context has {lengths}: what is longer is decoded plainly"
                yield Finding(NOTE, "context", str(peer), message)


def _way(target: ModelInfo, draft: DraftInfo) -> str:
    """How a draft of another vocabulary drafts for a target; empty for one of the same."""
    for row in draft.vocabularies:
        if row.tokenizer_fingerprint == target.tokenizer_fingerprint:
            ways = f"{row.greedy}-level for greedy requests, {row.sampled}-level for sampled ones"
            return f"has {row.overlap:.1%} of the tokens of {target.name}, and drafts {ways}"
    return ""


def _trials(seen: Deployment) -> Iterator[Finding]:
    """What drafts were found to be worth when they met their targets."""
    of_targets = {trial for peer in _answering(seen.targets) for trial in peer.info.trials}
    for peer in (*_answering(seen.targets), *_answering(seen.gateways)):
        for trial in (trial for trial in peer.info.trials if peer.kind == "target" or trial not in of_targets):
            if trial.is_useless:
                use = "it is not used" if trial.refused else "it drafts all the same"
                why = "was it made for this target, and for these weights?"
                message = f"{trial.method} is no better than a guess, and {use} ({trial}): {why}"
                yield Finding(PROBLEM, "trial", str(peer), message)
            if trial.remark:
                yield Finding(NOTE, "trial", str(peer), f"{trial.method}: {trial.remark}")


def _round_trips(seen: Deployment, limits: Given) -> Iterator[Finding]:
    """The loop hides a round trip behind a verification, not more."""
    costs = [peer.info.step_costs for peer in _answering(seen.targets) if peer.info.step_costs]
    verification_ms = min((_step_ms(one, limits.num_draft_tokens + 1) for one in costs), default=math.inf)
    is_measured, allowed = limits.max_round_trip_ms is None, limits.max_round_trip_ms or verification_ms
    what = "a verification takes" if is_measured else "--max-round-trip-ms allows"
    for peer in (peer for peer in seen.peers if peer.kind != "gateway" and (peer.round_trip_ms or 0.0) > allowed):
        is_here = is_loopback(peer.address)  # nothing is closer: the target is small, or the machine has other work
        hidden = "if so from the gateway, too, drafting does not hide behind verifying; move them closer"
        if is_here:
            hidden = "drafting does not hide behind verifying, and on this machine only a larger target changes that"
        takes = f"takes {peer.round_trip_ms:.1f} ms, longer than {what} ({allowed:.1f} ms)"
        level = NOTE if is_here and is_measured else PROBLEM
        yield Finding(level, "round trip", str(peer), f"a round trip from here {takes}: {hidden}")


def _step_ms(costs: Sequence[tuple[int, int]], rows: int) -> float:
    """The time of the smallest step measured that holds so many rows, else of the largest."""
    return next((us for size, us in costs if size >= rows), costs[-1][1]) / 1e3


def _probes(seen: Deployment, least: float) -> Iterator[Finding]:
    """What became of the known prompt. A draft without a model may accept little, and so may any of ids taken at
    random."""
    infos = {peer.address: peer.info for peer in _answering(seen.peers)}
    for probe in seen.gateway_probes:
        info = infos[probe.address]
        if probe.problem:
            yield Finding(PROBLEM, "probe", str(probe), probe.problem)
        elif probe.drafted is not None and (info.draft or info.methods):  # else the target's head drafted
            yield from _acceptance(str(probe), probe.drafted.stats, info.draft, least)
    for pair in seen.pair_probes:
        if pair.problem:
            yield Finding(PROBLEM, "probe", str(pair), pair.problem)
        elif pair.draft or pair.head:
            draft = infos[pair.draft].model if pair.draft else None
            yield from _acceptance(str(pair), pair, draft, least * seen.is_text, pair.lost_draft)


def _acceptance(
    subject: str, counts: SpeculationStats | PairProbe, draft: ModelInfo | None, least: float, lost: str = ""
) -> Iterator[Finding]:
    drafted, accepted = counts.num_draft_tokens, counts.num_accepted_tokens
    least *= draft is None or draft.vocab_size > 0
    if not drafted:
        why = lost or "the draft proposes nothing in time"
        yield Finding(PROBLEM, "acceptance", subject, f"no token of the known prompt was drafted: {why}")
    elif accepted < least * drafted:
        message = f"{accepted} of {drafted} drafted tokens of the known prompt were accepted, less than {least:.0%}"
        yield Finding(PROBLEM, "acceptance", subject, f"{message}: was this draft made for this target?")


def _lossless(seen: Deployment) -> Iterator[Finding]:
    """Greedy output is plain decoding's, and that of any other target of the model: to the bit where the targets say
    that their rows do not depend on the batch, and that they compute alike."""
    for gateway, probe in zip(_answering(seen.gateways), seen.gateway_probes, strict=True):
        if probe.drafted is not None and probe.plain is not None:
            what = "greedy output differs with drafted tokens and without"
            why = "and the target is batch-invariant: this is a defect" * gateway.info.target.batch_invariant
            yield from _differing(str(probe), what, probe.drafted.token_ids, probe.plain.token_ids, why)
    models, first = dict(_models(seen.targets)), dict[str, PairProbe]()
    for pair in (pair for pair in seen.pair_probes if not pair.problem):
        model, other = models[pair.target], first.setdefault(models[pair.target].digest, pair)
        is_broken = model.batch_invariant and model.arithmetic == models[other.target].arithmetic
        what = f"completes the known prompt otherwise than target {other.target}"
        why = "though both say that they compute the same bits: one of them is broken" * is_broken
        yield from _differing(f"target {pair.target}", what, other.token_ids, pair.token_ids, why)


def _differing(subject: str, what: str, one: Sequence[int], other: Sequence[int], why: str) -> Iterator[Finding]:
    """`why` it is a problem; empty where two tokens may be so nearly tied that either is right."""
    if one != other:
        same = (place for place, (a, b) in enumerate(zip(one, other, strict=False), 1) if a != b)
        message = f"{what}, from token {next(same, min(len(one), len(other)) + 1)} on"
        tie = f"{message}: a near-tie, unless it always does (--batch-invariant)"
        yield Finding(PROBLEM if why else NOTE, "lossless", subject, f"{message}, {why}" if why else tie)


def _not_looked_at(seen: Deployment) -> Iterator[Finding]:
    """What no address was given for; targets with heads need no draft."""
    has_heads = any(peer.info.methods for peer in _answering(seen.targets))
    given = {"--gateway": seen.gateways, "--target": seen.targets, "--draft": seen.drafts or has_heads}
    if flags := [flag for flag, peers in given.items() if not peers]:
        message = f"without {' and '.join(flags)}: what these would show was not checked"
        yield Finding(NOTE, "coverage", "deployment", message)
