"""What has arrived of a request, and so what is to be asked for if its stream breaks. No I/O.

A gateway takes the ids that a client has as output generated before: with the same seed the answer goes on where it
stopped, its text too. Greedy and coupled completions come out as if nothing had happened (in batch-invariant mode;
elsewhere up to near-ties), those accepted by rejection with the same distribution."""

from __future__ import annotations

from dataclasses import dataclass, replace

from outrider.client.parts import Part, decode_response
from outrider.v1 import common_pb2
from outrider.v1 import generation_pb2 as pb
from outrider.wire.errors import OTHER_MODEL, FailedPrecondition, Internal


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
        given = request.output_ids or [common_pb2.TokenIds()] * (request.n or 1)
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
            self._request.output_ids.extend(common_pb2.TokenIds(ids=entry.ids) for entry in self._completions)
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
        has_news = part.token_ids or part.text or part.finish_reason or part.prompt_logprobs or part.seed is not None
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
            self._request.token_ids.CopyFrom(common_pb2.TokenIds(ids=part.prompt_token_ids))
