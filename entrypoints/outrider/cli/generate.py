"""`outrider generate`: asks a gateway for completions and shows them as they come, or as JSON. Its settings are
SamplingParams' fields by their names, and how to speculate."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from outrider.cli.access import GATEWAY, AccessSettings
from outrider.cli.arguments import fail, load_tokenizer, of_gateway, parse, read_json, split_each, split_ids
from outrider.cli.terminal import TokenWriter, make_painter
from outrider.client import Part, SpeculationStats, Usage, generate
from outrider.gateway.text.tokenizer import Tokenizer
from outrider.rpc.errors import OutriderError
from outrider.rpc.token_times import TokenTimes
from outrider.rpc.words.answer import PositionLogprobs
from outrider.rpc.words.sampling_params import AcceptanceRule, LogprobsMode, SamplingParams
from outrider.rpc.words.structured import StructuredOutput

DESCRIPTION = (
    'Ask a gateway for completions of a prompt, given as a bare argument ("Once upon a time") or by --token-ids. On a '
    "terminal the colour of the text says how its tokens came about: green for drafted tokens that the target kept, "
    "yellow where it refused one, cyan for the token after a whole window. Without --tokenizer a round's text has one "
    "colour, that of its first token."
)
SHOWN = (  # of a completion, as JSON
    "request_id", "index", "text", "token_ids", "origins", "finish_reason", "stop_reason", "usage", "speculation",
    "seed",
)  # fmt: skip
SHORT = {"--json": "--output=json", "--no-json": "--output=text"}
# What the protocol's unsigned fields hold; whether a value makes sense is the gateway's to say.
UInt32 = Annotated[int, Field(ge=0, lt=2**32)]


class RequestSettings(AccessSettings):
    """What both `generate` and `chat` ask of a gateway. What is not given is the model's or the gateway's default; the
    gateway judges the values."""

    gateway: str = Field(GATEWAY, description="address of the gateway")
    temperature: float | None = Field(None, description="divides the logits; 0 is greedy (default: the model's)")
    top_p: float | None = Field(None, description="keep the smallest set of tokens with this mass")
    top_k: int | None = Field(None, description="keep the k most probable tokens; 0 and -1: all")
    min_p: float | None = Field(None, description="drop tokens below this share of the largest probability")
    repetition_penalty: float | None = Field(None, description="divides the logits of tokens in prompt and output")
    presence_penalty: float | None = Field(None, description="subtracted from the logits of tokens in the output")
    frequency_penalty: float | None = Field(None, description="the same, times the token's count")
    stop: tuple[str, ...] | None = Field(None, description="a text that ends the output")
    seed: int | None = Field(None, ge=0, lt=2**64, description="makes the output reproducible")
    speculation: bool = Field(True, description="draft at all")
    num_draft_tokens: int | None = Field(
        None, ge=0, lt=2**32, description="tokens drafted a round (default: the gateway's)"
    )
    mode: Literal["auto", "sequential", "chains", "branches"] | None = Field(
        None, description="how far the draft runs ahead (default: the gateway's)"
    )
    acceptance: Literal["auto", "rejection", "coupled", "block"] = Field(
        "auto", description="how drafted tokens are accepted"
    )
    tokenizer: Path | None = Field(None, description="the target's folder, to colour token by token")
    plain: bool = Field(False, description="no colours")
    timeout: float | None = Field(None, gt=0, description="seconds until a request is given up")
    priority: int = Field(0, description="lower is served first under load")
    salt: str = Field("", description="separates prefix caches")
    model: str = Field("", description="name of the model (default: the gateway's)")
    adapter: str = Field("", description="name of an adapter of the model (default: the model alone)")

    def given(self) -> dict[str, Any]:
        """The sampling parameters that were given, as SamplingParams takes them."""
        values = {field.name: getattr(self, field.name, None) for field in fields(SamplingParams)}
        return {name: value for name, value in values.items() if value is not None}

    def options(self) -> dict[str, Any]:
        """The rest of what every request says, as the client takes it."""
        names = "num_draft_tokens", "timeout", "priority", "salt", "model", "adapter"
        same = {name: getattr(self, name) for name in names}
        return same | {"mode": self.mode or "", "acceptance": AcceptanceRule[self.acceptance.upper()]}


class GenerateSettings(RequestSettings):
    """What is asked of a gateway, and how the answer is shown."""

    section: ClassVar[str] = "generate"

    prompt: str | None = Field(None, description="the text to continue; also the bare argument")
    token_ids: tuple[UInt32, ...] | None = Field(None, description="the prompt as ids, as in 1,2,3")
    image: tuple[Path, ...] = Field(
        (), description="file of a picture, in the order in which the prompt holds the model's placeholders"
    )
    n: int = Field(1, ge=1, lt=2**32, description="completions of the prompt")
    prediction: str | None = Field(None, description="a guess at the whole output: where it holds, tokens come sooner")
    prediction_file: Path | None = Field(None, description="a file with that guess, as the text that is to be edited")
    method: str = Field(
        "", description="how to draft, as suffix; several with commas draft in turn (default: the draft service's)"
    )
    output: Literal["text", "json"] = Field("text", description="json, or --json: one object a completion, at its end")
    request_id: str = Field("", description="name of the request in logs and traces")
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
    stop_token_ids: tuple[UInt32, ...] | None = Field(None, description="ids that end the output, as in 1,2,3")
    ignore_eos: bool | None = Field(None, description="go on past the end-of-sequence token")
    include_stop_str_in_output: bool | None = Field(None, description="leave the stop text in the output")
    logprobs: int | None = Field(None, description="log probabilities of this many tokens a position (with --json)")
    logprob_token_ids: tuple[UInt32, ...] | None = Field(
        None, description="those of these ids in place of the most probable ones, as in 1,2,3 (with --logprobs)"
    )
    prompt_logprobs: int | None = Field(None, description="the same for the prompt (with --json)")
    logprobs_mode: LogprobsMode | None = Field(None, description="what they are of")
    skip_special_tokens: bool | None = Field(None, description="leave special tokens out of the text")
    spaces_between_special_tokens: bool | None = Field(None, description="spaces between special tokens")
    detokenize: bool | None = Field(None, description="make text; off: ids alone")
    structured_output: dict[str, Any] | None = Field(None, description='a constraint, as in {"regex": "[0-9]+"}')
    truncate_prompt_tokens: int | None = Field(None, description="keep only the prompt's last tokens")

    def given(self) -> dict[str, Any]:
        """The sampling parameters that were given, with the constraint as SamplingParams has it."""
        constraint = self.structured_output
        return super().given() | ({} if constraint is None else {"structured_output": StructuredOutput(**constraint)})

    def request(self) -> dict[str, Any]:
        """All that is said of the request but its prompt as a text, as the client takes it. OSError for files that
        cannot be read."""
        same = {name: getattr(self, name) for name in ("token_ids", "n", "method", "request_id")}
        file = self.prediction_file
        own = {
            "media": [image.read_bytes() for image in self.image],
            "speculate": None if self.speculation else False,
            "prediction": self.prediction if file is None else file.read_text("utf-8"),
        }
        return {**same, **own, **self.access(), **self.options(), **self.given()}

    _ids = field_validator("token_ids", "allowed_token_ids", "stop_token_ids", "logprob_token_ids", mode="before")(
        split_ids
    )
    _id_lists = field_validator("bad_words_ids", mode="before")(split_each)
    _json = field_validator("logit_bias", "structured_output", mode="before")(read_json)

    @model_validator(mode="after")
    def _check_structured_output(self) -> GenerateSettings:
        if self.structured_output is not None:
            known = {field.name for field in fields(StructuredOutput)}
            if unknown := sorted(self.structured_output.keys() - known):
                raise ValueError(f"structured_output has no {', '.join(unknown)}; it has {', '.join(sorted(known))}")
        return self

    @model_validator(mode="after")
    def _check_prompt(self) -> GenerateSettings:
        if (self.prompt is None) == (self.token_ids is None):
            raise ValueError('give one prompt: a text, as in `outrider generate "Once"`, or --token-ids 1,2,3')
        if self.prediction is not None and self.prediction_file is not None:
            raise ValueError("give one prediction: --prediction or --prediction-file")
        return self


@dataclass(slots=True)
class CollectedCompletion:
    """One completion, as it comes in parts. Enumerations are their names in lower case, as JSON shows them."""

    index: int
    request_id: str = ""
    text: str = ""
    reasoning: str = ""
    token_ids: list[int] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    usage: Usage | None = None
    speculation: SpeculationStats | None = None
    seed: int | None = None
    prompt_token_ids: tuple[int, ...] = ()
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    prompt_logprobs: list[PositionLogprobs] = field(default_factory=list)
    times: TokenTimes = field(default_factory=TokenTimes)  # of responses

    def add(self, part: Part) -> None:
        """Adds what one response brings to the completion."""
        self.request_id = part.request_id
        self.text += part.text
        self.reasoning += part.reasoning
        self.token_ids += part.token_ids
        self.origins += [origin.name.lower() for origin in part.origins]
        self.logprobs += part.logprobs
        self.prompt_logprobs += part.prompt_logprobs
        self.prompt_token_ids += part.prompt_token_ids
        self.seed = self.seed if part.seed is None else part.seed
        if part.token_ids:
            self.times.add(time.monotonic(), len(part.token_ids))
        if part.finish_reason is not None:
            self.finish_reason = part.finish_reason.name.lower()
            self.stop_reason, self.usage, self.speculation = part.stop_reason, part.usage, part.speculation

    @property
    def acceptance(self) -> str:
        """The acceptance rule that was used."""
        return "" if self.speculation is None else self.speculation.acceptance.name.lower()

    @property
    def tokens_per_s(self) -> float:
        """The decoding speed: the tokens after the first response by the time after it; 0 where there are none."""
        return 1 / seconds if (seconds := self.times.seconds_per_token) else 0.0

    def as_json(self) -> dict[str, Any]:
        """What `outrider generate --json` prints. Log probabilities are there if they were asked for."""
        shown = {name: getattr(self, name) for name in SHOWN} | {
            "usage": None if self.usage is None else asdict(self.usage),
            "speculation": None if self.speculation is None else self._speculation(self.speculation),
        }
        for name, positions in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if positions:
                shown[name] = [[candidate._asdict() for candidate in position] for position in positions]
        return shown

    def _speculation(self, stats: SpeculationStats) -> dict[str, Any]:
        return {
            **asdict(stats),
            "acceptance": self.acceptance,
            "acceptance_rate": stats.acceptance_rate,
            "mean_acceptance_length": stats.mean_acceptance_length,
        }


def main(argv: Sequence[str] | None = None, prog: str = "outrider generate") -> int:
    """Streams the completions; 1 if the gateway refuses the request or cannot be reached."""
    settings = parse(GenerateSettings, argv, prog, DESCRIPTION, bare=("prompt",), short=SHORT)
    try:
        tokenizer = None if settings.tokenizer is None else load_tokenizer(settings.tokenizer, "--tokenizer")
        parts = generate(settings.gateway, settings.prompt, **settings.request())
        if settings.output == "json":
            _print_json(parts)
        else:
            _print_text(settings, tokenizer, parts)
    except (OutriderError, OSError, ValueError) as error:
        return fail(prog, error, of_gateway(error, settings.gateway))
    return 0


def _print_json(parts: Iterator[Part]) -> None:
    """A line for each completion when it has ended."""
    answers: dict[int, CollectedCompletion] = {}
    for part in parts:
        answer = answers.setdefault(part.index, CollectedCompletion(part.index))
        answer.add(part)
        if part.finish_reason is not None:
            print(json.dumps(answer.as_json(), ensure_ascii=False), flush=True)


def _print_text(settings: GenerateSettings, tokenizer: Tokenizer | None, parts: Iterator[Part]) -> None:
    """One completion as it comes; of several each where those before it have ended."""
    painter = make_painter(settings.plain)
    tokenizer = tokenizer if painter.colours else None
    shown = 0
    writer = TokenWriter(painter, tokenizer)
    for part in _one_after_another(parts):
        if part.index != shown:
            shown, writer = part.index, TokenWriter(painter, tokenizer)
            painter.note(f"\n-- completion {shown + 1} of {settings.n}")
        writer.write(part)
        if part.finish_reason is not None:
            print(flush=True)


def _one_after_another(parts: Iterator[Part]) -> Iterator[Part]:
    """The parts by completion: those of a later one wait for the end of those before it."""
    waiting: dict[int, list[Part]] = {}
    current = 0
    for part in parts:
        waiting.setdefault(part.index, []).append(part)
        while ready := waiting.pop(current, None):
            yield from ready
            if ready[-1].finish_reason is None:
                break
            current += 1
