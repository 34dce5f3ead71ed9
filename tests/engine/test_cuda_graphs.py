"""Which steps are captured, and in which bucket each runs.

Captured steps against eager ones: the same logits and the same cache, whatever ran in a bucket before."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.adapters import save_adapter
from support.devices import Replayed
from support.models import SMALLEST, build_decoder, cpu_kernels, tiny_config, tiny_hf_model, tiny_state
from torch import Tensor

from outrider.engine.adapters.loader import load_adapter
from outrider.engine.adapters.resident import AdapterRoom, ResidentAdapters
from outrider.engine.batch import (
    ALIGNMENT,
    ROWS,
    BatchEntry,
    Bucket,
    PackedRows,
    StepBuffer,
    StepLimits,
    all_buckets,
    buffer_size,
    choose_bucket,
)
from outrider.engine.cuda_graphs import CapturedSteps, CudaGraphs
from outrider.engine.model_runner import ModelRunner
from outrider.engine.models.decoder import Decoder
from outrider.engine.token_tree import CHAIN

LIMITS = [
    StepLimits(512, 256, 33), StepLimits(512, 8, 33), StepLimits(16, 4, 5), StepLimits(512, 1, 1),
    StepLimits(512, 3, 129), StepLimits(7, 256, 2), StepLimits(16, 4, 5, trees=True),
]  # fmt: skip


@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_every_step_within_the_limits_has_the_smallest_bucket_that_holds_it(limits: StepLimits) -> None:
    buckets, used = all_buckets(limits), set()
    assert buckets == sorted(set(buckets), reverse=True)
    generator = random.Random(0)
    for _ in range(5000):
        lengths = [
            generator.randint(1, limits.max_query_len) for _ in range(generator.randint(1, limits.max_sequences))
        ]
        if generator.random() < 0.3:
            lengths = [1] * len(lengths)
        if sum(lengths) > min(limits.max_rows, ROWS[-1]):
            continue
        has_trees = limits.trees and max(lengths) > 1 and generator.random() < 0.5
        bucket = choose_bucket(limits, sum(lengths), len(lengths), max(lengths), has_trees)
        assert bucket in buckets and bucket.trees == has_trees
        used.add(bucket)
        assert bucket.rows >= sum(lengths) and bucket.sequences >= len(lengths) >= bucket.sequences // 2
        assert bucket.max_query_len >= max(lengths)
        assert all(size >= bucket.rows for size in ROWS if size >= sum(lengths))
    assert len(used) >= len(buckets) // 2


def test_what_has_no_bucket() -> None:
    limits = StepLimits(512, 8, 33)
    assert choose_bucket(limits, 34, 1, 34) is None  # a prompt's chunk
    assert choose_bucket(limits, 257, 8, 33) is None  # too many rows
    assert choose_bucket(limits, 9, 9, 1) is None  # too many sequences
    assert choose_bucket(limits, 9, 7, 3, trees=True) is None  # none are expected
    assert choose_bucket(limits, 8, 8, 1) == Bucket(8, 8, 1)
    assert choose_bucket(limits, 9, 7, 3) == Bucket(16, 8, 33)


def test_the_default_limits_need_few_graphs() -> None:
    assert len(all_buckets(StepLimits(512, 256, 33))) <= 80


def test_a_buffer_holds_the_step_and_its_padding() -> None:
    """Whatever it held before, and as far as anything reads; the blocks of a table that are not reached yet, too."""
    bucket, width = Bucket(8, 4, 5), 6
    host, device = (torch.full((buffer_size(bucket, width) + 9,), poison, dtype=torch.int32) for poison in (77, -77))
    buffer = StepBuffer(bucket, width, host, device)
    entries = [BatchEntry([7, 8], 3, [5, 2, 9], 1), BatchEntry([9, 10, 11], 0, [4], 2)]
    used = buffer.write(PackedRows.of(entries, 4), [entry.block_table for entry in entries])
    device[:used] = host[:used]
    batch = buffer.batch
    assert batch.token_ids.tolist() == [7, 8, 9, 10, 11, 0, 0, 0]
    assert batch.positions.tolist() == [3, 4, 0, 1, 2, 0, 0, 0]
    assert batch.slot_mapping.tolist() == [23, 8, 16, 17, 18, -1, -1, -1]
    assert batch.logit_rows.tolist() == [1, 3, 4, 0, 0, 0, 0, 0]
    assert batch.query_starts.tolist() == [0, 2, 5, 5, 5] and batch.context_lens.tolist() == [5, 3, 0, 0]
    assert batch.block_tables.tolist() == [[5, 2, 9, *[77] * 3], [4, *[77] * 5], [-77] * 6, [-77] * 6]
    assert batch.max_query_len == 5 and host[-9:].tolist() == [77] * 9


def test_a_buffer_for_trees_holds_their_parents() -> None:
    bucket = Bucket(8, 4, 5, trees=True)
    host, device = (torch.full((buffer_size(bucket, 2),), poison, dtype=torch.int32) for poison in (77, -77))
    buffer = StepBuffer(bucket, 2, host, device)
    entries = [BatchEntry([7, 8], 3, [5, 2], 1), BatchEntry([9, 10, 11], 0, [4], 3, parents=(0, 0))]
    used = buffer.write(PackedRows.of(entries, 4), [entry.block_table for entry in entries])
    device[:used] = host[:used]
    assert buffer.batch.parents is not None
    assert buffer.batch.parents.tolist() == [CHAIN, CHAIN, -1, 0, 0, *[CHAIN] * 3]
    assert buffer.batch.positions.tolist() == [3, 4, 0, 1, 1, 0, 0, 0]


@pytest.mark.parametrize("sequences", [1, 2, 3, 8])
def test_parts_keep_the_alignment_that_kernels_are_compiled_for(sequences: int) -> None:
    bucket = Bucket(7, sequences, 3)
    size = buffer_size(bucket, 5)
    batch = StepBuffer(bucket, 5, torch.zeros(size, dtype=torch.int32), torch.zeros(size, dtype=torch.int32)).batch
    parts = [
        batch.token_ids, batch.positions, batch.slot_mapping, batch.logit_rows, batch.query_starts,
        batch.context_lens, batch.block_tables,
    ]  # fmt: skip
    offsets = [part.storage_offset() for part in parts]
    assert all(offset % ALIGNMENT == 0 for offset in offsets)
    assert all(
        left + part.numel() <= right for part, (left, right) in zip(parts, itertools.pairwise(offsets), strict=False)
    )


SIZE = SMALLEST | {"vocab_size": 61, "max_position_embeddings": 320}
NUM_BLOCKS = 64
POISON = NUM_BLOCKS - 1  # as a block it is one of NaN, as a slot it lies in block 3, as a row or position in no step
NUM_SEQUENCES = 6
REPLAYED_LIMITS = StepLimits(max_rows=24, max_sequences=NUM_SEQUENCES, max_query_len=5, trees=True)


def make_runner(device: torch.device | str, *, batch_invariant: bool = False) -> ModelRunner:
    config, state = tiny_config("qwen3", **SIZE), tiny_state(tiny_hf_model("qwen3", **SIZE))
    model = build_decoder(config, state, dtype="float32", device=device, batch_invariant=batch_invariant).model
    runner = ModelRunner(model, NUM_BLOCKS)
    for tensor in (*runner.cache.keys, *runner.cache.values):
        tensor[POISON] = torch.nan
    return runner


class Text:
    """Sequences in blocks of their own, of which steps of random windows are taken."""

    def __init__(self, seed: int, trees: bool = False) -> None:
        self._random = random.Random(seed)
        self._trees = trees
        blocks = self._random.sample([block for block in range(POISON) if block != 3], 8 * NUM_SEQUENCES)
        self._tables = [blocks[8 * index : 8 * index + 8] for index in range(NUM_SEQUENCES)]
        self._ids = [[self._random.randrange(61) for _ in range(128)] for _ in range(NUM_SEQUENCES)]
        self._computed = [0] * NUM_SEQUENCES

    def prompts(self) -> list[BatchEntry]:
        """A chunk of every sequence."""
        return [self._entry(index, 0, self._random.randint(6, 40)) for index in range(NUM_SEQUENCES)]

    def windows(self) -> list[BatchEntry]:
        """Of some sequences, in any order; some go back behind what was computed, as after a rejection."""
        chosen = self._random.sample(range(NUM_SEQUENCES), self._random.randint(1, REPLAYED_LIMITS.max_sequences))
        longest = self._random.choice((1, REPLAYED_LIMITS.max_query_len))
        entries = []
        for index in chosen:
            start = self._computed[index] - self._random.choice((0, 0, 3))
            rows = self._random.randint(1, longest)
            entries.append(self._entry(index, start, start + rows))
        return entries if sum(len(entry.token_ids) for entry in entries) <= REPLAYED_LIMITS.max_rows else entries[:1]

    def _entry(self, index: int, start: int, end: int) -> BatchEntry:
        self._computed[index] = end
        ids, parents = self._ids[index][start:end], []
        if self._trees and start and self._random.random() < 0.7:
            parents = [self._random.randint(0, node) for node in range(len(ids) - 1)]
        return BatchEntry(ids, start, self._tables[index], self._random.randint(0, len(ids)), parents)


class Captured:
    """A model with captured steps: replayed by hand on a CPU, by CUDA on a GPU."""

    def __init__(
        self, device: torch.device, *, batch_invariant: bool = False, limits: StepLimits = REPLAYED_LIMITS
    ) -> None:
        self.device = Replayed() if device.type == "cpu" else CudaGraphs(device)
        self.runner = make_runner(device, batch_invariant=batch_invariant)
        model = self.runner.model
        assert isinstance(model, Decoder)
        self.steps = CapturedSteps(model, self.runner.cache, limits, self.device)
        self.steps.capture()

    def run(self, entries: list[BatchEntry]) -> Tensor:
        """The logits of a step. A step that wants none is not waited for."""
        logits = self.steps.run(entries)
        assert logits is not None
        if len(logits) == 0:
            return logits.clone().cpu()
        self.wait()
        found = logits.clone().cpu()
        self.poison()
        return found

    def wait(self) -> None:
        """Until all that was launched has run."""
        if isinstance(self.device, Replayed):
            self.device.synchronize()
        else:
            torch.cuda.synchronize()

    def poison(self) -> None:
        """Fills every buffer with what would show, if it were read. Whoever read the logits has waited for the step."""
        self.steps._host.fill_(POISON)
        self.steps._numbers.fill_(POISON)
        self.steps.logits.fill_(torch.nan)


def check_cache(ours_of: ModelRunner, reference: ModelRunner) -> None:
    """Every slot, so that whatever padding stored would show."""
    for ours, theirs in zip(
        (*ours_of.cache.keys, *ours_of.cache.values), (*reference.cache.keys, *reference.cache.values), strict=True
    ):
        torch.testing.assert_close(ours.cpu(), theirs, atol=1e-5, rtol=1e-5, equal_nan=True)


@pytest.mark.parametrize("trees", [False, True], ids=["chains", "trees"])
@torch.inference_mode()
def test_replays_are_the_eager_pass(
    trees: bool, triton_everywhere: torch.device, monkeypatch: pytest.MonkeyPatch, prove: bool
) -> None:
    num_steps = 30 if prove else 12
    with cpu_kernels("pytorch"):
        reference = make_runner("cpu")
    captured, texts = Captured(triton_everywhere), [Text(0, trees), Text(0, trees)]
    captured.wait()
    check_cache(captured.runner, reference)  # capturing stored nothing
    prompts = [text.prompts() for text in texts]
    assert captured.steps.run(prompts[0]) is None  # too long for a window
    captured.runner.forward(prompts[0])
    steps = [(texts[0].windows(), texts[1].windows()) for _ in range(num_steps)]
    found = [captured.run(ours) for ours, _ in steps]
    captured.wait()
    assert any(entry.parents for step, _ in steps for entry in step) == trees
    if isinstance(captured.device, Replayed):
        assert captured.device.replayed == num_steps
    monkeypatch.undo()
    reference.forward(prompts[1])
    tolerance = 2e-5 if triton_everywhere.type == "cpu" else 1e-4
    for logits, (_, theirs) in zip(found, steps, strict=True):
        expected = reference.forward(theirs)
        assert logits.shape == expected.shape
        torch.testing.assert_close(logits, expected, atol=tolerance, rtol=tolerance)
    check_cache(captured.runner, reference)


@torch.inference_mode()
def test_a_step_with_adapters_is_launched_and_others_are_replayed(
    triton_everywhere: torch.device, tmp_path: Path
) -> None:
    captured = Captured(triton_everywhere, limits=StepLimits(max_rows=3, max_sequences=2, max_query_len=2))
    runner, folder = captured.runner, save_adapter(tmp_path, tiny_state(tiny_hf_model("qwen3", **SIZE)))
    runner.captured, runner.adapters = captured.steps, ResidentAdapters(runner.model, AdapterRoom(1, 16))
    adapter = runner.adapters.prepare(load_adapter(folder, runner.model, ""))
    plain = [BatchEntry([7, 8], 0, [5], 2), BatchEntry([9], 0, [6], 1)]
    runner.forward([replace(plain[0], adapter=adapter), plain[1]])
    before = captured.device.replayed if isinstance(captured.device, Replayed) else 0
    logits = runner.forward(plain)
    captured.wait()
    if isinstance(captured.device, Replayed):
        assert (before, captured.device.replayed) == (0, 1)
    adapted = runner.forward([replace(plain[0], adapter=adapter), plain[1]]).cpu()
    torch.testing.assert_close(adapted[2], logits[2].cpu(), atol=1e-4, rtol=1e-4)
    assert not torch.allclose(adapted[:2], logits[:2].cpu(), atol=1e-2)


@pytest.mark.slow
@torch.inference_mode()
def test_replays_have_the_bits_of_the_eager_pass_in_batch_invariant_mode(triton_everywhere: torch.device) -> None:
    captured, text = Captured(triton_everywhere, batch_invariant=True), Text(1)
    captured.runner.forward(text.prompts())
    for _ in range(8):
        step = text.windows()
        logits = captured.run(step)
        captured.wait()
        assert torch.equal(logits, captured.runner.forward(step).cpu())  # which stores the same once more
