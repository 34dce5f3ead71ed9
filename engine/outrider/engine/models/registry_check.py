"""The check at load: a small random copy of the architecture must give the logits of transformers' eager attention."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from outrider.engine.batch import BatchEntry, build_batch
from outrider.engine.blocks import BLOCK_SIZE
from outrider.engine.kv_cache import KVCache
from outrider.engine.models.base import UnsupportedModel
from outrider.engine.models.registry_copy import MAX_WINDOW, small_copy
from outrider.engine.models.registry_model import RegistryModel
from outrider.engine.models.registry_rotary import pin_rotary

TOLERANCE = 1e-3  # of the standard deviation of the logits
LENGTHS = (2 * MAX_WINDOW + 9, MAX_WINDOW + 5)  # of the two sequences: past twice and once the window
STEPS = ((13, 1), (1, 19), (29, 1), (14, 8))  # rows of each sequence per step
WRONG_ROWS = 3  # computed beyond each step, with wrong ids throughout, and rolled back
# What the code of an architecture raises for a configuration or an attention function that it was not written for.
FAILURES = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def check_architecture(config: PreTrainedConfig, max_model_len: int, *, trust_remote_code: bool) -> None:
    """Raises UnsupportedModel, with what differs, unless a small random copy agrees with eager attention."""
    model, prompts, expected = _first_that_runs(config, max_model_len, trust_remote_code)
    try:
        check_model(model, max_model_len, prompts, expected)
    except FAILURES as error:
        raise UnsupportedModel(f"a small random copy fails over the paged cache: {_line(error)}") from error


def _first_that_runs(
    config: PreTrainedConfig, max_model_len: int, trust_remote_code: bool
) -> tuple[PreTrainedModel, list[list[int]], list[Tensor]]:
    """A small copy with eager attention, prompts and their logits. Not every configuration can be narrowed."""
    reasons = []
    for narrow in (True, False):
        try:
            model = small_copy(config, narrow=narrow, trust_remote_code=trust_remote_code)
            pin_rotary(model, max_model_len)
            prompts = _prompts(int(model.config.get_text_config().vocab_size), max_model_len)
            return model, prompts, [_eager_logits(model, prompt) for prompt in prompts]
        except FAILURES as error:
            reasons.append(_line(error))
    raise UnsupportedModel(f"no small copy of it runs, to be checked: {'; '.join(dict.fromkeys(reasons))}")


def check_model(
    model: PreTrainedModel, max_model_len: int, prompts: Sequence[list[int]], expected: Sequence[Tensor]
) -> None:
    """Raises UnsupportedModel unless the model gives the `expected` logits (of each prompt [length, vocab], float32)
    over the paged cache: in ragged chunks, with rollbacks, and beside a neighbour at the last position."""
    run = _PagedRun(RegistryModel(model, max_model_len), prompts)
    for logits, reference in zip(run.all_logits(), expected, strict=True):
        _compare("it", logits, reference)
    far = max_model_len - 1
    _compare(f"a row beside another at position {far}", run.tail_logits(far), expected[0][-WRONG_ROWS:])


def _eager_logits(model: PreTrainedModel, prompt: Sequence[int]) -> Tensor:  # [length, vocab]
    ids = torch.tensor([list(prompt)])  # [1, length]
    with torch.inference_mode():
        logits: Tensor = model(input_ids=ids, position_ids=torch.arange(len(prompt))[None], use_cache=False).logits[0]
    return logits.float()


def _prompts(vocab_size: int, max_model_len: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    lengths = [min(length, max_model_len) for length in LENGTHS]
    return [torch.randint(1, vocab_size, (length,), generator=generator).tolist() for length in lengths]


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


class _PagedRun:
    """Computes prompts in ragged steps, each of them first with wrong ids and too far, as a refused window would."""

    def __init__(self, model: RegistryModel, prompts: Sequence[list[int]]) -> None:
        self._model = model
        self._prompts = prompts
        most = max(len(prompt) for prompt in prompts) // BLOCK_SIZE + 1
        self._tables = [list(range(1 + index, 1 + most * len(prompts), len(prompts))) for index in range(len(prompts))]
        self._cache = KVCache.allocate(model.layers, 1 + most * len(prompts), torch.float32, "cpu")

    def all_logits(self) -> list[Tensor]:  # of each sequence [length, vocab]
        """Every row of every prompt."""
        starts = [0] * len(self._prompts)
        parts: list[list[Tensor]] = [[] for _ in self._prompts]
        for step in STEPS:
            self._forward([self._wrong(i, starts[i], rows + WRONG_ROWS) for i, rows in enumerate(step)])
            entries = [self._entry(i, starts[i], rows) for i, rows in enumerate(step)]
            logits = self._forward(entries)  # [rows of both, vocab]
            for index, part in enumerate(torch.split(logits, [entry.num_logits for entry in entries])):
                starts[index] += len(part)
                parts[index].append(part)
        return [torch.cat(found) for found in parts]

    def tail_logits(self, far: int) -> Tensor:  # [WRONG_ROWS, vocab]
        """The last rows of the first prompt once more, beside a row that has only its position from a long sequence."""
        tail = self._entry(0, len(self._prompts[0]) - WRONG_ROWS, WRONG_ROWS)
        batch = build_batch([tail, BatchEntry([1], 0, [0], 1)], BLOCK_SIZE)
        batch.positions[-1] = far
        return self._model.forward(batch, self._cache)[:WRONG_ROWS]

    def _entry(self, index: int, start: int, rows: int) -> BatchEntry:
        ids = self._prompts[index][start : start + rows]
        return BatchEntry(ids, start, self._tables[index], len(ids))

    def _wrong(self, index: int, start: int, rows: int) -> BatchEntry:
        entry = self._entry(index, start, rows)
        return BatchEntry([token // 2 for token in entry.token_ids], start, entry.block_table, 1)

    def _forward(self, entries: list[BatchEntry]) -> Tensor:  # [logit rows, vocab]
        return self._model.forward(build_batch([e for e in entries if e.token_ids], BLOCK_SIZE), self._cache)


def _compare(name: str, logits: Tensor, expected: Tensor) -> None:  # both [rows, vocab]
    """Raises UnsupportedModel unless the logits agree in every row."""
    spread = float(expected.std())
    difference = (logits - expected).abs().amax(-1)  # [rows]
    wrong = ~(difference <= TOLERANCE * spread)  # [rows]; a NaN is wrong
    if bool(wrong.any()):
        raise UnsupportedModel(
            f"a small random copy differs from its eager attention: {name} by {float(difference.max()):.2g} at a "
            f"spread of {spread:.2g}, first in row {int(wrong.nonzero()[0])} of {len(wrong)}"
        )
