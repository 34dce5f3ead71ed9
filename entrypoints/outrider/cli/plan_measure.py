"""What `outrider plan` reads from services that run: what the target says of its steps, and what a few rounds through
both show of the draft's passes, the round trips and the acceptance."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.cli.probes import decode
from outrider.gateway.peers.remote import RemoteDrafts, RemoteTargets
from outrider.planner.policy import Policy, Round, SpeculationTally
from outrider.planner.sizing import StepCosts
from outrider.planner.virtual_services import MAX_ROWS
from outrider.rpc.errors import Unavailable
from outrider.rpc.messages import Open
from outrider.rpc.pair import check_pair
from outrider.rpc.security import ClientTls
from outrider.rpc.words.sampling_params import AcceptanceRule, SamplingParams

ANSWER_S = 10.0  # until which both services must have answered
WINDOW, NUM_TOKENS = 4, 128  # drafted tokens of a round, and tokens that are decoded to measure
SEED = 1


@dataclass(frozen=True, slots=True)
class MeasuredPair:
    """What was found out, by the names of the settings that it stands for. Costs are microseconds by rows."""

    target_ms: StepCosts
    draft_ms: StepCosts
    rtt_ms: float  # to the farther one
    acceptance: float
    cache_tokens: int  # whose keys and values the target holds


async def measure(
    target: str,
    draft: str,
    prompt_ids: Sequence[int],
    target_tls: ClientTls | None = None,
    draft_tls: ClientTls | None = None,
) -> MeasuredPair:
    """Decodes one completion, over TLS where it is given. Raises OutriderError where a service does not answer, or they
    are no pair, and ValueError where the draft proposes nothing."""
    async with RemoteTargets([target], tls=target_tls) as targets, RemoteDrafts([draft], tls=draft_tls) as drafts:
        for name, pool, address in (("target", targets, target), ("draft", drafts, draft)):
            try:
                await asyncio.wait_for(pool.wait_usable(), ANSWER_S)
            except TimeoutError:
                raise Unavailable(f"no {name} answers at {address}") from None
        info, draft_info = targets.info, drafts.info
        if draft_info is not None:
            check_pair(info.model, draft_info.model)
        room = info.model.max_model_len - len(prompt_ids)
        sampling = SamplingParams(temperature=0.0, max_tokens=min(NUM_TOKENS, max(1, room)), ignore_eos=True)
        fingerprint = info.model.tokenizer_fingerprint
        rule = AcceptanceRule.COUPLED
        request = Open(0, tuple(prompt_ids), sampling, seed=SEED, acceptance=rule, tokenizer_fingerprint=fingerprint)
        rounds = [closed async for closed in decode(drafts, targets, request, Policy(WINDOW))]
        trips_us = [replica.round_trip_us for pool in (targets, drafts) for replica in pool.replicas]
    return summarise(rounds, info.step_costs, max(trips_us), info.model.num_blocks * info.model.block_size)


def summarise(
    rounds: Sequence[Round], step_costs: Sequence[tuple[int, int]], round_trip_us: float, cache_tokens: int
) -> MeasuredPair:
    """What the rounds of one completion say. Raises ValueError where nothing was drafted."""
    tally = SpeculationTally()
    for closed in rounds:
        tally.add(closed)
    timed = [closed for closed in rounds[1:] if closed.draft_us and closed.commit.num_drafted]
    if not timed or not sum(tally.num_tested_per_position):
        raise ValueError("the draft proposed nothing to measure: give --draft-ms and --acceptance")
    pass_us = sum(closed.draft_us for closed in timed) / sum(closed.commit.num_drafted for closed in timed)
    costs: StepCosts = tuple((rows, float(step_us)) for rows, step_us in step_costs)
    if not costs:  # it was not measured at its start: what the rounds took, whatever their rows
        steps = sorted(closed.commit.timings.verify_us + closed.commit.timings.sample_us for closed in rounds[1:])
        typical = float(max(1, steps[len(steps) // 2]))
        costs = ((1, typical), (MAX_ROWS, typical))
    return MeasuredPair(
        target_ms=costs,
        draft_ms=((1, pass_us), (MAX_ROWS, pass_us)),
        rtt_ms=round_trip_us / 1e3,
        acceptance=min(0.99, sum(tally.num_accepted_per_position) / sum(tally.num_tested_per_position)),
        cache_tokens=cache_tokens,
    )
