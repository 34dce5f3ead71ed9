"""The target as it writes lessons, a few windows at once: as many as a cache of CACHE_BYTES holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from outrider.engine.batch import BatchEntry
from outrider.engine.kv_cache import bytes_per_block
from outrider.engine.kv_cache_manager import BLOCK_SIZE
from outrider.engine.loader import LoadedModel
from outrider.engine.model_runner import ModelRunner
from outrider.training.language_head import rows_at_once
from outrider.training.lessons import TOP, Lesson

CACHE_BYTES = 512 << 20
MOST_WINDOWS = 16  # at once: more are hardly faster
MOST_ROWS = 4096  # of one pass
TOLD_EVERY = 32  # tokens

OnWord = Callable[[str], None]  # is told in words what a run does before its next step


def silent(word: str) -> None:
    """Tells nobody."""


class Teacher:
    """A target, with a cache for some windows. Its lessons have the hidden states of the layers `taps`, as
    hidden_states.py numbers them."""

    def __init__(self, loaded: LoadedModel, length: int, taps: tuple[int, ...] = (), on_word: OnWord = silent) -> None:
        model = loaded.model
        self._length, self._on_word = length, on_word
        self._blocks = -(-length // BLOCK_SIZE)  # of a window
        self._windows = windows_at_once(self._blocks * bytes_per_block(model.layers, model.dtype))
        self._rows = min(MOST_ROWS, rows_at_once(model.vocab_size))
        self._runner = ModelRunner(model, self._windows * self._blocks, taps=taps)

    def lessons(
        self, name: str, prompts: Tensor, temperature: float | None, generator: torch.Generator | None = None
    ) -> Iterator[Lesson]:
        """Reads `prompts`, [windows, length or less], and goes on from them: the arg max at temperature 0. With None
        they are whole windows, [windows, length + 1]. Some windows at once, whose number changes nothing; `name` is
        what it is told by."""
        draws = torch.rand(len(prompts), self._length + 1, generator=generator)
        for start in range(0, len(prompts), self._windows):
            part = slice(start, start + self._windows)
            last = min(part.stop, len(prompts))
            yield self._lesson(
                f"{name}, windows {start + 1} to {last} of {len(prompts)}", prompts[part], temperature, draws[part]
            )

    @torch.inference_mode()
    def _lesson(self, name: str, prompts: Tensor, temperature: float | None, draws: Tensor) -> Lesson:
        made, num_known, start, told = self._empty(len(prompts)), prompts.shape[1], 0, -TOLD_EVERY
        made.ids[:, :num_known] = prompts
        while start < self._length:
            if start - told >= TOLD_EVERY:
                self._on_word(f"{name}: {start} of {self._length} tokens")
                told = start
            num_rows = max(1, min(num_known - start, self._length - start, self._rows // len(prompts)))
            rows = slice(start, start + num_rows)
            logits = self._logits(made.ids[:, rows], start)  # [windows, rows, vocabulary]
            values, made.top_ids[:, rows] = logits.topk(made.top_ids.shape[-1], dim=-1)
            made.top_probs[:, rows] = (values - logits.logsumexp(-1, keepdim=True)).exp()
            states = self._runner.hidden_states
            if states is not None:
                made.features[:, rows] = states.view(len(prompts), num_rows, *states.shape[1:])
            start += num_rows
            if start >= num_known and temperature is not None:
                made.ids[:, start] = drawn(logits[:, -1], temperature, draws[:, start])
        return made

    def _empty(self, num_windows: int) -> Lesson:
        """To be filled: what is kept of each pass would leave holes between the passes' logits."""
        model, taps = self._runner.model, len(self._runner.taps)
        top = num_windows, self._length, min(TOP, model.vocab_size)
        return Lesson(
            torch.zeros(num_windows, self._length + 1, dtype=torch.int64),
            torch.empty(top, dtype=torch.int64),
            torch.empty(top),
            torch.empty(num_windows, self._length, taps, model.hidden_size if taps else 0),
        )

    def _logits(self, ids: Tensor, start: int) -> Tensor:  # [windows, rows] -> [windows, rows, vocabulary]
        num_rows = ids.shape[1]
        entries = [
            BatchEntry(row, start, range(index * self._blocks, (index + 1) * self._blocks), num_rows)
            for index, row in enumerate(ids.tolist())
        ]
        return self._runner.forward(entries).view(len(ids), num_rows, -1)


def windows_at_once(window_bytes: int) -> int:
    """How many windows a cache holds that takes so many bytes for each; one at least."""
    return max(1, min(MOST_WINDOWS, CACHE_BYTES // window_bytes))


def drawn(logits: Tensor, temperature: float, draws: Tensor) -> Tensor:  # [windows, vocabulary], [windows] -> [windows]
    """The likeliest token at temperature 0; else that at which the summed probabilities pass the draw, from 0 to 1."""
    if temperature == 0.0:
        return logits.argmax(-1)
    sums = (logits / temperature).softmax(-1).cumsum(-1)  # each is rounded, the sum itself is of float64 on a CPU
    return torch.searchsorted(sums, draws[:, None] * sums[:, -1:], right=True)[:, 0].clamp_max(logits.shape[-1] - 1)
