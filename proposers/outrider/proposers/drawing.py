"""How a token is drawn from the draft's logits, alike on the host and on a device.

There are three rules (DraftRule): the arg max; the race of coupling, over the noise that the target meets, too; integer
weights, from which the token is drawn and which travel with it. The first two may also rank what else could stand in
the token's place. The host draws rows of one rule together; a captured draw draws by every rule that some row has, and
takes of each row what is its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from outrider.kernels.sampling.reference import best_ids
from outrider.kernels.verify.reference import coupled_choice
from outrider.proposers.draft_rows import DraftedToken, DraftRows


def race(probs: Tensor, noise: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
    """Of [rows, vocab] each: the ids that win, [rows], and what scores them all, [rows, vocab]. The scores hold the
    noise that the target will meet, so that they rank what it will take instead."""
    return coupled_choice(probs, noise), lambda: -noise / probs


def ranked_ids(scores: Callable[[], Tensor], rows: Sequence[DraftRows]) -> list[list[int]]:
    """Ids by falling score, [rows, any], one more than are wanted: the drawn one may be among them."""
    wanted = max(row.num_top_tokens for row in rows)
    return best_ids(scores(), wanted + 1).tolist() if wanted else [[]] * len(rows)


def confidence_of(probs: Callable[[], Tensor], ids: Tensor | None, rows: Sequence[DraftRows]) -> list[float]:
    """The probabilities of the ids, [rows], among `probs`, [rows, vocab]; without ids those of the likeliest ones. None
    where no row wants them."""
    if not any(row.wants_confidence for row in rows):
        return []
    found = probs().amax(-1) if ids is None else probs().gather(1, ids[:, None]).squeeze(1)
    values: list[float] = found.tolist()
    return values


def pack(values: Tensor) -> bytes:
    """Of integers below 2^32, as they travel."""
    return values.cpu().numpy().astype("<u4").tobytes()


def drafted_tokens(
    ids: Sequence[int],  # [rows]; below 0: none, the logits were not finite
    ranked: Sequence[Sequence[int]],  # [rows, any]; may hold the drawn id, and ends with -1 where there are no more
    entries: Sequence[tuple[bytes, bytes]],  # [rows]: ids and weights, packed; empty where none were drawn from
    rows: Sequence[DraftRows],
    confidence: Sequence[float] = (),  # [rows], or none was wanted
) -> list[DraftedToken | None]:
    """What was drawn, row by row."""
    drafted: list[DraftedToken | None] = []
    sure = confidence or [1.0] * len(rows)
    for token, best, (entry_ids, weights), row, held in zip(ids, ranked, entries, rows, sure, strict=True):
        others = [other for other in best if other not in (token, -1)]
        found = DraftedToken(token, entry_ids, weights, tuple(others[: row.num_top_tokens]), held)
        drafted.append(found if token >= 0 else None)
    return drafted
