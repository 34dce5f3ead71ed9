"""Identity: in every circumstance the services emit the very tokens of plain decoding.

Prompts are decoded through the gateway's loop by a target and a draft service over gRPC, in the cells of a covering
design, of which one has the weights of the target: float32, or integers of 8 or of 4 bits, and one whether it drafts
with those rounded to 4. In batch-invariant mode every token must be equal, greedy and coupled, at the first attempt.
In ordinary mode outputs may part where the scores of two tokens are as close as rounding is coarse; these places are
printed and counted. Short: 128 prompts of 64 tokens, more than a bug needs to be seen; with --prove 1,000 of 256."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import combinations, product

import pytest
import torch
from lossless.identity import LEVELS, NOT_CROSSED, Cell, Outcome, Work, assign, cells, check_happened, run, with_guesses
from lossless.plain import (
    VOCAB,
    Arithmetic,
    NearTie,
    PlainOutputs,
    Weights,
    first_difference,
    hf_model,
    make_prompt,
    near_tie,
    plain_scores,
    rounded_draft,
    score_bound,
    target_model,
)
from support.engines import hf_greedy
from support.models import letters_backend, logits_of

from outrider.draft_service.vocabularies import LoadedTokenizer, join
from outrider.engine.batch import BatchEntry
from outrider.engine.model_runner import ModelRunner
from outrider.engine.models.decoder_cpu import NativeDecoder
from outrider.engine.worker import set_switch_interval
from outrider.kernels.cpu.decoder import Kind
from outrider.proposers.reencoding import JoinedVocabulary
from outrider.proposers.vocabulary_map import VocabularyMap
from outrider.rpc.lexicon import lexicon_of
from outrider.rpc.words.lexicon import Lexicon, Token
from outrider.rpc.words.sampling_params import SamplingParams

pytestmark = pytest.mark.timeout(1800)  # 64 streams of the long form take minutes where others use the cores, too

SHORT_PROMPTS = 128  # as many as the largest batches of both rules need: none is twice in a cell
SMALL_LEVELS = {**LEVELS, "batch": (1, 4, 16), "k": (0, 1, 3, 8)}  # of the design for ordinary mode
TWINS_CELL = Cell(
    16,
    3,
    "sequential",
    cut=False,
    chunked=False,
    warm=False,
    preempted=False,
    killed=False,
    coupled=False,
    method="draft_model",
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    prove = bool(metafunc.config.getoption("--prove"))
    works: list[Work] = []
    if "invariant_work" in metafunc.fixturenames:
        works = assign(cells(crossed=prove), 1000 if prove else SHORT_PROMPTS, 256 if prove else 64)
        # Short: every fourth cell by PyTorch, which takes ten times as long, and the others by the C kernels.
        by_c = works if prove else [work for place, work in enumerate(works) if place % 4 != 1]
        dealt = [(Arithmetic.C, work) for work in by_c]
        dealt += [(Arithmetic.INVARIANT, work) for work in (works if prove else works[1::4])]
        metafunc.parametrize("invariant_work", dealt, ids=[f"{how.name} {work.cell.name}" for how, work in dealt])
    if "ordinary_work" in metafunc.fixturenames:
        works = assign(cells(prove, SMALL_LEVELS), 100 if prove else 40, 256 if prove else 64, truncated=False)
        dealt = [(Arithmetic.ORDINARY, work) for work in works]
        metafunc.parametrize("ordinary_work", dealt, ids=[work.cell.name for _, work in dealt])


@pytest.fixture(scope="module", autouse=True)
def quick_switches() -> Iterator[None]:
    """As in a service's process: the event loop need not wait long for the device thread."""
    before = sys.getswitchinterval()
    set_switch_interval()
    yield
    sys.setswitchinterval(before)


@pytest.fixture(scope="module")
def outcomes() -> dict[Cell, Outcome]:
    """What happened in the cells of batch-invariant mode."""
    return {}


@pytest.fixture(scope="module")
def near_ties(request: pytest.FixtureRequest) -> Iterator[dict[str, list[NearTie]]]:
    """Of ordinary mode, by target; shown at the end."""
    found: dict[str, list[NearTie]] = {}
    yield found
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        for target, ties in found.items():
            print(f"\nordinary mode, {target}: {len(ties)} near-ties", *ties, sep="\n")


@pytest.mark.parametrize("crossed", [False, True])
def test_every_pair_of_circumstances_and_every_prompt_occurs(crossed: bool) -> None:
    design = [asdict(cell) for cell in cells(crossed)]
    for (one, levels), (other, other_levels) in combinations(LEVELS.items(), 2):
        if crossed or {one, other} not in NOT_CROSSED:
            assert {(row[one], row[other]) for row in design} == set(product(levels, other_levels)), (one, other)
    by_own = {cell.weights for cell in cells(crossed) if cell.own and cell.k and "draft_model" in cell.method}
    assert by_own == set(LEVELS["weights"])
    num_prompts = 1000 if crossed else SHORT_PROMPTS
    works = assign(cells(crossed), num_prompts, 1)
    dealt = {prompt.ids for work in works for prompt in work.prompts[: work.cell.batch]}
    assert len(dealt) == num_prompts


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_products_of_few_bits_stay_packed(weights: Weights) -> None:
    """Of the target, and of what it drafts with; and each computes other numbers."""
    target, own = target_model(Arithmetic.C, weights), rounded_draft(weights)
    for loaded in (target, own):
        assert isinstance(loaded.model, NativeDecoder)
        first = loaded.model.kernel._layers[0]
        assert first.qkv.kind == Kind.SECTIONS
        assert first.output.kind == first.gate.kind == first.up.kind == first.down.kind == Kind.PACKED
    ids = list(make_prompt(1, False, 1).ids[:40])
    others = (target_model(Arithmetic.C), own)
    assert all(not torch.equal(logits_of(target, ids), logits_of(other, ids)) for other in others)


@pytest.mark.usefixtures("prove")  # which says how many there are
async def test_batch_invariant(
    invariant_work: tuple[Arithmetic, Work], plain: PlainOutputs, outcomes: dict[Cell, Outcome]
) -> None:
    arithmetic, work = invariant_work
    work = with_guesses(work, plain, arithmetic)
    outcome = await run(work, target_model(arithmetic, work.cell.weights))
    for prompt, output in zip(work.prompts, outcome.outputs, strict=True):
        expected = plain.of(prompt, arithmetic, work.cell.weights)
        assert len(expected) == prompt.sampling.max_tokens
        assert first_difference(expected, output) is None, (prompt.sampling, expected, output)
    check_happened(work, outcome)
    outcomes[work.cell] = outcome


def test_drafts_were_right_and_wrong(outcomes: dict[Cell, Outcome], prove: bool) -> None:
    """Under either rule and proposer; a design in which every draft is refused shows little."""
    if len(outcomes) < len(cells(crossed=prove)):
        pytest.skip("needs all cells of the design")
    for coupled in (False, True):
        for method in LEVELS["method"]:
            chosen = [o for cell, o in outcomes.items() if (cell.coupled, cell.method) == (coupled, method)]
            drafted, accepted = sum(o.num_drafted for o in chosen), sum(o.num_accepted for o in chosen)
            assert 0.01 * drafted < accepted < 0.99 * drafted, (coupled, method)
    assert any(outcome.draft_preemptions for outcome in outcomes.values())
    assert any(outcome.branches_taken for outcome in outcomes.values())


@pytest.mark.usefixtures("prove")
async def test_ordinary(
    ordinary_work: tuple[Arithmetic, Work], plain: PlainOutputs, near_ties: dict[str, list[NearTie]]
) -> None:
    arithmetic, work = ordinary_work
    work = with_guesses(work, plain, arithmetic)
    outcome = await run(work, target_model(arithmetic, work.cell.weights))
    ties = judge(work, outcome, plain, work.cell.weights)
    near_ties.setdefault(f"random target in {work.cell.weights}", []).extend(ties)
    check_happened(work, outcome)


async def test_twins(plain: PlainOutputs, near_ties: dict[str, list[NearTie]]) -> None:
    """A target whose tokens come in pairs with almost equal logits. Ordinary mode parts from plain decoding, at
    near-ties only; batch-invariant mode does not even here, and the C kernels never do."""
    (work,) = assign([TWINS_CELL], 32, 64)
    for arithmetic in Arithmetic:
        plain.start(work.prompts, arithmetic, "twins")
    for arithmetic in (Arithmetic.C, Arithmetic.INVARIANT):
        outcome = await run(work, target_model(arithmetic, "twins"))
        assert outcome.outputs == [plain.of(prompt, arithmetic, "twins") for prompt in work.prompts]
    outcome = await run(work, target_model(Arithmetic.ORDINARY, "twins"))
    near_ties["target of twins"] = judge(work, outcome, plain, "twins")
    assert near_ties["target of twins"]


def other_vocabulary() -> VocabularyMap:
    """The target's tokens are letters, of which the draft lacks every fifth and spells it with two of its own."""
    own = tuple(Token("text", chr(0x100 + token).encode()) for token in range(VOCAB))
    spelled = {token: own[token].content + own[token - 1].content for token in range(4, VOCAB, 5)}
    tokens = tuple(Token("text", spelled.get(token, own[token].content)) for token in range(VOCAB))
    return VocabularyMap.between(Lexicon("target", tokens, {}), Lexicon("draft", own, {}))


def reencoded() -> JoinedVocabulary:
    """Two such vocabularies, joined by their text. The target cannot say every fifth letter."""
    own = [chr(0x4E00 + token) for token in range(VOCAB)]
    names = [own[token - 1] + own[token - 2] if token % 5 == 4 else own[token] for token in range(VOCAB)]
    target, draft = (
        LoadedTokenizer(backend, lexicon_of(backend, {})) for backend in (letters_backend(names), letters_backend(own))
    )
    return join(target, draft, "string")


MAPPED_CELLS = [
    replace(TWINS_CELL, batch=4, killed=True),
    replace(TWINS_CELL, batch=4, ahead="branches", coupled=True, warm=True),
    replace(TWINS_CELL, batch=4, ahead="chains", chunked=True, warm=True),
    replace(TWINS_CELL, batch=1, ahead="branches", coupled=True, killed=True),
]

REENCODED_CELLS = [replace(cell, ahead="chains" if cell.ahead == "branches" else cell.ahead) for cell in MAPPED_CELLS]


@pytest.mark.parametrize("cell", MAPPED_CELLS, ids=lambda cell: cell.name)
async def test_a_draft_of_another_vocabulary(cell: Cell, plain: PlainOutputs) -> None:
    (work,), mapping = assign([cell], 8, 48), other_vocabulary()
    plain.start(work.prompts, Arithmetic.C)
    outcome = await run(work, target_model(Arithmetic.C), JoinedVocabulary(mapping, mapping))
    assert outcome.outputs == [plain.of(prompt, Arithmetic.C) for prompt in work.prompts]
    check_happened(work, outcome)
    assert 0 < outcome.num_accepted < outcome.num_drafted


@pytest.mark.parametrize("cell", REENCODED_CELLS, ids=lambda cell: cell.name)
async def test_a_draft_that_is_reencoded(cell: Cell, plain: PlainOutputs) -> None:
    (work,) = assign([cell], 8, 48)
    plain.start(work.prompts, Arithmetic.C)
    outcome = await run(work, target_model(Arithmetic.C), reencoded())
    assert outcome.outputs == [plain.of(prompt, Arithmetic.C) for prompt in work.prompts]
    check_happened(work, outcome)
    assert 0 < outcome.num_accepted < outcome.num_drafted


PARD_CELLS = [
    replace(cell, method="pard", batch=batch) for cell, batch in zip(MAPPED_CELLS, (4, 4, 16, 1), strict=True)
] + [replace(TWINS_CELL, method="pard", batch=4, k=8, ahead="chains", coupled=True, preempted=True)]


@pytest.mark.parametrize("cell", PARD_CELLS, ids=lambda cell: cell.name)
async def test_a_draft_in_parallel(cell: Cell, plain: PlainOutputs) -> None:
    """Its model knows nothing of masks, so that most of what they give is refused."""
    (work,) = assign([cell], 16, 48)
    plain.start(work.prompts, Arithmetic.C)
    outcome = await run(work, target_model(Arithmetic.C))
    assert outcome.outputs == [plain.of(prompt, Arithmetic.C) for prompt in work.prompts]
    check_happened(work, outcome)
    assert 0 < outcome.num_accepted < outcome.num_drafted


def judge(work: Work, outcome: Outcome, plain: PlainOutputs, weights: Weights) -> list[NearTie]:
    """The near-ties of a cell in ordinary mode; fails at any other difference."""
    ties = []
    for prompt, output in zip(work.prompts, outcome.outputs, strict=True):
        expected = plain.of(prompt, Arithmetic.ORDINARY, weights)
        if expected != output:
            loaded, hf = target_model(Arithmetic.ORDINARY, weights), hf_model(weights == "twins")
            ties.append(near_tie(expected, output, prompt, loaded, hf))
    return ties


def test_plain_decoding_is_transformers(plain: PlainOutputs, prove: bool) -> None:
    """Greedy, without parameters that transformers has not. Its order of summation is another one."""
    num_tokens = 256 if prove else 64
    bare = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    prompts = [make_prompt(number, False, num_tokens) for number in range(500 if prove else 100)]
    sample = [prompt for prompt in prompts if prompt.sampling == bare][: 40 if prove else 8]
    assert len(sample) == (40 if prove else 8)
    for prompt in sample:
        expected = hf_greedy(hf_model(), prompt.ids, num_tokens)
        for arithmetic in (Arithmetic.C, Arithmetic.INVARIANT):
            output = plain.of(prompt, arithmetic)
            if output != expected:
                print(near_tie(output, expected, prompt, target_model(arithmetic), hf_model()))


@pytest.mark.parametrize("coupled", [False, True])
def test_only_rounding_is_a_near_tie(coupled: bool, plain: PlainOutputs) -> None:
    """The second-best token in the place of the best is refused, wherever it is further away than the bound."""
    prompt = make_prompt(1, coupled, 64, truncated=False)
    output = plain.of(prompt, Arithmetic.ORDINARY)
    loaded, refused = target_model(Arithmetic.ORDINARY), 0
    for index in range(0, 64, 8):
        gap, second = second_best(plain_scores(prompt, output[:index], loaded), output[index])
        if gap > score_bound(prompt, len(prompt.ids) + index, hf_model()):
            with pytest.raises(AssertionError, match="no near-tie"):
                near_tie(output, [*output[:index], second, *output[index + 1 :]], prompt, loaded, hf_model())
            refused += 1
    assert refused >= 7
    with pytest.raises(AssertionError, match="lengths"):
        near_tie(output, output[:-1], prompt, loaded, hf_model())


def second_best(scores: torch.Tensor, best: int) -> tuple[float, int]:  # scores [vocab]
    """How far it lies behind, and which one it is. `best` must be the first."""
    values, ids = scores.topk(2)
    assert int(ids[0]) == best
    return float(values[0] - values[1]), int(ids[1])


def test_the_bound_is_near_what_rounding_does() -> None:
    """Logits of steps of many sizes differ by less than the bound, and not by far less."""
    prompt = make_prompt(1, False, 64)
    runner = ModelRunner(target_model(Arithmetic.ORDINARY).model, 8)
    ids, table = list(prompt.ids), list(range(8))

    def logits(step: int) -> torch.Tensor:  # [tokens, vocab]
        starts = range(0, len(ids), step)
        return torch.cat(
            [runner.forward([BatchEntry(ids[at : at + step], at, table, len(ids[at : at + step]))]) for at in starts]
        )

    one_by_one = logits(1)
    spread = max(float((logits(step) - one_by_one).abs().max()) for step in (2, 3, 5, 9, 17, 64, len(ids)))
    bound = score_bound(
        replace(prompt, sampling=replace(prompt.sampling, repetition_penalty=1.0)), len(ids), hf_model()
    )
    assert 2 * spread < bound < 200 * spread  # a gap is the difference of two logits
