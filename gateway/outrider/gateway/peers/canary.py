"""The canary: now and then every target decodes one prompt with one seed. Targets of one model whose arithmetic is
equal say the same, to the bit of their log probabilities; one that does not has a broken device, broken memory, or
another build than it says. Those that are not batch-invariant differ by design, and are not asked."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter, defaultdict
from itertools import count
from typing import Any

from outrider.gateway.peers.remote import RemoteTargets
from outrider.gateway.peers.replicas import Replica
from outrider.gateway.speculation.backends import Lost
from outrider.rpc.errors import Unavailable
from outrider.rpc.messages import Arithmetic, Commit, Credit, Failure, Open, TargetInfo
from outrider.rpc.words.answer import PositionLogprobs
from outrider.rpc.words.sampling_params import AcceptanceRule, SamplingParams, lacking

PROMPT_TOKENS, NUM_TOKENS = 24, 16
SEED = 0x5EED
LAST = 1 << 20  # its priority: behind all clients
ANSWER_S = 30.0
SAMPLING = SamplingParams(temperature=1.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=1)

Answer = tuple[PositionLogprobs, ...]  # of each token: itself, and others with their log probabilities
Computation = tuple[str, Arithmetic]  # a model's digest, and how it is computed

log = logging.getLogger(__name__)


class Canary:
    """Asks the targets of a gateway, and marks those that disagree."""

    def __init__(self, targets: RemoteTargets, every_s: float) -> None:
        self._targets, self._every_s, self._numbers = targets, every_s, count()
        self._known: dict[Computation, Answer] = {}  # what most of them have said

    async def run(self) -> None:
        """Until cancelled; a look that fails is told, and the next one comes in its time."""
        while True:
            await asyncio.sleep(self._every_s)
            try:
                await self.look()
            except Exception:
                log.exception("canary: it could not look at the targets, and will again in %g s", self._every_s)

    async def look(self) -> None:
        """Asks all that can be compared, at once, and marks them."""
        comparable: dict[Computation, list[Replica[TargetInfo]]] = defaultdict(list)
        for replica in self._targets.replicas:
            if (info := replica.info) is not None and _can_be_asked(replica, info):
                comparable[info.model.digest, info.model.arithmetic].append(replica)
        for key, replicas in comparable.items():
            if len(replicas) > 1 or key in self._known:
                await self._compare(key, replicas)

    async def _compare(self, key: Computation, replicas: list[Replica[TargetInfo]]) -> None:
        number = next(self._numbers)
        said = await asyncio.gather(*(ask(replica, number) for replica in replicas))
        answers = {replica: answer for replica, answer in zip(replicas, said, strict=True) if answer}
        right = right_answer(list(answers.values()), self._known.get(key))
        if right is not None:
            self._known[key] = right
        is_judged = right is not None or len(set(answers.values())) > 1
        for replica, answer in answers.items():
            _mark(replica, is_judged and answer != right, answer, right)


def _can_be_asked(replica: Replica[TargetInfo], info: TargetInfo) -> bool:
    lacks = lacking(info.capabilities, SAMPLING, AcceptanceRule.COUPLED)
    return replica.usable and not replica.breaker.open and info.model.batch_invariant and not lacks


def _mark(replica: Replica[TargetInfo], disagrees: bool, answer: Answer, right: Answer | None) -> None:
    """Says so where it has changed."""
    before, replica.disagrees = replica.disagrees, disagrees
    if disagrees and not before:
        log.error("canary: target %s %s", replica.address, difference(answer, right))
    elif before and not disagrees:
        log.warning("canary: target %s agrees again with the others of its arithmetic", replica.address)


def right_answer(answers: list[Answer], known: Answer | None) -> Answer | None:
    """What was said before by most; else what more than half of them say now, and more than one. None: nobody can
    tell."""
    if known is not None or not answers:
        return known
    answer, votes = Counter(answers).most_common(1)[0]
    return answer if votes > 1 and 2 * votes > len(answers) else None


def difference(answer: Answer, right: Answer | None) -> str:
    """In words, for the log."""
    if right is None:
        return "and others of its arithmetic disagree, and nobody can tell which is right"
    for place, (one, other) in enumerate(zip(answer, right, strict=False)):
        if one != other:
            what = f"token {other[0].id} is {one[0].id}" if one[0].id != other[0].id else "the log probabilities differ"
            return f"does not compute as others of its arithmetic: at position {place} {what}"
    return f"does not compute as others of its arithmetic: {len(answer)} tokens, and {len(right)} there"


async def ask(replica: Replica[TargetInfo], number: int) -> Answer | None:
    """A target's answer; None where it gives none, as one that is full. Each time another salt: nothing of it is found
    computed."""
    told: asyncio.Future[Answer | None] = asyncio.get_running_loop().create_future()
    found: list[PositionLogprobs] = []

    def on_event(event: Any) -> None:
        if told.done():
            return
        if isinstance(event, Commit):
            found.extend(event.logprobs)
        if isinstance(event, Failure | Lost):
            told.set_result(None)
        elif isinstance(event, Commit) and event.finish_reason is not None:
            told.set_result(tuple(found))

    info = replica.info
    if info is None:
        return None
    try:
        link = replica.open(_request(info, number), on_event)
    except Unavailable:
        return None
    link.send(Credit(0, PROMPT_TOKENS + NUM_TOKENS, 0))
    try:
        async with asyncio.timeout(ANSWER_S):
            return await told
    except TimeoutError:
        return None
    finally:
        link.close()


def _request(info: TargetInfo, number: int) -> Open:
    """The same ids for every target of a model."""
    dice = random.Random(SEED)
    prompt = tuple(dice.randrange(info.model.num_tokens or info.model.vocab_size) for _ in range(PROMPT_TOKENS))
    return Open(
        0,
        prompt,
        SAMPLING,
        acceptance=AcceptanceRule.COUPLED,
        seed=SEED,
        priority=LAST,
        salt=f"canary {number}",
        model_digest=info.model.digest,
        plain=True,
    )
