"""What it brings that a draft ends behind a token of which its model is less sure (`draft_confidence`):

    python bench/outrider/bench/confidence.py [--tokens 128] [--samples 2] [--cost 0.2]

Draft and target of the embedded pair decode the bench's prompts in turn, with every number of drafted tokens and every
bound. A draft's pass counts as a share of a target's (`--cost`), whatever it takes here. Prints, in Markdown, the best
number of drafted tokens without a bound, and the best with one. Seeds fix what is drawn, and so the numbers."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from outrider.bench.colocated import Colocated
from outrider.bench.prompts import read_prompts
from outrider.gateway.text.tokenizer import Tokenizer
from outrider.pairs import pair_path
from outrider.planner.policy import Policy
from outrider.rpc.messages import Open
from outrider.rpc.sampling_params import AcceptanceRule, SamplingParams

WINDOWS = (2, 3, 4, 6, 8)
BOUNDS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4)
AT_ONCE = 32  # sequences
KINDS = {
    "greedy": (0.0, AcceptanceRule.REJECTION),
    "coupled": (1.0, AcceptanceRule.COUPLED),
    "rejection": (1.0, AcceptanceRule.REJECTION),
}


@dataclass(frozen=True, slots=True)
class Tried:
    """All rounds with one number of drafted tokens and one bound."""

    k: int
    bound: float
    rounds: int
    tokens: int
    drafted: int
    accepted: int

    def speed(self, cost: float) -> float:
        """Tokens in the time of a target's pass, where one of the draft's takes `cost` of it."""
        return self.tokens / (self.rounds + cost * self.drafted)

    def row(self, cost: float) -> str:
        """Cells of the table."""
        wasted = (self.drafted - self.accepted) / self.tokens
        values = (self.tokens / self.rounds, self.drafted / self.rounds, wasted, self.speed(cost))
        return " | ".join((f"{self.k}", f"{self.bound:g}", *(f"{value:.2f}" for value in values)))


def decode(engines: Colocated, opens: Sequence[Open], k: int, bound: float) -> Tried:
    """Completions of all requests."""
    some = [opens[first : first + AT_ONCE] for first in range(0, len(opens), AT_ONCE)]
    commits = [one.commit for batch in some for rounds in engines.decode(batch, Policy(k, 60_000)) for one in rounds]
    sums = (len(commit.ids) for commit in commits), (c.num_drafted for c in commits), (c.num_accepted for c in commits)
    return Tried(k, bound, len(commits), *map(sum, sums))


def tried(
    engines: Colocated, prompts: Sequence[Sequence[int]], kind: str, tokens: int, samples: int
) -> Iterator[Tried]:
    """Every number of drafted tokens with every bound."""
    temperature, rule = KINDS[kind]
    sampling = SamplingParams(temperature=temperature, max_tokens=tokens, ignore_eos=True)
    for k, bound in product(WINDOWS, BOUNDS):
        opens = [
            Open(0, tuple(ids), sampling, acceptance=rule, seed=seed, completion=sample, draft_confidence=bound)
            for sample in range(samples if temperature else 1)
            for seed, ids in enumerate(prompts)
        ]
        yield decode(engines, opens, k, bound)


def main() -> None:
    """The table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=128, help="tokens of a completion (default: 128)")
    parser.add_argument("--samples", type=int, default=2, help="sampled completions of a prompt (default: 2)")
    parser.add_argument("--cost", type=float, default=0.2, help="a draft's pass, of a target's (default: 0.2)")
    options = parser.parse_args()
    folders = pair_path()
    engines = Colocated.of(folders.target, folders.draft, threads=1, cut_windows=False)
    prompts = read_prompts(Tokenizer.load(folders.target), None, 16)
    print(
        "| acceptance | k | bound | tokens a round | drafted | wasted a token | speed |\n|---|---|---|---|---|---|---|"
    )
    for kind in KINDS:
        found = list(tried(engines, prompts, kind, options.tokens, options.samples))
        for some in ([one for one in found if not one.bound], [one for one in found if one.bound]):
            best = max(some, key=lambda one: one.speed(options.cost))
            print(f"| {kind} | {best.row(options.cost)} |", flush=True)


if __name__ == "__main__":
    main()
