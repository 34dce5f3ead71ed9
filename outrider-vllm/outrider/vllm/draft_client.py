"""Drafts for a vLLM that stands already: its scheduler asks draft services by itself, with no gateway between.

Every request is opened at a draft when vLLM gets it, with credit of two windows, so that the draft runs ahead of the
verification; each step tells it what was committed and gives the credit that follows. A greedy row's draft may hold
branches for other outcomes of the verification under way, too, while these come into use. A row waits for drafts no
longer than some steps take, and only while that pays: a dead or slow draft means plain decoding."""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import secrets
import statistics
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from outrider.rpc.errors import Violations
from outrider.rpc.hub import locate
from outrider.rpc.messages import (
    MAX_BRANCHES,
    MAX_DRAFT_TOKENS,
    MAX_NAME_CHARS,
    Close,
    Closed,
    Commit,
    Credit,
    DraftCommand,
    DraftTokens,
    ModelInfo,
    Open,
)
from outrider.rpc.security import ClientTls
from outrider.rpc.settings import PeerSettings
from outrider.rpc.stream import StreamConfig
from outrider.rpc.vocabulary import read_vocabulary
from outrider.rpc.words.sampling_params import MIN_DIVISOR, AcceptanceRule, SamplingParams
from outrider.target_service.draft_buffer import ChainBuffer
from outrider.vllm.draft_pool import DraftNews, DraftPool
from outrider.vllm.rows import DraftedRow
from outrider.vllm.source import StepReport

log = logging.getLogger(__name__)

SALT = "OUTRIDER_SALT"  # environment: parts what this deployment's drafts keep from what others' do
PATIENCE = "OUTRIDER_PATIENCE"  # environment: how many steps a row may wait for its draft, or what share of one
BRANCHES = "OUTRIDER_BRANCHES"  # environment: how many branches a greedy row's draft may hold
# Environment: TLS to the drafts, by the same names as a gateway's settings.
PEER_FILES = {name: f"OUTRIDER_{name.upper()}" for name in PeerSettings.model_fields}
DRAFT_NAME = "OUTRIDER_DRAFT_TLS_NAME"

PATIENCE_STEPS = 1.0
MOST_PATIENCE_STEPS = 8.0
MAX_PATIENCE_S = 0.1
STEPS = 64  # the last ones, of which the median counts
SMOOTHING = 1 / 8  # of what waits gain
TRIAL_EVERY = 32  # waits that would not pay, and requests whose branches would not
MOST_BRANCHES = 12
LEAST_USED = 1 / 8  # of the chains that follow a refused one, those that were branches of it
USE_SMOOTHING = 1 / 32
MAX_STOP_IDS = 128
NUM_SEEDS = 1 << 64


class Patience:
    """How long a row may wait for its draft: some steps, while waits pay. They pay if what was accepted behind
    them would have taken longer to decode plainly; where they do not, one in a while tries whether they would."""

    def __init__(self, steps: float = PATIENCE_STEPS) -> None:
        self._most_steps = steps
        self._steps: deque[float] = deque(maxlen=STEPS)
        self._limit_s = 0.0
        self._gain_s = 0.0  # of a wait, smoothed
        self._since_trial = 0

    def stepped(self, seconds: float) -> None:
        """A step took so long."""
        self._steps.append(seconds)
        self._limit_s = min(self._most_steps * statistics.median(self._steps), MAX_PATIENCE_S)

    def judged(self, gain_s: float) -> None:
        """A wait gained so much time, or lost it."""
        self._gain_s = max(self._gain_s + SMOOTHING * (gain_s - self._gain_s), -self._limit_s)

    def grant(self) -> float:
        """The seconds of one wait."""
        self._since_trial += 1
        if self._gain_s < 0 and self._since_trial < TRIAL_EVERY:
            return 0.0
        self._since_trial = 0
        return self._limit_s


class BranchUse:
    """How many branches a row's draft may hold: `most`, while enough of them come into use. They take a draft's time,
    which many rows share; where they come too late, or guess wrong, one request in a while tries them."""

    def __init__(self, most: int = MOST_BRANCHES) -> None:
        self._most = most
        self._used = 1.0  # share of the chains that follow a refused one, smoothed
        self._since_trial = 0

    def followed(self, is_branch: bool) -> None:
        """A chain had its first window verified, whose row has branches and had another chain before."""
        self._used += USE_SMOOTHING * (is_branch - self._used)

    def grant(self) -> int:
        """Of one request, for all of its life."""
        self._since_trial += 1
        if self._used < LEAST_USED and self._since_trial < TRIAL_EVERY:
            return 0
        self._since_trial = 0
        return self._most


@dataclass(slots=True)
class AskedRow:
    """A row that a draft is asked for."""

    row: DraftedRow
    max_branches: int = 0
    is_heard: bool = False  # something has come from the draft that has it
    waits_since: float | None = None  # the commit that left it without drafted tokens, if it may wait for some
    branches: set[int] = field(default_factory=set)  # numbers of chains that fork off another
    verified_chain: int | None = None  # the last one

    def verified(self, chain: int | None, use: BranchUse) -> None:
        """A window of a chain was judged."""
        if chain is None or chain == self.verified_chain:
            return
        if self.max_branches and self.verified_chain is not None:
            use.followed(chain in self.branches)
        self.verified_chain = chain
        self.branches = {number for number in self.branches if number > chain}


class DraftClient:
    """A DraftSource. `addresses` are of draft services. Raises InvalidArgument for what is none."""

    is_reader = False
    longest_wait_s = 0.002  # nothing else says that a request comes

    def __init__(
        self,
        addresses: Sequence[str],
        vllm_config: Any,
        *,
        salt: str = "",
        patience: float = PATIENCE_STEPS,  # in steps
        max_branches: int = MOST_BRANCHES,
        stream_config: StreamConfig | None = None,
        tls: ClientTls | None = None,
    ) -> None:
        self._vocab_size: int = vllm_config.model_config.get_vocab_size()
        self._window = min(vllm_config.speculative_config.num_speculative_tokens, MAX_DRAFT_TOKENS)
        self._salt = salt
        self._patience = Patience(patience)
        self._branch_use = BranchUse(max_branches)
        self._numbers = itertools.count(1)
        self._asked: dict[int, AskedRow] = {}  # by sequence ids
        self._ended: list[int] = []  # whose drafts are not told yet
        self._news: deque[DraftNews] = deque()
        self._step_started = 0.0
        self._wake = threading.Event()
        target = partial(describe, vllm_config.model_config)
        self._pool = DraftPool(addresses, target, self._on_news, stream_config, tls)

    def output_len(self, request: Any) -> int:
        """Nobody's requests go on here."""
        return 0

    def opened(self, request: Any) -> DraftedRow | None:
        """Asks a draft for a request, if it is one of text alone."""
        if not can_be_drafted(request):
            return None
        one_hot = request.structured_output_request is not None  # its grammar cuts windows by what is drafted
        sampling = sampling_of(request)
        row = DraftedRow(
            request_id=request.request_id,
            sequence_id=next(self._numbers),
            tokens=request.all_token_ids,
            prompt_len=request.num_prompt_tokens,
            max_tokens=request.max_tokens,
            weighs=not (sampling.greedy or one_hot),
            chains=ChainBuffer(request.all_token_ids, self._vocab_size),
            until=request.num_prompt_tokens + request.max_tokens,
            max_window=self._window,
        )
        message = Open(
            sequence_id=row.sequence_id,
            prompt_ids=tuple(request.prompt_token_ids),
            sampling=sampling,
            acceptance=AcceptanceRule.REJECTION,
            seed=seed_of(request.sampling_params.seed),
            priority=request.priority,
            salt=joined_salt(self._salt, request.cache_salt),
            traceparent=(request.trace_headers or {}).get("traceparent", ""),
            one_hot=one_hot,
            adapter=adapter_of(request),
        )
        # Under rejection a branch's first token is a guess that hardly ever holds.
        asked = AskedRow(row, max_branches=0 if row.weighs else self._branch_use.grant())
        self._asked[row.sequence_id] = asked
        self._pool.submit([message, self._credit(asked, row.committed)])
        return row

    def closed(self, row: DraftedRow) -> None:
        """Its draft is told with the next step, behind what this one committed."""
        self._ended.append(row.sequence_id)

    def take(self, rows: Mapping[int, DraftedRow]) -> bool:
        """Gives rows what drafts have sent."""
        self._wake.clear()
        if self._ended:
            self._pool.submit(self._closes())
        self._hear()
        return False

    def wait(self, timeout_s: float) -> None:
        """Until a draft sends something."""
        self._wake.wait(timeout_s)

    def stepping(self, started: float) -> None:
        """Waits end here."""
        self._step_started = started

    def committed(self, report: StepReport) -> None:
        """Tells the drafts what a step committed, and how far they may go now."""
        self._hear()  # what came meanwhile is not waited for
        self._patience.stepped(report.seconds)
        commands: list[DraftCommand] = []
        for event in report.events:
            asked = self._asked.get(event.sequence_id)
            if asked is None or not isinstance(event, Commit):
                continue
            commands.append(replace(event, logprobs=()) if event.logprobs else event)
            asked.verified(event.chain, self._branch_use)
            if asked.waits_since is not None:
                waited_s = max(0.0, self._step_started - asked.waits_since)
                self._patience.judged(event.num_accepted * report.seconds - waited_s)
            if event.finish_reason is None:
                commands.append(self._credit(asked, event.position + len(event.ids)))
                self._be_patient(asked)
        commands += self._closes()
        if commands:
            self._pool.submit(commands)

    def close(self) -> None:
        """Ends the streams to the drafts."""
        self._pool.close()

    def _credit(self, asked: AskedRow, committed: int) -> Credit:
        """Two windows, each with the token of the target's own that follows it."""
        row = asked.row
        until = min(committed + 2 * (self._window + 1), row.prompt_len + row.max_tokens)
        return Credit(row.sequence_id, until, self._window, max_branches=asked.max_branches)

    def _be_patient(self, asked: AskedRow) -> None:
        """For a row's next step. Nobody waits for a draft of which nothing was heard."""
        row = asked.row
        lacks = asked.is_heard and not has_answer(row) and not row.patience_spent
        row.patience = self._patience.grant() if lacks else 0.0
        asked.waits_since = row.last_commit if row.patience else None

    def _hear(self) -> None:
        while self._news:
            message = self._news.popleft()
            asked = self._asked.get(message.sequence_id)
            if asked is None:
                continue
            asked.is_heard = isinstance(message, DraftTokens)
            if isinstance(message, Closed):
                asked.row.patience = 0.0
                continue
            asked.row.add(message)
            if message.parent is not None:
                asked.branches.add(message.chain)

    def _closes(self) -> list[Close]:
        ended, self._ended = self._ended, []
        for sequence_id in ended:
            self._asked.pop(sequence_id, None)
        return [Close(sequence_id) for sequence_id in ended]

    def _on_news(self, news: DraftNews) -> None:
        """On the pool's thread."""
        self._news.append(news)
        self._wake.set()


def draft_client(addresses: str, vllm_config: Any) -> DraftClient:
    """As the environment says it: addresses, separated by commas. Raises ValueError, or OutriderError for addresses
    and certificates that cannot be used."""
    given = [address.strip() for address in addresses.split(",") if address.strip()]
    steps, branches = os.environ.get(PATIENCE, ""), os.environ.get(BRANCHES, "")
    try:
        patience = float(steps or PATIENCE_STEPS)
    except ValueError:
        patience = -1.0
    if not 0 <= patience <= MOST_PATIENCE_STEPS:
        raise ValueError(f"{PATIENCE} is {steps!r}; allowed: 0 to {MOST_PATIENCE_STEPS:g}, in steps")
    if branches and not (branches.isdecimal() and int(branches) <= MAX_BRANCHES):
        raise ValueError(f"{BRANCHES} is {branches!r}; allowed: 0 to {MAX_BRANCHES}")
    most = int(branches or MOST_BRANCHES)
    salt, tls = os.environ.get(SALT, ""), draft_tls(os.environ)
    return DraftClient(given, vllm_config, salt=salt, patience=patience, max_branches=most, tls=tls)


def draft_tls(environment: Mapping[str, str]) -> ClientTls | None:
    """How drafts are known, and what they are shown; None for plaintext."""
    given = {name: environment.get(variable) or None for name, variable in PEER_FILES.items()}
    return ClientTls.of(PeerSettings.model_validate(given), environment.get(DRAFT_NAME, ""))


def has_answer(row: DraftedRow) -> bool:
    """Whether a row has drafted tokens for its next step, or its draft said that there are none."""
    return row.chains.live() is not None or row.chains.draft_is_idle


def can_be_drafted(request: Any) -> bool:
    """Of vLLM's requests those that generate from token ids alone, all of which came with the request."""
    return (
        request.sampling_params is not None
        and bool(request.prompt_token_ids)
        and request.prompt_embeds is None
        and not request.mm_features
        and not request.resumable
    )


def adapter_of(request: Any) -> str:
    """The name of its adapter, for which a draft may have one of its own; of a name that no Open takes none is told:
    the draft's model drafts alone."""
    name = "" if request.lora_request is None else request.lora_request.lora_name
    found = Violations()
    found.name("adapter", name, MAX_NAME_CHARS)
    return "" if found.count else name


def sampling_of(request: Any) -> SamplingParams:
    """What a draft needs of vLLM's SamplingParams, in the protocol's words."""
    given = request.sampling_params
    return SamplingParams(
        temperature=given.temperature if given.temperature >= MIN_DIVISOR else 0.0,
        top_p=given.top_p,
        top_k=given.top_k,
        repetition_penalty=given.repetition_penalty,
        presence_penalty=given.presence_penalty,
        frequency_penalty=given.frequency_penalty,
        allowed_token_ids=tuple(given.allowed_token_ids or ()),
        bad_words_ids=tuple(map(tuple, given.bad_words_token_ids or ())),
        max_tokens=request.max_tokens,
        min_tokens=given.min_tokens,
        stop_token_ids=tuple(sorted(given.all_stop_token_ids))[:MAX_STOP_IDS],
        ignore_eos=given.ignore_eos,
    )


def seed_of(seed: int | None) -> int:
    """A draft's noise is its own: two requests must not share it, whatever vLLM draws with. Of a request with a seed
    it follows from that. None is told as fresh: vLLM's own, by which drafts are judged, comes again with its engine."""
    if seed is None:
        return secrets.randbits(64)
    digest = hashlib.sha256(f"draft {seed}".encode()).digest()
    return int.from_bytes(digest[:8], "little") % NUM_SEEDS


def joined_salt(deployment: str, request: str | None) -> str:
    """A request that parts its prefix cache from others' parts its drafts' memory, too."""
    if not request:
        return deployment
    return hashlib.sha256(f"{deployment}\0{request}".encode()).hexdigest()


def describe(model_config: Any) -> ModelInfo:
    """The model for which drafts are asked, as a pair is checked by it."""
    model, vocabulary = str(model_config.tokenizer or model_config.model), None
    if model_config.tokenizer_revision and not Path(model).is_dir():
        model = f"{model}@{model_config.tokenizer_revision}"
    try:
        vocabulary = read_vocabulary(locate(model, weights=False))
    except Exception:  # whatever it is written in, the sizes will do
        log.warning("the tokenizer of %s cannot be read: drafts are compared by size alone", model, exc_info=True)
    return ModelInfo(
        name=str(model_config.model),
        digest="",
        vocab_size=model_config.get_vocab_size(),
        max_model_len=model_config.max_model_len,
        num_tokens=0 if vocabulary is None else vocabulary.num_tokens,
        tokenizer_fingerprint="" if vocabulary is None else vocabulary.fingerprint,
    )
