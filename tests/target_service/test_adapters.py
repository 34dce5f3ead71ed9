"""Sequences with adapters in the target engine: the output of merged weights, caches apart, adapters that come and go,
turns where more are wanted than fit."""

from __future__ import annotations

import random
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.adapters import ATTENTION, merged, save_adapter
from support.engines import COUPLED, REJECTION, VOCAB, TargetHarness, hf_greedy, opened, oracle, speculate
from support.heads import random_head
from support.models import build_decoder, tiny_config, tiny_hf_model, tiny_state

from outrider.engine.adapters.loader import load_adapter
from outrider.engine.adapters.resident import AdapterRoom, ResidentAdapters
from outrider.engine.batch import PreparedAdapter
from outrider.engine.loader import LoadedModel
from outrider.rpc.errors import NotFound
from outrider.rpc.messages import Adapter, Close, Credit, from_failure
from outrider.target_service.adapters import TURN, AdapterTurns

NAMES = ("one", "two", "three", "four")


@dataclass
class Bench:
    """A tiny base, adapters of it, and transformers' models with each merged in ("": the base)."""

    loaded: LoadedModel
    hf: dict[str, Any]
    folders: dict[str, Path]

    def harness(self, slots: int = 2, names: Sequence[str] = NAMES, **options: Any) -> TargetHarness:
        """An engine with these adapters."""
        resident = ResidentAdapters(self.loaded.model, AdapterRoom(slots, 16))
        harness = TargetHarness.of(self.loaded, adapters=resident, **options)
        for name in names:
            info, prepared = self.adapter(resident, name)
            harness.engine.adapters.table.add(info, prepared)
        return harness

    def adapter(self, resident: ResidentAdapters, name: str) -> tuple[Adapter, PreparedAdapter]:
        loaded = load_adapter(self.folders[name], self.loaded.model, "base")
        return Adapter(name, loaded.digest, loaded.rank), resident.prepare(loaded)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    hf = tiny_hf_model()
    state, models, folders = tiny_state(hf), {"": hf}, {}
    for seed, name in enumerate(NAMES, start=1):
        folder = tmp_path_factory.mktemp("adapters") / name
        folders[name] = save_adapter(folder, state, seed=seed, scale=0.3) if seed < 4 else folder
        if seed == 4:
            save_adapter(folder, state, ATTENTION, seed=seed, scale=0.3, r=16, lora_alpha=32)
        models[name] = tiny_hf_model()
        models[name].load_state_dict(merged(state, folder), strict=False)
    return Bench(build_decoder(tiny_config(), state, batch_invariant=True), models, folders)


def prompt_of(seed: int, length: int = 20) -> list[int]:
    return random.Random(seed).choices(range(3, VOCAB), k=length)


@pytest.mark.parametrize("name", NAMES)
def test_greedy_output_is_that_of_merged_weights(bench: Bench, name: str) -> None:
    prompt = prompt_of(1)
    expected = hf_greedy(bench.hf[name], prompt, 24)
    harness = bench.harness()
    assert harness.decode_plain(1, opened(1, prompt, max_tokens=24, adapter=name)) == expected
    assert hf_greedy(bench.hf[""], prompt, 24) != expected, "the adapter shows"


@pytest.mark.parametrize("acceptance", [REJECTION, COUPLED])
def test_speculation_changes_no_token(bench: Bench, acceptance: Any) -> None:
    """Drafts that hold, and drafts of the base, which seldom do."""
    prompt = prompt_of(2)
    for options in ({"temperature": 0.0}, {"temperature": 0.8, "seed": 77}):
        if options["temperature"] and acceptance == REJECTION:
            continue
        request = opened(1, prompt, max_tokens=40, acceptance=acceptance, adapter="one", **options)
        plain = bench.harness().decode_plain(1, request)
        base = bench.harness().decode_plain(1, opened(1, prompt, max_tokens=40, acceptance=acceptance, **options))
        assert base != plain
        for text in (plain, base):
            harness = bench.harness()
            assert speculate(harness, request, 4, oracle(text, len(prompt), random.Random(3))) == plain
            if text is plain:
                assert sum(commit.num_accepted for commit in harness.commits(1)) > 5


def test_one_batch_mixes_adapters_and_none(bench: Bench) -> None:
    """Chunked, preempted and beside one another they say what each says alone."""
    requests = [
        opened(
            number, prompt_of(number % 3, 5 + 4 * number), max_tokens=16, temperature=float(number % 2),
            acceptance=COUPLED, seed=number, adapter=("", "one", "two")[number % 3],
        )
        for number in range(1, 10)
    ]  # fmt: skip
    alone = {r.sequence_id: bench.harness().decode_plain(r.sequence_id, r) for r in requests}
    harness = bench.harness(num_blocks=14, max_rows=24)
    for request in requests:
        harness.send(request, Credit(request.sequence_id, 1 << 20, 0))
    harness.run()
    assert {r.sequence_id: harness.output(r.sequence_id) for r in requests} == alone
    assert harness.engine.cache.pool.num_free == 14


@pytest.mark.parametrize("layout", ["eagle3", "medusa", "mtp"])
def test_heads_draft_by_the_base_beside_adapters(bench: Bench, layout: str, tmp_path: Path) -> None:
    """Sequences of several adapters and of none share each pass, and say what each says alone, without a head."""
    head = random_head(layout, tmp_path, bench.hf[""], bench.loaded)
    requests = [
        opened(
            number, prompt_of(number % 2, 20), max_tokens=24, temperature=float(number % 2), acceptance=COUPLED,
            seed=number, adapter=("", "one", "two")[number % 3], method=head.name,
        )
        for number in range(1, 7)
    ]  # fmt: skip
    alone = [bench.harness().decode_plain(request.sequence_id, request) for request in requests]
    harness = bench.harness(slots=2, head=head)
    for request in requests:
        harness.send(request, Credit(request.sequence_id, 1 << 20, 3))
    harness.run()
    assert [harness.output(request.sequence_id) for request in requests] == alone
    assert all(any(commit.num_drafted for commit in harness.commits(request.sequence_id)) for request in requests)


def test_caches_are_never_shared(bench: Bench) -> None:
    prompt = prompt_of(4, 50)
    alone = {name: hf_greedy(bench.hf[name], prompt, 8) for name in ("", "one", "two")}
    harness = bench.harness()
    for number, name in enumerate(("", "one", "two", "one", "", "two"), start=1):
        assert harness.decode_plain(number, opened(number, prompt, max_tokens=8, adapter=name)) == alone[name], name
        found = harness.commits(number)[0].num_cached_ids
        assert found == (48 if number > 3 else 0), "its own blocks are found, and no other's"
    harness.engine.adapters.table.remove("one")
    info, prepared = bench.adapter(resident_of(harness), "one")
    harness.engine.adapters.table.add(Adapter("again", info.digest, info.rank), prepared)
    assert harness.decode_plain(7, opened(7, prompt, max_tokens=8, adapter="again")) == alone["one"]
    assert harness.commits(7)[0].num_cached_ids == 48, "the same weights under another name are the same"


def resident_of(harness: TargetHarness) -> ResidentAdapters:
    resident = harness.engine._runner.adapters
    assert resident is not None
    return resident


def test_a_fork_has_its_parents_adapter(bench: Bench) -> None:
    prompt = prompt_of(5)
    harness = bench.harness()
    harness.send(opened(1, prompt, max_tokens=8, adapter="one"), Credit(1, 21, 0))
    harness.run()
    harness.engine.adapters.table.remove("one")
    harness.send(opened(2, (), max_tokens=8, fork_of=1, completion=1), Credit(2, 1 << 20, 0))
    harness.send(opened(3, (), max_tokens=8, fork_of=1, completion=2, adapter="one"), Credit(3, 1 << 20, 0))
    harness.send(opened(4, (), max_tokens=8, fork_of=1, completion=3, adapter="two"))
    harness.run()
    expected = hf_greedy(bench.hf["one"], prompt, 8)
    assert harness.output(2) == harness.output(3) == expected
    [failure] = harness.failures(4)
    assert "allowed: that of the sequence to fork, 'one'" in failure.message


def test_a_name_that_is_none_is_refused_with_those_that_are(bench: Bench) -> None:
    harness = bench.harness()
    harness.send(opened(1, [5], max_tokens=2, adapter="five"))
    [failure] = harness.failures(1)
    error = from_failure(failure)
    assert isinstance(error, NotFound) and error.reason == "NO_ADAPTER"
    assert error.message == "adapter: is 'five'; allowed: four, one, three, two"
    bare = TargetHarness.of(bench.loaded)
    bare.send(opened(1, [5], max_tokens=2, adapter="one"))
    assert "this target has none" in bare.failures(1)[0].message


def test_the_digest_is_of_both(bench: Bench) -> None:
    harness = bench.harness()
    digest = load_adapter(bench.folders["one"], bench.loaded.model, "base").digest
    harness.send(opened(1, [5], max_tokens=2, adapter="one", model_digest=digest), Credit(1, 100, 0))
    harness.send(opened(2, [5], max_tokens=2, adapter="two", model_digest=digest), Credit(2, 100, 0))
    harness.send(opened(3, [5], max_tokens=2, model_digest=digest), Credit(3, 100, 0))
    harness.run()
    assert len(harness.output(1)) == 2
    assert [harness.failures(number)[0].reason for number in (2, 3)] == ["OTHER_MODEL"] * 2


def test_what_is_unloaded_serves_those_that_have_it_and_goes_with_the_last(bench: Bench) -> None:
    prompt = prompt_of(6)
    harness = bench.harness(names=("two",))
    info, prepared = bench.adapter(resident_of(harness), "one")
    harness.engine.adapters.table.add(info, prepared)
    kept, weights = weakref.ref(prepared.weights), prepared
    for number in (1, 2):
        harness.send(opened(number, prompt, max_tokens=30, adapter="one"), Credit(number, 25, 0))
    harness.run()
    assert harness.engine.adapters.table.remove("one") == 2
    assert weights in resident_of(harness)
    harness.send(opened(3, prompt, max_tokens=4, adapter="one"))
    assert "allowed: two" in harness.failures(3)[0].message
    harness.send(Credit(1, 1 << 20, 0))
    harness.run()
    assert harness.output(1) == hf_greedy(bench.hf["one"], prompt, 30) and weights in resident_of(harness)
    harness.send(Close(2))
    assert weights not in resident_of(harness)
    del weights, prepared
    assert kept() is None, "nothing keeps its weights"
    with pytest.raises(NotFound):
        harness.engine.adapters.table.remove("one")


def test_more_adapters_than_fit_take_turns(bench: Bench) -> None:
    """All advance: none waits for the end of another's sequences."""
    prompt, harness = prompt_of(7), bench.harness(slots=2)
    for number, name in enumerate(("one", "two", "three", "four", ""), start=1):
        harness.send(opened(number, prompt, max_tokens=60, adapter=name), Credit(number, 1 << 20, 0))
    steps = 0
    while len(harness.output(5)) < 60:
        harness.engine.step(harness.now)
        steps += 1
    counts = [len(harness.output(number)) for number in range(1, 5)]
    assert min(counts) >= TURN, counts
    harness.run()
    for number, name in enumerate(("one", "two", "three", "four", ""), start=1):
        assert harness.output(number) == hf_greedy(bench.hf[name], prompt, 60), name
    assert resident_of(harness).num_swaps < 16, "turns are long enough"


def test_turns() -> None:
    a, b, c, d = (PreparedAdapter(name, 1, None) for name in "abcd")
    turns = AdapterTurns[PreparedAdapter](2)
    assert turns.choose([a, b, a]) == {a, b}
    chosen = [turns.choose([a, b, c, d]) for _ in range(4 * TURN)]
    assert [chosen[at] for at in range(0, 4 * TURN, TURN)] == [{a, b}, {c, d}, {a, b}, {c, d}]
    assert all(chosen[at] == chosen[at - at % TURN] for at in range(4 * TURN))
    assert turns.choose([d, b, a], first=d) >= {d}
    assert d in turns.choose([b, a, c, d], first=d), "the oldest is in every step"
    alone = AdapterTurns[PreparedAdapter](1)
    chosen = [alone.choose([a, b], first=a) for _ in range(2 * TURN)]
    assert chosen == [{a}] * TURN + [{b}] * TURN, "nor does the oldest keep all others out"
    assert len(turns.choose([a, c, b])) == 2, "whose turn it was wants nothing: others take the place"
