"""A seed that comes again, beside a store that learned what it said before. Under rejection the same coins would judge
drafts that depend on them: exactly, for two tokens of 0.7 and 0.3, and as frequencies of an LLM's tokens.

Where a seed's own answers are drafted for it, the likelier token comes in 0.82 of every second call."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Protocol

import pytest
from lossless.law import Proposal, endings_of
from support.models import save_tiny, train_byte_level

from outrider.draft_service.admission import make_methods
from outrider.draft_service.engine import DraftEngine
from outrider.gateway.peers.local_drafts import LocalDrafter
from outrider.llm import LLM, RequestOutput, SamplingParams, TokensPrompt
from outrider.proposers.suffix.proposer import SuffixProposer
from outrider.rpc.messages import Close, Commit, Credit, DraftEvent, DraftTokens, Open
from outrider.rpc.servicer import Deliver
from outrider.rpc.words.sampling_params import AcceptanceRule
from outrider.rpc.words.sampling_params import SamplingParams as WireSampling

PROMPT = (11, 12, 13, 14)
LIKELIER = Fraction(7, 10)
P = (LIKELIER, 1 - LIKELIER)
COINS = {0.2: Fraction(3, 10), 0.5: Fraction(4, 10), 0.8: Fraction(3, 10)}  # one for each verdict that two drafts get
NUM_CALLS = 5

Judge = Callable[[Sequence[int]], int]  # of what was drafted, the token that is committed


class Drafting(Protocol):
    """Where drafts come from, and what is learned."""

    async def answer(self, request: Open, judge: Judge) -> int:
        """One token, of a sequence that is then over."""
        ...


class AtService:
    """A draft service's engine."""

    def __init__(self, file: Path | None = None) -> None:
        proposer = SuffixProposer(suffix_decoding_min_token_prob=0.0, suffix_store_file=file)
        self._engine = DraftEngine(make_methods([proposer]))
        self.close = self._engine.close
        self._last_id = 0

    async def answer(self, request: Open, judge: Judge) -> int:
        self._last_id = number = self._last_id + 1
        said: list[DraftEvent] = []
        end = len(PROMPT)
        self._tell(said, replace(request, sequence_id=number), Credit(number, end + 1, 1))
        token = judge([id for event in said if isinstance(event, DraftTokens) for id in event.ids])
        self._tell(said, Commit(number, end, (token,)), Close(number))
        return token

    def _tell(self, said: list[DraftEvent], *messages: Open | Commit | Credit | Close) -> None:
        self._engine.handle(Deliver(1, messages, said.append))
        self._engine.step(0.0)


class AtGateway:
    """A gateway that drafts by itself."""

    def __init__(self) -> None:
        self._drafter = LocalDrafter([SuffixProposer(suffix_decoding_min_token_prob=0.0)])

    async def answer(self, request: Open, judge: Judge) -> int:
        said: list[object] = []
        link = self._drafter.open(request, said.append)
        assert link is not None
        link.send(Credit(0, len(PROMPT) + 1, 1))
        await asyncio.sleep(0)
        token = judge([id for event in said if isinstance(event, DraftTokens) for id in event.ids])
        link.send(Commit(0, len(PROMPT), (token,)))
        link.close()
        return token


def verdicts() -> dict[tuple[int, float], int]:
    """By draft and coin the token that production's acceptance leaves."""
    proposals = [
        Proposal(Fraction(1), (draft,), (None,), takes_next=False, uniforms=(coin,))
        for draft, coin in product((0, 1), COINS)
    ]
    ends = endings_of(proposals, target=lambda context: P)
    return {
        (end.proposal.ids[0], end.uniforms[0]): end.proposal.ids[0] if end.num_accepted else 1 - end.proposal.ids[0]
        for end in ends
    }


def token_of(judged: Mapping[tuple[int, float], int], plain: int, coin: float, drafted: Sequence[int]) -> int:
    """What is committed: the verdict on what was drafted, else the plain token."""
    return judged[drafted[0], coin] if drafted else plain


async def shares(drafting: Drafting, rule: AcceptanceRule, fresh: Sequence[bool]) -> list[Fraction]:
    """How often each of a seed's calls says the likelier token, over all that is random: what another seed was answered
    before, the seed's plain token, and its coin. `fresh`: the seed is then the gateway's own, else its caller's."""
    judged, found = verdicts(), [Fraction(0)] * len(fresh)
    for other, plain, (coin, width) in product((0, 1), (0, 1), COINS.items()):
        mass = P[other] * P[plain] * width
        judge = partial(token_of, judged, plain, coin)
        asked = Open(0, PROMPT, WireSampling(), acceptance=rule, salt=f"{other} {plain} {coin}", fresh_seed=True)
        await drafting.answer(asked, partial(token_of, {}, other, coin))
        for call, is_fresh in enumerate(fresh):
            token = await drafting.answer(replace(asked, seed=7, fresh_seed=is_fresh), judge)
            found[call] += mass * (token == 0)
    return found


CALLS = {"its caller's": [False] * NUM_CALLS, "the gateway's, and told": [True] + [False] * (NUM_CALLS - 1)}


@pytest.mark.parametrize("fresh", CALLS.values(), ids=CALLS.keys())
@pytest.mark.parametrize("rule", [AcceptanceRule.REJECTION, AcceptanceRule.BLOCK], ids=lambda rule: rule.name)
@pytest.mark.parametrize("drafting", [AtService, AtGateway])
async def test_each_call_has_the_targets_law(
    drafting: Callable[[], Drafting], rule: AcceptanceRule, fresh: list[bool]
) -> None:
    assert await shares(drafting(), rule, fresh) == [LIKELIER] * NUM_CALLS


async def test_what_a_store_file_brings_is_recalled_for_no_such_seed(tmp_path: Path) -> None:
    drafted: list[list[int]] = []

    def judge(ids: Sequence[int]) -> int:
        drafted.append(list(ids))
        return 1

    fresh = Open(0, PROMPT, WireSampling(), fresh_seed=True)
    again = replace(fresh, fresh_seed=False)
    before = AtService(tmp_path / "store")
    await before.answer(fresh, judge)
    before.close()
    after = AtService(tmp_path / "store")
    for request in (
        fresh,
        again,
        replace(again, acceptance=AcceptanceRule.BLOCK),
        replace(again, acceptance=AcceptanceRule.COUPLED),
        replace(again, sampling=WireSampling(temperature=0.0)),
    ):
        await after.answer(request, judge)
    after.close()
    assert drafted == [[], [1], [], [], [1], [1]]


ASKED, TOKENS, CALLED = 120, 12, 3
MOST_Z = 4.0  # 5 and more where what a seed said is drafted for it


def ask_again(folder: Path, rule: str) -> list[list[RequestOutput]]:
    """Each of many seeds, with a prompt of its own, again and again: tokens 7 and 8, of which 7 is likelier."""
    dice = random.Random(5)
    prompts = [TokensPrompt(prompt_token_ids=[dice.randrange(300) for _ in range(8)]) for _ in range(ASKED)]
    params = [
        SamplingParams(
            seed=seed, allowed_token_ids=[7, 8], logit_bias={7: 1.0}, logprobs=2, max_tokens=TOKENS, ignore_eos=True
        )
        for seed in range(ASKED)
    ]
    config = {"method": "suffix", "num_speculative_tokens": 4, "suffix_decoding_min_token_prob": 0.0}
    with LLM(
        folder, acceptance=rule, mode="sequential", threads=1, logprobs_mode="processed_logprobs",
        speculative_config=config,
    ) as llm:  # fmt: skip
        return [llm.generate(prompts, params, use_tqdm=False) for _ in range(CALLED)]


def z_of(outputs: Iterable[RequestOutput]) -> float:
    """By how many standard deviations the likelier token came too often, by what the target says of each position, were
    all answers independent. The first token of one waits for no draft."""
    excess = variance = 0.0
    for output in outputs:
        (completion,) = output.outputs
        assert completion.logprobs is not None
        for token, logprobs in list(zip(completion.token_ids, completion.logprobs, strict=True))[1:]:
            p = math.exp(logprobs[7].logprob)
            excess += (token == 7) - p
            variance += p * (1 - p)
    return excess / math.sqrt(variance)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = save_tiny(tmp_path_factory.mktemp("target"), seed=1, vocab_size=300, eos_token_id=None)
    train_byte_level(300).save(str(made / "tokenizer.json"))
    return made


def test_an_llms_later_calls_follow_the_targets_law(folder: Path) -> None:
    first, *later = ask_again(folder, "rejection")
    found = z_of(first), z_of(chain.from_iterable(later))
    print(f"{found[0]:.2f}, later {found[1]:.2f}")
    assert max(map(abs, found)) < MOST_Z


@pytest.mark.slow
def test_coupled_tokens_are_the_first_calls(folder: Path) -> None:
    outputs = ask_again(folder, "coupled")
    calls = [[output.outputs[0].token_ids for output in each] for each in outputs]
    assert calls[1:] == [calls[0]] * (CALLED - 1) and abs(z_of(outputs[0])) < MOST_Z
