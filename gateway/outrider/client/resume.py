"""What has arrived of a request, and so what is to be asked for if its stream breaks. No I/O.

A gateway takes the ids that a client has as output generated before: with the same seed the answer goes on where it
stopped, its text too. Greedy and coupled completions come out as if nothing had happened (in batch-invariant mode;
elsewhere up to near-ties), those accepted by rejection with the same distribution."""

from __future__ import annotations

from dataclasses import dataclass, replace

from outrider.client.parts import Part, decode_response
from outrider.client.retry import OTHER_MODEL
from outrider.v1 import common_pb2
from outrider.v1 import generation_pb2 as pb
from outrider.wire.errors import FailedPrecondition, Internal


@dataclass(slots=True)
class _Completion:
    """What has arrived of one completion."""

    ids: list[int]  # those that the caller had before, too
    num_returned: int = 0
    num_before: int = 0  # of those returned, by earlier streams
    has_seed: bool = False
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
        self._model_digest = ""

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

    def check_model(self, digest: str) -> None:
        """Refuses to go on with another model than the one that has begun. Some gateways name none."""
        if self._model_digest and digest and digest != self._model_digest:
            raise FailedPrecondition("the gateway serves another model than the one that began", reason=OTHER_MODEL)
        self._model_digest = self._model_digest or digest

    def take(self, response: pb.GenerateResponse) -> Part | None:
        """What a response adds. None: nothing that the caller does not have."""
        part = decode_response(response)
        if part.index >= len(self._completions):
            raise Internal(f"the gateway answered for completion {part.index} of {len(self._completions)}")
        completion = self._completions[part.index]
        if completion.finished:
            return None
        part = self._without_repeats(part, completion)
        self._remember(part, completion)
        has_news = part.token_ids or part.text or part.finish_reason or part.prompt_logprobs or part.seed is not None
        return part if has_news else None

    def _without_repeats(self, part: Part, completion: _Completion) -> Part:
        skipped = min(self._num_to_skip, len(part.prompt_logprobs))
        self._num_to_skip -= skipped
        usage = part.usage
        if usage is not None:
            usage = replace(usage, completion_tokens=usage.completion_tokens + completion.num_before)
        return replace(
            part,
            usage=usage,
            seed=None if completion.has_seed else part.seed,
            prompt_token_ids=() if self._has_prompt_ids else part.prompt_token_ids,
            prompt_logprobs=part.prompt_logprobs[skipped:],
        )

    def _remember(self, part: Part, completion: _Completion) -> None:
        completion.ids += part.token_ids
        completion.num_returned += len(part.token_ids)
        completion.finished = part.finish_reason is not None
        self._num_prompt_logprobs += len(part.prompt_logprobs)
        self._request.request_id = part.request_id
        if part.seed is not None:
            completion.has_seed = True
            self._request.sampling.seed = part.seed
        if part.prompt_token_ids:  # they leave no room for another gateway's tokenizer or chat template
            self._has_prompt_ids = True
            self._request.token_ids.CopyFrom(common_pb2.TokenIds(ids=part.prompt_token_ids))
