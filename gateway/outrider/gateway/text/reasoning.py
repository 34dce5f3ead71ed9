"""Reasoning: what a model writes before its answer, between two tokens of its own, or in a message of its own
(`channels`). It is told apart by their ids, so that an answer that speaks of such a marker, letter by letter, is no
reasoning.

A chat template may have opened it in the prompt already; else it begins where the output's first token opens it. A
completion that is resumed rebuilds where it stands from the ids that it has."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from outrider.gateway.text.channels import CHANNEL_TOKENS, CHANNELS, ChannelBoundaries, Channels, channels_of
from outrider.gateway.text.tokenizer import NUM_CONTEXT_IDS, TextDelta, TextStream, Tokenizer
from outrider.rpc.errors import FailedPrecondition, InvalidArgument, Violation, Violations, quoted
from outrider.rpc.words.request import ReasoningOptions
from outrider.rpc.words.sampling_params import FinishReason, SamplingParams
from outrider.rpc.words.structured import REASONING, Reasoning

AUTO, NONE = "auto", "none"
# Start and end by the name of vLLM's parser, or the model's; the first whose tokens a tokenizer has are its own.
MARKERS: dict[str, tuple[str, ...]] = {
    "deepseek_r1": ("<think>", "</think>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "seed_oss": ("<seed:think>", "</seed:think>"),
    "cohere": ("<|START_THINKING|>", "<|END_THINKING|>"),
    "longcat": ("<longcat_think>", "</longcat_think>"),
}
_LIKE_DEEPSEEK = (
    "deepseek_v3", "ernie45", "glm45", "holo2", "kimi_k2", "mimo", "minimax_m2", "nemotron_v3", "qwen3", "think",
)  # fmt: skip
MARKERS |= dict.fromkeys(_LIKE_DEEPSEEK, MARKERS["deepseek_r1"])
MARKERS[CHANNELS] = CHANNEL_TOKENS
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
SWITCHES = ("enable_thinking", "thinking")  # templates' words for whether to reason
MAX_IDS_AFTER = 8  # of white space between a template's opening and the prompt's end


def template_variables(options: ReasoningOptions, known: Collection[str]) -> dict[str, Any]:
    """What a template that knows these names is told."""
    told: dict[str, Any] = {"reasoning_effort": options.effort} if options.effort else {}
    if options.effort == "none":
        told |= dict.fromkeys(SWITCHES, False)
    return {name: value for name, value in told.items() if name in known}


def check_reasoning(
    found: Violations, options: ReasoningOptions, markers: ReasoningMarkers | None, max_model_len: int
) -> None:
    """Adds what is wrong with what a request says of reasoning."""
    if options.effort not in ("", *EFFORTS):
        found.add("reasoning.effort", f"is {quoted(options.effort)}", ", ".join(EFFORTS))
    most = options.max_tokens
    if most is not None and found.integer("reasoning.max_tokens", most, 1, max_model_len) and markers is None:
        found.add("reasoning.max_tokens", "is given, and no reasoning of this model is known", "leave it out")


@dataclass(frozen=True, slots=True)
class ReasoningMarkers:
    """The tokens between which a model reasons."""

    start_ids: tuple[int, ...]
    end_ids: tuple[int, ...]
    channels: Channels | None = None  # what tells them from other messages; None: the first start, and its end

    def plan(
        self,
        options: ReasoningOptions | None,
        is_chat: bool,
        sampling: SamplingParams,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        capabilities: Collection[str],
    ) -> ReasoningPlan:
        """The plan of a request that was checked. Where the two texts are not told apart, a constraint is on the whole
        output, unless the prompt has opened reasoning. A target that knows nothing of it applies a constraint from the
        first token: then the answer comes at once, unless the prompt has opened reasoning. InvalidArgument for that,
        and for a bound that the target would not keep."""
        options = options or ReasoningOptions()
        splits = is_chat if options.split is None else options.split
        is_open, most = _is_open(self, tokenizer, prompt_ids), options.max_tokens or 0
        if not most and (sampling.structured_output is None or not (splits or is_open)):
            return ReasoningPlan(self, is_open, splits, None)
        if REASONING in capabilities:
            message = Reasoning(self.end_ids, self.start_ids, most, is_open)
            return ReasoningPlan(self, is_open, splits, message)
        if most or is_open:
            field = "reasoning.max_tokens" if most else "sampling.structured_output"
            problem = "needs a target that knows of reasoning, and this one does not; allowed: leave it out"
            raise InvalidArgument.of([Violation(field, problem)])
        return ReasoningPlan(self, is_open, splits, None)

    def boundaries(self, is_open: bool) -> Boundaries:
        """Where one text ends and the next begins, from an output's first token on."""
        if self.channels is not None:
            return ChannelBoundaries(self.channels, is_open)
        return _Pair(self.start_ids[0], self.end_ids[0], is_open)


@dataclass(frozen=True, slots=True)
class ReasoningPlan:
    """A request's reasoning, with nothing left open."""

    markers: ReasoningMarkers
    open: bool  # the prompt ends inside it
    splits: bool
    message: Reasoning | None  # to the peers: where it is bounded, or a constraint is on what follows it

    def stream(
        self, tokenizer: Tokenizer, sampling: SamplingParams, prompt_ids: Sequence[int], output_ids: Sequence[int]
    ) -> ReasoningStream | TextStream:
        """The text of a completion, or its two texts."""
        text = tokenizer, sampling, prompt_ids, output_ids
        return ReasoningStream(*text, self) if self.splits else TextStream(*text)


def find_markers(tokenizer: Tokenizer, parser: str) -> ReasoningMarkers | None:
    """The markers of a parser's name; by "auto" what the tokenizer has, if it has any. FailedPrecondition for a name
    that nobody knows, or whose tokens the tokenizer has not."""
    if parser == NONE:
        return None
    if parser not in (AUTO, *MARKERS):
        raise FailedPrecondition(f"reasoning_parser is {quoted(parser)}; allowed: {AUTO}, {NONE}, {', '.join(MARKERS)}")
    ids = {text: token_id for token_id, text in tokenizer.added_tokens.items()}
    names = MARKERS if parser == AUTO else (parser,)
    name = next((name for name in names if ids.keys() >= set(MARKERS[name])), None)
    if name is None and parser == AUTO:
        return None
    if name is None:
        needed = " and ".join(MARKERS[parser])
        raise FailedPrecondition(f"reasoning_parser is {parser}, and the tokenizer has no tokens {needed}")
    if name == CHANNELS:
        channels = channels_of(tokenizer)
        return ReasoningMarkers(channels.start_ids, channels.end_ids, channels)
    start, end = MARKERS[name]
    return ReasoningMarkers((ids[start],), (ids[end],))


def _is_open(markers: ReasoningMarkers, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> bool:
    """Only white space may follow: a marker in what a user wrote opens nothing."""
    start, tail = markers.start_ids, tuple(prompt_ids[-MAX_IDS_AFTER - len(markers.start_ids) :])
    ends = [at for at in range(len(start), len(tail) + 1) if tail[at - len(start) : at] == start]
    return bool(ends) and not tokenizer.decode(tail[ends[-1] :]).strip()


class Boundaries(Protocol):
    """What tells a completion's two texts apart as its ids come."""

    is_inside: bool  # of reasoning

    def find(self, ids: Sequence[int], begin: int) -> int:
        """The place of the next marker among ids, of which those before `begin` were seen; their number if there is
        none."""
        ...

    def take(self, token_id: int) -> None:
        """Steps over a marker."""
        ...


class _Pair:
    """Reasoning begins where the output's first token opens it, if the prompt has not, and ends once."""

    def __init__(self, start_id: int, end_id: int, is_open: bool) -> None:
        self.is_inside, self._end_id = is_open, end_id
        self._first = None if is_open else start_id  # that opens it

    def find(self, ids: Sequence[int], begin: int) -> int:
        first, self._first = self._first, None
        if self.is_inside:
            return next((place for place in range(begin, len(ids)) if ids[place] == self._end_id), len(ids))
        return begin if ids[begin] == first else len(ids)

    def take(self, token_id: int) -> None:
        self.is_inside = not self.is_inside


class ReasoningStream:
    """A TextStream of two texts, reasoning and answer; the markers belong to neither. Stop strings end the output in
    either, as with vLLM, but match within one alone."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        sampling: SamplingParams,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        plan: ReasoningPlan,
    ) -> None:
        self._tokenizer, self._sampling = tokenizer, sampling
        self._boundaries = plan.markers.boundaries(plan.open)
        self._last = deque(prompt_ids[-NUM_CONTEXT_IDS:], NUM_CONTEXT_IDS)
        self._num_output = 0
        self._stream: TextStream | None = None  # of the text that goes on; None: nothing of it has come
        self.resumed = self.push(output_ids)

    @property
    def finished(self) -> bool:
        return self._stream is not None and self._stream.finished

    @property
    def num_held(self) -> int:
        return 0 if self._stream is None else self._stream.num_held

    def push(
        self, ids: Sequence[int], finish_reason: FinishReason | None = None, stop_token_id: int | None = None
    ) -> TextDelta:
        """Takes the next committed ids; what is reasoning is told apart."""
        parts, begin = list[tuple[bool, TextDelta]](), 0
        while begin < len(ids) and not self.finished and (end := self._boundaries.find(ids, begin)) < len(ids):
            if end > begin or self._stream is not None:
                parts.append(self._pushed(ids[begin:end], FinishReason.LENGTH))  # lets go of what it holds back
                if parts[-1][1].stop_string is not None:
                    return _joined(parts)
            self._note(ids[end : end + 1])
            self._boundaries.take(ids[end])
            parts.append((False, TextDelta("", 1)))
            self._stream, begin = None, end + 1
        parts.append(self._pushed(ids[begin:], finish_reason, stop_token_id))
        return _joined(parts)

    def _pushed(
        self, ids: Sequence[int], finish_reason: FinishReason | None, stop_token_id: int | None = None
    ) -> tuple[bool, TextDelta]:
        """What further ids add to the present text, and whether that is reasoning."""
        if self._stream is None:
            left = max(0, self._sampling.min_tokens - self._num_output)
            self._stream = TextStream(self._tokenizer, replace(self._sampling, min_tokens=left), tuple(self._last))
        delta = self._stream.push(ids, finish_reason, stop_token_id)
        self._note(ids)
        return self._boundaries.is_inside, delta

    def _note(self, ids: Sequence[int]) -> None:
        self._num_output += len(ids)
        self._last.extend(ids)


def _joined(parts: Sequence[tuple[bool, TextDelta]]) -> TextDelta:
    """Both texts of what came in turn; it ends as the last of it."""
    texts = ["".join(delta.text for is_inside, delta in parts if is_inside == wanted) for wanted in (False, True)]
    num_ids, num_reasoning = (
        sum(delta.num_ids for is_inside, delta in parts if is_inside >= least) for least in (0, 1)
    )
    return replace(parts[-1][1], text=texts[0], num_ids=num_ids, reasoning=texts[1], num_reasoning=num_reasoning)
