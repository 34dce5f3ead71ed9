"""What crosses a process, as dataclasses: the words of the draft and target streams. Positions are
absolute indices into a sequence's tokens (prompt first). See the protocol notes in protos/outrider/v1/*.proto
for each field's meaning. Nothing changes them; those that every round makes are not frozen, which would take several
times as long to make."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from outrider.rpc.errors import TOO_LONG, OutriderError, Violations, make_error
from outrider.rpc.media import Media, check_media
from outrider.rpc.words.answer import PositionLogprobs
from outrider.rpc.words.expert_costs import ExpertCosts
from outrider.rpc.words.request import DraftOptions
from outrider.rpc.words.sampling_params import (
    CAPABILITIES,
    MAX_LOGPROBS,
    AcceptanceRule,
    FinishReason,
    SamplingParams,
    TokenOrigin,
    check_sampling,
)
from outrider.rpc.words.structured import Reasoning as Reasoning
from outrider.rpc.words.structured import check_reasoning


def to_failure(sequence_id: int, error: OutriderError) -> Failure:
    """The message that ends one sequence with an error."""
    return Failure(sequence_id, error.code.value[0], error.message, error.reason, error.retry_after_ms)


def from_failure(failure: Failure) -> OutriderError:
    """The error that a Failure stands for."""
    return make_error(failure.code, failure.message, reason=failure.reason, retry_after_ms=failure.retry_after_ms)


@dataclass(frozen=True, slots=True)
class TokenWeights:
    """What one drafted token was drawn from: positive integer weights of a few ids, their sum below 2^24. Both are
    packed little-endian uint32, so that the gateway passes them on unread."""

    ids: bytes
    weights: bytes

    @classmethod
    def of(cls, ids: Sequence[int], weights: Sequence[int]) -> TokenWeights:
        """Packs integers."""
        return cls(struct.pack(f"<{len(ids)}I", *ids), struct.pack(f"<{len(weights)}I", *weights))


@dataclass(frozen=True, slots=True)
class Open(DraftOptions):
    """Starts a sequence, with what the request says to its draft. Slicing of long prompts is the codec's business; here
    the ids are whole."""

    sequence_id: int
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    output_ids: tuple[int, ...] = ()
    fork_of: int | None = None  # prompt_ids are then empty: the parent's are taken
    completion: int = 0
    acceptance: AcceptanceRule = AcceptanceRule.REJECTION
    seed: int = 0
    timeout_ms: int = 0  # 0: none
    first_chain: int = 0
    priority: int = 0
    salt: str = ""
    traceparent: str = ""
    one_hot: bool = False
    method: str = ""
    model_digest: str = ""  # of the target that it is for; empty: any
    suspect: bool = False  # it may be what ended the targets that it was open on
    tokenizer_fingerprint: str = ""  # of the target, whose ids these are
    prediction: tuple[int, ...] = ()  # the caller's guess at the output; a draft's business
    methods: tuple[str, ...] = ()  # several that draft in turn, of which `method` is the first
    reasoning: Reasoning | None = None
    plain: bool = False  # the target shall guess at nothing, either
    adapter: str = ""  # with which the sequence is computed; model_digest is then of both
    media: tuple[Media, ...] = ()  # the prompt's pictures, in its order; a target's business
    resumed: bool = False  # output_ids are the client's word, and no target has let it in
    fresh_seed: bool = False  # drawn for this request alone: no other sequence had it before
    caller: str = ""  # a digest of who asks, for a draft that learns; empty: unknown

    @property
    def may_recall(self) -> bool:
        """Whether what other sequences said may be drafted for it. Under rejection a draft must not depend on the noise
        that judges it, and what the same seed said before does; all other output depends on no draft."""
        return self.fresh_seed or self.sampling.greedy or self.acceptance is AcceptanceRule.COUPLED

    @property
    def was_promised(self) -> bool:
        """Whether it began at another target, which had room for it."""
        return bool(self.output_ids) and not self.resumed

    @property
    def named_methods(self) -> tuple[str, ...]:
        """What is to draft; empty: the draft's default."""
        return self.methods or ((self.method,) if self.method else ())


@dataclass(frozen=True, slots=True)
class Close:
    """Ends a sequence; answered by Closed."""

    sequence_id: int


@dataclass(frozen=True, slots=True)
class Closed:
    """Confirms that a sequence was released."""

    sequence_id: int


@dataclass(frozen=True, slots=True)
class Failure:
    """Ends one sequence with an error. `code` is a gRPC status code's number, `reason` a machine-readable word
    (ErrorInfo)."""

    sequence_id: int
    code: int
    message: str
    reason: str = ""
    retry_after_ms: int = 0

    @property
    def is_full(self) -> bool:
        """Whether a service has no room now and says when to come back."""
        return self.retry_after_ms > 0 and self.code in (8, 14)  # RESOURCE_EXHAUSTED, UNAVAILABLE


@dataclass(slots=True)
class DraftTokens:
    """A part of a chain of drafted tokens."""

    sequence_id: int
    chain: int
    position: int  # of the first id
    ids: tuple[int, ...]
    weights: tuple[TokenWeights | None, ...] = ()  # shorter than ids, or None: one-hot there
    parent: int | None = None
    more: bool = False
    parents: tuple[int, ...] = ()  # a tree: index of the parent in ids plus one; 0 is the root
    draft_us: int = 0
    method: str = ""  # that drafted it, where several draft in turn
    encoded: Any = field(init=False, default=None, compare=False, repr=False)  # as it came, to be passed on so


@dataclass(slots=True)
class Credit:
    """How far a peer may go."""

    sequence_id: int
    until: int
    max_window: int
    patience_ms: int = 0
    max_branches: int = 0


@dataclass(slots=True)
class StepTimings:
    """One round's times inside the target, in microseconds."""

    queue_us: int = 0
    verify_us: int = 0
    sample_us: int = 0
    num_rows: int = 0
    num_sequences: int = 0
    draft_us: int = 0  # of the window, where the target drafts by itself
    mask_us: int = 0  # of sample_us, the wait for masks of constraints
    compile_us: int = 0  # of the sequence's constraint, before its first round here
    num_woken: int = 0  # experts of a mixture that the step's rows went to, over all layers

    def of_one(self, queue_us: int, draft_us: int, compile_us: int) -> StepTimings:
        """A step's times as one of its sequences sees them. Made anew: `replace` takes three times as long."""
        return StepTimings(
            queue_us,
            self.verify_us,
            self.sample_us,
            self.num_rows,
            self.num_sequences,
            draft_us,
            self.mask_us,
            compile_us,
            self.num_woken,
        )


@dataclass(slots=True)
class Load:
    """How busy a target is."""

    running: int = 0
    waiting: int = 0
    free_blocks: int = 0


@dataclass(slots=True)
class Commit:
    """Appends tokens to a sequence."""

    sequence_id: int
    position: int
    ids: tuple[int, ...]
    origins: tuple[TokenOrigin, ...] = ()
    chain: int | None = None
    num_drafted: int = 0
    num_accepted: int = 0
    logprobs: tuple[PositionLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    dropped: tuple[int, ...] = ()
    timings: StepTimings = field(default_factory=StepTimings)
    load: Load = field(default_factory=Load)
    num_cached_ids: int = 0
    num_forced: int = 0  # by a grammar, behind the drafted tokens of the window, which do not count them
    encoded: Any = field(init=False, default=None, compare=False, repr=False)  # as it came, to be passed on so

    @property
    def num_accepted_forced(self) -> int:
        """How many of the forced ones were accepted."""
        return max(0, self.origins.count(TokenOrigin.ACCEPTED) - self.num_accepted) if self.num_forced else 0


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log probabilities of prompt positions from `position` on."""

    sequence_id: int
    position: int
    logprobs: tuple[PositionLogprobs, ...]


DraftCommand = Open | Commit | Credit | Close  # gateway -> draft
DraftEvent = DraftTokens | Closed | Failure  # draft -> gateway
TargetCommand = Open | DraftTokens | Credit | Close  # gateway -> target
TargetEvent = Commit | PromptLogprobs | Closed | Failure  # target -> gateway


def is_last(event: object) -> bool:
    """Whether nothing follows an event for its sequence."""
    return event.finish_reason is not None if isinstance(event, Commit) else isinstance(event, Closed | Failure)


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """Leads every frame; `held_us` is how long the frame `last_seen` was held before this one left."""

    number: int
    last_seen: int = 0
    held_us: int = 0
    step_age_ms: int = 0
    draining: bool = False
    info_version: int = 0


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """How a model is computed. Where two replicas agree in all of it, and are batch-invariant, their logits are
    equal to the bit; elsewhere a greedy or coupled completion is open to near-ties."""

    engine: str  # whose layers, with the version: "outrider-0.1.0", "transformers-5.0.0"
    dtype: str  # of weights and activations
    kernels: str  # the variant of this processor: "c-avx512", "triton-2.9.0-sm90"
    batch_invariant: bool


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A served model, so that a pair can be checked before it is used. The digest is of its weights alone, and
    of their rounding; how they are computed is compared apart, by `arithmetic`."""

    name: str
    digest: str
    vocab_size: int
    max_model_len: int
    num_tokens: int = 0
    tokenizer_fingerprint: str = ""
    eos_token_ids: tuple[int, ...] = ()
    default_sampling: SamplingParams = field(default_factory=SamplingParams)
    dtype: str = "float32"
    device: str = "cpu"
    batch_invariant: bool = False
    num_blocks: int = 0
    block_size: int = 16
    protocol_major: int = 1
    protocol_minor: int = 0
    engine: str = ""
    kernels: str = ""
    mapped_fingerprints: tuple[str, ...] = ()  # of a draft: of the other vocabularies that it drafts for

    @property
    def max_open_tokens(self) -> int:
        """Tokens of prompts and max_tokens that are let in together; 0: it does not say what its cache holds."""
        return OVERCOMMIT * self.num_blocks * self.block_size

    @property
    def arithmetic(self) -> Arithmetic:
        """What has to be equal for equal logits."""
        return Arithmetic(self.engine, self.dtype, self.kernels, self.batch_invariant)


@dataclass(frozen=True, slots=True)
class DraftMethod:
    """One way of drafting."""

    name: str
    needs_features: bool = False
    can_run_ahead: bool = True
    learns: bool = False  # the service learns from every sequence that ends
    step_costs: tuple[tuple[int, int], ...] = ()  # sequences and microseconds of a drafted token, as measured at start


WORTH_HAVING = 0.5  # of first tokens kept: so much is no guess, however often the target says one token


@dataclass(frozen=True, slots=True)
class DraftTrial:
    """What a draft was found to be worth when it was met: the target went on from short texts, greedily."""

    method: str
    accepted: tuple[float, ...] = ()  # shares of tested tokens that the target kept, by position in the window
    guess: float = 0.0  # the share of its tokens that are the most frequent of them
    num_rounds: int = 0
    refused: bool = False  # it does not draft
    remark: str = ""  # how its weights are read where that is open, or by which other reading they would be worth more

    @property
    def is_useless(self) -> bool:
        """Whether the target keeps no more of its first tokens than of one that always drafts the same."""
        first = self.accepted[0] if self.accepted else 0.0
        return first <= self.guess and first < WORTH_HAVING

    def within(self, num_drafted: int) -> DraftTrial:
        """The same of shorter windows."""
        return replace(self, accepted=self.accepted[:num_drafted])

    @property
    def tokens_per_round(self) -> float:
        """The target's own, and each drafted one if all before it are kept."""
        total, survival = 1.0, 1.0
        for share in self.accepted:
            survival *= share
            total += survival
        return total

    def __str__(self) -> str:
        shares = " ".join(f"{share:.2f}" for share in self.accepted) or "none"
        return f"{shares} by position, {self.tokens_per_round:.2f} tokens a round; a guess has {self.guess:.2f}"


@dataclass(frozen=True, slots=True)
class DraftVocabulary:
    """Another vocabulary that a draft drafts for: token by token, or by the text (`token`, `string`)."""

    tokenizer_fingerprint: str
    overlap: float
    greedy: str
    sampled: str


# Of a lesson in memory, about: what stands beside its tokens, one of these, and one of its parameters' entries.
LESSON_BYTES, TOKEN_BYTES, ENTRY_BYTES = 512, 4, 96


class LearningKey(NamedTuple):
    """Sequences that teach one another, and no others."""

    target_digest: str  # of the model that draws them, and its adapter
    group: str  # the digest of their salt; empty: none

    @property
    def said(self) -> str:
        """In a few words."""
        return f"target {self.target_digest[:12]}, {'group ' + self.group[:12] if self.group else 'no salt'}"


@dataclass(frozen=True, slots=True)
class Lesson:
    """One sequence's text, and the law by which a target drew it."""

    target_digest: str  # of the model that drew it, and its adapter
    group: str  # the digest of its salt; empty: it had none
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    sampling: SamplingParams
    acceptance: AcceptanceRule
    seed: int
    completion: int = 0
    num_given: int = 0  # of output_ids, which were given when it was opened, and taught before
    caller: str = ""  # a digest of whose it is; empty: unknown

    @property
    def key(self) -> LearningKey:
        """Whom it teaches."""
        return LearningKey(self.target_digest, self.group)

    @property
    def drawn_ids(self) -> Sequence[int]:
        """Those of output_ids that the target drew."""
        return self.output_ids[self.num_given :]

    @property
    def num_drawn(self) -> int:
        """How many these are."""
        return len(self.output_ids) - self.num_given

    @property
    def num_bytes(self) -> int:
        """Memory that it takes, about."""
        tokens = TOKEN_BYTES * (len(self.prompt_ids) + len(self.output_ids))
        return LESSON_BYTES + tokens + ENTRY_BYTES * self.sampling.num_entries


@dataclass(frozen=True, slots=True)
class LearnedDraft:
    """What drafts for a target's sequences of one group in place of the model alone."""

    target_digest: str
    group: str
    digest: str  # of the weights and what they are beside together
    left_out: tuple[str, ...] = ()  # callers for whom the model alone drafts all the same

    @property
    def said(self) -> str:
        """In a word or two."""
        return self.digest[:12] + (f" (but for {len(self.left_out)} callers)" if self.left_out else "")

    @property
    def key(self) -> LearningKey:
        """For whom it drafts."""
        return LearningKey(self.target_digest, self.group)


@dataclass(frozen=True, slots=True)
class LearningNews:
    """What has ended since the one before; the first one says what learns, what is in use, and what may be."""

    lessons: tuple[Lesson, ...] = ()
    num_lost: int = 0  # lessons that were given up
    model_digest: str = ""  # of the weights that learn
    learned: tuple[LearnedDraft, ...] = ()
    max_learned: int = 0  # of these at once; 0: it is older than the field
    max_rank: int = 0  # of one


@dataclass(frozen=True, slots=True)
class PutLearned:
    """What became of putting learned weights in use, or out of it: the digests (empty: the model alone), how long
    loading took, for how long nothing was drafted, and how many open sequences went on with them."""

    before: str
    after: str
    load_ms: int
    pause_ms: int
    num_sequences: int


@dataclass(frozen=True, slots=True)
class DraftInfo:
    """What a draft service says of itself; the first method is the default."""

    model: ModelInfo
    methods: tuple[DraftMethod, ...]
    capabilities: tuple[str, ...] = CAPABILITIES
    version: str = ""  # of the service; empty: it is older than the field
    default_methods: tuple[str, ...] = ()  # that draft in turn where none is named; empty: the first alone
    vocabularies: tuple[DraftVocabulary, ...] = ()
    max_vocabulary_bytes: int = 0  # of a tokenizer.json that it takes
    info_version: int = field(default=0, compare=False)  # what its streams' frames say; 0: it is older than the field
    machine: str = ""  # the same for services of one machine; empty: unknown
    learned: tuple[LearnedDraft, ...] = ()  # low-rank weights that are in use

    @property
    def defaults(self) -> tuple[str, ...]:
        """What drafts where a sequence names no method."""
        return self.default_methods or tuple(method.name for method in self.methods[:1])


@dataclass(frozen=True, slots=True)
class Reloaded:
    """What became of a reload: the models, how long loading took, for how long nothing was drafted, or new sequences
    waited, and how many open sequences went on with another draft, or were ended at a target."""

    before: ModelInfo
    after: ModelInfo
    load_ms: int
    pause_ms: int
    num_sequences: int


@dataclass(frozen=True, slots=True)
class Adapter:
    """A low-rank change of a model's weights. Its digest is of both together: identity is content."""

    name: str
    digest: str
    rank: int


@dataclass(frozen=True, slots=True)
class TargetInfo:
    """What a target service says of itself."""

    model: ModelInfo
    max_window: int
    load: Load = field(default_factory=Load)
    step_costs: tuple[tuple[int, int], ...] = ()  # rows and microseconds, as measured at start
    capabilities: tuple[str, ...] = CAPABILITIES
    version: str = ""  # of the service; empty: it is older than the field
    methods: tuple[DraftMethod, ...] = ()  # that draft beside the model, the default first
    info_version: int = field(default=0, compare=False)  # what its streams' frames say; 0: it is older than the field
    adapters: tuple[Adapter, ...] = ()  # that an Open may name
    machine: str = ""  # the same for services of one machine; empty: unknown
    trials: tuple[DraftTrial, ...] = ()  # of the methods, and of those that were refused after it
    expert_costs: ExpertCosts | None = None  # of a mixture, as measured at start
    learned: tuple[LearnedDraft, ...] = ()  # low-rank weights of the head that are in use

    def digest_of(self, adapter: str) -> str | None:
        """What an Open of this adapter (empty: none) names as model_digest; None where it is not there."""
        if not adapter:
            return self.model.digest
        return next((one.digest for one in self.adapters if one.name == adapter), None)


OVERCOMMIT = (
    4  # times a cache is let in: few sequences reach their max_tokens, and those that share prompts share blocks
)
PRIORITY_STEP_S = 5.0  # of waiting make up for one number of priority
MOST_STEPS = 12
MAX_N = 64
MAX_DRAFT_TOKENS = 128
MAX_PATIENCE_MS = 60_000
MAX_NAME_CHARS = 128
MAX_METHODS = 8  # that draft one sequence
MAX_PIECE_IDS = 1024  # a tree may hold more ids than a chain
MAX_WEIGHTS = 4096
MAX_BRANCHES = 64
MAX_INT32, _MAX_UINT32, _MAX_UINT64 = 2**31 - 1, 2**32 - 1, 2**64 - 1


def validate_length(prompt_len: int, max_tokens: int, max_model_len: int, prefix: str = "sampling.") -> None:
    """Prompt and max_tokens fit the model's context together."""
    found = Violations(prefix)
    if prompt_len + max_tokens > max_model_len:
        left = max_model_len - prompt_len
        if left >= 1:
            found.add(
                "max_tokens", f"is {max_tokens} after a prompt of {prompt_len} tokens", f"at most {left}", TOO_LONG
            )
        else:
            found = Violations()
            found.add("prompt", f"has {prompt_len} tokens", f"at most {max_model_len - 1}", TOO_LONG)
    found.raise_if_any()


def validate_prompt_ids(ids: Sequence[int], vocab_size: int, max_model_len: int, field: str = "prompt_ids") -> None:
    """A prompt: not empty, shorter than the context, ids that exist."""
    found = Violations()
    check_prompt(found, field, ids, vocab_size, max_model_len)
    found.raise_if_any()


def check_prompt(found: Violations, field: str, ids: Sequence[int], vocab_size: int, max_model_len: int) -> None:
    """The same, among other checks."""
    if not ids:
        found.add(field, "is empty", f"1 to {max_model_len - 1} token ids")
    elif len(ids) >= max_model_len:
        found.add(field, f"has {len(ids)} tokens", f"at most {max_model_len - 1}", TOO_LONG)
    else:
        found.ids(field, ids, vocab_size)


def validate_sampling(
    params: SamplingParams,
    vocab_size: int,
    max_model_len: int,
    prefix: str = "sampling.",
) -> None:
    """Sampling parameters that stand alone. InvalidArgument names every field that is wrong."""
    found = Violations()
    check_sampling(found, params, vocab_size, max_model_len, prefix=prefix)
    found.raise_if_any()


def validate_open(message: Open, vocab_size: int, max_model_len: int, max_logprobs: int = MAX_LOGPROBS) -> None:
    """An Open, at a draft or target. A fork's prompt is its parent's, so its length is checked by the caller."""
    found = Violations("open.")
    if message.fork_of is not None:
        found.integer("fork_of", message.fork_of, 0, _MAX_UINT32)
        if message.prompt_ids:
            found.add("prompt_ids", f"has {len(message.prompt_ids)} entries beside fork_of", "none")
        if message.media:
            found.add("media", f"has {len(message.media)} entries beside fork_of", "none")
    else:
        check_prompt(found, "prompt_ids", message.prompt_ids, vocab_size, max_model_len)
    found.ids("output_ids", message.output_ids, vocab_size)
    if len(message.output_ids) > message.sampling.max_tokens:
        allowed = f"at most max_tokens ({message.sampling.max_tokens})"
        found.add("output_ids", f"has {len(message.output_ids)} entries", allowed)
    found.ids("prediction", message.prediction, vocab_size)
    found.integer("sequence_id", message.sequence_id, 0, _MAX_UINT32)
    found.integer("completion", message.completion, 0, MAX_N - 1)
    found.integer("seed", message.seed, 0, _MAX_UINT64)
    found.integer("timeout_ms", message.timeout_ms, 0, _MAX_UINT64)
    found.integer("first_chain", message.first_chain, 0, MAX_INT32)  # numbers that grow from it fit the field
    found.integer("priority", message.priority, -MAX_INT32 - 1, MAX_INT32)
    message.check_draft_options(found)
    for name in ("salt", "traceparent", "method", "model_digest", "tokenizer_fingerprint", "adapter", "caller"):
        found.text(name, getattr(message, name), MAX_NAME_CHARS)
    if found.length("methods", message.methods, MAX_METHODS):
        for index, method in enumerate(message.methods):
            found.text(f"methods[{index}]", method, MAX_NAME_CHARS, empty=False)
    if message.reasoning is not None:
        check_reasoning(found, message.reasoning, vocab_size)
    if message.media:
        check_media(found, message.media)
    check_sampling(found, message.sampling, vocab_size, max_model_len, max_logprobs, "open.sampling.")
    found.raise_if_any()


def _is_plain_piece(piece: DraftTokens) -> bool:
    """Whether a piece that came over the wire is a chain's, without weights, and sound, as most are."""
    return (
        piece.encoded is not None
        and not piece.weights
        and not piece.parents
        and piece.parent is None
        and len(piece.ids) <= MAX_PIECE_IDS
        and piece.chain <= MAX_INT32
        and piece.position <= MAX_INT32
        and len(piece.method) <= MAX_NAME_CHARS
    )


def validate_piece(message: DraftTokens) -> None:
    """A piece's shape. Its ids and weights are not judged: an id that the target does not know ends the chain, and a
    broken distribution counts as one-hot; neither is an error."""
    if _is_plain_piece(message):
        return
    found = Violations("piece.")
    count = len(message.ids)
    found.length("ids", message.ids, MAX_PIECE_IDS)
    if len(message.weights) > count:
        found.add("weights", f"has {len(message.weights)} entries", f"at most as many as ids ({count})")
    for index, weights in enumerate(message.weights):
        if weights is not None and max(len(weights.ids), len(weights.weights)) > 4 * MAX_WEIGHTS:
            found.add(f"weights[{index}]", f"has {len(weights.ids) // 4} ids", f"at most {MAX_WEIGHTS}")
            break
    if message.parents and len(message.parents) != count:
        found.add("parents", f"has {len(message.parents)} entries", f"none, or as many as ids ({count})")
    for index, parent in enumerate(message.parents):
        if not 0 <= parent <= index:  # 0 is the root, and i + 1 the id i: a parent stands before its children
            found.add(f"parents[{index}]", f"is {parent}", f"0 to {index}")
            break
    if message.parent is not None and message.parent >= message.chain:
        found.add("parent", f"is {message.parent}", f"a chain before this one ({message.chain})")
    found.integer("chain", message.chain, 0, MAX_INT32)  # a further one needs a number, too
    found.integer("position", message.position, 0, MAX_INT32)
    found.text("method", message.method, MAX_NAME_CHARS)
    found.raise_if_any()


def validate_credit(message: Credit) -> None:
    """A credit's numbers."""
    found = Violations("credit.")
    found.integer("until", message.until, 0, _MAX_UINT32)
    found.integer("max_window", message.max_window, 0, MAX_DRAFT_TOKENS)
    found.integer("patience_ms", message.patience_ms, 0, MAX_PATIENCE_MS)
    found.integer("max_branches", message.max_branches, 0, MAX_BRANCHES)
    found.raise_if_any()


def _is_plain(commit: Commit, vocab_size: int) -> bool:
    """Whether a commit that came over the wire, which has integers alone, is sound in all that `validate_commit` looks
    at: nearly every one is, and each round has one."""
    count, ids = len(commit.ids), commit.ids
    return (
        commit.encoded is not None
        and 0 < count <= MAX_PIECE_IDS
        and len(commit.origins) in (0, count)
        and len(commit.logprobs) in (0, count)
        and 0 <= commit.num_accepted <= commit.num_drafted <= MAX_PIECE_IDS
        and 0 <= commit.num_forced <= MAX_PIECE_IDS
        and 0 <= commit.position <= MAX_INT32
        and min(ids) >= 0
        and max(ids) < vocab_size
    )


def validate_commit(message: Commit, vocab_size: int) -> None:
    """A commit's shape and ids, where a draft or a gateway receives it. `vocab_size` is the target's."""
    if _is_plain(message, vocab_size):
        return
    found = Violations("commit.")
    found.length("ids", message.ids, MAX_PIECE_IDS)
    found.ids("ids", message.ids, vocab_size)
    for name in ("origins", "logprobs"):
        size = len(getattr(message, name))
        if size and size != len(message.ids):
            found.add(name, f"has {size} entries", f"none, or as many as ids ({len(message.ids)})")
    if found.integer("num_drafted", message.num_drafted, 0, MAX_PIECE_IDS):  # so long are the lists of what is learned
        found.integer("num_accepted", message.num_accepted, 0, message.num_drafted)
    found.integer("num_forced", message.num_forced, 0, MAX_PIECE_IDS)
    found.integer("position", message.position, 0, MAX_INT32)
    found.raise_if_any()
