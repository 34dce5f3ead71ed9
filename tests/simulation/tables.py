"""Tiny models: a table of logits by state, and a runner that keeps the states in the slots of real key-value blocks.

The state after a token is a function of the state before it, and a row reads the state before it from the slot of the
previous position, found through its block table. So a stale slot, a wrong block or a position computed twice changes
the tokens, as it would with attention.

What an honest draft draws: a function of the table, the state and the position. A draft that kept a tail of tokens
from another context, or mixed up its weights, does not draw that."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace

import torch
from torch import Tensor

from outrider.engine.batch import BatchEntry
from outrider.engine.kv_cache_manager import BLOCK_SIZE
from outrider.engine.sampler import SamplingRows, SequenceSampler, assemble
from outrider.engine.token_tree import KeptPath
from outrider.kernels.random.reference import as_int64, exponential_noise
from outrider.kernels.sampling.reference import DEFAULT_MASS, MAX_ENTRIES, integer_weights, logits_to_probs
from outrider.rpc.messages import Open, TokenWeights
from outrider.rpc.words.sampling_params import AcceptanceRule, SamplingParams

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
    adapters = None  # nor has any row one
    last_pass = staticmethod(lambda: 1 << 40)  # the whole of a step: a clock in virtual time does not tell its parts
    last_woken = staticmethod(lambda: 0)
    census = None  # nor has the model experts

    def __init__(self, table: Table, num_blocks: int) -> None:
        self.table = table
        self.model = SimpleNamespace(
            takes_trees=False,
            device=torch.device("cpu"),
            dtype=torch.float32,
            vocab_size=table.vocab_size,
            max_model_len=MAX_LEN,
        )
        self.num_forwards = self.num_rows = 0
        self.fails_next = False
        self._slots: list[int | None] = [None] * (num_blocks * BLOCK_SIZE)

    def keep_paths(self, paths: Sequence[KeptPath]) -> None:
        """There are no trees."""
        assert not paths

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


IsHonest = Callable[[int, int, int, TokenWeights | None], bool]  # position, state, token, weights


def honesty_of(table: Table, request: Open) -> IsHonest:
    """For a request at temperature 0 or 1 without other processors."""
    if request.sampling.greedy:
        return lambda position, state, token, weights: token == table.choices[state] and weights is None
    probs = _probs(table)
    if request.acceptance == AcceptanceRule.COUPLED:
        return _coupled(probs, request)
    return _weighted(probs)


def _probs(table: Table) -> Tensor:
    """Of every state, [states, vocab]."""
    sampler = SequenceSampler(SamplingParams(), (), (), (), table.vocab_size)
    return logits_to_probs(table.logits.clone(), assemble([SamplingRows(sampler)] * NUM_STATES))[0]


def _weighted(probs: Tensor) -> IsHonest:
    rows = integer_weights(probs, DEFAULT_MASS, MAX_ENTRIES).long().tolist()
    expected = [{token: weight for token, weight in enumerate(row) if weight} for row in rows]

    def is_honest(position: int, state: int, token: int, weights: TokenWeights | None) -> bool:
        if weights is None:
            return False
        count = len(weights.ids) // 4
        ids, values = (struct.unpack(f"<{count}I", packed) for packed in (weights.ids, weights.weights))
        law, sent = expected[state], dict(zip(ids, values, strict=True))
        return token in law and sent.keys() == law.keys() and all(abs(law[i] - sent[i]) <= 1 for i in law)

    return is_honest


def _coupled(probs: Tensor, request: Open) -> IsHonest:
    length = len(request.prompt_ids) + request.sampling.max_tokens
    positions = torch.arange(length)
    seeds = torch.full_like(positions, as_int64(request.seed))
    noise = exponential_noise(seeds, positions, torch.full_like(positions, request.completion), probs.shape[1])

    def is_honest(position: int, state: int, token: int, weights: TokenWeights | None) -> bool:
        ratios = noise[position] / probs[state]  # [vocab]
        return weights is None and bool(ratios[token] <= ratios.min() * 1.0001)

    return is_honest
