"""What is drawn, from which services, through the whole path; and the exact law of it, which shares nothing with the
product: transformers' own logits in float64, and the sampling processors written a second time, one row after
another."""

from __future__ import annotations

import asyncio
import copy
import itertools
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from support.environment import SEED, START_S
from support.heads import save_guess
from support.models import letters_backend, tiny_hf_model

from outrider.cli.local_services import Services
from outrider.draft_service.boot import DraftService, model_builder, runner_options
from outrider.draft_service.boot import start as start_draft
from outrider.draft_service.settings import DraftSettings
from outrider.gateway.peers.handshake import vocabulary_for
from outrider.gateway.peers.remote import RemoteDrafts, RemoteTargets
from outrider.gateway.peers.untrusted import UntrustedDrafts
from outrider.gateway.speculation.backends import Lost, VerifierLink
from outrider.gateway.speculation.loop import speculate
from outrider.gateway.text.tokenizer import Tokenizer
from outrider.planner.policy import Policy, Round
from outrider.rpc.errors import Unavailable
from outrider.rpc.messages import Arithmetic, Credit, DraftInfo, DraftTokens, ModelInfo, Open, TargetEvent, TargetInfo
from outrider.rpc.vocabulary import TokenizerFile, has_tokenizer
from outrider.rpc.words.sampling_params import AcceptanceRule, SamplingParams, TokenOrigin
from outrider.target_service.boot import build, load
from outrider.target_service.settings import TargetSettings

PATIENCE_MS = 60_000  # the target waits for every draft: then a seed fixes the draws, whatever the timing
VOCAB, WIDE_VOCAB = 16, 4096
PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": -0.6, "frequency_penalty": -1.8}  # it likes to repeat
EVERY_TOKEN = (7, 2, 11, 0, 5, 14, 9, 3, 12, 6, 1, 15, 8, 4, 13, 10, 7)  # whatever comes next, n-grams have a match
HALF_OF_THE_TOKENS = (5, 3, 6, 7, 1, 0, 4, 2, 3)  # after the others there is none, and the model drafts
TOKENS_3K, TOKENS_5K, TOKENS_20K, TOKENS_200K = 1_000, 1_667, 6_667, 66_667  # sequences of 3 tokens
WHOLE = TOKENS_200K if SEED == 0 else TOKENS_20K  # a night's are new ones: ten nights draw as many


@dataclass(frozen=True)
class Setting:
    """What is asked for, and how it is drafted."""

    name: str
    sampling: dict[str, Any] = field(default_factory=dict)
    acceptance: AcceptanceRule = AcceptanceRule.REJECTION
    draft: str = "opposite"
    method: str = "draft_model"  # or several in turn, with commas
    prediction: tuple[int, ...] = ()
    prompt: tuple[int, ...] = (3, 1, 4, 1, 5)
    k: int = 2
    depth: int = 3  # tokens of every sequence: at the first two a draft is judged, the third may be a bonus
    at_target: bool = False  # a head beside the target drafts, from the second token on
    windows_ahead: int = 0  # drafted during the verification
    max_branches: int = 0
    cut_windows: bool = False  # the target verifies fewer drafted tokens where that pays
    reloads: bool = False  # the draft's weights change all the time
    short: int = TOKENS_3K  # sequences
    long: int = WHOLE

    @property
    def params(self) -> SamplingParams:
        """The sampling parameters of every request."""
        return SamplingParams(**self.sampling, max_tokens=self.depth, ignore_eos=True)

    @property
    def policy(self) -> Policy:
        """The gateway's."""
        return Policy(
            self.k, PATIENCE_MS, windows_ahead=self.windows_ahead, max_branches=self.max_branches, max_target_opens=1
        )

    @property
    def depends_on_time(self) -> bool:
        """Whether clocks decide what is verified when: then a seed does not fix how tokens come about."""
        by_what_ended = "suffix" in self.method  # and in turn by what took how long
        return self.windows_ahead > 0 or self.cut_windows or self.reloads or by_what_ended

    def seeds(self, count: int) -> range:
        """Of `count` sequences; no two settings share any."""
        first = random.Random(f"{SEED} {self.name}").getrandbits(63)
        return range(first, first + count)


BLOCK, COUPLED = AcceptanceRule.BLOCK, AcceptanceRule.COUPLED
ALL = {"temperature": 0.6, "top_p": 0.97, "min_p": 0.01, **PENALTIES}
TEMPERATURE_1 = Setting("temperature 1")
WITH_PENALTIES = Setting("penalties", PENALTIES)
EACH = [
    TEMPERATURE_1,
    Setting("temperature 0.6", {"temperature": 0.6}),
    Setting("top_p", {"top_p": 0.8}),
    Setting("min_p", {"min_p": 0.05}),
    WITH_PENALTIES,
]
EACH_COUPLED = [replace(setting, name=f"{setting.name}, coupled", acceptance=COUPLED) for setting in EACH]
BONUS = Setting("bonus", draft="tempered", short=1_250)
MAPPED = Setting("other vocabulary", draft="mapped", long=TOKENS_20K)
REENCODED = Setting("re-encoded", draft="reencoded", long=TOKENS_20K)
REENCODED_COUPLED = Setting("re-encoded, coupled", ALL, COUPLED, draft="reencoded", windows_ahead=1, long=TOKENS_5K)
MAPPED_COUPLED = Setting(
    "other vocabulary, coupled",
    ALL,
    COUPLED,
    draft="mapped",
    windows_ahead=1,
    max_branches=2,
    long=TOKENS_5K,
)
PARD = Setting("pard", draft="parallel", method="pard", k=3, depth=4, short=750, long=TOKENS_20K)
HEAD = Setting("head", method="eagle", at_target=True, depth=4, short=1_250, long=TOKENS_20K)
HEAD_BY_BLOCK = replace(HEAD, name="head, block", acceptance=BLOCK)
HEAD_COUPLED = replace(HEAD, name="head, all, coupled", sampling=ALL, acceptance=COUPLED)
CHAINS = Setting("chains", k=3, depth=4, windows_ahead=1, short=750)
RELOADS = Setting("reloads", k=3, depth=4, reloads=True, short=TOKENS_3K, long=TOKENS_20K)
RELOADS_BY_BLOCK = replace(RELOADS, name="reloads, block", acceptance=BLOCK)
BY_BLOCK = Setting("block", acceptance=BLOCK, k=3, depth=4, short=1_250)
IN_TURN = Setting("in turn", method="suffix,draft_model", prompt=HALF_OF_THE_TOKENS, long=TOKENS_20K)
IN_TURN_BY_BLOCK = replace(IN_TURN, name="in turn, block", acceptance=BLOCK, depth=4, short=750)
NGRAM = Setting("ngram", method="ngram", prompt=EVERY_TOKEN, long=TOKENS_20K)
EVERYTHING = Setting("all", ALL, long=TOKENS_20K)
# Every rule, every parameter, what is drafted ahead, and every kind of draft: by a model, in parallel, beside the
# target, one-hot, of another vocabulary, several in turn.
SHORT = [
    TEMPERATURE_1,
    EVERYTHING,
    BONUS,
    MAPPED,
    REENCODED_COUPLED,
    NGRAM,
    CHAINS,
    PARD,
    HEAD_BY_BLOCK,
    IN_TURN_BY_BLOCK,
]
LONG = [
    *EACH[1:],
    REENCODED,
    Setting("suffix", method="suffix", prompt=EVERY_TOKEN, long=TOKENS_20K),
    Setting("prediction", method="prediction", prediction=(13, 15, *EVERY_TOKEN), long=TOKENS_20K),
    HEAD,
    IN_TURN,
    replace(CHAINS, name="cut chains", cut_windows=True, long=TOKENS_20K),
    replace(IN_TURN, name="in turn, chains", k=3, depth=4, windows_ahead=1),
]
LONG_BY_RULE = [
    MAPPED_COUPLED,
    HEAD_COUPLED,
    *EACH_COUPLED,
    BY_BLOCK,
    Setting("all, coupled", ALL, COUPLED, long=TOKENS_20K),
    Setting("branches, coupled", ALL, COUPLED, windows_ahead=1, max_branches=2, long=TOKENS_20K),
    replace(CHAINS, name="chains, block", acceptance=BLOCK, long=TOKENS_20K),
    Setting("all, block", ALL, BLOCK, long=TOKENS_20K),
    replace(IN_TURN, name="in turn, all, coupled", sampling=ALL, acceptance=COUPLED, windows_ahead=1, max_branches=2),
    replace(PARD, name="pard, all, block", sampling=ALL, acceptance=BLOCK),
    replace(HEAD, name="head, all, block", sampling=ALL, acceptance=BLOCK),
    replace(PARD, name="pard, coupled", acceptance=COUPLED, windows_ahead=1, max_branches=2),
]
WIDE = Setting("wide", draft="half", k=1, depth=2, long=40_960)

MAX_ROWS = 8192  # of a step: no window is cut for want of room, so that a seed fixes the draws
MODEL_SEED, LOGIT_SCALE = 9, 0.8  # enough overlap with its own opposite that top_p leaves some, min_p cuts some
SHARED = 12  # tokens of the target that the mapped draft has; it spells the others with two of its own
LETTERS = "abcdefghijklmnop"
TARGET_NAMES = [*LETTERS[:SHARED], *(LETTERS[token : token + 2] for token in range(VOCAB - SHARED))]
OF_TARGET = random.Random(SEED).sample(range(VOCAB), VOCAB)  # by id of the draft
DRAFT_NAMES = [LETTERS[token] for token in OF_TARGET]
DRAFTS = {
    "opposite": lambda weight: -weight,  # most drafted tokens are refused, and the residual decides
    "tempered": lambda weight: 0.6 * weight,  # the target at another temperature: most windows end in a bonus
    "mapped": lambda weight: 0.6 * weight[OF_TARGET],  # the target's rows, and four of its own that nobody asks for
    "reencoded": lambda weight: 0.6 * weight[OF_TARGET],
    "parallel": lambda weight: 0.6 * weight,  # what masks give, it was never taught
    "half": lambda weight: weight * (1 - 2 * (torch.arange(len(weight)) % 2))[:, None],  # opposite at odd ids
}

OTHER_VOCABULARIES = {"mapped": "token", "reencoded": "string"}  # the second one gets the target's in slices


@dataclass(frozen=True)
class Pair:
    """The target's weights in transformers, its folder, and the addresses of the services. `cutting` is a target that
    verifies fewer drafted tokens than there are where that pays; beside `with_head` a head drafts."""

    hf: Any
    folder: Path
    target: str
    cutting: str | None
    with_head: str | None
    drafts: dict[str, str]


@contextmanager
def serving(
    folder: Path,
    drafts: tuple[str, ...],
    scale: float = LOGIT_SCALE,
    cutting: bool = False,
    head: bool = False,
    **shape: int,
) -> Iterator[Pair]:
    """One process each, until the end of the block."""
    hf = tiny_hf_model("llama", MODEL_SEED, **shape)
    with torch.no_grad():
        hf.lm_head.weight *= scale
    hf.save_pretrained(folder / "target")
    for name in drafts:
        draft = tiny_hf_model("llama", MODEL_SEED, **shape)
        with torch.no_grad():
            draft.lm_head.weight.copy_(DRAFTS[name](hf.lm_head.weight))
            if name in OTHER_VOCABULARIES:
                draft.model.embed_tokens.weight.copy_(hf.model.embed_tokens.weight[OF_TARGET])
            if name == "parallel":
                draft.config.pard_token = draft.config.vocab_size - 1  # an id that is also the target's
        draft.save_pretrained(folder / name)
        if name in OTHER_VOCABULARIES:
            for model, names in (("target", TARGET_NAMES), (name, DRAFT_NAMES)):
                letters_backend(names).save(str(folder / model / "tokenizer.json"))
    with Services() as services:
        started = {"target": services.start("target", [*_arguments("target", folder / "target"), "--no-cut-windows"])}
        if cutting:
            started["cutting"] = services.start("cutting", _arguments("target", folder / "target"))
        if head:
            guess = str(save_guess(folder / "head", hf))
            beside = ["--head", guess, "--head-trial", "off", "--no-cut-windows"]
            started["with_head"] = services.start("with_head", [*_arguments("target", folder / "target"), *beside])
        lookup = ["--prompt-lookup-min", "1", "--prompt-lookup-max", "3"]
        lookup += ["--suffix-decoding-min-token-prob", "0", "--suffix-decoding-max-spec-factor", "9"]
        levels = {name: ["--vocabulary-level", level] for name, level in OTHER_VOCABULARIES.items()}
        levels["mapped"] += ["--target-tokenizer", str(folder / "target")]
        methods = {"parallel": ["--method", "pard"]}
        suffix = ["--method", "suffix", *lookup]  # and all others
        started |= {
            name: services.start(
                name, [*_arguments("draft", folder / name), *methods.get(name, suffix), *levels.get(name, [])]
            )
            for name in drafts
        }
        for service in started.values():
            services.wait(service, START_S)
        addresses = {name: service.address for name, service in started.items()}
        yield Pair(
            hf,
            folder / "target",
            addresses.pop("target"),
            addresses.pop("cutting", None),
            addresses.pop("with_head", None),
            addresses,
        )


def _arguments(command: str, model: Path) -> list[str]:
    return [command, "--model", str(model), "--listen", "127.0.0.1:0", "--threads", "1", "--max-rows", str(MAX_ROWS)]


@asynccontextmanager
async def target_in_process(model: Path, head: Path | None = None, **more: Any) -> AsyncIterator[str]:
    """The address of a target that can be harmed, with more settings than its model."""
    common = {"listen": "127.0.0.1:0", "threads": 1, "max_rows": MAX_ROWS, "cache_mb": 16, "cut_windows": False}
    settings = TargetSettings(model=model, head=head, head_trial="off", **common, **more)
    service = build(settings, load(settings))
    await service.server.start()
    try:
        yield service.server.address
    finally:
        await service.stop()


@asynccontextmanager
async def draft_in_process(model: Path, **more: Any) -> AsyncIterator[DraftService]:
    """A draft that can be harmed, with more settings than its model."""
    settings = DraftSettings(model=model, listen="127.0.0.1:0", threads=1, max_rows=MAX_ROWS, cache_mb=16, **more)
    service = await start_draft(settings)
    await service.server.start()
    try:
        yield service
    finally:
        await service.stop()


@asynccontextmanager
async def changed_all_the_time(draft: DraftService, folders: Sequence[Path]) -> AsyncIterator[list[int]]:
    """While in it, a draft's model is now this one, now that: `outrider admin reload` without the loading, which
    would leave few changes between the tokens of a piece. Gives how many sequences each has met."""
    settings = DraftSettings(model=folders[0], cache_mb=16, max_rows=MAX_ROWS)
    builds = [model_builder(settings, folder, runner_options(settings)) for folder in folders]
    methods, met = [build()[0] for build in builds], list[int]()

    async def change() -> None:
        for method in itertools.cycle(methods):
            met.append(await asyncio.wrap_future(draft.thread.call(partial(draft.engine.replace_model, method))))
            await asyncio.sleep(0.002)

    task = asyncio.create_task(change())
    try:
        yield met
        assert not task.done(), task.exception()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


Integers = NDArray[np.int64]
Row = tuple[int, int, int, bool]  # the fields of Draws, for one token
AT_ONCE = 128  # sequences
ATTEMPTS, RETRY_S = 10, 0.2
SEQUENCE_S = 150.0  # one that takes longer hangs: it waits for a draft once at most


@dataclass(frozen=True)
class Draws:
    """Tokens of many sequences with the same prompt, and how each came about. All are [sequences, depth]."""

    tokens: Integers
    origins: Integers
    offsets: Integers  # index in the round that committed the token
    drafted: NDArray[np.bool_]  # a drafted token was judged at the position: accepted, or replaced
    by_method: Counter[str] = field(default_factory=Counter)  # tokens that were judged, where several draft in turn

    def share(self, origin: TokenOrigin) -> float:
        """How many of the tokens came about in this way."""
        return float((self.origins == origin).mean())


class DraftedFirst:
    """Targets that see a sequence's first credit only behind its first piece, so that the first token is judged against
    a draft as well, and in every run."""

    def __init__(self, targets: RemoteTargets) -> None:
        self._targets = targets

    @property
    def info(self) -> TargetInfo:
        return self._targets.info

    def open(
        self,
        request: Open,
        on_event: Callable[[TargetEvent | Lost], None],
        fork_of: VerifierLink | None = None,
        like: Arithmetic | None = None,
        refused_by: Sequence[VerifierLink] = (),
    ) -> VerifierLink | None:
        link = self._targets.open(request, on_event, fork_of, like, refused_by)
        return None if link is None else _HeldLink(link)


class _HeldLink:
    def __init__(self, link: VerifierLink) -> None:
        self._link = link
        self._held: list[DraftTokens | Credit] | None = []

    @property
    def model(self) -> ModelInfo:
        return self._link.model

    def send(self, *messages: DraftTokens | Credit) -> None:
        if self._held is not None:
            self._held += messages
            if not any(isinstance(message, DraftTokens) for message in messages):
                return
            messages = tuple(sorted(self._held, key=lambda message: isinstance(message, Credit)))
            self._held = None
        self._link.send(*messages)

    def close(self) -> None:
        self._link.close()


async def draw(
    setting: Setting, target: str, draft: str, seeds: range, tokenizer: Path | None = None, trusted: bool = True
) -> Draws:
    """One sequence per seed, from the services at these addresses. A draft that lacks the target's vocabulary is given
    it where the tokenizer's folder is known; one that is not `trusted` is believed nothing."""

    def offer(info: DraftInfo) -> TokenizerFile | None:
        known = tokenizer is not None and has_tokenizer(tokenizer)
        return vocabulary_for(info, targets.info.model, Tokenizer.load(str(tokenizer))) if known else None

    rows: dict[int, list[Row]] = {}
    by_method = Counter[str]()
    remaining = iter(seeds)
    async with AsyncExitStack() as stack:
        targets = await stack.enter_async_context(RemoteTargets([target]))
        connections = RemoteDrafts if trusted else UntrustedDrafts
        drafts = None if setting.at_target else await stack.enter_async_context(connections([draft], offer=offer))
        await asyncio.wait_for(targets.wait_admitted(), START_S)
        if drafts is not None:
            await asyncio.wait_for(drafts.wait_attempted(), START_S)

        async def draw_some() -> None:
            for seed in remaining:
                async with asyncio.timeout(SEQUENCE_S):
                    rows[seed] = await _draw_one(setting, drafts, targets, seed, by_method)

        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(draw_some())
    table = np.array([rows[seed] for seed in seeds], dtype=np.int64)  # [sequences, depth, 4]
    return Draws(table[..., 0], table[..., 1], table[..., 2], table[..., 3].astype(bool), by_method)


async def _draw_one(
    setting: Setting, drafts: RemoteDrafts | None, targets: RemoteTargets, seed: int, by_method: Counter[str]
) -> list[Row]:
    """A process that gets no time for seconds loses its streams. That depends on no token, and a seed that is drawn
    again gives the same ones."""
    methods = tuple(setting.method.split(","))
    in_turn = len(methods) > 1
    request = Open(
        0,
        setting.prompt,
        setting.params,
        acceptance=setting.acceptance,
        seed=seed,
        method=methods[0],
        methods=methods if in_turn else (),
        prediction=setting.prediction,
        salt=str(seed) if in_turn else "",  # each by its own text alone
    )
    failures = 0
    while True:
        peers = [peer for peer in (targets, drafts) if peer is not None]
        if not all(peer.usable for peer in peers):
            await asyncio.wait_for(asyncio.gather(*(peer.wait_usable() for peer in peers)), 30)
        fingerprint = targets.info.model.tokenizer_fingerprint
        request = replace(request, tokenizer_fingerprint=fingerprint, fresh_seed=not failures)
        judging = targets if drafts is None else DraftedFirst(targets)
        rounds = speculate(
            drafts,
            judging,
            request,
            setting.policy,
            at_target=setting.at_target,
            on_draft_stop=_raise_unavailable,
        )
        try:
            found: list[Row] = []
            async for closed in rounds:
                if isinstance(closed, Round):
                    found += _rows(closed)
                    by_method.update({share.method: share.num_drafted for share in closed.drafted_by})
            return found
        except Unavailable:
            failures += 1
            if failures == ATTEMPTS:
                raise
            await asyncio.sleep(RETRY_S * failures)  # it comes back, once it gets time


def _raise_unavailable(reason: str) -> None:
    raise Unavailable(f"a sequence lost its draft: {reason}")


def _rows(closed: Round) -> Iterator[Row]:
    commit = closed.commit
    for offset, (token, origin) in enumerate(zip(commit.ids, commit.origins, strict=True)):
        yield token, origin, offset, offset < commit.num_drafted


Array = NDArray[np.float64]
ROWS = 512  # contexts of one forward pass


def exact_laws(hf: Any, prompt: Sequence[int], sampling: SamplingParams, depth: int) -> list[Array]:
    """For n below `depth` the law of the token after n drawn ones, [vocab] * n + [vocab]: the last axis is a law."""
    model, vocab_size = copy.deepcopy(hf).double(), hf.config.vocab_size
    laws = []
    for num_drawn in range(depth):
        outputs = list(itertools.product(range(vocab_size), repeat=num_drawn))
        logits = np.concatenate(
            [_last_logits(model, prompt, outputs[n : n + ROWS]) for n in range(0, len(outputs), ROWS)]
        )
        rows = [exact_law(row, prompt, output, sampling) for row, output in zip(logits, outputs, strict=True)]
        laws.append(np.stack(rows).reshape([vocab_size] * (num_drawn + 1)))
    return laws


def exact_law(logits: Array, prompt: Sequence[int], output: Sequence[int], sampling: SamplingParams) -> Array:
    """One row, [vocab] -> [vocab]. A repetition penalty counts prompt and output, the other two the output alone."""
    logits = logits.copy()
    for token in {*prompt, *output}:
        logits[token] *= sampling.repetition_penalty if logits[token] < 0 else 1 / sampling.repetition_penalty
    for token in set(output):
        logits[token] -= sampling.presence_penalty + sampling.frequency_penalty * list(output).count(token)
    law = np.exp((logits - logits.max()) / sampling.temperature)
    law /= law.sum()
    law[law < sampling.min_p * law.max()] = 0
    law /= law.sum()
    if sampling.top_k > 0:
        law[np.argsort(-law, kind="stable")[sampling.top_k :]] = 0
        law /= law.sum()
    if sampling.top_p < 1:
        descending = np.argsort(-law, kind="stable")
        num_kept = int(np.searchsorted(np.cumsum(law[descending]), sampling.top_p)) + 1
        law[descending[num_kept:]] = 0
    return cast(Array, law / law.sum())


def of_position(laws: Sequence[Array], position: int) -> Array:
    """The law of the token at a position by itself, [vocab]."""
    joint = _joint(laws, position + 1)
    return cast(Array, joint.sum(axis=tuple(range(position))))


def of_pair(laws: Sequence[Array], position: int) -> Array:
    """The joint law of the tokens at a position and the next one, [vocab, vocab]."""
    joint = _joint(laws, position + 2)
    return cast(Array, joint.sum(axis=tuple(range(position))))


def _joint(laws: Sequence[Array], length: int) -> Array:
    """The law of the first `length` tokens, [vocab] * length."""
    joint = laws[0]
    for law in laws[1:length]:
        joint = joint[..., None] * law
    return joint


def _last_logits(model: Any, prompt: Sequence[int], outputs: Sequence[Sequence[int]]) -> Array:
    with torch.inference_mode():
        ids = torch.tensor([[*prompt, *output] for output in outputs])
        logits: Array = model(ids, use_cache=False, logits_to_keep=1).logits[:, -1].numpy()
    return logits
