"""Where a new sequence goes: to the replica that its first tokens choose, unless that one is busier than the others.

Rendezvous hashing (Thaler and Ravishankar 1998) lets prompts that begin alike meet on one replica, whose prefix cache
then knows them, and moves only a lost replica's share. Bounded loads (Mirrokni et al., arXiv 1608.01350) send what a
full replica cannot take to the next in the same order.

Which model a gateway serves while its targets have more than one, as during a rolling change, and which adapters."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from itertools import chain

from outrider.rpc.media import Media
from outrider.rpc.messages import Adapter

AFFINITY_TOKENS = 64  # later tokens tell prompts of one kind apart: they would scatter what shares its beginning
MAX_OVER_MEAN = 1.25


def affinity_key(prompt_ids: Sequence[int], salt: str = "", adapter: str = "", media: Sequence[Media] = ()) -> bytes:
    """Of a prompt's first tokens, and its first picture, which a conversation keeps. A salt parts the prefix caches of
    two callers, an adapter's name those of two adapters, and so their keys."""
    digest = blake2b(salt.encode(), digest_size=16, key=blake2b(adapter.encode()).digest() if adapter else b"")
    digest.update(b"".join(token.to_bytes(4, "little") for token in prompt_ids[:AFFINITY_TOKENS]))
    for first in media[:1]:
        digest.update(first.digest)
    return digest.digest()


def choose(key: bytes, loads: Mapping[str, int]) -> str | None:
    """One of the replicas, given by name and number of sequences; None where there is none."""
    if not loads:
        return None
    bound = math.ceil(MAX_OVER_MEAN * (sum(loads.values()) + 1) / len(loads))
    order = sorted(loads, key=lambda name: _rank(key, name), reverse=True)
    return next(name for name in order if loads[name] < bound)  # the least loaded is always below the bound


def _rank(key: bytes, name: str) -> bytes:
    return blake2b(name.encode(), key=key, digest_size=8).digest()


def choose_model(current: str | None, answers: Sequence[tuple[str, bool]]) -> str | None:
    """A model's digest, from what every target that answers serves and whether it takes new sequences, in the order of
    their addresses. The current model stays while it is served and no other has more than half of the answers; else
    it is the most common one, of equals the first. None, or the current one, where nobody takes new sequences."""
    votes = Counter(model for model, _ in answers)
    served = list(dict.fromkeys(model for model, usable in answers if usable))
    if not served:
        return current
    most = max(served, key=lambda model: votes[model])  # of equals the first
    return current if current in served and 2 * votes[most] <= len(answers) else most


def choose_adapters(served: Sequence[Sequence[Adapter]], away: Sequence[Sequence[Adapter]] = ()) -> tuple[Adapter, ...]:
    """The adapters of a model, each name once, from what every target of it has, in the order of their addresses. One
    that stands for several is the one of the most targets, of equals the first; the others serve what has begun there.
    What only targets had that are away, as while they start again, is not gone."""
    votes = Counter(adapter for adapters in served for adapter in adapters)  # in the order of the addresses
    names = dict.fromkeys(adapter.name for adapter in votes)
    chosen = {name: max((one for one in votes if one.name == name), key=votes.__getitem__) for name in names}
    for adapter in chain.from_iterable(away):
        chosen.setdefault(adapter.name, adapter)
    return tuple(chosen.values())


def choose_capabilities(told: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Of a model, from those of every target of it. What a request may ask for is what any of them can do: it goes to
    one that can. Of the rules of acceptance only those that all have: the gateway chooses one where a request has not,
    and a rule that some lack would send everything past them."""
    of_any = dict.fromkeys(chain.from_iterable(told))
    return tuple(name for name in of_any if not name.startswith("acceptance.") or all(name in one for one in told))
