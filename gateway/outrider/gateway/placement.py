"""Where a new sequence goes: to the replica that its first tokens choose, unless that one is busier than the others.

Rendezvous hashing (Thaler and Ravishankar 1998) lets prompts that begin alike meet on one replica, whose prefix cache
then knows them, and moves only a lost replica's share. Bounded loads (Mirrokni et al., arXiv 1608.01350) send what a
full replica cannot take to the next in the same order."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from hashlib import blake2b

AFFINITY_TOKENS = 64  # later tokens tell prompts of one kind apart: they would scatter what shares its beginning
MAX_OVER_MEAN = 1.25


def affinity_key(prompt_ids: Sequence[int], salt: str = "") -> bytes:
    """Of a prompt's first tokens. A salt parts the prefix caches of two callers, and so their keys."""
    digest = blake2b(salt.encode(), digest_size=16)
    digest.update(b"".join(token.to_bytes(4, "little") for token in prompt_ids[:AFFINITY_TOKENS]))
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
