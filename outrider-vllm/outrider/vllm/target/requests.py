"""An Open as a request of vLLM's: which of its parameters vLLM obeys under speculation, and how they are said there."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from outrider.rpc.errors import InvalidArgument, Violation
from outrider.rpc.messages import Adapter, Open
from outrider.rpc.words.sampling_params import BASELINE, AcceptanceRule, SamplingParams, lacking
from outrider.target_service.sequence import TargetLimits, check_open
from outrider.vllm.link import EXTRA

# vLLM refuses the first two under speculation, reports raw log probabilities alone, and shares no noise with a draft.
MISSING = (
    "sampling.min_p",
    "sampling.logit_bias",
    "sampling.logprobs_mode",
    "acceptance.coupled",
)
VLLM_CAPABILITIES = tuple(name for name in BASELINE if name not in MISSING)
GRAMMARS = "sampling.structured_output"  # where vLLM has read a tokenizer
ALL_NOISE = 1 << 63  # seeds are below


def check_request(
    message: Open,
    limits: TargetLimits,
    capabilities: Sequence[str] = VLLM_CAPABILITIES,
    adapter: Adapter | None = None,  # that the sequence has
) -> None:
    """Raises an OutriderError that says why a sequence is not taken."""
    check_open(message, limits, adapter)
    sampling, found = message.sampling, []
    rule = AcceptanceRule.AUTO if sampling.greedy else message.acceptance
    for name in lacking(capabilities, sampling, rule):
        found.append(Violation(name, "is not what this target's engine, vLLM, does; leave it unset"))
    if message.output_ids:
        found += [
            Violation(f"sampling.{name}", "cannot be resumed by this target's engine, vLLM; leave it unset")
            for name in counting_parameters(sampling)
        ]
    if message.media and sampling.prompt_logprobs is not None:
        found.append(
            Violation("sampling.prompt_logprobs", "is given with media, whose places have no ids; leave it unset")
        )
    if sampling.structured_output is not None:
        found += [
            Violation(f"sampling.{name}", "is held under no grammar by this target's engine, vLLM; leave it unset")
            for name in ("min_tokens", "allowed_token_ids", "bad_words_ids")
            if getattr(sampling, name)  # vLLM would bar the one token that its grammar allows, and end the request
        ]
    reasoning = message.reasoning
    if reasoning is not None and (reasoning.max_tokens or sampling.structured_output is not None):
        problem = "is bounded, or comes before a grammar; this target's engine, vLLM, holds neither; leave it unset"
        found.append(Violation("open.reasoning", problem))
    if found:
        raise InvalidArgument.of(found)


def counting_parameters(sampling: SamplingParams) -> list[str]:
    """What looks at the output alone: a continuation's first tokens are a prompt to vLLM."""
    names = [name for name in ("presence_penalty", "frequency_penalty") if getattr(sampling, name)]
    return names + (["bad_words"] if any(len(words) > 1 for words in sampling.bad_words_ids) else [])


def prompt_of(message: Open) -> dict[str, Any]:
    """What is computed before the first token: a continuation's output, too. As vLLM's renderer would make it, which
    would take a turn of a thread for that."""
    prompt: dict[str, Any] = {"type": "token", "prompt_token_ids": [*message.prompt_ids, *message.output_ids]}
    return {**prompt, "cache_salt": message.salt} if message.salt else prompt


def sampling_of(
    message: Open, eos_ids: Sequence[int], sequence_id: int, is_streamed: bool = False, grammar: Any = None
) -> Any:
    """vLLM's SamplingParams. Ends of sequence are stop ids there, since it knows one of them alone; a continuation has
    noise of its own, since the same seed would spend the same noise twice."""
    from vllm import SamplingParams as VllmParams
    from vllm.sampling_params import RequestOutputKind

    sampling, before = message.sampling, len(message.output_ids)
    said = {"sequence_id": sequence_id, "num_output": before, "suspect": message.suspect}
    goes_on = sampling.ignore_eos and grammar is None  # behind a grammar's end nothing is allowed
    stops = [*sampling.stop_token_ids, *(() if goes_on else eos_ids)]
    weighs = not sampling.greedy and grammar is None  # a grammar cuts windows by what is drafted
    params = VllmParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=max(0, sampling.top_k),
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        seed=None if sampling.greedy else seed_of(message),
        stop_token_ids=stops or None,
        ignore_eos=True,
        max_tokens=sampling.max_tokens - before,
        min_tokens=max(0, sampling.min_tokens - before),
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
        allowed_token_ids=list(sampling.allowed_token_ids) or None,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA if is_streamed else RequestOutputKind.FINAL_ONLY,
        structured_outputs=grammar,
        extra_args={EXTRA: {**said, "weighs": weighs}},
    )
    if sampling.bad_words_ids:
        params._bad_words_token_ids = [list(words) for words in sampling.bad_words_ids]
    return params


def refusals() -> tuple[type[Exception], ...]:
    """What vLLM raises for a request that it does not take."""
    from vllm.exceptions import VLLMClientError

    return ValueError, VLLMClientError


def seed_of(message: Open) -> int:
    """A number made of its seed, which completion it is, and where it goes on."""
    facts = (message.seed, message.completion, len(message.output_ids))
    digest = hashlib.sha256(b"".join(fact.to_bytes(8, "little") for fact in facts)).digest()
    return int.from_bytes(digest[:8], "little") % ALL_NOISE
