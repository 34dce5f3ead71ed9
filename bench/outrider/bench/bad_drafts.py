"""What a bad draft costs: tokens a second beside one, over those of plain decoding.

    python -m outrider.bench.bad_drafts [--target DIR] [--tokens 256] [--repeats 5]

The target writes its answers without a draft and, right after each, once more with one that is bad: it drafts the same
id always, ids that no vocabulary has, or what it repeats from the text but ten times later than a round takes. The
gateway chooses for itself (mode auto). The first 64 tokens, in which it learns what the draft is worth, are left out.
Greedy, one stream. Prints a table in Markdown: the medians over prompts and repeats."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from outrider.bench.prompts import PROMPTS
from outrider.cli.local_services import LOOPBACK, Services
from outrider.cli.serve import ServeSettings, start
from outrider.client import SyncClient
from outrider.pairs import pair_path
from outrider.proposers.base import MAX_ID, ProposerState, SequenceContext

LEARNING = 64  # tokens that do not count
NUM_PROMPTS = 4
LATE_S = 0.05  # some ten rounds of the embedded target


class _State:
    """A text, and what follows it by a method's lights."""

    def __init__(self, tokens: Iterable[int], drafted: int | None, late_s: float) -> None:
        self._tokens, self._drafted, self._late_s = list(tokens), drafted, late_s

    @property
    def num_tokens(self) -> int:
        """Tokens held."""
        return len(self._tokens)

    def append(self, ids: Iterable[int]) -> None:
        """Adds tokens at the end."""
        self._tokens += ids

    def truncate(self, length: int) -> None:
        """Keeps the first ones."""
        del self._tokens[length:]

    def propose(self, max_tokens: int) -> list[int]:
        """The same id over and over; without one, that of the last token."""
        time.sleep(self._late_s)
        return [self._tokens[-1] if self._drafted is None else self._drafted] * max_tokens


class Constant:
    """Drafts one id, which is a token."""

    name = "constant"
    _drafted: int | None = 5
    _late_s = 0.0

    def open(self, tokens: Iterable[int], context: SequenceContext) -> ProposerState:
        """Starts a sequence."""
        return _State(tokens, self._drafted, self._late_s)


class Foreign(Constant):
    """Drafts an id that no vocabulary has."""

    name = "foreign"
    _drafted = MAX_ID


class Late(Constant):
    """Repeats the last token, and takes its time."""

    name = "late"
    _drafted = None
    _late_s = LATE_S


BAD = (Constant, Foreign, Late)


def tokens_a_second(client: SyncClient, prompt: str, num_tokens: int, **options: Any) -> float:
    """Of one answer, behind its first tokens."""
    times: list[float] = []
    for part in client.generate(prompt, max_tokens=num_tokens, temperature=0.0, ignore_eos=True, **options):
        times += [time.perf_counter()] * len(part.token_ids)
    return (len(times) - LEARNING) / (times[-1] - times[LEARNING - 1])


def measure(client: SyncClient, num_tokens: int, repeats: int) -> tuple[float, float, float]:
    """Medians of plain tokens a second, of those beside the draft, and of the second over the first."""
    pairs = [
        tuple(tokens_a_second(client, prompt, num_tokens, speculate=speculate) for speculate in (False, None))
        for _ in range(repeats)
        for prompt in PROMPTS[:NUM_PROMPTS]
    ]
    shares = [beside / plain for plain, beside in pairs]
    return (
        statistics.median(plain for plain, _ in pairs),
        statistics.median(beside for _, beside in pairs),
        statistics.median(shares),
    )


def main() -> None:
    """The table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--target", type=Path, default=None, help="folder of the target; the embedded pair's")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of each answer")
    parser.add_argument("--repeats", type=int, default=5, help="of each prompt")
    options = parser.parse_args()
    target = options.target or pair_path().target
    print("| draft | tokens a second, plain | beside it | median share |\n|---|---|---|---|")
    for bad in BAD:
        name = f"outrider.bench.bad_drafts.{bad.__name__}"  # not __main__'s: the draft service imports it
        settings = ServeSettings.model_validate(
            {"target": target, "method": name, "allow_code": True, "listen": LOOPBACK}
        )
        with Services() as services:
            running = start(services, settings, lambda _: None)
            with SyncClient(running.gateway.address) as client:
                plain, beside, share = measure(client, options.tokens, options.repeats)
        print(f"| {bad.name} | {plain:.0f} | {beside:.0f} | {share:.3f} |", flush=True)


if __name__ == "__main__":
    main()
