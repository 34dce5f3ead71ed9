"""Tiny models: a table of logits by state, and a runner that keeps the states in the slots of real key-value blocks.

The state after a token is a function of the state before it, and a row reads the state before it from the slot of the
previous position, found through its block table. So a stale slot, a wrong block or a position computed twice changes
the tokens, as it would with attention.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import torch
from torch import Tensor

from outrider.engine.batch import BatchEntry
from outrider.engine.kv_cache_manager import BLOCK_SIZE

NUM_STATES = 61  # prime, so that no state forgets the tokens behind it
FIRST_STATE = 17
MAX_LEN = 4096


class Table:
    """A model: `logits` are [states, vocab] float32."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits
        self.vocab_size = logits.shape[1]
        self.choices: list[int] = logits.argmax(dim=-1).tolist()  # the greedy token of each state

    @classmethod
    def random(cls, seed: int, vocab_size: int, spread: float = 1.5, num_laws: int = NUM_STATES) -> Table:
        """Normal logits. With fewer laws than states, states share them, and each is drawn from more often."""
        generator = torch.Generator().manual_seed(seed)
        laws = spread * torch.randn(num_laws, vocab_size, generator=generator)
        return cls(laws[torch.arange(NUM_STATES) % num_laws])

    def near(self, seed: int, distance: float, num_more_ids: int = 0) -> Table:
        """A draft of this model: its logits and noise; ids that this one does not have are rare."""
        other = Table.random(seed, self.vocab_size + num_more_ids, distance).logits
        other[:, : self.vocab_size] += self.logits
        other[:, self.vocab_size :] -= 2.0
        return Table(other)

    def state_after(self, tokens: Sequence[int], state: int = FIRST_STATE) -> int:
        """The state that gives the next token's law."""
        for token in tokens:
            state = (5 * state + token + 1) % NUM_STATES
        return state

    def law(self, prompt: Sequence[int], num_tokens: int) -> Iterator[tuple[tuple[int, ...], float]]:
        """Every output of `num_tokens` tokens and its probability, at temperature 1."""
        probs = torch.softmax(self.logits.double(), dim=-1).tolist()
        for output in itertools.product(range(self.vocab_size), repeat=num_tokens):
            state, probability = self.state_after(prompt), 1.0
            for token in output:
                probability *= probs[state][token]
                state = self.state_after((token,), state)
            yield output, probability


class TableRunner:
    """In the place of a ModelRunner."""

    captured = None  # no pass is
    last_forward_us = 1 << 40  # the whole of a step: a clock in virtual time does not tell its parts

    def __init__(self, table: Table, num_blocks: int) -> None:
        self.table = table
        self.model = SimpleNamespace(
            device=torch.device("cpu"), dtype=torch.float32, vocab_size=table.vocab_size, max_model_len=MAX_LEN
        )
        self.num_forwards = self.num_rows = 0
        self.fails_next = False
        self._slots: list[int | None] = [None] * (num_blocks * BLOCK_SIZE)

    def forward(self, entries: Sequence[BatchEntry]) -> Tensor:
        """Logits are [rows that want them, vocab]."""
        self.num_forwards += 1
        self.num_rows += sum(len(entry.token_ids) for entry in entries)
        if self.fails_next:
            self.fails_next = False
            raise RuntimeError("the simulated device failed")
        states = [state for entry in entries for state in self._compute(entry)]
        return self.table.logits[torch.tensor(states, dtype=torch.int64)]

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies the states of whole blocks."""
        for source, target in pairs:
            states = self._slots[source * BLOCK_SIZE : (source + 1) * BLOCK_SIZE]
            self._slots[target * BLOCK_SIZE : (target + 1) * BLOCK_SIZE] = states

    def _compute(self, entry: BatchEntry) -> list[int]:
        before = self._slots[self._slot(entry, entry.start - 1)] if entry.start else FIRST_STATE
        if before is None:
            raise RuntimeError("a slot is read that was never written")
        states = []
        for offset, token in enumerate(entry.token_ids):
            before = self.table.state_after((token,), before)
            self._slots[self._slot(entry, entry.start + offset)] = before
            states.append(before)
        return states[len(states) - entry.num_logits :]

    @staticmethod
    def _slot(entry: BatchEntry, position: int) -> int:
        return entry.block_table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
