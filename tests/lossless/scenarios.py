"""Rounds of a draft and a target engine by hand, and what is looked at between them: keys and values against a fresh
prefill, the prefix cache against what was committed, and which random counters are asked for, each traced by its
value."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from support.engines import VOCAB, DraftFn, DraftHarness, TargetHarness, tiny_draft
from support.models import build_decoder, tiny_config, tiny_hf_model, tiny_state
from support.quantized import rounded_state
from torch import Tensor

from outrider.engine import random as engine_random
from outrider.engine.batch import BatchEntry
from outrider.engine.kv_cache_manager import CachedSequence, KVCacheManager, chain_key, root_key
from outrider.engine.loader import LoadedModel
from outrider.engine.model_runner import ModelRunner
from outrider.engine.models.base import CausalLM
from outrider.engine.quantized.rounding import Rounding
from outrider.kernels.random import reference as philox
from outrider.kernels.random.reference import Purpose, exponential_noise
from outrider.kernels.verify.reference import accept
from outrider.proposers import drawing
from outrider.rpc.messages import Commit, Credit, DraftTokens, Open
from outrider.target_service import verifier
from outrider.target_service.sequence import TargetSequence

Forward = Callable[[Sequence[BatchEntry]], Tensor]
FRESH_BLOCKS = 16


class FreshPrefill:
    """Keys and values of tokens computed in one pass into an empty cache."""

    def __init__(self, model: CausalLM) -> None:
        self._model = model
        self._known: dict[tuple[int, ...], list[Tensor]] = {}

    def of(self, tokens: Sequence[int]) -> list[Tensor]:  # per layer keys, then values: [tokens, kv_heads, dim]
        """Computed once per prefix."""
        key = tuple(tokens)
        if key not in self._known:
            runner = ModelRunner(self._model, FRESH_BLOCKS)
            runner.forward([BatchEntry(key, 0, list(range(FRESH_BLOCKS)), 1)])
            self._known[key] = [part.flatten(0, 1)[: len(key)] for part in (*runner.cache.keys, *runner.cache.values)]
        return self._known[key]


def held_kv(runner: ModelRunner, block_table: Sequence[int], length: int) -> list[Tensor]:
    """What the cache holds of the first `length` tokens of a block table, in the same form."""
    table = torch.tensor(block_table, dtype=torch.int64)
    return [part[table].flatten(0, 1)[:length] for part in (*runner.cache.keys, *runner.cache.values)]


def check_kv(runner: ModelRunner, sequence: CachedSequence, fresh: FreshPrefill, exact: bool = True) -> None:
    """Every computed token's keys and values are those of a fresh prefill: to the bit, or but for rounding."""
    length = sequence.num_computed_tokens
    assert length < len(sequence), f"{length} of {len(sequence)} tokens count as computed"
    if length == 0:
        return
    held = held_kv(runner, sequence.block_table, length)
    for ours, theirs in zip(held, fresh.of(sequence.tokens[:length]), strict=True):
        same = (ours == theirs) if exact else torch.isclose(ours, theirs, atol=1e-4)
        wrong = (~same).flatten(1).any(1).nonzero().flatten().tolist()
        assert not wrong, f"keys or values of positions {wrong} of {length} are not a fresh prefill's"


class PrefixLedger:
    """The committed prefixes that a prefix cache may hold, by key."""

    def __init__(self, cache: KVCacheManager) -> None:
        self._cache = cache
        self._prefixes: dict[bytes, tuple[int, ...]] = {}
        self._mirror: list[Tensor] = []  # per layer keys, then values, as they should be in findable blocks
        self._mirrored: dict[int, bytes] = {}

    def keys(self, committed: Sequence[int], salt: str = "") -> list[bytes]:
        """The keys of all full blocks of committed tokens; they are known from now on."""
        size, keys = (
            self._cache.block_size,
            [root_key(salt, cache_dtype=self._cache.cache_dtype, model=self._cache.model)],
        )
        for end in range(size, len(committed) + 1, size):
            keys.append(chain_key(keys[-1], committed[end - size : end]))
            self._prefixes[keys[-1]] = tuple(committed[:end])
        return keys[1:]

    def check(self, runner: ModelRunner, fresh: FreshPrefill) -> None:
        """Findable blocks are full blocks of committed tokens, and hold what these tokens give."""
        findable, parts = dict(self._cache.pool._key_of), (*runner.cache.keys, *runner.cache.values)
        if not self._mirror:
            self._mirror = [torch.empty_like(part) for part in parts]
        for block, key in findable.items() - self._mirrored.items():
            assert key in self._prefixes, f"block {block} is findable by tokens that were not committed"
            for mirror, expected in zip(self._mirror, fresh.of(self._prefixes[key]), strict=True):
                mirror[block] = expected[-self._cache.block_size :]
        self._mirrored = findable
        blocks = torch.tensor(sorted(findable), dtype=torch.int64)
        for part, mirror in zip(parts, self._mirror, strict=True):
            assert torch.equal(part[blocks], mirror[blocks]), "a findable block holds other tokens' keys or values"

    def check_complete(self, sequence: CachedSequence) -> None:
        """Every full computed block of a living sequence was published: nothing that was accepted is left out."""
        full = sequence.num_computed_tokens // self._cache.block_size
        keys = self.keys(sequence.tokens[: full * self._cache.block_size], sequence.salt)
        assert sequence.block_keys == keys, "a computed block of committed tokens was not published"


def watch_forward(runner: ModelRunner, wrap: Callable[[Forward, Sequence[BatchEntry]], Tensor]) -> None:
    """Lets `wrap` run the runner's forward passes from now on."""
    forward = runner.forward
    runner.forward = lambda entries: wrap(forward, entries)  # type: ignore[method-assign]


def poison(runner: ModelRunner, cache: KVCacheManager, sequences: Callable[[], Iterable[CachedSequence]]) -> list[int]:
    """Before every pass, writes NaN wherever nothing may be read: blocks that are free and not findable, and the slots
    of tables past what is computed. Returns the numbers of blocks poisoned, a list that grows."""
    num_poisoned: list[int] = []

    def run(forward: Forward, entries: Sequence[BatchEntry]) -> Tensor:
        pool = cache.pool
        free = [b for b in range(pool.num_blocks) if pool.references(b) == 0 and b not in pool._key_of]
        slots = [block * cache.block_size + offset for block in free for offset in range(cache.block_size)]
        for sequence in sequences():
            end = len(sequence.block_table) * cache.block_size
            slots += [slot_of(sequence.block_table, p) for p in range(sequence.num_computed_tokens, end)]
        for part in (*runner.cache.keys, *runner.cache.values):
            part.flatten(0, 1)[slots] = float("nan")
        num_poisoned.append(len(free))
        return forward(entries)

    watch_forward(runner, run)
    return num_poisoned


def check_writes(runner: ModelRunner, cache: KVCacheManager) -> list[int]:
    """Checks from now on that a pass writes the slots of its own rows alone, in blocks that nobody shares or can find.
    Returns the numbers of slots written, a list that grows."""
    num_written: list[int] = []

    def run(forward: Forward, entries: Sequence[BatchEntry]) -> Tensor:
        before = [part.clone() for part in (*runner.cache.keys, *runner.cache.values)]
        logits = forward(entries)
        changed: set[int] = set()
        for old, new in zip(before, (*runner.cache.keys, *runner.cache.values), strict=True):
            changed |= set((old != new).flatten(0, 1).flatten(1).any(1).nonzero().squeeze(1).tolist())
        rows = {slot_of(e.block_table, e.start + offset) for e in entries for offset in range(len(e.token_ids))}
        assert changed <= rows, "slots were written that are no row's of this pass"
        for block in {slot // cache.block_size for slot in rows}:
            assert cache.pool.references(block) == 1, f"block {block} is written and not owned alone"
            assert block not in cache.pool._key_of, f"block {block} is written and findable"
        num_written.append(len(changed))
        return logits

    watch_forward(runner, run)
    return num_written


def slot_of(block_table: Sequence[int], position: int, block_size: int = 16) -> int:
    """Where a position's keys and values are."""
    return block_table[position // block_size] * block_size + position % block_size


MAX_ROUNDS = 400


@cache
def target_model(
    family: str = "llama", batch_invariant: bool = True, noise: float = 0.0, rounding: Rounding | None = None
) -> LoadedModel:
    """A tiny target. It is the draft of the tests, but for noise on its weights where a draft has to err, or for their
    rounding, for which it is wider by a little: packed products have inputs by 32."""
    options = {} if rounding is None else {"intermediate_size": 128}
    state: Mapping[str, Tensor] = tiny_state(tiny_hf_model(family, **options))
    generator = torch.Generator().manual_seed(1)
    state = {name: w + noise * torch.randn(w.shape, generator=generator) for name, w in state.items()}
    if rounding is not None:
        state = rounded_state(state, rounding)
    return build_decoder(tiny_config(family, **options), state, batch_invariant=batch_invariant)


@cache
def fresh_prefill(family: str = "llama", noise: float = 0.0, rounding: Rounding | None = None) -> FreshPrefill:
    """Of the target model in batch-invariant mode; shared, because prefills are what these tests spend time on."""
    return FreshPrefill(target_model(family, noise=noise, rounding=rounding).model)


@cache
def fresh_draft_prefill() -> FreshPrefill:
    """Of the draft model."""
    return FreshPrefill(tiny_draft().model)


def prompt_of(seed: int, length: int = 20) -> tuple[int, ...]:
    """Random tokens."""
    rng = random.Random(seed)
    return tuple(rng.randrange(3, VOCAB) for _ in range(length))


class Inspector:
    """Looks at a target between two steps: tokens, lengths, keys and values, prefix cache."""

    def __init__(
        self, harness: TargetHarness, fresh: FreshPrefill, requests: Sequence[Open], exact: bool = True
    ) -> None:
        self.harness, self.fresh, self.exact = harness, fresh, exact
        self.runner = harness.engine._runner
        self.requests = {request.sequence_id: request for request in requests}
        self.ledger = PrefixLedger(harness.engine.cache)
        self.num_checked = self.num_preempted = 0
        step, preempt = harness.engine.step, harness.engine.scheduler.release

        def watched(now: float) -> float | None:
            wait = step(now)
            self.check()
            return wait

        def counted(target: TargetSequence) -> None:
            self.num_preempted += bool(target.sequence.block_table)
            preempt(target)

        harness.engine.step = watched  # type: ignore[method-assign]
        harness.engine.scheduler.release = counted  # type: ignore[method-assign]

    def committed(self, sequence_id: int) -> list[int]:
        """By what the target said, not by what it holds."""
        request = self.requests[sequence_id]
        return [*request.prompt_ids, *request.output_ids, *self.harness.output(sequence_id)]

    def check(self) -> None:
        """After every step."""
        for request in self.requests.values():
            failures = self.harness.failures(request.sequence_id)
            assert not failures, failures
            self.ledger.keys(self.committed(request.sequence_id), request.salt)
        for target in self.harness.engine.scheduler.sequences.values():
            self._check_sequence(target)
        if self.exact:
            self.ledger.check(self.runner, self.fresh)

    def _check_sequence(self, target: TargetSequence) -> None:
        sequence = target.sequence
        assert sequence.tokens == self.committed(target.open.sequence_id), "tokens are held that were not committed"
        assert target.sampler.num_output == target.num_output, "the sampler counts other tokens"
        assert target.chains._committed == len(sequence), "the chains stand elsewhere"
        check_kv(self.runner, sequence, self.fresh, self.exact)
        if self.exact and sequence.block_table:
            self.ledger.check_complete(sequence)
        self.num_checked += 1


def run_rounds(
    harness: TargetHarness,
    requests: Sequence[Open],
    drafts: Mapping[int, DraftFn],
    k: int,
    after_round: Callable[[list[Commit]], None] = lambda _: None,
) -> dict[int, list[int]]:
    """Every sequence that is not at its end gets a piece and credit for it; then the target runs till it rests. Returns
    what each generated."""
    tokens = {r.sequence_id: [*r.prompt_ids, *r.output_ids] for r in requests}
    seen, alive, waiting = dict.fromkeys(tokens, 0), set(tokens), set(tokens)  # for a piece
    harness.send(*requests)
    for chain in range(MAX_ROUNDS):
        if not alive:
            return {r.sequence_id: tokens[r.sequence_id][len(r.prompt_ids) :] for r in requests}
        for number in sorted(waiting):
            ids, weights = drafts[number](tokens[number], k)
            length = len(tokens[number])
            piece = DraftTokens(number, chain, length, tuple(ids), tuple(weights))
            harness.send(piece, Credit(number, length + k + 1, k, 60_000))
        harness.run()
        commits, waiting = [], set()
        for number in sorted(alive):
            assert not harness.failures(number), harness.failures(number)
            fresh = harness.commits(number)[seen[number] :]
            seen[number] += len(fresh)
            commits += fresh
            tokens[number] += [token for commit in fresh for token in commit.ids]
            if fresh and fresh[-1].finish_reason is not None:
                alive.discard(number)
            elif fresh:  # else there were no blocks for it in this round
                waiting.add(number)
        assert commits, "a round without a commit"
        after_round(commits)
    raise AssertionError("the sequences never ended")


def forced(reference: Sequence[int], prompt_len: int, accepted: Callable[..., int]) -> DraftFn:
    """Drafts of which exactly `accepted(round)` tokens are the reference's, then one that is not."""
    rounds = iter(range(10_000))

    def draft(tokens: list[int], k: int) -> tuple[list[int], list[Any]]:
        done, keep = len(tokens) - prompt_len, accepted(next(rounds))
        right = [*reference[done : done + k], *([0] * k)][:k]
        return [token if index < keep else (token + 1) % VOCAB for index, token in enumerate(right)], []

    return draft


def plain_outputs(model: LoadedModel, requests: Sequence[Open]) -> dict[int, list[int]]:
    """Each decoded alone, token by token."""
    return {r.sequence_id: TargetHarness.of(model).decode_plain(r.sequence_id, r) for r in requests}


class Pair:
    """Real drafts, verified in rounds. `noise` sets how far the target is from its draft; 0: they are the same."""

    def __init__(self, k: int, noise: float, **target: Any) -> None:
        self.k = k
        self.draft = DraftHarness(num_blocks=128)
        self.target = TargetHarness.of(target_model(noise=noise), **{"num_blocks": 128, **target})
        self.pieces: list[DraftTokens] = []
        self.commits: list[Commit] = []
        self.num_draft_rows = 0
        # Not the harness's own watch: it stops at the first slot that is read and was never written.
        self.draft.method.proposer.runner.forward = self._draft_forward  # type: ignore[method-assign]

    def generate(
        self, requests: Sequence[Open], after_round: Callable[[], None] = lambda: None
    ) -> dict[int, list[int]]:
        """All of them to their ends, in lockstep; what each generated."""
        lengths = {r.sequence_id: len(r.prompt_ids) + len(r.output_ids) for r in requests}
        seen, waiting = dict.fromkeys(lengths, 0), set(lengths)  # for a piece
        news: list[Any] = [*requests]
        self.target.send(*requests)
        for _ in range(MAX_ROUNDS):
            if not lengths:
                return {r.sequence_id: [*r.output_ids, *self.target.output(r.sequence_id)] for r in requests}
            news += [Credit(number, lengths[number] + self.k, self.k) for number in sorted(waiting)]
            pieces = [event for event in self.draft.run(*news) if isinstance(event, DraftTokens)]
            assert {piece.sequence_id for piece in pieces} == waiting, "a sequence was not drafted for"
            self.pieces += pieces
            credits = [Credit(number, lengths[number] + self.k + 1, self.k, 60_000) for number in sorted(waiting)]
            self.target.send(*pieces, *credits)
            self.target.run()
            news, waiting = [], set()
            for number in sorted(lengths):
                assert not self.target.failures(number), self.target.failures(number)
                fresh = self.target.commits(number)[seen[number] :]
                if not fresh:
                    continue  # no blocks for it in this round
                seen[number] += len(fresh)
                news += [replace(commit, logprobs=()) for commit in fresh]
                lengths[number] += sum(len(commit.ids) for commit in fresh)
                waiting.add(number)
                if fresh[-1].finish_reason is not None:
                    waiting.discard(number)
                    del lengths[number]
            assert news, "a round without a commit"
            self.commits += news
            self.draft.check()
            after_round()
        raise AssertionError("the sequences never ended")

    def _draft_forward(self, entries: Sequence[BatchEntry]) -> Tensor:
        self.num_draft_rows += sum(len(entry.token_ids) for entry in entries)
        return self.draft._forward(entries)

    def draft_tables(self) -> list[CachedSequence]:
        """What the draft holds open."""
        return [draft.sequence for draft in self.draft.engine.sequences.values()]

    @property
    def acceptance(self) -> float:
        """Of all drafted tokens that were verified."""
        return sum(c.num_accepted for c in self.commits) / max(1, sum(c.num_drafted for c in self.commits))


class DraftInspector:
    """Looks at a draft when it rests: keys and values of the committed tokens and of the chain, prefix cache."""

    def __init__(self, harness: DraftHarness) -> None:
        self.harness, self.fresh = harness, fresh_draft_prefill()
        self.runner = harness.method.proposer.runner
        self.ledger = PrefixLedger(harness.method.cache)
        self.num_checked = 0
        step = harness.engine.step

        def watched(now: float) -> float | None:
            wait = step(now)
            if wait != 0.0:
                self.check()
            return wait

        harness.engine.step = watched  # type: ignore[method-assign]

    def check(self) -> None:
        """After every proposal."""
        for draft in self.harness.engine.sequences.values():
            self.ledger.keys(draft.sequence.tokens[: draft.committed], draft.sequence.salt)
            check_kv(self.runner, draft.sequence, self.fresh)
            self.num_checked += 1
        self.ledger.check(self.runner, self.fresh)


Counter = tuple[int, int, int, int, int, int]  # seed, position, purpose, draw, completion, token id >> 2
Raw = tuple[int, ...]  # the four words of the counter and the two of the key

PURPOSE_OF = {
    "draft": Purpose.DRAFT,
    "accept": Purpose.ACCEPT,
    "recovered": Purpose.RECOVERED,
    "bonus": Purpose.BONUS,
    "coupled draft": Purpose.BONUS,
    "coupled target": Purpose.BONUS,
}
SHARED = {"coupled draft", "coupled target"}  # one decision, taken on both sides


def by_row(groups: Any, rows: Any) -> list[list[int]]:
    """Token ids >> 2 of every row, which may be the same for all."""
    table: list[list[int]] = groups.tolist()
    return table if len(table) == len(rows) else table * len(rows)


class CounterLog:
    """Listens while a test runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.requested: set[Counter] = set()
        self.meaning: defaultdict[Raw, set[Counter]] = defaultdict(set)  # of what is encrypted
        self.uses: defaultdict[Counter, list[str]] = defaultdict(list)
        self._counters: dict[object, list[Counter]] = {}  # by four words, or by a row of noise
        self._raw: list[Raw] = []
        self._full: list[bool] = []
        self._listen_to_philox(monkeypatch)
        self._listen_to_uses(monkeypatch)

    def check(self, once: Collection[int] = ()) -> None:
        """No counter is encrypted under two meanings, none decides two things; both sides of coupling share theirs.
        Those of the seeds `once` decide one thing once."""
        assert all(len(meanings) == 1 for meanings in self.meaning.values()), "two requests have one counter"
        for counter, uses in self.uses.items():
            kinds = set(uses)
            assert counter[0] not in once or len(uses) == 1, f"{counter} decides {uses}"
            assert len(kinds) == 1 or kinds <= SHARED, f"{counter} decides {sorted(kinds)}"
            assert {PURPOSE_OF[kind] for kind in kinds} == {counter[2]}, f"{counter} decides {sorted(kinds)}"

    def kinds(self) -> set[str]:
        """What was decided."""
        return {kind for kinds in self.uses.values() for kind in kinds}

    def _listen_to_philox(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(philox, "cpu_library", lambda: None)  # its noise is not overheard
        run, grouped = philox._run, philox._grouped_words

        def listen_run(groups: Any, columns: Any) -> Any:
            position, purpose, completion, low, high = (column.squeeze(-1).tolist() for column in columns)
            rows = zip(position, purpose, completion, low, high, strict=True)
            self._raw = [
                (group, *row) for row, of_row in zip(rows, by_row(groups, position), strict=True) for group in of_row
            ]
            return run(groups, columns)

        def listen(
            groups: Tensor, seeds: Tensor, positions: Tensor, purpose: Any, completions: Tensor, draw: Any
        ) -> Tensor:
            words = grouped(groups, seeds, positions, purpose, completions, draw)
            purposes, draws = (
                value.tolist() if isinstance(value, Tensor) else [int(value)] * len(seeds) for value in (purpose, draw)
            )
            rows = zip(seeds.tolist(), positions.tolist(), purposes, draws, completions.tolist(), strict=True)
            each = zip(rows, by_row(groups, positions), strict=True)
            counters = [(*row, group) for row, of_row in each for group in of_row]
            self.requested.update(counters)
            for raw, counter, four in zip(self._raw, counters, words.flatten(0, 1).tolist(), strict=True):
                self.meaning[raw].add(counter)
                self._counters[tuple(four)] = [counter]
            return words

        monkeypatch.setattr(philox, "_run", listen_run)
        monkeypatch.setattr(philox, "_grouped_words", listen)

    def _listen_to_uses(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def listen_noise(seeds: Tensor, positions: Tensor, completions: Tensor, vocab: int, purpose: Any) -> Tensor:
            rows = exponential_noise(seeds, positions, completions, vocab, purpose)
            for row, *key in zip(rows, seeds.tolist(), positions.tolist(), completions.tolist(), strict=True):
                seed, position, completion = key
                groups = range(-(-vocab // 4))
                counters = [(seed, position, int(purpose), 0, completion, group) for group in groups]
                self._counters[row.numpy().tobytes()] = counters
            return rows

        def listen_accept(probs: Tensor, windows: Any, *rest: Any) -> Any:
            num_accepted, weights = accept(probs, windows, *rest)
            self._full = (num_accepted == windows.num_drafted).tolist()
            return num_accepted, weights

        monkeypatch.setattr(engine_random, "exponential_noise", listen_noise)
        monkeypatch.setattr(verifier, "accept", listen_accept)
        self._trace(monkeypatch, verifier, "accept_uniforms", 0, lambda index: "accept")
        self._trace(monkeypatch, verifier, "draw", 1, lambda index: "bonus" if self._full[index] else "recovered")
        self._trace(monkeypatch, verifier, "coupled_choice", 1, lambda index: "coupled target")
        self._trace(monkeypatch, drawing, "coupled_choice", 1, lambda index: "coupled draft")
        self._trace(monkeypatch, drawing, "draft_sample", 1, lambda index: "draft")

    def _trace(
        self, monkeypatch: pytest.MonkeyPatch, module: Any, name: str, argument: int, kind: Callable[[int], str]
    ) -> None:
        """Notes the counters behind each row of one argument of a function."""
        function = getattr(module, name)

        def traced(*arguments: Any) -> Any:
            for index, row in enumerate(arguments[argument]):
                value = row.numpy().tobytes() if row.is_floating_point() else tuple(row.tolist())
                for counter in self._counters[value]:
                    self.uses[counter].append(kind(index))
            return function(*arguments)

        monkeypatch.setattr(module, name, traced)
