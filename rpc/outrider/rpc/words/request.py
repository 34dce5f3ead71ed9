"""What is asked for: completions of one prompt, the same for gRPC, HTTP and in process. A field is a row here and one
in generation.proto: codec and the client's keywords follow (`generation_codec`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Annotated, Any, NamedTuple, get_type_hints

from outrider.rpc.words.checks import Checks
from outrider.rpc.words.sampling_params import AcceptanceRule, SamplingParams

PICTURE = {"type": "image"}  # a part of a message's content, in whose place a template writes the placeholder


def split_methods(text: str) -> tuple[str, ...]:
    """Names with commas between them."""
    return tuple(part.strip() for part in text.split(",")) if text.strip() else ()


class Range(NamedTuple):
    """What a number may be, its ends included."""

    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftOptions:
    """What a request says to its draft: it goes there as it is, in a field of the same name of Open. A row says what
    a value may be."""

    # A draft ends behind a token of which its model is less sure.
    draft_confidence: Annotated[float, Range(0, 1)] = 0.0

    def check_draft_options(self, found: Checks, prefix: str = "") -> None:
        """Adds what is wrong with them."""
        for name, bounds in DRAFT_OPTIONS.items():
            found.number(prefix + name, getattr(self, name), *bounds)


DRAFT_OPTIONS: Mapping[str, Range] = {
    name: hint.__metadata__[0] for name, hint in get_type_hints(DraftOptions, include_extras=True).items()
}


def options_for_draft(source: object) -> dict[str, Any]:
    """The fields of DraftOptions, by name, of whatever has them."""
    return {name: getattr(source, name) for name in DRAFT_OPTIONS}


@dataclass(frozen=True, slots=True)
class SpeculationOptions(DraftOptions):
    """How to speculate for one request; None and AUTO are the gateway's choice."""

    enabled: bool = True
    num_draft_tokens: int | None = None
    method: str = ""  # short for methods, with commas between several
    methods: tuple[str, ...] = ()  # that draft in turn; empty: the draft's default
    acceptance: AcceptanceRule = AcceptanceRule.AUTO
    mode: str = ""  # how far the draft runs ahead; empty: the gateway's default
    greedy_draft: bool = False  # the draft takes its most probable token; accepted as one-hot. Not sent

    @property
    def named_methods(self) -> tuple[str, ...]:
        """The methods that were asked for, by either field; empty: the draft's default."""
        return self.methods or (split_methods(self.method) if self.method else ())


@dataclass(frozen=True, slots=True)
class ReasoningOptions:
    """What a request says of reasoning."""

    split: bool | None = None  # its text is told apart; None: a conversation's is
    max_tokens: int | None = None  # after so many it ends
    effort: str = ""  # for a template that knows it; empty: the template's own


@dataclass(frozen=True, slots=True)
class MediaSource:
    """A picture as it was given: exactly one of data, url and path."""

    data: bytes | None = field(default=None, repr=False)
    url: str = field(default="", repr=False)  # data: or file:; not sent
    path: str = ""
    mime_type: str = ""  # that it is said to be

    @property
    def name(self) -> str:
        """Of the field in which it came."""
        return "data" if self.data is not None else "url" if self.url else "path"


@dataclass(frozen=True, slots=True)
class LatencyGoals:
    """What a caller wants of a request's times, in milliseconds; None: nothing."""

    ttft_ms: float | None = None  # from its arrival to its first token
    tpot_ms: float | None = None  # of a token after its first delivery, on the mean of a completion
    strict: bool = False  # refused where one is foreseen to be missed; else it is served behind others

    @property
    def by_name(self) -> dict[str, float]:
        """Those that are set, as ttft and tpot."""
        given = {"ttft": self.ttft_ms, "tpot": self.tpot_ms}
        return {name: goal_ms for name, goal_ms in given.items() if goal_ms is not None}


@dataclass(frozen=True, slots=True)
class ServerCall:
    """By what a request came in: attributes of its span, and the one for its status. `status_of` takes the error (an
    OutriderError), None for a good end, and whether anything was answered before."""

    attributes: Mapping[str, str]
    status_attribute: str
    status_of: Callable[[Any, bool], str | int]


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """Completions of one prompt; exactly one of text, token_ids and messages is given."""

    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # further variables of the template
    tools: tuple[Any, ...] = ()  # in OpenAI's form
    tool_choice: Any = None  # in OpenAI's form: auto, none, required, or a function; None: auto
    parallel_tool_calls: bool = True
    sampling: SamplingParams | None = None  # None: the model's defaults
    # Fields of sampling that are left open, where the model's defaults stand: a client sends none of them. HTTP names
    # max_tokens alone, which is read again.
    unset: tuple[str, ...] = ()
    reasoning: ReasoningOptions | None = None
    prediction: str | tuple[int, ...] | None = None  # a guess at the output, as text or token ids
    speculation: SpeculationOptions = field(default_factory=SpeculationOptions)
    request_id: str = ""
    n: int = 1
    priority: int = 0
    output_ids: tuple[tuple[int, ...], ...] = ()  # resumes: per completion what the client has
    model_digest: str = ""  # resumes, too: of the model that began; empty: any
    model: str = ""  # by name; empty: the one that is served
    adapter: str = ""  # of the model, by name; empty: the model alone
    salt: str = ""
    media: tuple[MediaSource, ...] = ()  # the prompt's pictures, in its order
    # Of HTTP and in process alone.
    continue_final_message: bool = False  # the answer goes on with the last message's text
    chat_template: str | None = None  # of the request's own; None: the checkpoint's
    documents: tuple[Any, ...] = ()  # for a template that shows them
    add_special_tokens: bool | None = None  # None: to a text, and not to what a chat template has written
    truncation_side: str = "left"  # where sampling.truncate_prompt_tokens cuts: left or right
    among_long: bool = False  # other prompts came with it, and all texts together are long
    whole: bool = False  # nobody sees anything of the answer before its end: it may begin anew until then
    # What is known of the call that brought it.
    caller: str = ""  # whom its credential names
    peer: str = ""  # the host that it came from; empty: this process
    timeout_s: float | None = None  # what remains of the caller's deadline
    goals: LatencyGoals = LatencyGoals()
    traceparent: str = ""
    call: ServerCall | None = None  # None: in this process

    @property
    def account(self) -> str:
        """Whose share of the room it takes: its credential's, else its salt's, else its host's."""
        named = (("caller", self.caller), ("salt", self.salt), ("peer", self.peer))
        return next((f"{kind} {name}" for kind, name in named if name), "")

    @property
    def account_digest(self) -> str:
        """By which the account is known to services that need not know it; empty where there is none."""
        return sha256(self.account.encode("utf-8", "surrogatepass")).hexdigest()[:16] if self.account else ""

    @property
    def max_tokens_given(self) -> bool:
        """Whether sampling.max_tokens was asked for; else it is cut to what the context leaves."""
        return "max_tokens" not in self.unset

    def truncated(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        """A prompt's ids that are kept."""
        keep = None if self.sampling is None else self.sampling.truncate_prompt_tokens
        if not isinstance(keep, int) or keep <= 0:  # all, or what the validator finds
            return ids
        return ids[:keep] if self.truncation_side == "right" else ids[-keep:]
