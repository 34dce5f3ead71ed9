"""From an Open to a sequence: its method, its prompt (a fork's is its parent's), and what cannot be served."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import grpc

from outrider.draft_service.chains import Chain
from outrider.draft_service.grammar import DraftGrammar, DraftGrammars
from outrider.draft_service.sequence import DraftLimits, DraftSequence, ModelState, SequenceKey, Sink
from outrider.engine.batch import PreparedAdapter
from outrider.engine.kv_cache_manager import CachedSequence, KVCacheManager
from outrider.engine.profile import StepProfile
from outrider.engine.random import RandomAhead, RandomKey
from outrider.engine.sampler import SequenceSampler
from outrider.engine.token_tree import TokenTree
from outrider.planner.method_choice import MethodChoice, MethodRates
from outrider.proposers.base import Lookup, SequenceContext, TokenProposer
from outrider.proposers.draft_model import DraftModelProposer
from outrider.proposers.draft_rows import DraftRule, DraftSampling
from outrider.proposers.draft_text import DraftText, MappedText
from outrider.proposers.reencoded_text import ReencodedText
from outrider.proposers.reencoding import JoinedVocabulary, PairMap, Reencoding
from outrider.proposers.registry import method_of
from outrider.rpc.errors import FailedPrecondition, InvalidArgument, NotFound, OutriderError
from outrider.rpc.learning.learned import LearnedAdapters
from outrider.rpc.learning.lessons import Teaching
from outrider.rpc.messages import Open
from outrider.rpc.words.sampling_params import AcceptanceRule, SamplingParams

UNBOUNDED = 2**31 - 1


class ContextTooShort(OutriderError):
    """The sequence does not fit the draft's context; the request goes on without a draft."""

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.OUT_OF_RANGE
    default_reason = "CONTEXT_TOO_SHORT"


@dataclass(frozen=True, slots=True)
class ModelMethod:
    """The draft model, and what bounds the sequences that it drafts for."""

    proposer: DraftModelProposer
    cache: KVCacheManager
    eos_token_ids: tuple[int, ...] = ()
    vocabularies: dict[str, JoinedVocabulary] = field(default_factory=dict)  # by the fingerprint of a target's
    tree: TokenTree | None = None  # what it drafts for greedy and coupled requests in place of chains
    grammars: DraftGrammars | None = None  # over its own ids, where it has a tokenizer
    adapters: Mapping[str, PreparedAdapter] = field(default_factory=dict)  # its own, by the names of the target's
    step_costs: StepProfile = ()  # of a drafted token, by sequences; empty: not measured
    learned: LearnedAdapters[PreparedAdapter] = field(default_factory=LearnedAdapters)  # of others of a key

    @property
    def name(self) -> str:
        """The method's name, as in the protocol."""
        return self.proposer.name

    @property
    def vocab_size(self) -> int:
        """Ids below it can be computed."""
        return self.proposer.runner.model.vocab_size

    def adapter_for(self, name: str, teaching: Teaching | None) -> PreparedAdapter | None:
        """What drafts in place of the model alone: for a target's adapter of that name, else what was learned."""
        return self.adapters.get(name) or self.learned.get(teaching)

    @property
    def capacity(self) -> int:
        """How many of its own tokens a sequence may have: the model's context ends, or the pool."""
        return min(self.proposer.runner.model.max_model_len, self.cache.pool.num_blocks * self.cache.block_size)


Methods = Mapping[str, ModelMethod | TokenProposer]  # by name, the default first


def make_methods(methods: Iterable[ModelMethod | TokenProposer]) -> Methods:
    """The methods of these names, in the order given."""
    return {method.name: method for method in methods}


def build_sequence(
    key: SequenceKey,
    request: Open,
    sink: Sink,
    methods: Methods,
    names: Sequence[str],
    rates: MethodRates,
    parent: DraftSequence | None,
    arrival: int,
    now: float,
    salts: Collection[str] = (),  # whose sequences learn of one another
) -> DraftSequence:
    """A sequence with the methods of these names, or the first one there is. Raises an OutriderError that says why the
    sequence cannot be drafted for."""
    drafting = [_method(name, methods) for name in names] or [next(iter(methods.values()))]
    prompt_ids = _prompt_ids(request, parent)
    tokens = [*prompt_ids, *request.output_ids]
    capacity, text, model = UNBOUNDED, DraftText(CachedSequence(tokens, salt=request.salt)), None
    with_model = next((method for method in drafting if isinstance(method, ModelMethod)), None)
    grammar, teaching = _grammar(request, methods), Teaching.of(request, salts) if salts else None
    if with_model is not None:
        joined = with_model.vocabularies.get(request.tokenizer_fingerprint)
        by_turns = len(drafting) > 1  # with lookups, whose tokens are the target's
        mapping = None if joined is None else joined.mapping if by_turns else joined.way(request.sampling.greedy)
        capacity = with_model.capacity
        if mapping is not None or request.adapter in with_model.adapters:
            teaching = None  # what is learned is the model's alone, in its own ids
        text = _text(tokens, request, with_model, mapping, teaching)
        model = _model_state(request, prompt_ids, with_model, mapping, teaching)
        rejects = request.acceptance != AcceptanceRule.COUPLED and not request.sampling.greedy
        if not by_turns and mapping is None and not rejects:
            model = replace(model, tree=with_model.tree)
        model.sampler.draft_masks = grammar
    context = SequenceContext(len(prompt_ids), _memory_of(request), request.prediction)
    context = context if request.may_recall else context.alone()
    return DraftSequence(
        key=key,
        prompt_len=len(prompt_ids),
        chain=Chain(request.first_chain, text, sent=len(text)),
        limits=DraftLimits(capacity),
        methods=tuple(method.name for method in drafting),
        sink=sink,
        model=model,
        lookups=tuple(Lookup.of(one, tokens, context) for one in drafting if not isinstance(one, ModelMethod)),
        choice=MethodChoice(rates) if len(drafting) > 1 else None,
        seniority=(request.priority, arrival),
        deadline=now + request.timeout_ms / 1000 if request.timeout_ms else None,
        parent=parent,
        traceparent=request.traceparent,
        grammar=grammar,
        memory=_memory_of(request),
        teaching=None if with_model is None else teaching,
    )


def _memory_of(request: Open) -> str:
    """What sequences learn of one another by: ids of different vocabularies have nothing to do with one another."""
    fingerprint = request.tokenizer_fingerprint
    return f"{request.salt}\0{fingerprint}" if fingerprint else request.salt


def _grammar(request: Open, methods: Methods) -> DraftGrammar | None:
    """The grammar of a request in the ids of the service's own tokenizer, whatever drafts for them."""
    model = next((method for method in methods.values() if isinstance(method, ModelMethod)), None)
    if model is None or model.grammars is None or request.tokenizer_fingerprint in model.vocabularies:
        return None
    return model.grammars.open(request)


def _method(name: str, methods: Methods) -> ModelMethod | TokenProposer:
    method = methods.get(name)
    if method is None:
        raise NotFound(f"no method {name!r}; allowed: {', '.join(methods)}", reason="UNKNOWN_METHOD")
    return method


def readmit(draft: DraftSequence, method: ModelMethod) -> None:
    """Lets a sequence that holds no blocks go on with another model of the same tokenizer. Its chain goes on, too: what
    was drafted keeps the weights that it was drawn from, and is not drawn again. Raises an OutriderError that says why
    the new one cannot draft for it."""
    state, tokens = draft.model, draft.text.tokens
    if state is None:
        return
    mapping = state.draft_sampling.mapping
    if mapping is None:
        check_ids(tokens, method.vocab_size)
    _check_length(draft.text, method)
    prompt_ids, output_ids = tokens[: draft.prompt_len], tokens[draft.prompt_len : draft.committed]
    sampler = _sampler(state.sampler.params, prompt_ids, output_ids, method, mapping)
    draft.grammar = None if method.grammars is None else draft.grammar
    sampler.draft_masks = draft.grammar
    anew = replace(state.draft_sampling, ahead=RandomAhead())
    draft.model = _state_of(sampler, anew, method, state.adapter_name, draft.teaching)
    draft.sequence.adapter = _digest_of(method, state.adapter_name, draft.teaching)
    draft.model = replace(draft.model, tree=state.tree)
    draft.limits.capacity = method.capacity


def check_ids(ids: Iterable[int], vocab_size: int) -> None:
    """The draft must know every id that it computes. A target's vocabulary may be padded further than the draft's."""
    worst = max(ids, default=0)
    if worst >= vocab_size:
        message = f"token id {worst} is not in the draft's vocabulary of {vocab_size}"
        raise FailedPrecondition(message, reason="UNKNOWN_TOKEN")


def _prompt_ids(request: Open, parent: DraftSequence | None) -> list[int]:
    if request.fork_of is None:
        return list(request.prompt_ids)
    if parent is None:
        raise FailedPrecondition(f"sequence {request.fork_of} is not open: nothing to fork", reason="PARENT_GONE")
    return parent.text.tokens[: parent.prompt_len]


def _text(
    tokens: list[int], request: Open, method: ModelMethod, mapping: PairMap | None, teaching: Teaching | None
) -> DraftText:
    """The text of the target's ids."""
    sequence = CachedSequence([], salt=request.salt, adapter=_digest_of(method, request.adapter, teaching))
    if mapping is None:
        check_ids(tokens, method.vocab_size)
        sequence.tokens = tokens
        text = DraftText(sequence)
    elif isinstance(mapping, Reencoding):
        text = ReencodedText(sequence, mapping, tokens)
    else:
        text = MappedText(sequence, mapping, tokens)
    _check_length(text, method)
    return text


def _check_length(text: DraftText, method: ModelMethod) -> None:
    if len(text.sequence) >= method.capacity:
        message = f"the sequence has {len(text.sequence)} tokens, the draft's context {method.capacity}"
        raise ContextTooShort(message)


def _model_state(
    request: Open, prompt_ids: list[int], method: ModelMethod, mapping: PairMap | None, teaching: Teaching | None
) -> ModelState:
    sampler = _sampler(request.sampling, prompt_ids, request.output_ids, method, mapping)
    rule = DraftRule.ARGMAX if isinstance(mapping, Reencoding) else _rule(request, method.name)
    draft_sampling = DraftSampling(
        rule,
        RandomKey(request.seed, request.completion),
        mapping,
        by_chain=request.acceptance == AcceptanceRule.BLOCK,
        confidence=request.draft_confidence,
    )
    return _state_of(sampler, draft_sampling, method, request.adapter, teaching)


def _state_of(
    sampler: SequenceSampler,
    draft_sampling: DraftSampling,
    method: ModelMethod,
    adapter: str,
    teaching: Teaching | None,
) -> ModelState:
    mapping = draft_sampling.mapping
    vocab_size = method.vocab_size if mapping is None else len(mapping.target_tokens)
    found = method.adapter_for(adapter, teaching)
    return ModelState(sampler, draft_sampling, method.name, vocab_size, adapter_name=adapter, adapter=found)


def _digest_of(method: ModelMethod, adapter: str, teaching: Teaching | None) -> str:
    """The digest of the draft's own adapter; empty where its model drafts alone."""
    found = method.adapter_for(adapter, teaching)
    return "" if found is None else found.digest


def _sampler(
    params: SamplingParams,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    method: ModelMethod,
    mapping: PairMap | None,
) -> SequenceSampler:
    """What is re-encoded is drawn by the arg max of the draft's own logits: sampling parameters are over the target's
    ids, and no probability of a target's token is known."""
    device, vocab_size, eos_ids = method.proposer.runner.model.device, method.vocab_size, method.eos_token_ids
    if isinstance(mapping, Reencoding):
        return SequenceSampler(SamplingParams(temperature=0.0), (), (), (), vocab_size, device)
    if mapping is not None:
        vocab_size, eos_ids = len(mapping.target.tokens), mapping.targets_of(eos_ids)
    try:
        return SequenceSampler(params, prompt_ids, output_ids, eos_ids, vocab_size, device)
    except ValueError as error:
        raise InvalidArgument(str(error)) from error


def _rule(request: Open, method: str) -> DraftRule:
    if request.sampling.greedy:
        return DraftRule.ARGMAX
    if request.acceptance == AcceptanceRule.COUPLED:
        return DraftRule.COUPLED
    return DraftRule.ARGMAX if request.one_hot or method_of(method).one_hot else DraftRule.REJECTION
