"""What the rounds of one run say."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from outrider.gateway.rounds import Round


@dataclass(frozen=True, slots=True)
class Digest:
    """One run, without each stream's first round, which holds the prompt."""

    ms_per_token: float  # of a stream
    tokens_per_round: float
    accepted: int
    tested: int  # drafted tokens that were reached: those before them were accepted
    verify_ms: float  # median, sampling included
    pass_ms: float  # of the draft; 0 where it is not known
    hits: float | None  # share of rounds whose window had been drafted before the round began; None without drafts


def digest(streams: Sequence[Sequence[Round]], branches: Sequence[Collection[int]] = ()) -> Digest:
    """Sums up all streams; `branches` are the chains of each that began as a branch. Raises ValueError where no
    stream has two rounds."""
    later = [closed for rounds in streams for closed in rounds[1:]]
    if not later:
        raise ValueError("every completion ended with its first round: ask for more tokens")
    spans = [(rounds[-1].ended - rounds[0].ended, _num_tokens(rounds[1:])) for rounds in streams if len(rounds) > 1]
    whole = [closed for rounds in streams for closed in rounds[1:-1]] or later  # a stream's last round is cut
    drafted = [closed for closed in later if closed.commit.num_drafted]
    tested = sum(min(closed.commit.num_accepted + 1, closed.commit.num_drafted) for closed in drafted)
    timed = [closed for closed in drafted if closed.draft_us]
    passes = sum(closed.commit.num_drafted for closed in timed)
    return Digest(
        ms_per_token=1e3 * sum(span for span, _ in spans) / sum(num for _, num in spans),
        tokens_per_round=_num_tokens(whole) / len(whole),
        accepted=sum(closed.commit.num_accepted for closed in drafted),
        tested=tested,
        verify_ms=median(closed.commit.timings.verify_us + closed.commit.timings.sample_us for closed in whole) / 1e3,
        pass_ms=sum(closed.draft_us for closed in timed) / passes / 1e3 if passes else 0.0,
        hits=_hits(streams, branches) if drafted and branches else None,
    )


def _hits(streams: Sequence[Sequence[Round]], branches: Sequence[Collection[int]]) -> float:
    """A hit goes on with the chain of the round before, or with one that began as a branch of it."""
    hits = [
        bool(later.commit.num_drafted) and (later.commit.chain == earlier.commit.chain or later.commit.chain in begun)
        for rounds, begun in zip(streams, branches, strict=True)
        for earlier, later in pairwise(rounds[1:])
    ]
    return sum(hits) / len(hits) if hits else 0.0


def _num_tokens(rounds: Sequence[Round]) -> int:
    return sum(len(closed.commit.ids) for closed in rounds)
