"""Which drafted tokens hold, and the target's own token after them, judged on the host from the logits of a step.

Greedy, coupled and rejection sequences of a batch are each judged together. The acceptance rules themselves are
kernels; here rows are matched with sequences, and random numbers with positions: of each the words that judge a drafted
token and draw the target's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum

import torch
from torch import Tensor

from outrider.engine.random import MAX_WORD_ROWS, RandomRange, RandomSource, noise_source
from outrider.engine.sampler import process, process_greedy
from outrider.kernels.random.reference import Purpose, words
from outrider.kernels.types import DraftWeights, Windows
from outrider.kernels.verify.reference import accept, accept_uniforms, coupled_accept, coupled_choice, draw
from outrider.target_service.outputs import VerifiedWindow, verified_windows
from outrider.target_service.scheduler import ScheduledSequence
from outrider.target_service.sequence import TargetSequence


class VerifyRule(IntEnum):
    """On a device a later one takes what an earlier one does, and more."""

    GREEDY = 0
    COUPLED = 1
    REJECTION = 2


def rule_of(target: TargetSequence) -> VerifyRule:
    """The rule of a sequence, fixed when it was opened."""
    return VerifyRule.GREEDY if target.greedy else VerifyRule.COUPLED if target.coupled else VerifyRule.REJECTION


PURPOSES = (Purpose.ACCEPT, Purpose.RECOVERED, Purpose.BONUS)  # the order within a row
ACCEPT, RECOVERED, BONUS = range(len(PURPOSES))


def verify_source(device: torch.device) -> RandomSource:
    """Rows are [3, 4] int64: four words under each purpose."""

    def generate(seeds: Tensor, positions: Tensor, completions: Tensor) -> Tensor:  # [n] each -> [n, 3, 4]
        repeated = [column.repeat_interleave(len(PURPOSES)) for column in (seeds, positions, completions)]
        purposes = torch.tensor([int(purpose) for purpose in PURPOSES], device=device).repeat(len(seeds))
        return words(repeated[0], repeated[1], purposes, repeated[2]).view(-1, len(PURPOSES), 4)

    return RandomSource(generate, MAX_WORD_ROWS, device)


HOST = torch.device("cpu")
VerifyResult = tuple[Tensor, Tensor, Tensor]  # accepted [n] int64, next id or -1 [n] int64, invalid [rows] bool
VerifyFunction = Callable[[Tensor, Sequence[ScheduledSequence]], VerifyResult]


class HostVerifier:
    """Judges windows of many sequences on the host; holds nothing but the sources of random numbers."""

    def __init__(self, vocab_size: int) -> None:
        self._noise = noise_source(vocab_size, HOST)
        self._words = verify_source(HOST)

    @torch.inference_mode()
    def verify(self, logits: Tensor, windows: Sequence[ScheduledSequence]) -> list[VerifiedWindow]:
        """Judges every window, in no fixed order; logits are [rows of the step that want them, vocab] float32."""
        verified: list[VerifiedWindow] = []
        verify_functions: dict[VerifyRule, VerifyFunction] = {
            VerifyRule.GREEDY: _verify_greedy,
            VerifyRule.COUPLED: self._verify_coupled,
            VerifyRule.REJECTION: self._verify_rejection,
        }
        for rule, members in _by_rule(windows).items():
            chosen = rows_of(members, logits)
            verified += verified_windows(chosen, members, *verify_functions[rule](chosen, members))
        return verified

    @torch.inference_mode()
    def prepare(self, target: TargetSequence) -> bool:
        """Draws a sequence's random numbers of its next window while there is time; whether any were missing."""
        if target.greedy:
            return False
        source = self._noise if target.coupled else self._words
        first, count = target.committed, target.max_window + 1
        return source.prepare(RandomRange(target.random_key, target.random_ahead, first, count, first + count))

    def _verify_coupled(self, logits: Tensor, members: Sequence[ScheduledSequence]) -> VerifyResult:
        probs, invalid = process(logits, [member.sampling_rows for member in members])
        noise = self._noise.rows(_spans(members, [member.num_verify_rows for member in members]))  # [rows, vocab]
        return *_accept(coupled_choice(probs, noise), members), invalid

    def _verify_rejection(self, logits: Tensor, members: Sequence[ScheduledSequence]) -> VerifyResult:
        target_probs, invalid = process(logits, [member.sampling_rows for member in members])  # [rows, vocab]
        windows, draft_ids = layout_of(members), draft_ids_of(members)
        # One more position than drafted tokens: a bonus (or plain) token has its own.
        counts = [len(member.window.ids) + 1 for member in members]
        words = self._words.rows(_spans(members, counts))  # [positions, 3, 4] int64
        first = windows.draft_starts + torch.arange(len(members))  # [n]: each window's first row of words
        uniforms = accept_uniforms(words[first[windows.window_of_draft] + windows.offset_of_draft, ACCEPT])  # [drafted]
        draft_weights = DraftWeights.of([vector for member in members for vector in weights_of(member)])
        accepted, next_weights = accept(target_probs, windows, draft_ids, draft_weights, uniforms)
        purposes = torch.where(accepted == windows.num_drafted, BONUS, RECOVERED)  # [n]
        return accepted, draw(next_weights, words[first + accepted, purposes]), invalid


def rows_of(windows: Sequence[ScheduledSequence], logits: Tensor) -> Tensor:
    """The rows of a step's logits that judge these windows; the others are a prompt's, or of other windows."""
    rows = [row for window in windows for row in window.verify_rows]
    return logits if len(rows) == len(logits) else logits[torch.tensor(rows, device=logits.device)]


def _by_rule(windows: Sequence[ScheduledSequence]) -> dict[VerifyRule, list[ScheduledSequence]]:
    groups: dict[VerifyRule, list[ScheduledSequence]] = {}
    for member in windows:
        groups.setdefault(rule_of(member.target), []).append(member)
    return groups


def _verify_greedy(logits: Tensor, members: Sequence[ScheduledSequence]) -> VerifyResult:
    choices, invalid = process_greedy(logits, [member.sampling_rows for member in members])
    return *_accept(choices.masked_fill(invalid, -1), members), invalid


def _accept(
    own: Tensor,  # [rows] int64: the target's own tokens
    members: Sequence[ScheduledSequence],
) -> tuple[Tensor, Tensor]:  # [n] int64 each
    """How many drafted tokens are the target's own, and the next id after them. Plain tokens alone need no comparison,
    and every operation costs: a pass leaves the processor's caches full of weights."""
    if not any(member.window.ids for member in members):
        return torch.zeros_like(own), own
    return coupled_accept(own, layout_of(members), draft_ids_of(members))


def _spans(members: Sequence[ScheduledSequence], counts: Sequence[int]) -> list[RandomRange]:
    """The first `counts` positions of every window. The counter is the absolute position of the token that is judged or
    drawn."""
    return [
        RandomRange(m.target.random_key, m.target.random_ahead, m.committed, count, m.committed + count)
        for m, count in zip(members, counts, strict=True)
    ]


def layout_of(windows: Sequence[ScheduledSequence]) -> Windows:
    """Which rows judge which drafted tokens."""
    return Windows.of([len(w.window.ids) for w in windows], [w.num_verify_rows for w in windows])


def draft_ids_of(windows: Sequence[ScheduledSequence]) -> Tensor:
    """The drafted tokens of all, [drafted] int64."""
    return torch.tensor([token for window in windows for token in window.window.ids], dtype=torch.int64)


def weights_of(scheduled: ScheduledSequence) -> list[tuple[bytes, bytes] | None]:
    """By drafted token the ids and weights that it was drawn from, packed uint32. None is one-hot: under another rule
    than rejection, and where none came or ids and weights differ in number."""
    if not scheduled.target.rejects:
        return [None] * len(scheduled.window.ids)
    vectors = [(w.ids, w.weights) if w is not None else None for w in scheduled.window.weights]
    return [v if v is not None and len(v[0]) == len(v[1]) and len(v[0]) % 4 == 0 else None for v in vectors]
