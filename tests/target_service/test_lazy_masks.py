"""Windows judged without masks, and under masks where they need them, are what windows under masks from the start are;
random rows, constraints and drafts, and ways to be nearly right that are seen."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.engines import COUPLED, GRAMMAR_EOS, VOCAB, AtOnce, grammar_compiler, grammars_at_once, opened
from support.models import ascii_backend
from torch import Tensor

from outrider.engine.grammar.constraint import Constraint
from outrider.engine.grammar.masks import allowed_ids
from outrider.engine.grammar.source import GrammarSpec
from outrider.rpc.words.sampling_params import AcceptanceRule, LogprobsMode
from outrider.rpc.words.structured import Reasoning, StructuredOutput
from outrider.target_service import lazy_masks, verifier
from outrider.target_service.draft_buffer import Window
from outrider.target_service.grammars import Grammars, spec_of
from outrider.target_service.scheduler import ScheduledSequence
from outrider.target_service.sequence import TargetLimits, TargetSequence, admit
from outrider.target_service.verifier import HostVerifier

PROMPT = (5, 6, 7, 8)
K = 4
CONSTRAINTS = (
    StructuredOutput(regex="[a-m]{2,40}"),
    StructuredOutput(regex="([ab]{2,3} )+end"),
    StructuredOutput(choice=("yes", "yesterday", "no")),
    StructuredOutput(json_object=True),
    None,
)
GREEDY: dict[str, Any] = {}
RULES: dict[str, dict[str, Any]] = {"greedy": GREEDY, "coupled": {"temperature": 0.8, "acceptance": COUPLED}}
BESIDE: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.5, "logit_bias": {40: 5.0}},
    {"min_tokens": 30, "stop_token_ids": (70,)},
    {"ignore_eos": True, "bad_words_ids": ((66,), (65, 67))},
]
TREE = (0, 0, 2, 2)  # parents


def new_target(number: int, rng: random.Random, constraint: StructuredOutput | None, **options: Any) -> TargetSequence:
    """One whose text is somewhere inside its constraint."""
    limits = TargetLimits(VOCAB, 4096, (GRAMMAR_EOS,), 1024)
    request = opened(number, PROMPT, structured_output=constraint, seed=number, max_tokens=90, **options)
    if constraint is not None and rng.random() < 0.2:
        request = replace(request, reasoning=Reasoning((41, 42), (43,), max_tokens=3))
    target = admit(request, None, (1, number), print, limits, number, 0.0)
    spec = spec_of(target)
    if spec is not None:
        matcher, output = grammar_compiler().compile(spec).matcher(), list[int]()
        for _ in range(rng.randrange(6)):
            known = sorted(allowed_ids(matcher.masks(())[0], VOCAB) - {GRAMMAR_EOS})
            output += rng.sample(known, min(1, len(known)))
            matcher.advance(output[-1:] if known else ())
        target = admit(replace(request, output_ids=tuple(output)), None, (1, number), print, limits, number, 0.0)
        target.sampler.constrain(matcher, (GRAMMAR_EOS,) if request.sampling.ignore_eos else ())
    return target


def scheduled(target: TargetSequence, drafted: Sequence[int], parents: Sequence[int] = ()) -> ScheduledSequence:
    committed, rows = target.committed, len(drafted) + 1
    window = Window(1, tuple(drafted), (None,) * len(drafted), False, parents=tuple(parents))
    return ScheduledSequence(target, committed, committed - 1, rows, window, takes_next=True, num_logits=rows)


def judged(rows: Sequence[Tensor], windows: Sequence[ScheduledSequence], *, lazily: bool) -> list[Any]:
    """What the target says of windows of these rows, [rows, vocab] each: in their order, all but whose it is."""
    grammars, host, first = grammars_at_once(), HostVerifier(VOCAB), 0
    placed: list[ScheduledSequence] = []
    for window in windows:
        placed.append(replace(window, first_logit=first))
        first += window.num_logits
    masks = grammars.start(placed, host.takes_masks_lazily) if lazily else grammars.start(placed)
    if masks is not None:
        masks.wait(0.0)
    found = {
        one.scheduled.target.key: (one.ids, one.origins, one.num_accepted, one.finish_reason, one.invalid, one.path)
        for one in host.launch(torch.cat([*rows]), placed, masks).read()
    }
    if masks is not None:
        masks.close()
    return [found[window.target.key] for window in windows]


def drafted_for(target: TargetSequence, rows: Tensor, rng: random.Random) -> list[int]:  # [rows, vocab]
    """Often what the target takes itself, else anything."""
    drafted: list[int] = []
    for row in range(K):
        [(ids, _, num_accepted, *_)] = judged([rows[: row + 1]], [scheduled(target, drafted)], lazily=False)
        holds = num_accepted == row and len(ids) == row + 1 and rng.random() < 0.85
        drafted.append(ids[-1] if holds else rng.randrange(VOCAB))
    return drafted


def windows_of(seed: int, as_tree: bool, options: dict[str, Any]) -> tuple[list[Tensor], list[ScheduledSequence]]:
    """One of each constraint, and their rows, [rows, vocab] each, of which some hold NaN or infinity."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    rows, windows = [], []
    for number, constraint in enumerate(CONSTRAINTS):
        own = {name: value for name, value in options.items() if constraint is not None or name != "ignore_eos"}
        target = new_target(number, rng, constraint, **own)
        rows.append(2.5 * torch.randn(K + 1, VOCAB, generator=generator))
        if rng.random() < 0.1:
            rows[-1][rng.randrange(K + 1), rng.randrange(VOCAB)] = rng.choice([torch.nan, torch.inf, -torch.inf])
        drafted = drafted_for(target, rows[-1], rng)
        if as_tree:  # the right token may be the second child, and what follows stands below it
            drafted = [rng.randrange(VOCAB), *drafted[:2], rng.randrange(VOCAB)]
            rows[-1] = rows[-1][[0, 3, 1, 2, 4]]
        windows.append(scheduled(target, drafted, TREE if as_tree else ()))
    return rows, windows


CASES = [(rule, beside, as_tree) for rule in RULES for beside in range(len(BESIDE)) for as_tree in (False, True)]


@pytest.mark.parametrize(("rule", "beside", "as_tree"), CASES)
def test_lazily_chosen_is_chosen_under_the_mask(rule: str, beside: int, as_tree: bool, prove: bool) -> None:
    most = 0
    for seed in range(400 if prove else 6):
        rows, windows = windows_of(seed, as_tree, RULES[rule] | BESIDE[beside])
        expected = judged(rows, windows, lazily=False)
        assert judged(rows, windows, lazily=True) == expected, seed
        most = max(most, *(num_accepted for _, _, num_accepted, *_ in expected))
    assert most >= (2 if as_tree else 3)


def differs(rule: str, monkeypatch: pytest.MonkeyPatch, *bug: Any, **options: Any) -> bool:
    """Whether some windows differ from those under masks from the start, with something in another's place."""
    for seed in range(12):
        rows, windows = windows_of(seed, False, RULES[rule] | options)
        expected = judged(rows, windows, lazily=False)
        with monkeypatch.context() as patch:
            patch.setattr(*bug)
            if judged(rows, windows, lazily=True) != expected:
                return True
    return False


class NoThread(AtOnce):
    """Makes no mask."""

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        raise RuntimeError("a mask was asked for")


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("place", range(lazy_masks.MOST_LOOKS + 1))
def test_a_mask_is_made_where_none_of_the_best_is_allowed(rule: str, place: int) -> None:
    """With the only allowed ids of a row, A and more, at that place among its best."""
    backend, row = ascii_backend(VOCAB, GRAMMAR_EOS), torch.zeros(VOCAB)
    target = new_target(1, random.Random(2), None, **RULES[rule])
    letters = backend.encode("Axyzuvw").ids
    target.sampler.constrain(grammar_compiler().compile(GrammarSpec("regex", "[ABC]{9}")).matcher())
    best = [*letters[1 : place + 1], letters[0], *letters[place + 1 :]]
    row[best] = torch.arange(len(best), 0, -1.0)
    grammars, host = Grammars(grammar_compiler(), AtOnce(), NoThread()), HostVerifier(VOCAB)
    host._noise = replace(host._noise, generate=lambda seeds, *_: torch.ones(len(seeds), VOCAB))
    window = scheduled(target, ())
    masks = grammars.start([window], host.takes_masks_lazily)
    assert masks is not None
    if place == lazy_masks.MOST_LOOKS:
        with pytest.raises(RuntimeError, match="a mask was asked for"):
            host.launch(row[None], [window], masks).read()
    else:
        assert [one.ids for one in host.launch(row[None], [window], masks).read()] == [(letters[0],)]


@pytest.mark.parametrize("gap", [87.0, 103.0])  # float32's normal numbers end at e^-87.3, all of them at e^-103.3
def test_what_is_unlikely_without_the_mask_competes_under_it(gap: float) -> None:
    """Two allowed tokens, one of them 1.65 times as likely as the other, far below a forbidden one."""
    letters, row = ascii_backend(VOCAB, GRAMMAR_EOS).encode("xAB").ids, torch.full((VOCAB,), -torch.inf)
    row[letters] = torch.tensor([0.0, -0.2 * gap, -0.2 * gap - 0.1])
    chosen = set()
    for seed in range(12):
        target = new_target(1, random.Random(2), None, temperature=0.2, acceptance=COUPLED)
        target.sampler.constrain(grammar_compiler().compile(GrammarSpec("regex", "[AB]{9}")).matcher())
        noise, wait = torch.ones(VOCAB), 1.0 + seed / 8  # B wins from e^0.5 on
        noise[letters[1:]] = 1e-7 * torch.tensor([wait, 1.0])  # so that noise / probability is a number yet
        host = HostVerifier(VOCAB)
        host._noise = replace(host._noise, generate=lambda seeds, *_, noise=noise: noise.expand(len(seeds), -1).clone())
        grammars = grammars_at_once()
        window = scheduled(target, ())
        masks = grammars.start([window], host.takes_masks_lazily)
        assert masks is not None
        [one] = host.launch(row[None], [window], masks).read()
        assert one.ids == ((letters[2],) if wait > 1.6487213 else (letters[1],))
        chosen.add(one.ids)
    assert len(chosen) == 2


@pytest.mark.parametrize("rule", RULES)
def test_a_forbidden_choice_that_is_not_made_again_is_seen(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert differs(rule, monkeypatch, lazy_masks, "_settled", lambda again, masks: ())


@pytest.mark.parametrize("rule", RULES)
def test_another_spelling_of_what_is_forced_is_seen(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token that no mask has. Single characters have one spelling, so here the constraint takes anything."""
    assert differs(rule, monkeypatch, Constraint, "num_allowed", lambda self, before, ids: len(ids))


@pytest.mark.parametrize("options", [{"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.1}], ids=str)
def test_masks_that_change_what_is_kept_are_made_before(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(4):
        rows, windows = windows_of(seed, False, RULES["coupled"] | options)
        assert judged(rows, windows, lazily=True) == judged(rows, windows, lazily=False)
    assert differs("coupled", monkeypatch, verifier, "takes_masks_lazily", lambda target: True, **options)


def test_who_needs_masks_before() -> None:
    def is_lazy(**options: Any) -> bool:
        return HostVerifier(VOCAB).takes_masks_lazily(new_target(1, random.Random(0), CONSTRAINTS[0], **options))

    coupled = RULES["coupled"]
    assert is_lazy() and is_lazy(top_k=3, top_p=0.5, min_p=0.3)  # which the arg max does not ask
    assert is_lazy(**coupled) and not is_lazy(**coupled, top_p=0.9) and not is_lazy(**coupled, min_p=0.1)
    assert not is_lazy(temperature=1.0, acceptance=AcceptanceRule.REJECTION)
    assert not is_lazy(temperature=1.0, acceptance=AcceptanceRule.BLOCK)
    assert is_lazy(logprobs=2, logprobs_mode=LogprobsMode.RAW_LOGPROBS)
    assert not is_lazy(logprobs=2, logprobs_mode=LogprobsMode.PROCESSED_LOGITS)
    slow = new_target(1, random.Random(0), CONSTRAINTS[0])
    assert slow.sampler.constraint is not None
    slow.sampler.constraint.matcher.is_slow = True
    assert not HostVerifier(VOCAB).takes_masks_lazily(slow)
