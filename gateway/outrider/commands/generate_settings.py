"""The settings of `outrider generate`: a prompt, SamplingParams' fields by their names, and how to speculate."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from outrider.commands.arguments import read_json, split_each, split_ids
from outrider.wire.config import ServiceSettings
from outrider.wire.sampling import LogprobsMode, SamplingParams, StructuredOutput

# What the protocol's unsigned fields hold; whether a value makes sense is the gateway's to say.
UInt32 = Annotated[int, Field(ge=0, lt=2**32)]


class SamplingSettings(ServiceSettings):
    """How tokens are chosen; what is not given is the model's default. The gateway judges the values."""

    section: ClassVar[str] = "sampling"

    temperature: float | None = Field(None, description="divides the logits; 0 is greedy")
    top_p: float | None = Field(None, description="keep the smallest set of tokens with this mass")
    top_k: int | None = Field(None, description="keep the k most probable tokens; 0 and -1: all")
    min_p: float | None = Field(None, description="drop tokens below this share of the largest probability")
    repetition_penalty: float | None = Field(None, description="divides the logits of tokens in prompt and output")
    presence_penalty: float | None = Field(None, description="subtracted from the logits of tokens in the output")
    frequency_penalty: float | None = Field(None, description="the same, times the token's count")
    logit_bias: dict[UInt32, float] | None = Field(None, description='added to logits, as in {"42": -1.5}')
    allowed_token_ids: tuple[UInt32, ...] | None = Field(None, description="the only ids that may come, as in 1,2,3")
    bad_words: tuple[str, ...] | None = Field(None, description="a text that must not come")
    bad_words_ids: tuple[tuple[UInt32, ...], ...] | None = Field(
        None, description="ids that must not come in this order, as in 7,8"
    )
    max_tokens: int | None = Field(
        None, ge=0, lt=2**32, description="most tokens of a completion (the gateway's default: 16)"
    )
    min_tokens: int | None = Field(None, ge=0, lt=2**32, description="tokens before which nothing ends the output")
    stop: tuple[str, ...] | None = Field(None, description="a text that ends the output")
    stop_token_ids: tuple[UInt32, ...] | None = Field(None, description="ids that end the output, as in 1,2,3")
    ignore_eos: bool | None = Field(None, description="go on past the end-of-sequence token")
    include_stop_str_in_output: bool | None = Field(None, description="leave the stop text in the output")
    logprobs: int | None = Field(None, description="log probabilities of this many tokens a position (with --json)")
    prompt_logprobs: int | None = Field(None, description="the same for the prompt (with --json)")
    logprobs_mode: LogprobsMode | None = Field(None, description="what they are of")
    skip_special_tokens: bool | None = Field(None, description="leave special tokens out of the text")
    spaces_between_special_tokens: bool | None = Field(None, description="spaces between special tokens")
    detokenize: bool | None = Field(None, description="make text; off: ids alone")
    structured_output: dict[str, Any] | None = Field(None, description='a constraint, as in {"regex": "[0-9]+"}')
    truncate_prompt_tokens: int | None = Field(None, description="keep only the prompt's last tokens")
    seed: int | None = Field(None, ge=0, lt=2**64, description="makes the output reproducible")

    def given(self) -> dict[str, Any]:
        """The sampling parameters that were given, as SamplingParams takes them."""
        values = {field.name: getattr(self, field.name) for field in fields(SamplingParams)}
        if self.structured_output is not None:
            values["structured_output"] = StructuredOutput(**self.structured_output)
        return {name: value for name, value in values.items() if value is not None}

    _ids = field_validator("allowed_token_ids", "stop_token_ids", mode="before")(split_ids)
    _id_lists = field_validator("bad_words_ids", mode="before")(split_each)
    _json = field_validator("logit_bias", "structured_output", mode="before")(read_json)

    @model_validator(mode="after")
    def _check_structured_output(self) -> SamplingSettings:
        if self.structured_output is not None:
            known = {field.name for field in fields(StructuredOutput)}
            if unknown := sorted(self.structured_output.keys() - known):
                raise ValueError(f"structured_output has no {', '.join(unknown)}; it has {', '.join(sorted(known))}")
        return self


class GenerateSettings(SamplingSettings):
    """What is asked of a gateway, and how the answer is shown."""

    section: ClassVar[str] = "generate"

    gateway: str = Field("127.0.0.1:50050", description="address of the gateway")
    prompt: str | None = Field(None, description="the text to continue; also the bare argument")
    token_ids: tuple[UInt32, ...] | None = Field(None, description="the prompt as ids, as in 1,2,3")
    n: int = Field(1, ge=1, lt=2**32, description="completions of the prompt")
    num_draft_tokens: int | None = Field(
        None, ge=0, lt=2**32, description="tokens drafted a round (default: the gateway's)"
    )
    method: str = Field("", description="how to draft (default: the draft service's)")
    mode: Literal["auto", "sequential", "chains", "branches"] | None = Field(
        None, description="how far the draft runs ahead (default: the gateway's)"
    )
    acceptance: Literal["auto", "rejection", "coupled"] = Field("auto", description="how drafted tokens are accepted")
    speculation: bool = Field(True, description="draft at all")
    tokenizer: Path | None = Field(None, description="the target's folder, to colour token by token")
    output: Literal["text", "json"] = Field("text", description="json, or --json: one object a completion, at its end")
    plain: bool = Field(False, description="no colours")
    timeout: float | None = Field(None, gt=0, description="seconds until the request is given up")
    request_id: str = Field("", description="name of the request in logs and traces")
    priority: int = Field(0, description="lower is served first under load")
    salt: str = Field("", description="separates prefix caches")

    _prompt_ids = field_validator("token_ids", mode="before")(split_ids)

    @model_validator(mode="after")
    def _check_prompt(self) -> GenerateSettings:
        if (self.prompt is None) == (self.token_ids is None):
            raise ValueError('give one prompt: a text, as in `outrider generate "Once"`, or --token-ids 1,2,3')
        return self
