"""Each draft is tried once beside the target that it meets, by the digests of both: it drafts meanwhile, since nothing
that it says changes an answer, and is refused where the target keeps no more of it than of a guess."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Literal

from outrider.gateway.peers.remote import RemoteDrafts
from outrider.gateway.peers.replicas import Replica
from outrider.gateway.speculation.backends import Drafter, DrafterLink, Verifier
from outrider.gateway.speculation.loop import speculate
from outrider.planner.draft_trial import MOST_DRAFTED, NUM_TOKENS, judge_trial, trial_prompts
from outrider.planner.policy import Policy, Round
from outrider.proposers.registry import METHODS
from outrider.rpc.errors import FailedPrecondition, OutriderError, Unavailable
from outrider.rpc.messages import Commit, DraftInfo, DraftTrial, Open
from outrider.rpc.words.sampling_params import SamplingParams

LAST = 1 << 20  # its priority: behind all clients
PATIENCE_MS = 2000  # that a window waits for the draft: what is late says nothing of what it is worth
TRIAL_S = 60.0
ATTEMPTS, PAUSE_S = 3, 2.0

Pair = tuple[str, str, str]  # the digests of target and draft, and the method
log = logging.getLogger(__name__)


class DraftTrials:
    """What the drafts of a gateway were found to be worth. `encode` gives a text's ids."""

    def __init__(
        self, targets: Verifier, encode: Callable[[str], Sequence[int]], verdict: Literal["refuse", "warn"]
    ) -> None:
        self._targets, self._encode, self._verdict = targets, encode, verdict
        self._known: dict[Pair, DraftTrial | None] = {}  # None: the draft said nothing in time

    def check(self, draft: DraftInfo) -> None:
        """Raises FailedPrecondition for one that was tried beside the present target, and is no draft for it."""
        trial = self._known.get(self._pair(draft) or ("", "", ""))
        if trial is not None and trial.refused:
            raise FailedPrecondition(f"it is no draft for this target: {trial}", reason="DRAFT_TRIAL")

    def found(self) -> tuple[DraftTrial, ...]:
        """The trials beside the present target."""
        try:
            digest = self._targets.info.model.digest
        except Unavailable:
            return ()
        return tuple(trial for (target, _, _), trial in self._known.items() if trial is not None and target == digest)

    async def run(self, drafts: RemoteDrafts) -> None:
        """Until cancelled: tries what comes, one after another."""
        while True:
            pairs = ((replica, self._new_pair(replica)) for replica in drafts.replicas)
            found = next(((replica, pair) for replica, pair in pairs if pair is not None), None)
            if found is None:
                await drafts.wait_change()
                continue
            replica, pair = found
            trial = self._known[pair] = await self._tried(replica, pair[-1])
            if trial is not None and trial.refused:
                drafts.recheck()

    def _new_pair(self, replica: Replica[DraftInfo]) -> Pair | None:
        pair = self._pair(replica.info) if replica.usable and replica.info is not None else None
        return None if pair in self._known else pair

    def _pair(self, draft: DraftInfo) -> Pair | None:
        """None where no model drafts: what tokens alone say depends on the text."""
        names = [one.name for one in draft.methods if one.name in METHODS and METHODS[one.name].needs_model]
        try:
            return (self._targets.info.model.digest, draft.model.digest, names[0]) if names else None
        except Unavailable:
            return None

    async def _tried(self, replica: Replica[DraftInfo], method: str) -> DraftTrial | None:
        for _ in range(ATTEMPTS):
            try:
                async with asyncio.timeout(TRIAL_S):
                    commits = await trial_commits(_OneDraft(replica), self._targets, self._encode, method)
                    trial = judge_trial(method, commits)
            except (OutriderError, TimeoutError) as error:
                log.warning("draft %s could not be tried: %s", replica.address, str(error) or "it takes too long")
                return None
            except Exception:  # a bug must not end the trials of others
                log.exception("draft %s could not be tried", replica.address)
                return None
            if trial.num_rounds:
                return self._judged(trial, replica.address)
            await asyncio.sleep(PAUSE_S)
        log.warning("draft %s could not be tried: it drafted nothing in time", replica.address)
        return None

    def _judged(self, trial: DraftTrial, address: str) -> DraftTrial:
        log.info("draft %s was tried: %s", address, trial)
        if not trial.is_useless:
            return trial
        log.error(
            "draft %s is no draft for this target: %s. Was it made for it, and for these weights?", address, trial
        )
        return replace(trial, refused=self._verdict == "refuse")


async def trial_commits(
    drafter: Drafter, targets: Verifier, encode: Callable[[str], Sequence[int]], method: str
) -> list[Commit]:
    """All that the target says behind the texts, beside a draft's method."""
    info = targets.info
    prompts = trial_prompts(encode, info.model.max_model_len)
    said = await asyncio.gather(*(_continued(drafter, targets, prompt, method) for prompt in prompts))
    return [commit for commits in said for commit in commits]


async def _continued(drafter: Drafter, targets: Verifier, prompt: tuple[int, ...], method: str) -> list[Commit]:
    model = targets.info.model
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    asked = Open(
        0, prompt, sampling, priority=LAST, salt="draft trial", method=method,
        tokenizer_fingerprint=model.tokenizer_fingerprint, model_digest=model.digest,
    )  # fmt: skip
    policy = Policy(min(MOST_DRAFTED, targets.info.max_window), patience_ms=PATIENCE_MS)
    async with aclosing(speculate(drafter, targets, asked, policy)) as items:
        return [item.commit async for item in items if isinstance(item, Round)]


@dataclass(frozen=True, slots=True)
class _OneDraft:
    """A replica by itself, as a Drafter."""

    replica: Replica[DraftInfo]

    @property
    def info(self) -> DraftInfo | None:
        """What it said of itself."""
        return self.replica.info

    @property
    def round_trip_us(self) -> float:
        """To it."""
        return self.replica.round_trip_us

    def open(self, request: Open, on_event: Callable[[Any], None]) -> DrafterLink | None:
        """Starts a sequence; None if it takes none now."""
        return self.replica.open(request, on_event) if self.replica.usable else None
