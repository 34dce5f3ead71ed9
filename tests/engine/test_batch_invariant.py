"""The contract of batch-invariant mode: a row's bits depend on its sequence alone. And the inverse."""

from __future__ import annotations

import pytest
import torch
from support.models import FAMILIES, KERNELS, build_decoder, cpu_kernels, tiny_config, tiny_hf_model, tiny_state
from torch import Tensor

from outrider.engine.batch import BatchEntry
from outrider.engine.kv_cache_manager import BlockPool, CachedSequence, KVCacheManager
from outrider.engine.model_runner import ModelRunner
from outrider.engine.token_tree import KeptPath, path_to

LENGTH = 150  # more than one split of keys
SIZE = {"hidden_size": 96, "intermediate_size": 200, "vocab_size": 6000}  # the head is packed, the rest transposed
TABLE, OTHER_TABLES = list(range(30, 40)), [list(range(10 * index, 10 * index + 10)) for index in range(3)]


@pytest.fixture(scope="module", params=[(family, kernels) for family in FAMILIES for kernels in KERNELS], ids="-".join)
def runner(request: pytest.FixtureRequest) -> ModelRunner:
    return make_runner(request.param[0], batch_invariant=True, kernels=request.param[1])


def make_runner(
    family: str, batch_invariant: bool, dtype: str = "float32", kernels: str = "pytorch", halves: bool = False
) -> ModelRunner:
    config, state = tiny_config(family, **SIZE), tiny_state(tiny_hf_model(family, **SIZE))
    if halves:
        state = {name: tensor.bfloat16().float() for name, tensor in state.items()}
    with cpu_kernels(kernels):
        loaded = build_decoder(config, state, dtype=dtype, batch_invariant=batch_invariant)
    return ModelRunner(loaded.model, num_blocks=44)


def tokens(seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 6000, (LENGTH,), generator=generator).tolist()


def run_steps(runner: ModelRunner, steps: list[int], others: int = 0, first: bool = True) -> Tensor:
    """All logits of one sequence computed in steps of so many rows, beside rows of other sequences."""
    ids, logits, at = tokens(), [], 0
    for step in steps:
        entry = BatchEntry(ids[at : at + step], at, TABLE, step)
        beside = [BatchEntry(tokens(index + 1)[: 3 + 2 * index], 0, OTHER_TABLES[index], 1) for index in range(others)]
        out = runner.forward([entry, *beside] if first else [*beside, entry])
        logits.append(out[:step] if first else out[-step:])
        at += step
    return torch.cat(logits)


SCHEDULES = {
    "chunks of 64": [64, 64, 22],
    "one by one": [*([1] * LENGTH)],
    "twos": [*([2] * (LENGTH // 2))],
    "fives": [*([5] * (LENGTH // 5))],
    "seventeens": [*([17] * 8), 14],
    "mixed": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 60, 24],
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_steps_of_any_size_give_the_bits_of_one_pass(runner: ModelRunner, schedule: str) -> None:
    assert torch.equal(run_steps(runner, SCHEDULES[schedule]), run_steps(runner, [LENGTH]))


@pytest.mark.parametrize("others", [1, 2, 3])
def test_neighbours_change_no_bit(runner: ModelRunner, others: int) -> None:
    whole = run_steps(runner, [LENGTH])
    assert torch.equal(run_steps(runner, SCHEDULES["seventeens"], others), whole)
    assert torch.equal(run_steps(runner, SCHEDULES["mixed"], others, first=False), whole)


def test_warm_prefix_cache_changes_no_bit(runner: ModelRunner) -> None:
    cache = KVCacheManager(BlockPool(44))
    logits = []
    for _ in range(2):  # cold, then warm
        sequence = CachedSequence(tokens())
        start = cache.admit(sequence)
        cache.extend(sequence)
        entry = BatchEntry(sequence.tokens[start:], start, sequence.block_table, 6)
        logits.append(runner.forward([entry]))
        sequence.num_computed_tokens = LENGTH - 1
        cache.publish(sequence, LENGTH)
        cache.release(sequence)
    assert start == 144
    assert torch.equal(*logits)


def test_rejected_rows_change_no_bit(runner: ModelRunner) -> None:
    whole = run_steps(runner, [LENGTH])
    run_steps(runner, [100])
    ids = tokens()
    for at in range(100, 120):
        wrong = [ids[at], *tokens(9)[:4]]
        assert torch.equal(runner.forward([BatchEntry(wrong, at, TABLE, 5)])[0], whole[at])


TREE = (0, 0, 1, 1, 2, 4, 6)  # the path of nodes 0, 3, 5, 6 is the longest
LONGEST = (0, 3, 5, 6)


@pytest.mark.parametrize("before", [1, 6])
@pytest.mark.parametrize("beside", [False, True])
def test_a_path_of_a_tree_has_the_bits_of_a_chain(runner: ModelRunner, before: int, beside: bool) -> None:
    """Of every node, and of what follows the path that is kept."""
    whole, ids, at = run_steps(runner, [LENGTH]), tokens(), 130
    drafted = [tokens(7)[node] for node in range(len(TREE))]
    for depth, node in enumerate(LONGEST):
        drafted[node] = ids[at + depth]
    run_steps(runner, [at])
    rows = [*ids[at - before : at], *drafted]
    entries = [BatchEntry(rows, at - before, TABLE, len(rows), TREE)]
    if beside:
        entries = [BatchEntry(tokens(1)[:5], 0, OTHER_TABLES[0], 0), *entries]
    logits = runner.forward(entries)
    for node in range(len(TREE)):
        path = path_to(TREE, node)
        run_steps(runner, [at])
        chain = BatchEntry([*ids[at - before : at], *(drafted[node] for node in path)], at - before, TABLE, 1)
        assert torch.equal(logits[before + node], runner.forward([chain])[0])
    run_steps(runner, [at])
    runner.forward(entries)
    first_row = 5 * beside + before
    runner.keep_paths([KeptPath(TABLE, at, first_row, LONGEST)])
    after = runner.forward([BatchEntry(ids[at + 4 : at + 10], at + 4, TABLE, 6)])
    assert torch.equal(after, whole[at + 4 : at + 10])


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gemma3_text"])
def test_bfloat16_holds_the_contract_too(family: str) -> None:
    runner = make_runner(family, batch_invariant=True, dtype="bfloat16")
    whole = run_steps(runner, [LENGTH])
    assert all(torch.equal(run_steps(runner, schedule, others=1), whole) for schedule in SCHEDULES.values())


@pytest.mark.parametrize("kernels", KERNELS)
def test_equal_models_give_equal_bits(kernels: str) -> None:
    first, second = (run_steps(make_runner("llama", True, kernels=kernels), [LENGTH]) for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_c_kernels_hold_the_contract_whatever_the_threads_and_the_weights(family: str, batch_invariant: bool) -> None:
    """They need no mode for it. Weights of 16 bits are widened on the way, a part at a time where rows are many."""
    runner = make_runner(family, batch_invariant, kernels="c", halves=True)
    assert runner.model.batch_invariant and not make_runner(family, False).model.batch_invariant
    whole = run_steps(runner, [LENGTH])
    threads = torch.get_num_threads()
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            for schedule in ("seventeens", "fives", "mixed"):
                assert torch.equal(run_steps(runner, SCHEDULES[schedule], others=number), whole)
    finally:
        torch.set_num_threads(threads)
    torch.testing.assert_close(
        run_steps(make_runner(family, False, halves=True), [LENGTH]), whole, atol=1e-4, rtol=1e-4
    )


def test_ordinary_mode_fails_the_contract() -> None:
    """The inverse test: without the mode some step size changes bits where PyTorch computes."""
    runner = make_runner("llama", batch_invariant=False)
    whole = run_steps(runner, [LENGTH])
    results = [run_steps(runner, schedule) for schedule in SCHEDULES.values()]
    assert not all(torch.equal(result, whole) for result in results)
    for result in results:
        torch.testing.assert_close(result, whole, atol=1e-4, rtol=1e-4)
