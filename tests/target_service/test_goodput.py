"""Windows under load: the choice of most tokens per time, in closed form, and that it changes no token."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engines import COUPLED, REJECTION, VOCAB, TargetHarness, opened, tiny_model
from support.models import build_decoder, tiny_config, tiny_hf_model, tiny_state

from outrider.engine.loader import LoadedModel
from outrider.planner.estimates import Acceptance
from outrider.rpc.messages import Commit, Credit, DraftTokens, TokenWeights
from outrider.rpc.words.expert_costs import ExpertCosts
from outrider.rpc.words.sampling_params import AcceptanceRule, TokenOrigin
from outrider.target_service.goodput import MARGIN, PROBE_SHARE, Goodput, GoodputRequest, best_rows

ROWS = (1, 2, 4, 8, 16, 32, 64)
FLAT = tuple((rows, 10_000) for rows in ROWS)
STEEP = tuple((rows, 1_000 * rows) for rows in ROWS)
HALF = tuple((rows, 10_000 + 1_000 * rows) for rows in ROWS)
LIKELY, UNLIKELY = 0.9, 0.2


def acceptance_of(*chances: float) -> Acceptance:
    """So many verdicts that the prior does not count."""
    return Acceptance(tested=[1e9] * len(chances), accepted=[1e9 * chance for chance in chances])


def wishes_of(*chances: float, further: int = 4) -> list[GoodputRequest]:
    return [GoodputRequest(acceptance_of(*[chance] * further), 1, 0, further) for chance in chances]


# The choice itself


def test_flat_cost_takes_whole_windows() -> None:
    assert Goodput(FLAT).choose(wishes_of(LIKELY, UNLIKELY, 0.01), 512) == [4, 4, 4]


def test_cost_in_proportion_to_rows_takes_none() -> None:
    """Every row costs what a plain token costs, and brings less."""
    assert Goodput(STEEP).choose(wishes_of(LIKELY, UNLIKELY, 0.99), 512) == [0, 0, 0]


def test_some_cost_takes_the_likely_tokens() -> None:
    """Two sequences, 10 ms + 1 ms a row: 2 tokens in 12 ms to begin with; 0.9 makes it 2.9 in 13, and so on up to
    2 + 0.9 + 0.81 + 0.729 + 0.6561 in 16. The other's first token would make 5.295 in 17, its second 5.335 in 18."""
    requests = wishes_of(LIKELY, UNLIKELY)
    assert 5.0951 / 16 > 5.2951 / 17 > 5.3351 / 18 > MARGIN * 5.3447 / 20
    assert Goodput(HALF).choose(requests, 512) == [4, 0]
    gains = [[LIKELY**j for j in range(1, 5)], [UNLIKELY**j for j in range(1, 5)]]
    assert best_rows(gains, 2.0, [12.0 + n for n in range(9)]) == [4, 0]
    assert best_rows(gains, 2.0, [12.0 + n for n in range(4)]) == [3, 0]
    assert best_rows(gains, 2.0, [12.0]) == [0, 0]


def test_a_dear_row_is_taken_when_those_after_it_are_cheap() -> None:
    """A step in the cost, as where a tile is full: up to 4 rows 1, then 2 up to 8."""
    gains = [[0.9, 0.8, 0.7, 0.6], [0.9, 0.8, 0.7, 0.6]]
    assert best_rows(gains, 2.0, [1.0] * 3 + [1.5] * 6) == [4, 4]
    assert best_rows(gains, 2.0, [1.0] * 3 + [3.0] * 6) == [1, 1]


def test_the_pause_between_steps_counts() -> None:
    """Two sequences, 1 ms a row: 2 tokens in 2 ms; with a pause of 2 ms as well, 2 in 4 or, with four likely ones, 5.1
    in 8."""
    goodput = Goodput(STEEP)
    for _ in range(200):
        goodput.add_step(2, 2_000, 10_000_000)  # nobody was there: it counts as one step
    assert goodput.choose(wishes_of(LIKELY, UNLIKELY), 512) == [4, 0]
    for _ in range(200):
        goodput.add_step(2, 2_000, 0)
    assert goodput.choose(wishes_of(LIKELY, UNLIKELY), 512) == [0, 0]


def test_the_context_counts() -> None:
    """Two sequences, 1 ms a row: none pays. Behind 10,000 tokens of 1 us each it is 2 tokens in 12 ms to begin with, as
    where a step of no rows takes 10 ms: the likely ones pay."""
    requests = [replace(request, context=5_000) for request in wishes_of(LIKELY, UNLIKELY)]
    assert Goodput(STEEP).choose(requests, 512) == [0, 0]
    assert Goodput(STEEP, context_us=1.0).choose(requests, 512) == [4, 0]
    assert Goodput(STEEP, context_us=1.0).rows_beside(32, 0.5, context=8_000) == 20  # half of 32 ms and 8


def test_a_long_context_says_nothing_of_rows() -> None:
    """Steps that are longer by what they look back on make no row dearer."""
    known, blind = Goodput(HALF, context_us=1.0), Goodput(HALF)
    for goodput in (known, blind):
        for _ in range(900):
            goodput.add_step(8, 18_000 + 18_000, 0, context=18_000)
    assert known.time.at(8) == pytest.approx(18_000) and known.time.at(8, 18_000) == pytest.approx(36_000)
    assert known.time.at(16) - known.time.at(8) == pytest.approx(8_000)
    assert blind.time.at(16) - blind.time.at(8) > 12_000
    for _ in range(900):  # and where the machine is slower, all is
        known.add_step(8, 1.5 * 36_000, 0, context=18_000)
    assert known.time.at(8, 18_000) == pytest.approx(54_000, rel=0.01)
    assert known.time.at(16) - known.time.at(8) == pytest.approx(12_000, rel=0.1)


def test_one_sequence_alone_is_never_cut() -> None:
    assert Goodput(STEEP).choose(wishes_of(0.01), 512) == [4]
    assert Goodput(STEEP).choose([], 512) == []


def test_a_cut_that_gains_next_to_nothing_is_not_made() -> None:
    gains = [[0.1], [0.1]]
    assert best_rows(gains, 2.0, [1.0 + 0.09 * n for n in range(3)]) == [1, 1]  # 2.2 tokens in 1.18, or 2 in 1
    assert best_rows(gains, 2.0, [1.0 + 0.12 * n for n in range(3)]) == [0, 0]  # 2.2 tokens in 1.24


def test_rows_of_a_prompt_make_no_others_cheap(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows beside a chunk are those of a step without it, and the chunk takes its share of their time."""
    harness = TargetHarness.of(loaded, num_blocks=128)
    harness.engine.scheduler.goodput = goodput = Goodput(STEEP)
    for index in range(1, 5):
        harness.send(opened(index, PROMPTS[index], max_tokens=LENGTH), Credit(index, len(PROMPTS[index]) + 1, 0))
    harness.run()
    for index in range(1, 5):
        harness.send(DraftTokens(index, 0, len(PROMPTS[index]) + 1, (40, 41, 42, 43)), Credit(index, 1 << 20, 4))
    learn_a_little(harness)
    harness.send(opened(9, [7] * 200, max_tokens=2), Credit(9, 1 << 20, 0))
    asked, rows_beside = list[int](), goodput.rows_beside

    def noted(num_rows: int, share: float, context: int = 0, sequences: int = 1) -> int:
        asked.append(sequences)
        return rows_beside(num_rows, share, context, sequences)

    monkeypatch.setattr(goodput, "rows_beside", noted)
    entries = harness.engine.scheduler.plan(harness.engine.scheduler.runnable(0.0))
    assert asked == [4], "they are four sequences' rows"
    assert [len(entry.window.ids) for entry in entries] == [0, 0, 0, 0, 0]
    assert entries[-1].target.key == (1, 9) and entries[-1].num_rows == 64  # an eighth of 512


def test_a_prompt_adds_its_share_of_the_time() -> None:
    assert Goodput(STEEP).rows_beside(32, 0.75) == 24
    assert Goodput(HALF).rows_beside(10, 0.75) == 15  # 20 ms, and 15 more
    assert Goodput(FLAT).rows_beside(1, 0.0) == 127  # to twice as many as were measured
    goodput = Goodput(STEEP)
    for _ in range(200):
        goodput.add_step(32, 32_000, 16_000)
    assert goodput.rows_beside(32, 0.5) == 23  # half of 32 ms and of a pause of nearly 16


def test_a_prompt_beside_many_sequences_of_a_mixture_has_its_share_of_what_they_wake() -> None:
    """Eight rows of eight texts wake more experts than eight of one, and their step is as much longer."""
    goodput = Goodput(FLAT, experts=ExpertCosts(2, 32, 2, expert_us=100.0, along=0.3))
    assert goodput.time.experts is not None
    for _ in range(50):
        goodput.time.experts.add(8, 8, num_woken=25)
        goodput.time.experts.add(8, 1, num_woken=8)
    one, eight = (goodput.time.at(8, sequences=count) for count in (1, 8))
    assert eight > one + 500
    rows = [goodput.rows_beside(8, 0.5, sequences=count) for count in (1, 8)]
    assert rows[0] == goodput.time.rows_beside(8, 0.5 * one) and rows[1] == goodput.time.rows_beside(8, 0.5 * eight)
    assert rows[1] > rows[0]


@settings(max_examples=200, derandomize=True)
@given(
    chances=st.lists(st.lists(st.floats(0.05, 1.0), max_size=4), min_size=1, max_size=3),
    steps=st.lists(st.floats(0.0, 2.0), min_size=13, max_size=13),
    room=st.integers(0, 12),
)
def test_no_other_windows_give_more(chances: list[list[float]], steps: list[float], room: int) -> None:
    """Against every choice of windows, for any time that grows with the rows."""
    gains = [list(itertools.accumulate(row, lambda a, b: a * b)) for row in chances]
    times = list(itertools.accumulate(steps, initial=1.0))

    def goodput(taken: tuple[int, ...]) -> float:
        gained = sum(sum(row[:count]) for row, count in zip(gains, taken, strict=True))
        return (len(gains) + gained) / times[sum(taken)]

    everything = itertools.product(*(range(len(row) + 1) for row in gains))
    best = max(goodput(taken) for taken in everything if sum(taken) <= room)
    taken = tuple(best_rows(gains, float(len(gains)), times[: room + 1]))
    assert sum(taken) <= room
    whole = sum(map(len, gains))
    assert goodput(taken) >= best / (MARGIN if sum(taken) == min(room, whole) else 1.0) - 1e-9


def test_whole_windows_are_tried_again_now_and_then() -> None:
    """Ten rows where two are best: for every share of the time that this takes."""
    goodput, requests, every = Goodput(STEEP), wishes_of(UNLIKELY, UNLIKELY), math.ceil(10 / 2 / PROBE_SHARE)
    choices = [goodput.choose(requests, 512) for _ in range(3 * every)]
    whole = [index for index, choice in enumerate(choices, start=1) if choice == [4, 4]]
    assert whole == [every, 2 * every, 3 * every]
    assert all(choice == [0, 0] for index, choice in enumerate(choices, start=1) if index not in whole)


# What it knows


def test_acceptance_of_the_target_is_the_prior_of_a_sequence() -> None:
    goodput = Goodput(HALF)
    known, fresh = Acceptance(), Acceptance()
    for _ in range(300):
        goodput.add_verified(known, 4, 0)
    goodput.add_verified(fresh, 0, 0)
    assert fresh == Acceptance()  # a plain token says nothing
    request = GoodputRequest(fresh, 1, 0, 4)
    assert goodput.choose([request, request], 512) == [0, 0]
    assert Goodput(HALF).choose([request, request], 512) != [0, 0]


# In the engine

PROMPTS = [random.Random(seed).choices(range(3, VOCAB), k=12) for seed in range(6)]
LENGTH = 30


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return tiny_model()[1]


def harness_of(loaded: LoadedModel, costs: tuple[tuple[int, int], ...] | None) -> TargetHarness:
    harness = TargetHarness.of(loaded, num_blocks=128)
    harness.engine.scheduler.goodput = None if costs is None else Goodput(costs)
    return harness


def weights_of(rng: random.Random) -> TokenWeights:
    """Nearly even ones: a random model's law is no steeper, so that about half of the tokens hold."""
    return TokenWeights.of(range(VOCAB), [rng.randrange(5, 10) for _ in range(VOCAB)])


def learn_a_little(harness: TargetHarness) -> None:
    """The first window of a sequence is whole; one token tested, and it is over."""
    for target in harness.engine.scheduler.sequences.values():
        target.acceptance.add(1, 1)


def run(
    loaded: LoadedModel,
    costs: tuple[tuple[int, int], ...] | None,
    drafts: list[list[int]],
    acceptance: AcceptanceRule,
    max_window: int = 6,
    fresh: bool = False,
    **sampling: Any,
) -> tuple[list[list[int]], list[list[Commit]]]:
    """All sequences at once, each with its whole chain held after the first token. The commits are those after it."""
    harness = harness_of(loaded, costs)
    for index in range(len(drafts)):
        request = opened(index, PROMPTS[index], max_tokens=LENGTH, acceptance=acceptance, seed=index, **sampling)
        harness.send(request, Credit(index, len(PROMPTS[index]) + 1, 0))
    harness.run()
    for index, draft in enumerate(drafts):
        rng = random.Random(index)
        weights = tuple(weights_of(rng) for _ in draft) if acceptance == REJECTION else ()
        piece = DraftTokens(index, 0, len(PROMPTS[index]) + 1, tuple(draft), weights)
        harness.send(piece, Credit(index, 1 << 20, max_window))
    if not fresh:
        learn_a_little(harness)
    harness.run()
    numbers = range(len(drafts))
    return [harness.output(number) for number in numbers], [harness.commits(number)[1:] for number in numbers]


@pytest.mark.parametrize(
    ("acceptance", "temperature"), [(REJECTION, 0.0), (REJECTION, 1.0), (COUPLED, 0.0), (COUPLED, 1.0)]
)
def test_cut_windows_give_the_same_tokens(loaded: LoadedModel, acceptance: AcceptanceRule, temperature: float) -> None:
    """Also in rejection mode: what is past a cut is put off and meets the same random numbers."""
    plain, _ = run(loaded, None, [[] for _ in PROMPTS], acceptance, temperature=temperature)
    drafts = [[*tokens[1 : 5 + 4 * index], 50, 51, 52] for index, tokens in enumerate(plain)]
    whole, whole_commits = run(loaded, FLAT, drafts, acceptance, temperature=temperature)
    cut, cut_commits = run(loaded, STEEP, drafts, acceptance, temperature=temperature)
    assert cut == whole
    assert sum(c.num_accepted for commits in whole_commits for c in commits) > 10
    assert {own[0].num_drafted for own in whole_commits} == {6}
    assert {own[0].num_drafted for own in cut_commits} <= {0, 1}
    assert all(c.ids for commits in cut_commits for c in commits)  # no step without progress


def test_in_rejection_mode_one_token_stays_and_the_cut_takes_no_token_of_its_own(loaded: LoadedModel) -> None:
    _, commits = run(loaded, STEEP, [[40, 41, 42]] * 4, REJECTION, temperature=1.0)
    for first in (own[0] for own in commits):
        assert first.num_drafted == 1 and len(first.ids) == 1
        assert first.origins[0] in (TokenOrigin.ACCEPTED, TokenOrigin.RECOVERED)
        assert first.timings.num_rows == len(commits)  # as many rows as plain tokens would take


def test_a_window_of_one_token_keeps_its_bonus_in_rejection_mode(loaded: LoadedModel) -> None:
    _, commits = run(loaded, STEEP, [[40]] * 4, REJECTION, temperature=1.0)
    assert all(own[0].num_drafted == 1 and own[0].timings.num_rows == 2 * 4 for own in commits)


@pytest.mark.parametrize("acceptance", [REJECTION, COUPLED])
def test_the_first_window_of_a_sequence_is_whole(loaded: LoadedModel, acceptance: AcceptanceRule) -> None:
    """So that what it is worth is known, and counted in its rounds."""
    _, commits = run(loaded, STEEP, [[40, 41, 42, 43]] * 4, acceptance, fresh=True, temperature=1.0)
    assert all(own[0].num_drafted == 4 for own in commits)


@pytest.mark.parametrize("acceptance", [REJECTION, COUPLED])
def test_one_sequence_alone_keeps_its_windows(loaded: LoadedModel, acceptance: AcceptanceRule) -> None:
    _, commits = run(loaded, STEEP, [[40, 41, 42, 43]], acceptance, temperature=1.0)
    assert commits[0][0].num_drafted == 4


def test_plain_tokens_of_a_cut_window_teach(loaded: LoadedModel) -> None:
    """With greedy or coupled acceptance a plain token that equals the held one would have accepted it."""
    plain, _ = run(loaded, None, [[] for _ in PROMPTS], COUPLED, temperature=0.0)
    harness = harness_of(loaded, STEEP)
    for index in range(len(plain)):
        request = opened(index, PROMPTS[index], max_tokens=LENGTH, acceptance=COUPLED)
        harness.send(request, Credit(index, len(PROMPTS[index]) + 1, 0))
    harness.run()
    for index, tokens in enumerate(plain):
        draft = tokens[1:] if index % 2 else [(token + 1) % VOCAB for token in tokens[1:]]
        harness.send(DraftTokens(index, 0, len(PROMPTS[index]) + 1, tuple(draft)), Credit(index, 1 << 20, 6))
    learn_a_little(harness)
    for _ in range(8):
        harness.engine.step(0.0)
    for index in range(len(plain)):
        known = harness.engine.scheduler.sequences[1, index].acceptance
        assert {c.num_drafted for c in harness.commits(index)} == {0} and len(harness.output(index)) == 9
        if index % 2:
            assert known.tested[0] > 8 and known.accepted[0] == known.tested[0]
        else:
            assert known.tested[0] > 1.9 and known.accepted[0] < 1


def windows_of(loaded: LoadedModel, tokens: random.Random, acceptance: AcceptanceRule) -> list[list[int]]:
    """The windows of the first steps, all with the same past, for drafts whose tokens and weights are drawn anew."""
    harness = harness_of(loaded, HALF)
    for index, prompt in enumerate(PROMPTS):
        request = opened(index, prompt, max_tokens=LENGTH, acceptance=acceptance, temperature=1.0)
        harness.send(request, Credit(index, 1 << 20, 6))
    assert harness.engine.step(0.0) == 0.0
    past, goodput = random.Random(5), harness.engine.scheduler.goodput
    assert goodput is not None
    chosen = list[list[int]]()
    for _ in range(12):
        for index, target in enumerate(harness.engine.scheduler.sequences.values()):
            ids = [tokens.randrange(3, VOCAB) for _ in range(6)]
            weights = tuple(weights_of(tokens) for _ in ids) if acceptance == REJECTION else ()
            target.chains.add(DraftTokens(index, 100 * len(chosen), target.committed, tuple(ids), weights))
            for _ in range(3):
                goodput.add_verified(target.acceptance, 6, past.randrange(index + 1))
        limits = harness.engine.scheduler._cut(list(harness.engine.scheduler.sequences.values()), 512).limits
        chosen.append(list(limits.values()))
        for target in harness.engine.scheduler.sequences.values():
            target.sequence.tokens.append(tokens.randrange(3, VOCAB))
            target.sequence.num_computed_tokens = target.committed - 1
            target.chains.advance()
    return chosen


@pytest.mark.parametrize("acceptance", [REJECTION, COUPLED])
def test_no_peeking(loaded: LoadedModel, acceptance: AcceptanceRule) -> None:
    """Other drafted tokens with other weights are cut at the same places, by the same past."""
    first, *others = (windows_of(loaded, random.Random(seed), acceptance) for seed in range(4))
    assert all(other == first for other in others)
    assert len({window for step in first for window in step}) > 2


def test_a_mixtures_steps_teach_what_they_woke() -> None:
    """The start measures what an expert costs, commits say how many a step woke, and steps are foreseen by them."""
    options: dict[str, Any] = {"num_experts": 16, "num_experts_per_tok": 2, "num_hidden_layers": 2}
    loaded = build_decoder(tiny_config("qwen3_moe", **options), tiny_state(tiny_hf_model("qwen3_moe", **options)))
    harness = TargetHarness.of(loaded)
    harness.engine.profile()
    goodput, costs = harness.engine.scheduler.goodput, harness.engine.expert_costs
    assert goodput is not None and costs is not None and (costs.num_layers, costs.num_experts) == (2, 16)
    assert goodput.time.experts is not None
    before = goodput.time.experts.at(5, 5)
    for number in (1, 2, 3):
        harness.send(opened(number, range(5, 30 + number), max_tokens=24), Credit(number, 200, 0))
    harness.run()
    woken = [commit.timings.num_woken for commit in harness.commits(1)]
    assert len(woken) > 20 and all(4 <= number <= 2 * 16 for number in woken)
    assert goodput.time.experts.at(5, 5) != before
