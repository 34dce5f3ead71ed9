"""From a request to what may run: prompt ids and resolved parameters. Everything is checked here, by the one validator,
before anything is opened; a refusal names the field as the protocol does."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from outrider.gateway.admission import AdmissionCost
from outrider.gateway.media import MediaLimits, held_bytes, media_of
from outrider.gateway.methods import check_method_names, check_methods
from outrider.gateway.prediction import NUM_DRAFT_TOKENS, PREDICTION, prediction_ids
from outrider.gateway.text.chat import chat_ids, num_pictures
from outrider.gateway.text.reasoning import ReasoningMarkers, ReasoningPlan, check_reasoning
from outrider.gateway.text.tokenizer import LONG_TEXT, TextStream, Tokenizer, encode_bounded
from outrider.gateway.text.tools.use import AnswerText, ToolUse, tool_use
from outrider.rpc.errors import (
    OTHER_MODEL,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    Violation,
    Violations,
    quoted,
)
from outrider.rpc.media import Media
from outrider.rpc.messages import (
    MAX_DRAFT_TOKENS,
    MAX_INT32,
    MAX_N,
    MAX_NAME_CHARS,
    DraftInfo,
    ModelInfo,
    Open,
    TargetInfo,
    validate_length,
    validate_prompt_ids,
)
from outrider.rpc.words.checks import ALL_LOGPROBS
from outrider.rpc.words.request import GenerationRequest, SpeculationOptions, options_for_draft
from outrider.rpc.words.sampling_params import (
    MAX_LOGPROBS,
    AcceptanceRule,
    SamplingParams,
    check_sampling,
    lacking,
    sampling_for_peers,
    without_prompt_logprobs,
)

MAX_PROMPT_LOGPROBS = 1 << 19  # of a request; each takes about 120 bytes here
TRUNCATION_SIDES = ("left", "right")
SPECULATION_MODES = ("auto", "sequential", "chains", "branches")
SHOWN_DIGEST = 16  # characters in an error
SHOWN_NAME = 100
SHOWN_NAMES = 20


def num_long_chars(request: GenerationRequest) -> int:
    """Of texts that are tokenised beside the event loop; 0: there are none."""
    guess = len(request.prediction) if isinstance(request.prediction, str) else 0
    prompt = len(request.text or "")
    return prompt + guess if request.among_long or max(prompt, guess) > LONG_TEXT else 0


def least_tokens(request: GenerationRequest, max_model_len: int) -> int:
    """So many at least are admitted for it, as far as that is known before anything is tokenised; 0 where a number is
    wrong, which is told with all else that is."""
    sampling, n = request.sampling, request.n
    if sampling is None or not (type(n) is int and 1 <= n <= MAX_N):
        return 0
    most, keep = sampling.max_tokens, sampling.truncate_prompt_tokens
    prompt = len(request.token_ids or ()) if keep is None else 0
    known = request.max_tokens_given and type(most) is int and 1 <= most <= max_model_len
    return n * most + prompt if known and prompt < max_model_len else 0


@dataclass(frozen=True, slots=True)
class Served:
    """What requests are prepared for: the peers that are there, and what the gateway allows."""

    tokenizer: Tokenizer
    target: TargetInfo
    draft: DraftInfo | None
    num_draft_tokens: int  # of a round, where a request does not say
    mode: str = "sequential"
    max_logprobs: int = MAX_LOGPROBS
    markers: ReasoningMarkers | None = None  # of the model's reasoning
    media: MediaLimits = field(default_factory=MediaLimits)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that was checked and that may run, with nothing left open."""

    request: GenerationRequest
    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams  # as the text sees it: stop strings included
    num_draft_tokens: int
    acceptance: AcceptanceRule
    mode: str  # of speculation.mode, resolved
    seed: int
    model_digest: str  # of the model that it runs on to its end; with an adapter of both together
    tokenizer_fingerprint: str  # of the same
    prediction: tuple[int, ...] = ()
    methods: tuple[str, ...] = ()  # that draft in turn; empty: the draft's default
    can_run_ahead: bool = True  # each of them
    at_target: bool = False  # the target drafts by it, and no draft is opened
    tools: ToolUse | None = None
    reasoning: ReasoningPlan | None = None  # None: no reasoning of this model is known
    media: tuple[Media, ...] = ()  # kept to the end, for another target

    @property
    def work(self) -> AdmissionCost:
        """What is admitted for it: completions share their prompt and its pictures."""
        n, request = self.request.n, self.request
        num_tokens = len(self.prompt_ids) + n * self.sampling.max_tokens
        held = held_bytes(request.media, self.media) if self.media else 0
        return AdmissionCost(n, num_tokens, request.account, held)

    def output_ids(self, index: int) -> tuple[int, ...]:
        """What the client already has of a completion."""
        return self.request.output_ids[index] if self.request.output_ids else ()

    def text_streams(self, tokenizer: Tokenizer) -> list[AnswerText]:
        """The texts of all completions."""
        return [self.text_stream(tokenizer, index) for index in range(self.request.n)]

    def text_stream(self, tokenizer: Tokenizer, index: int) -> AnswerText:
        """The text of one completion."""
        if self.tools is None:
            return self.answer_text(tokenizer, index)
        text = self.answer_text(self.tools.tokenizer, index)
        return self.tools.stream(text, self.request_id, self.seed, self.prompt_ids, index)

    def answer_text(self, tokenizer: Tokenizer, index: int) -> AnswerText:
        """The text of one completion with the calls of tools in it; reasoning is told apart where it is to be."""
        text = tokenizer, self.sampling, self.prompt_ids, self.output_ids(index)
        return TextStream(*text) if self.reasoning is None else self.reasoning.stream(*text)

    def open(self, index: int, timeout_ms: int, traceparent: str) -> Open:
        """The Open of one completion: without what only concerns text."""
        sampling = sampling_for_peers(self.sampling)
        if index > 0:
            sampling = without_prompt_logprobs(sampling)
        return Open(
            sequence_id=0,
            prompt_ids=self.prompt_ids,
            sampling=sampling,
            output_ids=self.output_ids(index),
            completion=index,
            acceptance=self.acceptance,
            seed=self.seed,
            fresh_seed=self.sampling.seed is None,  # what is told of it may come back, as its caller's
            timeout_ms=timeout_ms,
            priority=self.request.priority,
            salt=self.request.salt,
            caller=self.request.account_digest,
            traceparent=traceparent,
            one_hot=self.sampling.greedy or self.request.speculation.greedy_draft,
            method=self.methods[0] if self.methods else "",
            methods=self.methods if len(self.methods) > 1 else (),
            prediction=self.prediction if PREDICTION in (self.methods or (PREDICTION,)) else (),
            model_digest=self.model_digest,
            adapter=self.request.adapter,
            media=self.media,
            tokenizer_fingerprint=self.tokenizer_fingerprint,
            reasoning=None if self.reasoning is None else self.reasoning.message,
            **options_for_draft(self.request.speculation),
            plain=not self.request.speculation.enabled or self.request.speculation.num_draft_tokens == 0,
        )


@dataclass(frozen=True, slots=True)
class _Inputs:
    """What a request gives to be computed, of no use where something was found wrong with it."""

    sampling: SamplingParams
    tools: ToolUse | None
    prompt_ids: tuple[int, ...]
    media: tuple[Media, ...]
    prediction: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Drafting:
    """How a request is drafted for, with nothing left open."""

    num_draft_tokens: int
    methods: tuple[str, ...]
    at_target: bool
    can_run_ahead: bool
    mode: str
    acceptance: AcceptanceRule


async def prepare(request: GenerationRequest, served: Served) -> Prepared:
    """Checks a request and resolves what it leaves open. InvalidArgument names the field; NotFound an adapter that is
    not there; FailedPrecondition says that another model began what is to be resumed."""
    target = served.target
    digest = digest_for(request, target)
    found = Violations()  # of all parts: a refusal names every field
    inputs = await _check(found, request, served)
    found.raise_if_any()
    _require_model(request, target.model, digest)
    sampling, prediction = _with_constraints(inputs, served.tokenizer), inputs.prediction
    drafting = _drafting(request.speculation, served, sampling, bool(prediction))
    _check_capabilities(target, sampling, drafting.acceptance)
    reasoning = None
    if served.markers is not None:
        options, is_chat = request.reasoning, request.messages is not None
        text = sampling, served.tokenizer, inputs.prompt_ids, target.capabilities
        reasoning = served.markers.plan(options, is_chat, *text)
    return Prepared(
        request=request,
        request_id=request.request_id or f"gen-{uuid.uuid4().hex}",
        prompt_ids=inputs.prompt_ids,
        sampling=sampling,
        num_draft_tokens=drafting.num_draft_tokens,
        acceptance=drafting.acceptance,
        mode=drafting.mode,
        seed=secrets.randbits(63) if sampling.seed is None else sampling.seed,
        model_digest=digest,
        tokenizer_fingerprint=target.model.tokenizer_fingerprint,
        prediction=prediction,
        methods=drafting.methods,
        can_run_ahead=drafting.can_run_ahead,
        at_target=drafting.at_target,
        tools=inputs.tools,
        reasoning=reasoning,
        media=inputs.media,
    )


async def _check(found: Violations, request: GenerationRequest, served: Served) -> _Inputs:
    """Reads a request's prompt and what goes with it; what is wrong with any part is added to `found`."""
    tokenizer, target, model = served.tokenizer, served.target, served.target.model
    vocab_size, max_model_len = model.vocab_size, model.max_model_len
    check_request(found, request, vocab_size)
    if request.reasoning is not None:
        check_reasoning(found, request.reasoning, served.markers, max_model_len)
    if request.speculation.named_methods:
        by_list, predicts = bool(request.speculation.methods), request.prediction is not None
        check_methods(found, request.speculation.named_methods, by_list, predicts, target, served.draft)
    sampling = request.sampling or model.default_sampling
    if not request.max_tokens_given:
        sampling = _capped(sampling, max_model_len)
    check_sampling(found, sampling, vocab_size, max_model_len, served.max_logprobs)
    tools = None
    if request.tools or request.tool_choice:
        tools = tool_use(found, request, sampling, tokenizer, target.capabilities)
    prompt_ids = await _prompt_ids(found, request, tokenizer, model)
    sampling = _with_length(found, request, sampling, len(prompt_ids), max_model_len)
    _check_prompt_logprobs(found, request, sampling, len(prompt_ids), vocab_size)
    media: tuple[Media, ...] = ()
    if request.media:
        media = await media_of(found, request.media, target, served.media)
    prediction: tuple[int, ...] = ()
    if request.prediction is not None:
        prediction = await prediction_ids(found, request.prediction, prompt_ids, tokenizer, model)
    return _Inputs(sampling, tools, prompt_ids, media, prediction)


def _require_model(request: GenerationRequest, model: ModelInfo, digest: str) -> None:
    if request.model_digest in ("", digest):
        return
    of = f" with the adapter {request.adapter!r}" if request.adapter else ""
    raise FailedPrecondition(
        f"model_digest: is {request.model_digest[:SHOWN_DIGEST]}, another model's than that of {model.name}{of}, "
        f"which is served here; allowed: {digest[:SHOWN_DIGEST]}, or none",
        reason=OTHER_MODEL,
    )


def _with_constraints(inputs: _Inputs, tokenizer: Tokenizer) -> SamplingParams:
    """The sampling with what its bad words and its tools come to."""
    sampling = inputs.sampling
    if sampling.bad_words:
        words_ids = tokenizer.bad_words_ids(sampling.bad_words)
        sampling = replace(sampling, bad_words_ids=(*sampling.bad_words_ids, *words_ids))
    if inputs.tools is not None and inputs.tools.constraint is not None:
        sampling = replace(sampling, structured_output=inputs.tools.constraint)
    return sampling


def _drafting(speculation: SpeculationOptions, served: Served, sampling: SamplingParams, predicts: bool) -> _Drafting:
    """The gateway's choice of all that the request leaves open."""
    target, draft, k = served.target, served.draft, speculation.num_draft_tokens
    if k is None:
        k = served.num_draft_tokens or NUM_DRAFT_TOKENS * predicts
    methods = _methods(speculation, target, draft, bool(predicts and k and speculation.enabled))
    at_target = methods[:1] in [(own.name,) for own in target.methods]
    can_run_ahead = not at_target and _can_run_ahead(methods, draft)
    mode = speculation.mode or served.mode
    if not can_run_ahead and mode != "auto":
        mode = "sequential"
    is_ahead = can_run_ahead and mode != "sequential"
    shares_noise = is_ahead or (sampling.seed is not None and _recalls(methods, draft))
    rule = speculation.acceptance or _own_rule(shares_noise, target, None if at_target else draft)
    most = min(k, target.max_window) if speculation.enabled else 0
    return _Drafting(most, methods, at_target, can_run_ahead, mode, rule)


def _methods(
    speculation: SpeculationOptions, target: TargetInfo, draft: DraftInfo | None, predicts: bool
) -> tuple[str, ...]:
    """What was asked for; else, with a prediction, that and then what a draft with a list of its own has; else, without
    a draft, the target's own."""
    named, defaults = speculation.named_methods, () if draft is None else draft.default_methods
    if not named and not predicts and draft is None:
        return tuple(own.name for own in target.methods[:1])
    if named or not predicts or PREDICTION in defaults:
        return named
    known = draft is not None and PREDICTION in [known.name for known in draft.methods]
    return (PREDICTION, *defaults) if known else (PREDICTION,)


def _can_run_ahead(methods: tuple[str, ...], draft: DraftInfo | None) -> bool:
    """Whether all that drafts can do so past a verification under way."""
    if draft is None:
        return True
    able = {known.name: known.can_run_ahead for known in draft.methods}
    return all(able.get(name, True) for name in methods or draft.defaults)


def check_request(found: Violations, request: GenerationRequest, vocab_size: int) -> None:
    """Checks what a request holds beside prompt and sampling parameters."""
    speculation, output_ids = request.speculation, request.output_ids
    if found.integer("n", request.n, 1, MAX_N) and output_ids and len(output_ids) != request.n:
        found.add("output_ids", f"has {len(output_ids)} entries", f"none, or as many as completions ({request.n})")
    if speculation.num_draft_tokens is not None:
        found.integer("speculation.num_draft_tokens", speculation.num_draft_tokens, 0, MAX_DRAFT_TOKENS)
    speculation.check_draft_options(found, "speculation.")
    found.name("request_id", request.request_id, MAX_NAME_CHARS)
    found.text("salt", request.salt, MAX_NAME_CHARS)
    found.text("model_digest", request.model_digest, MAX_NAME_CHARS)
    if speculation.method or speculation.methods:
        check_method_names(found, speculation.method, speculation.methods)
    if speculation.mode and speculation.mode not in SPECULATION_MODES:
        found.add("speculation.mode", f"is {quoted(speculation.mode)}", ", ".join(SPECULATION_MODES))
    found.integer("priority", request.priority, -MAX_INT32 - 1, MAX_INT32)
    if request.messages is not None and (num := num_pictures(request.messages)) != len(request.media):
        found.add("media", f"has {len(request.media)} entries for {num} pictures in the messages", "one for each")
    for index, ids in enumerate(output_ids[:MAX_N]):
        found.ids(f"output_ids[{index}].ids", ids, vocab_size)


def cut(name: str) -> str:
    """A name as an error shows it."""
    return name if len(name) <= SHOWN_NAME else f"{name[: SHOWN_NAME - 3]}..."


def no_such_model(name: str, *served: str) -> NotFound:
    """A request for a model that is not served here."""
    return NotFound(f"the model {cut(name)!r} does not exist; served here: {listed(served)}", reason="MODEL_NOT_FOUND")


def listed(names: Sequence[str]) -> str:
    """Names as an error shows them."""
    more = f", and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    return ", ".join(map(repr, names[:SHOWN_NAMES])) + more if names else "none"


def digest_for(request: GenerationRequest, target: TargetInfo) -> str:
    """The digest of what a request is computed by. NotFound names the adapters that there are; what is to be resumed
    may go on at another gateway, as with any other model."""
    digest = target.digest_of(request.adapter)
    if digest is not None:
        return digest
    names = listed([known.name for known in target.adapters])
    text = f"adapter: is {cut(request.adapter)!r}, which does not exist; served here: {names}"
    if request.model_digest:
        raise FailedPrecondition(text, reason=OTHER_MODEL)
    raise NotFound(text, reason="ADAPTER_NOT_FOUND")


def _check_prompt_logprobs(
    found: Violations, request: GenerationRequest, sampling: SamplingParams, prompt_len: int, vocab_size: int
) -> None:
    """They come with the prompt, all at once, whether or not the client reads: no credit holds them up. In this process
    they are its own."""
    count = sampling.prompt_logprobs
    if request.media and count is not None:
        found.add("sampling.prompt_logprobs", "is given with media, whose places have no ids", "leave it unset")
    scored, first = sampling.prompt_logprob_token_ids, sampling.prompt_logprob_start
    if scored and prompt_len and isinstance(first, int) and first + len(scored) >= prompt_len:
        problem = f"has {len(scored)} entries from position {first} of a prompt of {prompt_len} tokens"
        found.add("sampling.prompt_logprob_token_ids", problem, "one for each token of the prompt behind that at most")
    if request.call is None or not isinstance(count, int):
        return
    of_each = vocab_size if count == ALL_LOGPROBS else count + 1 + max(map(len, scored), default=0)
    if prompt_len * of_each > MAX_PROMPT_LOGPROBS:
        problem = f"asks for {prompt_len * of_each} log probabilities, {of_each} of each of {prompt_len} tokens"
        found.add("sampling.prompt_logprobs", problem, f"at most {MAX_PROMPT_LOGPROBS} of a prompt")


def _invalid(field: str, problem: str) -> InvalidArgument:
    return InvalidArgument.of([Violation(field, problem)])


def _recalls(methods: tuple[str, ...], draft: DraftInfo | None) -> bool:
    """Whether what drafts may know an earlier answer: it has learned it, or its caller has it."""
    if draft is None:
        return PREDICTION in methods
    learners = [known.name for known in draft.methods if known.learns]
    return any(name in (PREDICTION, *learners) for name in methods or draft.defaults)


def _own_rule(shares_noise: bool, target: TargetInfo, draft: DraftInfo | None) -> AcceptanceRule:
    """The gateway's choice. Branches and chains ahead meet the target's tokens far more often where both sides share
    their noise, and what a seed said before may be drafted for it again; of the rules that weigh, blocks accept the
    most."""
    if shares_noise and "acceptance.coupled" in target.capabilities:
        return AcceptanceRule.COUPLED
    peers = (target,) if draft is None else (target, draft)
    has_blocks = all("acceptance.block" in peer.capabilities for peer in peers)
    return AcceptanceRule.BLOCK if has_blocks else AcceptanceRule.REJECTION


def _check_capabilities(target: TargetInfo, sampling: SamplingParams, rule: AcceptanceRule) -> None:
    """A target that does not know a field would generate as if it were not set."""
    found = Violations()
    for name in lacking(target.capabilities, sampling, rule):
        field = "speculation.acceptance" if name.startswith("acceptance.") else name
        found.add(field, f"{name} is not supported by this target", "leave it unset")
    found.raise_if_any()


async def _prompt_ids(
    found: Violations, request: GenerationRequest, tokenizer: Tokenizer, model: ModelInfo
) -> tuple[int, ...]:
    """The prompt, of no use once something was found."""
    try:
        field, ids = await encoded(request, tokenizer, model.max_model_len)
        ids = request.truncated(ids)
        validate_prompt_ids(ids, model.vocab_size, model.max_model_len, field)
    except InvalidArgument as error:
        found.take(error)
        return ()
    return ids


async def encoded(request: GenerationRequest, tokenizer: Tokenizer, max_model_len: int) -> tuple[str, tuple[int, ...]]:
    """The input's field and its ids."""
    given = [name for name in ("text", "token_ids", "messages") if getattr(request, name) is not None]
    if len(given) != 1:
        raise _invalid("input", f"sets {len(given)} of text, token_ids and chat; allowed: exactly one")
    if request.token_ids is not None:
        return "token_ids.ids", request.token_ids
    if request.messages is None:
        adds, text = request.add_special_tokens is not False, request.text or ""
        return "text", await encode_bounded(
            "text", text, max_model_len, lambda text: tokenizer.encode(text, adds), request.among_long
        )
    return "chat", await chat_ids(request, tokenizer, max_model_len)


def _capped(sampling: SamplingParams, room: int) -> SamplingParams:
    most, least = max(1, min(sampling.max_tokens, room)), sampling.min_tokens
    # What is no number is left to the validator.
    return replace(sampling, max_tokens=most, min_tokens=min(least, most) if isinstance(least, int) else least)


def _with_length(
    found: Violations, request: GenerationRequest, sampling: SamplingParams, prompt_len: int, max_model_len: int
) -> SamplingParams:
    """The sampling with max_tokens as the prompt leaves it; a prompt or max_tokens that is wrong by itself was found
    before."""
    if not prompt_len or not isinstance(sampling.max_tokens, int) or not 1 <= sampling.max_tokens <= max_model_len:
        return sampling
    if not request.max_tokens_given:
        sampling = _capped(sampling, max_model_len - prompt_len)
    try:
        validate_length(prompt_len, sampling.max_tokens, max_model_len)
    except InvalidArgument as error:
        found.take(error)
    for index, ids in enumerate(request.output_ids[:MAX_N]):
        if len(ids) > sampling.max_tokens:
            found.add(
                f"output_ids[{index}].ids", f"has {len(ids)} entries", f"at most max_tokens ({sampling.max_tokens})"
            )
    return sampling
