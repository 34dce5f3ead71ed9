"""A stream that breaks: what has arrived of the request, and so what is asked for next (`Resumption`), and when, where
and after how long (`Route`). No I/O.

A gateway takes the ids that a client has as output generated before: with the same seed the answer goes on where it
stopped, its text too. Greedy and coupled completions come out as if nothing had happened (in batch-invariant mode;
elsewhere up to near-ties), those accepted by rejection with the same distribution."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from outrider.client.types import Part, decode_response
from outrider.rpc.errors import (
    OTHER_MODEL,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    OutriderError,
    ResourceExhausted,
    Unavailable,
    Violation,
    Violations,
)
from outrider.v1 import generation_pb2 as pb


@dataclass(slots=True)
class _Completion:
    """What has arrived of one completion."""

    ids: list[int]  # those that the caller had before, too
    num_returned: int = 0
    num_before: int = 0  # of those returned, by earlier streams
    has_seed: bool = False
    near_ties: bool = False
    finished: bool = False


class Resumption:
    """One request over as many streams as it takes."""

    def __init__(self, request: pb.GenerateRequest) -> None:
        self._request = pb.GenerateRequest()
        self._request.CopyFrom(request)
        given = request.output_ids or [pb.TokenIds()] * (request.n or 1)
        self._completions = [_Completion(list(entry.ids)) for entry in given]
        self._num_prompt_logprobs = self._num_to_skip = 0
        self._has_prompt_ids = False

    @property
    def finished(self) -> bool:
        """Whether every completion has its end: then a broken stream has lost nothing."""
        return all(completion.finished for completion in self._completions)

    def begin(self) -> pb.GenerateRequest:
        """The request for the next stream."""
        self._num_to_skip = self._num_prompt_logprobs
        for completion in self._completions:
            completion.num_before = completion.num_returned
        if any(completion.num_returned for completion in self._completions):
            del self._request.output_ids[:]
            self._request.output_ids.extend(pb.TokenIds(ids=entry.ids) for entry in self._completions)
        return self._request

    def take(self, response: pb.GenerateResponse) -> Part | None:
        """What a response adds. None: nothing that the caller does not have. FailedPrecondition: another model than
        the one that began has answered."""
        part = decode_response(response)
        self._check_model(part.model_digest)
        if part.index >= len(self._completions):
            raise Internal(f"the gateway answered for completion {part.index} of {len(self._completions)}")
        completion = self._completions[part.index]
        if completion.finished:
            return None
        part = self._without_repeats(part, completion)
        self._remember(part, completion)
        has_text = part.token_ids or part.text or part.reasoning or part.tool_calls
        has_news = has_text or part.finish_reason or part.prompt_logprobs or part.seed is not None
        return part if has_news else None

    def _check_model(self, digest: str) -> None:
        """A gateway that knows the request's field has refused it."""
        began = self._request.model_digest
        if began and digest and digest != began:
            raise FailedPrecondition(
                f"model {began[:16]} began, and another model, {digest[:16]}, answers",
                reason=OTHER_MODEL,
            )

    def _without_repeats(self, part: Part, completion: _Completion) -> Part:
        skipped = min(self._num_to_skip, len(part.prompt_logprobs))
        self._num_to_skip -= skipped
        usage = part.usage
        if usage is not None:
            usage = replace(usage, completion_tokens=usage.completion_tokens + completion.num_before)
        return replace(
            part,
            usage=usage,
            near_ties=part.near_ties or completion.near_ties,
            seed=None if completion.has_seed else part.seed,
            model_digest="" if completion.has_seed else part.model_digest,
            prompt_token_ids=() if self._has_prompt_ids else part.prompt_token_ids,
            prompt_logprobs=part.prompt_logprobs[skipped:],
        )

    def _remember(self, part: Part, completion: _Completion) -> None:
        completion.ids += part.token_ids
        completion.num_returned += len(part.token_ids)
        completion.near_ties = part.near_ties
        completion.finished = part.finish_reason is not None
        self._num_prompt_logprobs += len(part.prompt_logprobs)
        self._request.request_id = part.request_id
        if part.seed is not None:
            completion.has_seed = True
            self._request.sampling.seed = part.seed
        if part.model_digest:
            self._request.model_digest = part.model_digest
        if part.prompt_token_ids:  # they leave no room for another gateway's tokenizer or chat template
            self._has_prompt_ids = True
            if self._request.HasField("chat") and not self._request.reasoning.HasField("split"):
                self._request.reasoning.split = True  # as of a conversation
            self._request.token_ids.CopyFrom(pb.TokenIds(ids=part.prompt_token_ids))


_LEAST_TIMEOUT_S = 1e-9


@dataclass(frozen=True, slots=True)
class Retry:
    """How often a call is made again. Waits double, less up to a half of each by chance."""

    attempts: int = 6  # at each address, in a row without a token
    first_wait_s: float = 0.1
    most_wait_s: float = 2.0


NO_RETRY = Retry(attempts=1)


def may_repeat(error: OutriderError) -> bool:
    """Whether another try can help, and does no harm: the gateway is gone, drains or has no target, or it refused the
    call before anything ran and said when to come back."""
    if isinstance(error, ResourceExhausted):
        return error.retry_after_ms > 0
    return isinstance(error, Unavailable) or error.reason == OTHER_MODEL


def addresses_of(address: str | Sequence[str]) -> tuple[str, ...]:
    """One address or several, of which at least one is needed."""
    addresses = (address,) if isinstance(address, str) else tuple(address)
    if not addresses:
        raise InvalidArgument.of([Violation("address", "has no entries; allowed: at least one")])
    return addresses


def check_timeout(timeout: object) -> None:
    """A time that may be waited for. InvalidArgument names it."""
    found = Violations()
    found.number("timeout", timeout, _LEAST_TIMEOUT_S, math.inf, say="seconds, above 0; or None")
    found.raise_if_any()


@dataclass(slots=True)
class Route:
    """The way of one request over the addresses: another address at once, one that failed before after a wait."""

    retry: Retry
    num_addresses: int
    index: int  # of the address in use
    timeout: float | None  # for all tries together
    clock: Callable[[], float] = time.monotonic
    chance: Callable[[], float] = field(default_factory=lambda: random.Random().random)
    pace: Callable[[float], float] = lambda within_s: 0.0  # seconds until the client's requests may try again once more
    _deadline: float = field(init=False)
    _num_failures: int = 0  # in a row
    _has_begun: bool = False

    def __post_init__(self) -> None:
        if self.timeout is not None:
            check_timeout(self.timeout)
        self._deadline = math.inf if self.timeout is None else self.clock() + self.timeout

    @property
    def remaining(self) -> float | None:
        """Seconds until the deadline."""
        return None if self.timeout is None else max(0.0, self._deadline - self.clock())

    def progressed(self) -> None:
        """Tokens came: what failed before does not count any more."""
        self._num_failures, self._has_begun = 0, True

    def failed(self, error: OutriderError) -> float:
        """Turns to the next address and says after how long to ask it. Raises the error if there is to be no other
        try."""
        self._num_failures += 1
        if not may_repeat(error) or self._num_failures >= self.retry.attempts * self.num_addresses:
            raise error
        wait, left = self._wait(error), self._deadline - self.clock()
        if not self._has_begun and wait < left:  # a stream that broke is due at once, and there are only so many
            wait = max(wait, self.pace(left))
        if wait >= left:
            raise error
        self.index = (self.index + 1) % self.num_addresses
        return wait

    def _wait(self, error: OutriderError) -> float:
        whole_rounds, rest = divmod(self._num_failures, self.num_addresses)
        if rest:
            return 0.0  # the next one has not failed in this round
        wait = min(self.retry.most_wait_s, self.retry.first_wait_s * 2.0 ** (whole_rounds - 1))
        return max(wait * (1 - self.chance() / 2), error.retry_after_ms / 1000)
