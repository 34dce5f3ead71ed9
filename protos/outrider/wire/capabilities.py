"""What a peer can be asked for. A field of an Open that changes what is generated or reported goes only to a peer whose
description names it: one that does not know the field would drop it unseen, and generate by another law."""

from __future__ import annotations

from collections.abc import Collection

from outrider.wire.sampling import AcceptanceRule, SamplingParams

# Fields of SamplingParams that mean something to a target or a draft. What only concerns text stays at the gateway.
SAMPLING_FIELDS = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "logit_bias", "allowed_token_ids", "bad_words_ids", "min_tokens", "stop_token_ids", "ignore_eos", "logprobs",
    "prompt_logprobs", "logprobs_mode", "structured_output",
)  # fmt: skip
_UNSET = SamplingParams()

# What every peer does, also one that is older than the list of capabilities and names none. It never grows: what came
# later has to be named.
BASELINE = (
    *(f"sampling.{field}" for field in SAMPLING_FIELDS if field != "structured_output"),
    "acceptance.rejection",
    "acceptance.coupled",
)


def lacking(
    capabilities: Collection[str], sampling: SamplingParams, acceptance: AcceptanceRule = AcceptanceRule.AUTO
) -> list[str]:
    """What a request needs, and a peer with these capabilities does not do."""
    needed = [f"sampling.{field}" for field in SAMPLING_FIELDS if getattr(sampling, field) != getattr(_UNSET, field)]
    if acceptance is not AcceptanceRule.AUTO:
        needed.append(f"acceptance.{acceptance.name.lower()}")
    return [name for name in needed if name not in capabilities]
