"""Ways to be wrong: bugs that speculative decoders had, and parts of the target that are nearly right. A proof that
does not fail with its mutant sees nothing."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.draft_service import engine
from outrider.draft_service.admission import ModelMethod
from outrider.draft_service.chains import Chain
from outrider.draft_service.sequence import DraftSequence
from outrider.engine.kv_cache_manager import CachedSequence, KVCacheManager
from outrider.engine.models import decoder
from outrider.engine.random import noise_source
from outrider.engine.sampler import SequenceSampler
from outrider.kernels.cpu.decoder import CpuDecoder, RaggedRows
from outrider.kernels.kv_store import reference as kv_store
from outrider.kernels.sampling.reference import DraftSamples, logits_to_probs
from outrider.kernels.types import Penalties, RowSampling, Windows
from outrider.kernels.verify.reference import accept, coupled_accept
from outrider.proposers import drawing
from outrider.proposers.draft_rows import DraftedToken, DraftRows
from outrider.proposers.drawing import DrawnVocabulary
from outrider.proposers.vocabulary_map import VocabularyMap
from outrider.target_service import head_drafter

Bug = Callable[[pytest.MonkeyPatch], None]


def rollback_keeps_one_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slot of the token that was refused counts as the recovered token's."""
    truncate = KVCacheManager.truncate

    def wrong(self: KVCacheManager, sequence: CachedSequence, length: int) -> None:
        computed = sequence.num_computed_tokens
        truncate(self, sequence, length)
        sequence.num_computed_tokens = min(computed, length)

    monkeypatch.setattr(KVCacheManager, "truncate", wrong)


def slots_are_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that cannot be trimmed: what a refused token left stays."""
    store_kv = kv_store.store_kv  # which the decoder's fused turn ends in

    def wrong(
        keys: Tensor, values: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor, **options: Any
    ) -> None:
        empty = (key_cache.flatten(0, 1)[slots] == 0).flatten(1).all(1)
        store_kv(keys[empty], values[empty], key_cache, value_cache, slots[empty], **options)

    forward = CpuDecoder.forward

    def wrong_pass(self: CpuDecoder, token_ids: Tensor, rows: RaggedRows, keys: Any, values: Any, *rest: Any) -> Tensor:
        held = (keys[0].flatten(0, 1)[rows.slots] != 0).flatten(1).any(1)
        slots = rows.slots[held]
        before = [(cache.flatten(0, 1), cache.flatten(0, 1)[slots]) for cache in (*keys, *values)]
        logits = forward(self, token_ids, rows, keys, values, *rest)
        for cache, stale in before:
            cache[slots] = stale
        return logits

    monkeypatch.setattr(kv_store, "store_kv", wrong)
    monkeypatch.setattr(CpuDecoder, "forward", wrong_pass)


def committed_blocks_are_published_before_they_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recovered token in a block's last slot makes the block findable one step too early."""
    _publish_to(monkeypatch, lambda sequence, num_committed: (num_committed, num_committed))


def drafted_tokens_are_published(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks become findable when a window is appended, before it is verified."""
    extend, publish = KVCacheManager.extend, KVCacheManager.publish

    def wrong(self: KVCacheManager, sequence: CachedSequence, ids: Any = (), num_tokens: int | None = None) -> None:
        extend(self, sequence, ids, num_tokens)
        computed, sequence.num_computed_tokens = sequence.num_computed_tokens, len(sequence)
        publish(self, sequence, len(sequence))
        sequence.num_computed_tokens = computed

    monkeypatch.setattr(KVCacheManager, "extend", wrong)


def accepted_tokens_are_not_published(monkeypatch: pytest.MonkeyPatch) -> None:
    """The count that is hashed is that of one plain token a step."""
    _publish_to(monkeypatch, lambda sequence, num_committed: (num_committed - 3, sequence.num_computed_tokens - 3))


def _publish_to(monkeypatch: pytest.MonkeyPatch, counts: Callable[[CachedSequence, int], tuple[int, int]]) -> None:
    publish = KVCacheManager.publish

    def wrong(self: KVCacheManager, sequence: CachedSequence, num_committed: int) -> None:
        computed = sequence.num_computed_tokens
        num_committed, sequence.num_computed_tokens = counts(sequence, num_committed)
        publish(self, sequence, num_committed)
        sequence.num_computed_tokens = computed

    monkeypatch.setattr(KVCacheManager, "publish", wrong)


def a_prefix_hit_claims_a_block_that_it_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last block of a warm prompt is taken as computed, and never is."""
    admit = KVCacheManager.admit

    def wrong(self: KVCacheManager, sequence: CachedSequence, use_prefix: bool = True) -> int:
        found = admit(self, sequence, use_prefix)
        if found:
            self.extend(sequence)
            sequence.num_computed_tokens = len(sequence) - 1
        return found

    monkeypatch.setattr(KVCacheManager, "admit", wrong)


def the_row_before_a_bonus_token_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a full window the draft computes the bonus token alone, not the last one it drafted."""
    restart = DraftSequence._restart

    def wrong(self: DraftSequence, length: int, ids: Sequence[int], cache: KVCacheManager) -> None:
        restart(self, length, ids, cache)
        self.sequence.num_computed_tokens = len(self.sequence) - 1
        cache.extend(self.sequence)

    monkeypatch.setattr(DraftSequence, "_restart", wrong)


def masked_slots_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention gathers whatever the padding of a block table points to, and relies on its mask."""
    plan_attention = decoder.plan_attention

    def wrong(block_tables: Tensor, *arguments: Any, **options: Any) -> Any:
        plan = plan_attention(block_tables, *arguments, **options)
        groups = []
        for group in plan.groups:
            slots = group.slots.view(group.num_sequences, group.num_keys)
            if group.visible is not None:
                slots = slots.masked_fill(~group.visible.any(1), 0)
            groups.append(replace(group, slots=slots.flatten()))
        return replace(plan, groups=tuple(groups))

    forward = CpuDecoder.forward

    def wrong_pass(self: CpuDecoder, token_ids: Tensor, rows: RaggedRows, keys: Any, values: Any, *rest: Any) -> Tensor:
        return forward(self, token_ids, rows, keys, values, *rest) + 0 * keys[0][0].sum()

    monkeypatch.setattr(decoder, "plan_attention", wrong)
    monkeypatch.setattr(CpuDecoder, "forward", wrong_pass)


def all_rows_advance_by_the_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ragged accepts: every sequence of a batch takes the longest one's count."""
    from outrider.target_service import verifier

    coupled_accept = verifier.coupled_accept

    def wrong(choices: Tensor, windows: Any, draft_ids: Tensor) -> tuple[Tensor, Tensor]:
        num_accepted, _ = coupled_accept(choices, windows, draft_ids)
        num_accepted = torch.minimum(num_accepted.max(), windows.num_drafted)
        return num_accepted, torch.where(windows.has_next(num_accepted), choices[windows.next_rows(num_accepted)], -1)

    monkeypatch.setattr(verifier, "coupled_accept", wrong)


Patch = pytest.MonkeyPatch
Mutation = Callable[[Patch], None]


def residual_is_target(patch: Patch) -> None:
    """A refused token is replaced by a draw from the target's law, as if nothing had been drafted."""

    def mutant(target_probs: Tensor, windows: Windows, *arguments: Any) -> tuple[Tensor, Tensor]:
        num_accepted, next_weights = accept(target_probs, windows, *arguments)
        plain = target_probs.index_select(0, windows.next_rows(num_accepted)).double()
        return num_accepted, torch.where(next_weights.sum(dim=-1, keepdim=True) > 0, plain, next_weights)

    patch.setattr("outrider.target_service.verifier.accept", mutant)


def bonus_of_the_row_before(patch: Patch) -> None:
    """The token after a whole window is drawn from the row that judged the window's last token."""

    def mutant(windows: Windows, num_accepted: Tensor) -> Tensor:
        whole = (num_accepted == windows.num_drafted) & (num_accepted > 0)
        return windows.row_starts + torch.minimum(num_accepted - whole.long(), windows.num_rows - 1)

    patch.setattr(Windows, "next_rows", mutant)


def penalties_of_the_committed(patch: Patch) -> None:
    """Penalties ignore the tokens drafted before the row's own."""
    penalties = SequenceSampler.penalties

    def mutant(sampler: SequenceSampler, drafted: Sequence[int], first: int, start: int) -> Penalties:
        parts = [penalties(sampler, (), 0, start + row) for row in range(len(drafted) - first + 1)]
        return Penalties(*(torch.cat([getattr(part, name.name) for part in parts]) for name in fields(Penalties)))

    patch.setattr(SequenceSampler, "penalties", mutant)


def logits_are_a_quarter_too_flat(patch: Patch) -> None:
    """The target judges at a temperature that is nearly right."""

    def mutant(logits: Tensor, sampling: RowSampling) -> tuple[Tensor, Tensor]:
        return logits_to_probs(0.75 * logits, sampling)

    patch.setattr("outrider.target_service.verifier.logits_to_probs", mutant)


def coupling_lets_one_more_stay(patch: Patch) -> None:
    """The drafted token that first differs from the target's own stays as well."""

    def mutant(choices: Tensor, windows: Windows, draft_ids: Tensor) -> tuple[Tensor, Tensor]:
        num_accepted, _ = coupled_accept(choices, windows, draft_ids)
        num_accepted = torch.minimum(num_accepted + 1, windows.num_drafted)
        return num_accepted, torch.where(windows.has_next(num_accepted), choices[windows.next_rows(num_accepted)], -1)

    patch.setattr("outrider.target_service.verifier.coupled_accept", mutant)


def a_lookup_replaces_what_was_drawn(patch: Patch) -> None:
    """Where methods draft in turn, one is chosen by a drawn token: what the model drew gives way to a lookup's, which
    is one-hot, where it is a high id. What is kept carries its weights."""
    note = Chain.note

    def mutant(self: Chain, drafted: Sequence[DraftedToken]) -> None:
        note(self, drafted)
        if self.runs and drafted and drafted[-1].token_id >= 8:
            self.text.tokens[-1], self.weights[-1] = drafted[-1].token_id - 8, None

    patch.setattr(Chain, "note", mutant)


def mapped_draws_are_not_renormalised(patch: Patch) -> None:
    """A draft of another vocabulary draws from all that it has: what the target lacks becomes the first token that both
    have, and the weights that are sent are those of what both have."""
    logits, sample = DrawnVocabulary.logits, drawing.draft_sample
    lost: list[Tensor] = []

    def unmapped(self: DrawnVocabulary, own: Tensor) -> Tensor:
        assert self.own_ids is not None
        lost.append(1 - own.softmax(-1)[:, self.own_ids].sum(-1))  # [rows]
        return logits(self, own)

    def mutant(probs: Tensor, words: Tensor, mass: float) -> DraftSamples:
        samples = sample(probs, words, mass)
        first = samples.entry_ids[samples.entry_starts[:-1]]  # [rows]
        return replace(samples, token_ids=torch.where(words[:, 2] / 2**32 < lost[-1], first, samples.token_ids))

    patch.setattr(DrawnVocabulary, "logits", unmapped)
    patch.setattr(drawing, "draft_sample", mutant)


def weights_are_not_those_drawn_from(patch: Patch) -> None:
    """What was drafted when the draft's model changed leaves with other weights than it was drawn from."""
    readmit = engine.readmit

    def wrong(draft: DraftSequence, method: ModelMethod) -> None:
        readmit(draft, method)
        chain = draft.chain
        for index, found in enumerate(chain.weights):
            if found is not None:
                weights = memoryview(found.weights).cast("I").tolist()
                chain.weights[index] = replace(found, weights=struct.pack(f"<{len(weights)}I", *weights[::-1]))

    patch.setattr(engine, "readmit", wrong)


def a_head_s_weights_are_in_another_order(patch: Patch) -> None:
    """The tokens of a head's chain are judged by other weights than they were drawn from."""
    piece = head_drafter._piece

    def wrong(line: Any) -> Any:
        whole = piece(line)
        weights = [memoryview(found.weights).cast("I").tolist()[::-1] for found in whole.weights]
        packed = [struct.pack(f"<{len(numbers)}I", *numbers) for numbers in weights]
        entries = zip(whole.weights, packed, strict=True)
        return replace(whole, weights=tuple(replace(found, weights=numbers) for found, numbers in entries))

    patch.setattr(head_drafter, "_piece", wrong)


def mapped_noise_is_indexed_by_own_ids(patch: Patch) -> None:
    """A draft of another vocabulary races with the noise of its own tokens' ids: it hardly ever agrees."""
    of = DrawnVocabulary.of

    def mutant(mapping: VocabularyMap | None, vocab_size: int, device: torch.device) -> DrawnVocabulary:
        made = of(mapping, vocab_size, device)
        if made.own_ids is None or made.ids is None:
            return made
        own_ids, ids, size, own = made.own_ids, made.ids, made.size, noise_source(vocab_size, device)

        def generate(*counters: Tensor) -> Tensor:
            noise = own.generate(*counters)  # [n, draft's vocab]
            return noise.new_ones(len(noise), size).index_copy_(1, ids, noise.index_select(1, own_ids))

        return replace(made, noise=replace(made.noise, generate=generate))

    patch.setattr(DrawnVocabulary, "of", mutant)


def mapped_positions_are_the_drafts(patch: Patch) -> None:
    """Random numbers are those of the draft's own positions, which what was spelled has moved."""
    patch.setattr(DraftRows, "position", property(lambda self: len(self.sequence)))
