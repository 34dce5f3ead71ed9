"""What the demo measured, as lines of text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from outrider.commands.answers import Answer


@dataclass(frozen=True, slots=True)
class Comparison:
    """The same prompt with and without speculation, in turns."""

    drafted: tuple[Answer, ...]
    plain: tuple[Answer, ...]
    greedy: bool

    @property
    def same_tokens(self) -> bool:
        """Whether every completion has the same tokens."""
        return len({tuple(answer.token_ids) for answer in (*self.drafted, *self.plain)}) == 1

    @property
    def comparable(self) -> bool:
        """Whether they must have: the output then does not depend on the drafts."""
        return self.greedy or all(answer.acceptance == "coupled" for answer in self.drafted)


def summary(answer: Answer) -> list[str]:
    """The completion that was shown."""
    return [
        _line("tokens", f"{len(answer.token_ids)} ({_origins(answer)}), then {answer.finish_reason}"),
        *rounds(answer),
        _line("speed", f"{answer.tokens_per_s:.1f} tokens/s"),
        _line("seed", str(answer.seed)),
    ]


def rounds(answer: Answer) -> list[str]:
    """What speculation did for a completion."""
    stats = answer.speculation
    if stats is None or not stats.num_rounds:
        return [_line("rounds", "none")]
    return [
        _line("tokens per round", f"{len(answer.token_ids) / stats.num_rounds:.2f} in {stats.num_rounds} rounds"),
        _line("acceptance", _share(stats.num_accepted_tokens, stats.num_draft_tokens) + " of the drafted tokens"),
        _line("  by position", by_position(stats.num_accepted_per_position, stats.num_tested_per_position)),
        _line("control overhead", f"{stats.overhead_us / 1000:.2f} ms a round (median, forward passes left out)"),
    ]


def comparison(compared: Comparison) -> list[str]:
    """With speculation and without, and whether the tokens are the same."""
    drafted = [answer.tokens_per_s for answer in compared.drafted]
    plain = [answer.tokens_per_s for answer in compared.plain]
    return [
        *rounds(compared.drafted[-1]),
        _line("with speculation", _speeds(drafted)),
        _line("without", _speeds(plain)),
        _line("ratio", f"{median(drafted) / median(plain):.2f} (of the medians)"),
        _line("same tokens", _same(compared)),
    ]


def by_position(accepted: Sequence[int], tested: Sequence[int]) -> str:
    """The share accepted at each position of the window, of those tested: a token after a refused one is not."""
    shares = (f"{position}: {_share(*pair)}" for position, pair in enumerate(zip(accepted, tested, strict=True), 1))
    return "  ".join(shares) or "nothing was drafted"


def _same(compared: Comparison) -> str:
    if not compared.comparable:
        return "not to be expected: they are sampled by rejection, so only the distribution is the same"
    if compared.same_tokens:
        return "yes, in every completion"
    ids = [answer.token_ids for answer in (*compared.drafted, *compared.plain)]
    shortest = min(map(len, ids))
    first = next((place for place in range(shortest) if len({row[place] for row in ids}) > 1), shortest)
    return (
        f"no, they part at token {first + 1}: two tokens so nearly tied that the number of rows in a step decides "
        "(batch-invariant mode rules this out)"
    )


def _origins(answer: Answer) -> str:
    return ", ".join(f"{answer.origins.count(name)} {name}" for name in dict.fromkeys(answer.origins))


def _speeds(speeds: Sequence[float]) -> str:
    each = ", ".join(f"{speed:.1f}" for speed in speeds)
    return f"{median(speeds):.1f} tokens/s (median of {each})"


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%} ({part}/{whole})" if whole else "none (0/0)"


def _line(name: str, value: str) -> str:
    return f"  {name:<17} {value}"
