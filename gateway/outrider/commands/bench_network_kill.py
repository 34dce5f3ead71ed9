"""Never below: the draft is killed at a random moment of a completion; what follows is compared with plain decoding."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.commands.bench_network_block import LOOPBACK, Note
from outrider.commands.bench_network_draft import DraftWorker
from outrider.commands.bench_network_fleet import NetworkFleet, connect, start_draft
from outrider.commands.bench_network_run import BRANCHES, PLAIN, Batch, ServicesWay, batch_of
from outrider.commands.bench_result import Json, spread
from outrider.gateway.rounds import Round

WITHIN_S = 0.05  # of the round that ends next: the moment has nothing to do with the rounds


@dataclass(slots=True)
class Killer:
    """Kills the draft a while after a number of tokens."""

    draft: DraftWorker
    after_tokens: int
    wait_s: float
    killed_at: float | None = None
    _num_tokens: int = field(default=0)
    _timer: asyncio.TimerHandle | None = None

    def on_round(self, closed: Round) -> None:
        """Counts."""
        self._num_tokens += len(closed.commit.ids)
        if self._num_tokens >= self.after_tokens and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self.wait_s, self._kill)

    def _kill(self) -> None:
        self.draft.kill()
        self.killed_at = time.monotonic()


async def measure_kills(
    fleet: NetworkFleet, prompts: Sequence[Sequence[int]], kills: int, max_tokens: int, seed: int, note: Note
) -> Json:
    """Milliseconds a token: plain, and from the kill to the end, alternating; `kept` is plain over the latter."""
    rng = random.Random(seed)
    plain, after = [], []
    for number in range(kills):
        k = fleet.setup.num_draft_tokens
        batch = batch_of([prompts[number % len(prompts)]], 1, 0.0, max_tokens, k, seed + number)
        plain.append((await fleet.way(PLAIN, LOOPBACK, 0.0).run(batch)).ms_per_token)
        moment = rng.randint(max_tokens // 8, max_tokens // 2)
        after.append(await _after_kill(fleet, batch, moment, rng.uniform(0.0, WITHIN_S)))
        note(f"  {number + 1} of {kills}: plain {plain[-1]:.1f}, after the draft's end {after[-1]:.1f} ms a token")
    return {
        "plain_ms": spread(plain),
        "after_ms": spread(after),
        "kept": spread([before / later for before, later in zip(plain, after, strict=True)]),
    }


async def _after_kill(fleet: NetworkFleet, batch: Batch, after_tokens: int, wait_s: float) -> float:
    """A draft of its own is started, used and killed. Raises ValueError if the completion ended too early."""
    with start_draft(fleet.setup) as draft:
        await asyncio.to_thread(draft.wait, fleet.setup.timeout_s)
        async with connect(fleet.setup, fleet.target.address, draft.address) as gateway:
            killer = Killer(draft, after_tokens, wait_s)
            way = ServicesWay(gateway.engine, gateway.watcher, BRANCHES)
            rounds = await way.stream(batch, 0, killer.on_round)
    return after_ms(rounds, killer.killed_at)


def after_ms(rounds: Sequence[Round], killed_at: float | None) -> float:
    """Milliseconds a token from a moment on."""
    later = [closed for closed in rounds if killed_at is not None and closed.ended > killed_at]
    tokens = sum(len(closed.commit.ids) for closed in later)
    if killed_at is None or not tokens:
        raise ValueError("a completion ended before its draft was killed: ask for more tokens")
    return 1e3 * (rounds[-1].ended - killed_at) / tokens
