"""From the sampling parameters of sequences to those of the rows of a ragged batch, each with the state that holds at
its own position.

A row that follows drafted tokens is processed as if they had been committed: penalties, bad words and min_tokens count
them. The target asks for the rows of a whole window, the draft for one row at the end of its chain. `assemble` lists
what single rows and ids ask for; where a number a row says it all, `row_sampling` reads columns on a device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from outrider.engine.grammar.constraint import Constraint
from outrider.engine.grammar.masks import allowed_ids, num_words
from outrider.engine.staging import Column, StagedColumns, index_on, put_on
from outrider.kernels.types import Allowed, Entries, Penalties, RowSampling, Truncation
from outrider.rpc.words.sampling_params import SamplingParams

if TYPE_CHECKING:
    from outrider.engine.grammar.compiler import Matcher

OFF = {"temperature": 1.0, "min_p": 0.0, "top_k": 0, "top_p": 1.0}  # what leaves a row as it is, and pads others


class DraftMasks(Protocol):
    """A grammar as drafts keep it, which follows the committed tokens; where it cannot, nothing is masked."""

    def masks(self, drafted: Sequence[int], first: int) -> Tensor | None:
        """What may follow the prefixes of `drafted` from length `first` on, [rows, ceil(vocab / 32)] int32; None: all
        may."""


class SequenceSampler:
    """One sequence's parameters and what they count so far; `append` follows every commit."""

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        eos_ids: Sequence[int],
        vocab_size: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self.params = params
        self.vocab_size = vocab_size
        self.draft_masks: DraftMasks | None = None  # a draft's
        self.greedy = params.temperature == 0
        self.num_output = 0
        self.penalised = params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
        self.truncated = not self.greedy and (0 < params.top_k < vocab_size or params.top_p < 1)
        self._allowed = _mask_of(tuple(params.allowed_token_ids), vocab_size)  # [vocab] float32; None: all
        biases = {token: bias for token, bias in params.logit_bias.items() if self._known(token)}
        self.bias_ids = torch.tensor(list(biases), dtype=torch.int64)  # [biased]
        self.bias_values = torch.tensor(list(biases.values()), dtype=torch.float32)  # [biased]
        self._held_back = [token for token in {*eos_ids, *params.stop_token_ids} if self._known(token)]
        bad_words = [tuple(word) for word in params.bad_words_ids if word and self._known(word[-1])]
        self._bad_tokens = {word[0] for word in bad_words if len(word) == 1}
        self._bad_words: dict[int, list[tuple[int, ...]]] = {}  # by the token before the last
        for word in bad_words:
            if len(word) > 1:
                self._bad_words.setdefault(word[-2], []).append(word)
        self._restricted_always = self._allowed is not None or bool(biases or bad_words)
        self._tail_length = max((len(word) - 1 for word in bad_words), default=0)
        self._tail: tuple[int, ...] = ()  # the last output tokens, as many as a bad word's beginning needs
        self._column_of: dict[int, int] = {}  # where each id in prompt or output is counted
        self.constraint: Constraint | None = None  # behind the output so far
        self._seen_ids = torch.empty(0, dtype=torch.int64, device=device)  # [seen]
        self._output_counts = torch.empty(0, device=device)  # [seen] float32
        if self.penalised:
            self._add_columns(prompt_ids)
        self.append(output_ids)

    def constrain(self, matcher: Matcher, ignored_ends: Iterable[int] = ()) -> None:
        """From now on tokens follow this, too; it stands behind the output so far."""
        self.constraint = Constraint(matcher, self._held_back, self.params.min_tokens, ignored_ends)

    @property
    def constrained(self) -> bool:
        """Whether masks say which tokens may follow, now or later."""
        return self.constraint is not None and self.constraint.matcher.constrains

    def append(self, token_ids: Sequence[int]) -> None:
        """Counts committed tokens as output."""
        self.num_output += len(token_ids)
        if self.constraint is not None:
            self.constraint.matcher.advance(token_ids)
        if self._tail_length:
            self._tail = (*self._tail, *token_ids)[-self._tail_length :]
        if self.penalised and token_ids:
            self._add_columns(token_ids)
            columns = [self._column_of[token] for token in token_ids if self._known(token)]
            index = torch.tensor(columns, dtype=torch.int64, device=self._output_counts.device)
            self._output_counts.index_put_((index,), self._output_counts.new_ones(()), accumulate=True)

    def banned_after(self, drafted: Sequence[int]) -> set[int]:
        """Ids that may not follow these drafted tokens: ends of bad words, and until min_tokens EOS and stop ids."""
        banned: set[int] = set()
        holds_back = self.constraint is None or not self.constraint.holds_ends_back
        if holds_back and self.num_output + len(drafted) < self.params.min_tokens:
            banned.update(self._held_back)
        banned.update(self._bad_tokens)
        if self._bad_words:
            tail = (*self._tail, *drafted)
            words = self._bad_words.get(tail[-1], ()) if tail else ()
            banned.update(word[-1] for word in words if tail[1 - len(word) :] == word[:-1])
        return banned

    def allowed_on(self, device: torch.device) -> Tensor | None:
        """What is added for the ids that may follow at all: [vocab] float32, 0 or minus infinity; None: all may. It
        moves to the device once."""
        if self._allowed is not None:
            self._allowed = self._allowed.to(device)
        return self._allowed

    def penalties(self, drafted: Sequence[int], first: int, start: int) -> Penalties:
        """The penalties of rows `start` and on, one for each prefix of `drafted` of length `first` and above."""
        num_rows, num_seen, params = len(drafted) - first + 1, len(self._column_of), self.params
        unseen = self._unseen(drafted)
        column_of = {token: self._column_of.get(token, -1) for token in drafted if self._known(token)}
        column_of |= {token: num_seen + index for index, token in enumerate(unseen)}
        pairs = [
            (row, column_of[token]) for row in range(num_rows) for token in drafted[: first + row] if token in column_of
        ]
        ids = torch.cat((self._seen_ids, self._seen_ids.new_tensor(unseen)))  # [seen]
        counts = self._output_counts.new_zeros(num_rows, len(ids))  # [rows, seen]
        counts[:, :num_seen] = self._output_counts
        if pairs:
            rows, columns = torch.tensor(pairs, device=ids.device).unbind(1)  # [pairs] each
            counts.index_put_((rows, columns), counts.new_ones(()), accumulate=True)
        repetition = torch.full_like(counts, params.repetition_penalty)
        repetition[:, num_seen:].masked_fill_(counts[:, num_seen:] == 0, 1.0)  # not yet drafted in that row
        return Penalties(
            rows=torch.arange(start, start + num_rows, device=ids.device).repeat_interleave(len(ids)),
            ids=ids.repeat(num_rows),
            output_counts=counts.flatten(),
            repetition=repetition.flatten(),
            presence=torch.full_like(counts, params.presence_penalty).flatten(),
            frequency=torch.full_like(counts, params.frequency_penalty).flatten(),
        )

    @property
    def restricted(self) -> bool:
        """Whether single ids are allowed, banned or biased now, other than by a constraint."""
        return self._restricted_always or self.num_output < self.params.min_tokens

    def _known(self, token_id: int) -> bool:
        return 0 <= token_id < self.vocab_size

    def _unseen(self, token_ids: Sequence[int]) -> list[int]:
        return [token for token in dict.fromkeys(token_ids) if self._known(token) and token not in self._column_of]

    def _add_columns(self, token_ids: Sequence[int]) -> None:
        unseen = self._unseen(token_ids)
        self._column_of |= {token: len(self._column_of) + index for index, token in enumerate(unseen)}
        self._seen_ids = torch.cat((self._seen_ids, self._seen_ids.new_tensor(unseen)))
        self._output_counts = torch.cat((self._output_counts, self._output_counts.new_zeros(len(unseen))))


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """The rows of one sequence in a batch: one per prefix of `drafted`, from length `first` to the whole.

    The target asks for a window with `first=0`, the draft for its chain's next token with `first=len(drafted)`.
    """

    sampler: SequenceSampler
    drafted: Sequence[int] = ()
    first: int = 0

    @property
    def num_rows(self) -> int:
        """How many rows of the batch are this sequence's."""
        return len(self.drafted) - self.first + 1


def assemble(
    plans: Sequence[SamplingRows],
    device: torch.device | str = "cpu",
    token_mask: Tensor | None = None,  # [rows, ceil(vocab / 32)] int32: set bits are allowed
    *,
    for_argmax: bool = False,
) -> RowSampling:
    """Row parameters for a packed batch, in the order of `plans`; for the arg max of every row those that change it,
    which are what precedes temperature."""
    device = torch.device(device)
    if for_argmax and not any(plan.sampler.restricted or plan.sampler.penalised for plan in plans):
        return RowSampling(token_mask=None if token_mask is None else put_on(token_mask, device))
    assembly = _Assembly()
    for plan in plans:
        assembly.add(plan)
    changes = assembly.changes(device, token_mask)
    return changes if for_argmax else assembly.with_numbers(changes, device)


class _Assembly:
    """Row parameters as lists, while rows are added."""

    def __init__(self) -> None:
        self.num_rows = 0
        self.temperature: list[float] = []
        self.min_p: list[float] = []
        self.greedy_rows: list[int] = []
        self.truncation: list[tuple[int, int, float]] = []  # row, top_k, top_p
        self.restricted: list[tuple[range, SequenceSampler]] = []
        self.banned: list[tuple[int, int]] = []  # row, id
        self.penalised: list[Penalties] = []

    def add(self, plan: SamplingRows) -> None:
        """Appends one sequence's rows."""
        sampler, params = plan.sampler, plan.sampler.params
        rows = range(self.num_rows, self.num_rows + plan.num_rows)
        self.num_rows = rows.stop
        self.temperature += [1.0 if sampler.greedy else params.temperature] * len(rows)
        self.min_p += [0.0 if sampler.greedy else params.min_p] * len(rows)
        if sampler.greedy:
            self.greedy_rows += rows
        if sampler.truncated:
            self.truncation += [(row, params.top_k, params.top_p) for row in rows]
        if sampler.restricted:
            self._restrict(plan, rows)
        if sampler.penalised:
            self.penalised.append(sampler.penalties(plan.drafted, plan.first, rows.start))

    def _restrict(self, plan: SamplingRows, rows: range) -> None:
        self.restricted.append((rows, plan.sampler))
        for row in rows:
            prefix = plan.drafted[: plan.first + row - rows.start]
            self.banned += [(row, token) for token in plan.sampler.banned_after(prefix)]

    def changes(self, device: torch.device, token_mask: Tensor | None) -> RowSampling:
        """What changes the logits of single ids; None for what no row uses."""
        bias, bias_values = self._bias(device)
        return RowSampling(
            allowed=self._allowed(device),
            banned=_entries(self.banned, device),
            bias=bias,
            bias_values=bias_values,
            penalties=self._penalties(device),
            token_mask=None if token_mask is None else put_on(token_mask, device),
        )

    def with_numbers(self, changes: RowSampling, device: torch.device) -> RowSampling:
        """The same with what is a number a row."""
        return replace(
            changes,
            temperature=_unless_all(self.temperature, 1.0, device),
            greedy_rows=torch.tensor(self.greedy_rows, device=device) if self.greedy_rows else None,
            min_p=_unless_all(self.min_p, 0.0, device),
            truncation=self._truncation(device),
        )

    def _allowed(self, device: torch.device) -> Allowed | None:
        found = [(rows, sampler.allowed_on(device)) for rows, sampler in self.restricted]
        masked = [(rows, mask) for rows, mask in found if mask is not None]
        if not masked:
            return None
        rows = index_on([row for rows, _ in masked for row in rows], device)
        mask_of = index_on([place for place, (rows, _) in enumerate(masked) for _ in rows], device)
        return Allowed(rows, mask_of, torch.stack([mask for _, mask in masked]))

    def _bias(self, device: torch.device) -> tuple[Entries | None, Tensor | None]:
        biased = [(rows, sampler) for rows, sampler in self.restricted if len(sampler.bias_ids)]
        if not biased:
            return None, None
        rows = [
            torch.arange(rows.start, rows.stop).repeat_interleave(len(sampler.bias_ids)) for rows, sampler in biased
        ]
        ids = [sampler.bias_ids.repeat(len(rows)) for rows, sampler in biased]
        values = [sampler.bias_values.repeat(len(rows)) for rows, sampler in biased]
        places = Entries(put_on(torch.cat(rows), device), put_on(torch.cat(ids), device))
        return places, put_on(torch.cat(values), device)

    def _truncation(self, device: torch.device) -> Truncation | None:
        if not self.truncation:
            return None
        rows, top_k, top_p = zip(*self.truncation, strict=True)
        return Truncation(
            torch.tensor(rows, device=device),
            torch.tensor(top_k, device=device),
            torch.tensor(top_p, dtype=torch.float64, device=device),
        )

    def _penalties(self, device: torch.device) -> Penalties | None:
        """The penalties, counted on the host."""
        if not self.penalised:
            return None
        names = [column.name for column in fields(Penalties)]
        columns = [[getattr(part, name) for part in self.penalised] for name in names]
        return Penalties(*(put_on(parts[0] if len(parts) == 1 else torch.cat(parts), device) for parts in columns))


def _entries(pairs: list[tuple[int, int]], device: torch.device) -> Entries | None:
    if not pairs:
        return None
    rows, ids = zip(*pairs, strict=True)
    return Entries(index_on(rows, device), index_on(ids, device))


def _unless_all(values: list[float], off: float, device: torch.device) -> Tensor | None:
    """[rows] float32; None where every row has it off."""
    return None if all(value == off for value in values) else torch.tensor(values, dtype=torch.float32, device=device)


@lru_cache(maxsize=8)  # the completions of a request share theirs
def _mask_of(ids: tuple[int, ...], vocab_size: int) -> Tensor | None:
    """0 for these ids, minus infinity for the others, [vocab] float32; None without ids. Ids that are not in the
    vocabulary are ignored, but not all of them."""
    if not ids:
        return None
    wanted = torch.tensor(ids, dtype=torch.int64)  # [ids]
    known = wanted[(wanted >= 0) & (wanted < vocab_size)]
    if not len(known):
        raise ValueError("allowed_token_ids: has none of the vocabulary; allowed: at least one")
    return torch.full((vocab_size,), -torch.inf).index_fill_(0, known, 0.0)


def sampling_columns(num_rows: int) -> list[Column]:
    """The columns that `row_sampling` reads."""
    return [
        Column("temperature", torch.float32, num_rows),
        Column("min_p", torch.float32, num_rows),
        Column("top_k", torch.int64, num_rows),
        Column("top_p", torch.float64, num_rows),
    ]


def parameters_of(sampler: SequenceSampler) -> dict[str, float]:
    """A sequence's numbers in these columns. A greedy row's are off: its arg max does not ask for them."""
    params = sampler.params
    if sampler.greedy:
        return OFF
    cut = {"top_k": params.top_k, "top_p": params.top_p} if sampler.truncated else {}
    return OFF | {"temperature": params.temperature, "min_p": params.min_p} | cut


def is_numeric_only(sampler: SequenceSampler) -> bool:
    """Whether the columns hold all that a sequence asks for: no single ids, no masks, and no penalties."""
    return not (sampler.restricted or sampler.constrained or sampler.penalised or sampler.draft_masks is not None)


def row_sampling(columns: StagedColumns) -> RowSampling:
    """The parameters of every row; each does nothing where it is off. Greedy rows are drawn like the others, and nobody
    asks what was drawn."""
    every_row = torch.arange(len(columns["top_k"]), device=columns["top_k"].device)  # [rows]
    return RowSampling(
        temperature=columns["temperature"],
        min_p=columns["min_p"],
        truncation=Truncation(every_row, columns["top_k"], columns["top_p"]),
    )


def is_stuck(sampler: SequenceSampler, drafted: Sequence[int]) -> bool:
    """Whether a sequence's constraint and its other parameters together leave no token, here or behind some of these.
    Raises GrammarError."""
    constraint, size = sampler.constraint, sampler.vocab_size
    if constraint is None:
        return False
    masks = torch.empty(len(drafted) + 1, num_words(size), dtype=torch.int32)
    constraint.write_masks(sampler.num_output, drafted, 0, masks)
    allowed = sampler.allowed_on(torch.device("cpu"))
    known = set(range(size)) if allowed is None else set((allowed == 0).nonzero()[:, 0].tolist())
    left = (
        (known & allowed_ids(row, size)) - sampler.banned_after(drafted[:length]) for length, row in enumerate(masks)
    )
    return not all(left)
