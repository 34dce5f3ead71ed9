"""Reasoning: what a model writes before its answer, between two tokens of its own. It is told apart by their ids, so
that an answer that speaks of such a marker, letter by letter, is no reasoning.

A chat template may have opened it in the prompt already; else it begins where the output's first token opens it. A
completion that is resumed rebuilds where it stands from the ids that it has."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from outrider.gateway.text.tokenizer import NUM_CONTEXT_IDS, TextDelta, TextStream, Tokenizer
from outrider.rpc.errors import FailedPrecondition, InvalidArgument, Violation, Violations, quoted
from outrider.rpc.sampling_params import FinishReason, SamplingParams
from outrider.rpc.structured import REASONING, Reasoning

if TYPE_CHECKING:
    from outrider.gateway.request import GenerationRequest

AUTO, NONE = "auto", "none"
# Start and end by the name of vLLM's parser, or the model's; the first whose tokens a tokenizer has are its own.
MARKERS = {
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
EFFORTS = ("none", "minimal", "low", "medium", "high")
SWITCHES = ("enable_thinking", "thinking")  # templates' words for whether to reason
MAX_IDS_AFTER = 8  # of white space between a template's opening and the prompt's end


@dataclass(frozen=True, slots=True)
class ReasoningOptions:
    """What a request says of reasoning."""

    splits: bool | None = None  # its text is told apart; None: a conversation's is
    max_tokens: int | None = None  # after so many it ends
    effort: str = ""  # of EFFORTS, for a template that knows it; empty: the template's own

    def variables(self, known: Collection[str]) -> dict[str, Any]:
        """What a template that knows these names is told."""
        told: dict[str, Any] = {"reasoning_effort": self.effort} if self.effort else {}
        if self.effort == "none":
            told |= dict.fromkeys(SWITCHES, False)
        return {name: value for name, value in told.items() if name in known}

    def check(self, found: Violations, markers: ReasoningMarkers | None, max_model_len: int) -> None:
        """Adds what is wrong with it."""
        if self.effort not in ("", *EFFORTS):
            found.add("reasoning.effort", f"is {quoted(self.effort)}", ", ".join(EFFORTS))
        most = self.max_tokens
        if most is not None and found.integer("reasoning.max_tokens", most, 1, max_model_len) and markers is None:
            found.add("reasoning.max_tokens", "is given, and no reasoning of this model is known", "leave it out")


@dataclass(frozen=True, slots=True)
class ReasoningMarkers:
    """The tokens between which a model reasons."""

    start_id: int
    end_id: int

    def plan(
        self,
        request: GenerationRequest,
        sampling: SamplingParams,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        capabilities: Collection[str],
    ) -> ReasoningPlan:
        """Of a request that was checked. Where the two texts are not told apart, a constraint is on the whole output,
        unless the prompt has opened reasoning. A target that knows nothing of it applies a constraint from the first
        token: then the answer comes at once, unless the prompt has opened reasoning. InvalidArgument for that, and for
        a bound that the target would not keep."""
        options = request.reasoning or ReasoningOptions()
        splits = request.messages is not None if options.splits is None else options.splits
        is_open, most = _is_open(self, tokenizer, prompt_ids), options.max_tokens or 0
        if not most and (sampling.structured_output is None or not (splits or is_open)):
            return ReasoningPlan(self, is_open, splits, None)
        if REASONING in capabilities:
            message = Reasoning((self.end_id,), (self.start_id,), most, is_open)
            return ReasoningPlan(self, is_open, splits, message)
        if most or is_open:
            field = "reasoning.max_tokens" if most else "sampling.structured_output"
            problem = "needs a target that knows of reasoning, and this one does not; allowed: leave it out"
            raise InvalidArgument.of([Violation(field, problem)])
        return ReasoningPlan(self, is_open, splits, None)


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


def decode_reasoning(message: Any) -> ReasoningOptions:
    """From the protocol's ReasoningParams."""
    splits = message.split if message.HasField("split") else None
    return ReasoningOptions(splits, message.max_tokens if message.HasField("max_tokens") else None, message.effort)


def find_markers(tokenizer: Tokenizer, parser: str) -> ReasoningMarkers | None:
    """Those of a parser's name; by "auto" what the tokenizer has, if it has any. FailedPrecondition for a name
    that nobody knows, or whose tokens the tokenizer has not."""
    if parser == NONE:
        return None
    if parser not in (AUTO, *MARKERS):
        raise FailedPrecondition(f"reasoning_parser is {quoted(parser)}; allowed: {AUTO}, {NONE}, {', '.join(MARKERS)}")
    ids = {text: token_id for token_id, text in tokenizer.added_tokens.items()}
    pairs = MARKERS.values() if parser == AUTO else (MARKERS[parser],)
    for start, end in pairs:
        if start in ids and end in ids:
            return ReasoningMarkers(ids[start], ids[end])
    if parser == AUTO:
        return None
    start, end = MARKERS[parser]
    raise FailedPrecondition(f"reasoning_parser is {parser}, and the tokenizer has no tokens {start} and {end}")


def _is_open(markers: ReasoningMarkers, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> bool:
    """Only white space may follow: a marker in what a user wrote opens nothing."""
    tail = list(prompt_ids[-MAX_IDS_AFTER - 1 :])
    if markers.start_id not in tail:
        return False
    after = tail[len(tail) - tail[::-1].index(markers.start_id) :]
    return not tokenizer.decode(after).strip()


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
        self._tokenizer, self._sampling, self._markers = tokenizer, sampling, plan.markers
        self._last = list(prompt_ids[-NUM_CONTEXT_IDS:])
        self._num_output = 0
        self._is_inside = plan.open
        self._stream = self._new_stream()
        self.resumed = self.push(output_ids)

    @property
    def finished(self) -> bool:
        """As TextStream's."""
        return self._stream.finished

    def push(
        self, ids: Sequence[int], finish_reason: FinishReason | None = None, stop_token_id: int | None = None
    ) -> TextDelta:
        """As TextStream's; what is reasoning is told apart."""
        if self.finished or not ids:
            return self._stream.push(ids, finish_reason, stop_token_id)
        whole = TextDelta("", 0)
        if not self._num_output and not self._is_inside and ids[0] == self._markers.start_id:
            self._pass(ids[:1], is_inside=True)
            whole.num_ids, ids = 1, ids[1:]
        if self._is_inside and self._markers.end_id in ids:
            end = list(ids).index(self._markers.end_id)
            self._add(whole, self._stream.push(ids[:end], FinishReason.LENGTH))  # lets go of what it holds back
            if whole.stop_string is not None:
                return whole
            self._note(ids[:end])
            self._pass(ids[end : end + 1], is_inside=False)
            whole.num_ids, whole.finish_reason, ids = whole.num_ids + 1, None, ids[end + 1 :]
        self._add(whole, self._stream.push(ids, finish_reason, stop_token_id))
        self._note(ids)
        return whole

    def _add(self, whole: TextDelta, part: TextDelta) -> None:
        if self._is_inside:
            whole.reasoning += part.text
            whole.num_reasoning += part.num_ids
        else:
            whole.text += part.text
        whole.num_ids += part.num_ids
        whole.finish_reason, whole.stop_string = part.finish_reason, part.stop_string
        whole.stop_token_id = part.stop_token_id

    def _pass(self, marker: Sequence[int], is_inside: bool) -> None:
        self._note(marker)
        self._is_inside = is_inside
        self._stream = self._new_stream()

    def _note(self, ids: Sequence[int]) -> None:
        self._num_output += len(ids)
        self._last = [*self._last, *ids][-NUM_CONTEXT_IDS:]

    def _new_stream(self) -> TextStream:
        left = max(0, self._sampling.min_tokens - self._num_output)
        return TextStream(self._tokenizer, replace(self._sampling, min_tokens=left), self._last)
