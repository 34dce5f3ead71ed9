"""What a head's layers hold of every sequence is what they would hold were it computed anew, whatever happened to the
sequence's blocks; and whatever shares a step with it, output is the target's own."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engines import COUPLED, VOCAB, TargetHarness, opened, speculate, tiny_model
from support.heads import passes_of, random_head

from outrider.engine.batch import BatchEntry, build_batch
from outrider.engine.kv_cache import KVCache
from outrider.engine.kv_cache_manager import BLOCK_SIZE
from outrider.engine.loader import LoadedModel
from outrider.proposers.heads.loading import AnyHead
from outrider.rpc.messages import Close, Credit, Open
from outrider.target_service.goodput import Goodput
from outrider.target_service.heads.drafter import HeadDrafter
from outrider.target_service.sequence import TargetSequence

LAYERS = ("eagle3", "p-eagle", "dflash", *(pytest.param(layout, marks=pytest.mark.slow) for layout in ("eagle", "mtp")))
FAR = 1 << 20


@pytest.fixture(scope="module")
def models() -> tuple[Any, LoadedModel]:
    return tiny_model()


@pytest.fixture(params=LAYERS)
def head(request: pytest.FixtureRequest, models: tuple[Any, LoadedModel], tmp_path: Path) -> AnyHead:
    return random_head(request.param, tmp_path, *models)


def prompt_of(seed: int, length: int = 20) -> list[int]:
    return random.Random(seed).choices(range(3, VOCAB), k=length)


class Checked:
    """An engine that is looked at after every few steps."""

    def __init__(self, models: tuple[Any, LoadedModel], head: AnyHead, every: int = 3, **options: Any) -> None:
        self.hf, self.head, self.every = models[0], head, every
        self.harness = TargetHarness.of(models[1], head=head, **options)
        self.num_checked = 0

    def run(self, max_steps: int = 2000) -> None:
        for step in range(max_steps):
            wait = self.harness.engine.step(self.harness.now)
            if step % self.every == 0 or wait != 0.0:
                for target in self.harness.engine.scheduler.sequences.values():
                    self.check(target)
            if wait != 0.0:
                return
        raise RuntimeError("the engine never became idle")

    def check(self, target: TargetSequence) -> None:
        """Every place below `head_end`: all places that the target has, but where blocks were short, and of the block
        that plain tokens fill."""
        sequence, end = target.sequence, target.head_end
        if end < 2:
            return
        num_computed = sequence.num_computed_tokens
        assert num_computed - num_computed % BLOCK_SIZE <= end <= num_computed + 1
        text = sequence.tokens[:end]
        with torch.inference_mode():
            states = self.hf(torch.tensor([text]), output_hidden_states=True).hidden_states
            features = torch.stack([states[layer][0, : end - 1] for layer in self.head.taps], dim=1)
            table = list(range(-(-end // BLOCK_SIZE)))
            anew = KVCache.allocate(self.head.layers, len(table), torch.float32, "cpu")
            self.head.fill(build_batch([BatchEntry(text[1:], 1, table, 1)], BLOCK_SIZE, "cpu"), features, anew)
        local = self.harness.engine.parts[-1]
        assert isinstance(local, HeadDrafter)
        for found, expected in zip((*local._cache.keys, *local._cache.values), (*anew.keys, *anew.values), strict=True):
            rows = found[torch.tensor(sequence.block_table)].flatten(0, 1)[1:end]
            torch.testing.assert_close(rows, expected.flatten(0, 1)[1:end], atol=1e-4, rtol=1e-3)
        self.num_checked += 1


def asked(number: int, prompt: list[int], head: AnyHead, **sampling: Any) -> Open:
    return opened(number, prompt, method=head.name, **sampling)


def alone(loaded: LoadedModel, request: Open) -> list[int]:
    return TargetHarness.of(loaded).decode_plain(request.sequence_id, request)


@pytest.mark.parametrize("num_blocks", [64, 15])
def test_chunks_preemption_and_prefixes(models: Any, head: AnyHead, num_blocks: int) -> None:
    """Cold, then warm; with few blocks sequences give theirs up, and a head finds none for a row."""
    loaded = models[1]
    checked = Checked(models, head, num_blocks=num_blocks, max_rows=24)
    harness = checked.harness
    for batch in range(2):
        requests = [
            asked(10 * batch + n, prompt_of(n % 3, 14 + 9 * n), head, max_tokens=24, temperature=float(n % 2),
                  acceptance=COUPLED, seed=n)
            for n in range(1, 6)
        ]  # fmt: skip
        for request in requests:
            harness.send(request, Credit(request.sequence_id, FAR, request.sequence_id % 4))
        checked.run()
        assert [harness.output(r.sequence_id) for r in requests] == [alone(loaded, r) for r in requests]
    assert checked.num_checked > 20 and harness.engine.scheduler.num_found > 0
    assert (harness.engine.scheduler.num_preempted > 0) == (num_blocks < 64)


@pytest.mark.parametrize("length", [16, 17, 31, 40])
def test_forks(models: Any, head: AnyHead, length: int) -> None:
    """Of a prompt that ends at a block's end, behind it, before it and in the middle of one."""
    checked = Checked(models, head, every=1)
    first = asked(1, prompt_of(2, length), head, max_tokens=20, temperature=1.0, acceptance=COUPLED, seed=3)
    forks = [
        asked(n, [], head, fork_of=1, completion=n - 1, max_tokens=20, temperature=1.0, acceptance=COUPLED, seed=3)
        for n in (2, 3)
    ]
    for request in (first, *forks):
        checked.harness.send(request, Credit(request.sequence_id, FAR, 4))
    checked.run()
    for completion, number in enumerate((1, 2, 3)):
        whole = asked(9, prompt_of(2, length), head, completion=completion, max_tokens=20, temperature=1.0,
                      acceptance=COUPLED, seed=3)  # fmt: skip
        assert checked.harness.output(number) == alone(models[1], whole)
        drafted = [commit.num_drafted for commit in checked.harness.commits(number)]
        assert all(drafted[1:-1]), "a fork is drafted for from its second round on"


@pytest.mark.parametrize("k", [0, 1, 4])
def test_a_block_that_the_head_has_to_wait_for(models: Any, head: AnyHead, k: int) -> None:
    """No block is free where the row behind a block's end is due; the target's next step takes another's."""
    checked = Checked(models, head, every=1, num_blocks=4)
    checked.harness.send(asked(1, prompt_of(1, 20), head, max_tokens=9), Credit(1, 21, 0))
    checked.run()
    checked.harness.send(asked(2, prompt_of(2, 30), head, max_tokens=20), Credit(2, FAR, k))
    checked.run()
    assert checked.harness.output(2) == alone(models[1], asked(2, prompt_of(2, 30), head, max_tokens=20))
    assert checked.harness.engine.scheduler.num_preempted == 1 and checked.num_checked > 4


def test_windows_that_are_cut(models: Any, head: AnyHead) -> None:
    """What a cut leaves of a chain is the next window, for which nothing was drafted: its time is told once."""
    loaded, checked = models[1], Checked(models, head)
    checked.harness.engine.scheduler.goodput = Goodput(((1, 100), (4, 1_000), (64, 64_000)))
    requests = [
        asked(number, prompt_of(number), head, max_tokens=24, temperature=float(number % 2), acceptance=COUPLED)
        for number in range(1, 5)
    ]
    for request in requests:
        checked.harness.send(request, Credit(request.sequence_id, FAR, 6))
    checked.run()
    assert [checked.harness.output(r.sequence_id) for r in requests] == [alone(loaded, r) for r in requests]
    assert checked.harness.engine.scheduler.num_rows_cut > 0
    for request in requests:
        told: dict[int | None, list[bool]] = {}
        for commit in checked.harness.commits(request.sequence_id):
            told.setdefault(commit.chain, []).append(commit.timings.draft_us > 0)
        assert not any(told.pop(None)) and all(took == [True] + [False] * (len(took) - 1) for took in told.values())


@pytest.mark.parametrize("layout", ["eagle3", "medusa", "p-eagle"])
def test_a_head_whose_numbers_are_none_drafts_nothing(models: Any, layout: str, tmp_path: Path) -> None:
    hf, loaded = models
    broken = random_head(layout, tmp_path, hf, loaded, scale=float("nan"))
    harness = TargetHarness.of(loaded, head=broken)
    harness.send(asked(1, prompt_of(1), broken, max_tokens=12), Credit(1, FAR, 4))
    harness.run()
    assert harness.output(1) == alone(models[1], asked(1, prompt_of(1), broken, max_tokens=12))
    assert {commit.num_drafted for commit in harness.commits(1)} == {0}


def test_others_in_the_step(models: Any, head: AnyHead) -> None:
    """One of another method, one without credit for windows, one that a draft elsewhere drafts for."""
    loaded, checked = models[1], Checked(models, head)
    requests = {
        1: asked(1, prompt_of(1), head, max_tokens=16),
        2: opened(2, prompt_of(1), max_tokens=16, method="ngram"),
        3: opened(3, prompt_of(2), max_tokens=16),
    }
    for number, request in requests.items():
        checked.harness.send(request, Credit(number, FAR, 3))
    checked.run()
    assert all(checked.harness.output(number) == alone(loaded, request) for number, request in requests.items())
    assert [any(c.num_drafted for c in checked.harness.commits(n)) for n in (1, 2, 3)] == [True, False, False]
    piece = speculate(checked.harness, opened(4, prompt_of(1), max_tokens=9), 2, lambda _, k: ([5] * k, [None] * k))
    assert piece == alone(loaded, opened(4, prompt_of(1), max_tokens=9))


def test_credit_that_ends_and_comes_back(models: Any, head: AnyHead) -> None:
    """Of tokens, and of windows: what stands still goes on; what is off is not drafted for, and its rows are kept."""
    loaded, checked, prompt = models[1], Checked(models, head, every=1), prompt_of(5, 30)
    checked.harness.send(asked(1, prompt, head, max_tokens=40))
    windows: list[list[int]] = []
    for until, max_window in ((36, 4), (42, 0), (43, 4), (52, 4), (70, 200)):
        seen = len(checked.harness.commits(1))
        checked.harness.send(Credit(1, until, max_window))
        checked.run()
        windows.append([commit.num_drafted for commit in checked.harness.commits(1)[seen:]])
    assert checked.harness.output(1) == alone(loaded, asked(2, prompt, head, max_tokens=40))
    assert [max(drafted) > 0 for drafted in windows] == [True, False, False, True, True]
    assert max(windows[-1]) > 4


def test_plain_tokens_wait_for_the_end_of_their_block(models: Any, head: AnyHead) -> None:
    """Off costs next to nothing, and what is drafted afterwards is what it would have been."""
    loaded, prompt, request = models[1], prompt_of(6, 20), {"max_tokens": 60}
    checked = Checked(models, head, every=1)
    local = checked.harness.engine.parts[-1]
    assert isinstance(local, HeadDrafter)
    checked.harness.send(asked(1, prompt, head, **request), Credit(1, 60, 0))
    checked.run()
    assert local.num_steps == 1 + 2, "the prompt, and the two blocks that are full"
    seen = len(checked.harness.commits(1))
    checked.harness.send(Credit(1, FAR, 3))
    checked.run()
    always = Checked(models, head, every=1)
    always.harness.send(asked(1, prompt, head, **request), Credit(1, FAR, 3))
    always.run()
    assert checked.harness.output(1) == always.harness.output(1) == alone(loaded, asked(2, prompt, head, **request))
    drafted = [commit.num_drafted for commit in checked.harness.commits(1)[seen:]]
    assert max(drafted) == 3


def test_failover_to_another_target(models: Any, head: AnyHead) -> None:
    """What was generated elsewhere is computed here, and drafted for from then on, under other numbers of chains."""
    loaded, prompt = models[1], prompt_of(7, 20)
    options = {"max_tokens": 30, "temperature": 1.0, "acceptance": COUPLED, "seed": 4}
    expected = alone(loaded, asked(1, prompt, head, **options))
    for known in (1, 11, 12, 13):
        checked = Checked(models, head)
        request = asked(1, prompt, head, output_ids=tuple(expected[:known]), suspect=known == 11, **options)
        checked.harness.send(request, Credit(1, FAR, 5))
        checked.run()
        assert checked.harness.output(1) == expected[known:]
        assert all(commit.num_drafted for commit in checked.harness.commits(1)[1:-1])


def test_a_head_that_fails_once_goes_on(models: Any, head: AnyHead, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, prompt = models[1], prompt_of(4)
    name, calls = passes_of(head)[0], [0]
    first = getattr(type(head), name)

    def flaky(self: AnyHead, *arguments: Any) -> Any:
        calls[0] += 1
        if calls[0] == 3:
            raise RuntimeError("out of luck")
        return first(self, *arguments)

    monkeypatch.setattr(type(head), name, flaky)
    harness = TargetHarness.of(loaded, head=head)
    harness.send(asked(1, prompt, head, max_tokens=12), Credit(1, FAR, 1))
    harness.run()
    assert harness.output(1) == alone(loaded, asked(1, prompt, head, max_tokens=12))
    drafted = [commit.num_drafted for commit in harness.commits(1)]
    assert drafted[:5] == [0, 1, 1, 0, 1]
    harness.send(Close(1))
    assert harness.engine.cache.pool.num_free == 64
