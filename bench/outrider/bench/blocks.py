"""How many tokens a round brings where drafted tokens are judged by blocks, and where token by token:

    python bench/outrider/bench/blocks.py [--pair DIR] [--tokens 160] [--samples 16]

Draft and target decode the bench's prompts in turn, several completions of each, with both rules; windows that the end
of a completion cuts do not count. Seeds fix what is drawn, and so the numbers. Prints a table in Markdown; intervals
hold with 95 % confidence, over completions as independent draws."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np

from outrider.bench.colocated import Colocated
from outrider.bench.prompts import read_prompts
from outrider.gateway.text.tokenizer import Tokenizer
from outrider.pairs import pair_path
from outrider.planner.policy import Policy, Round
from outrider.rpc.messages import Open
from outrider.rpc.sampling_params import AcceptanceRule, SamplingParams

TEMPERATURES = (0.6, 1.0)
WINDOWS = (4, 8)
AT_ONCE = 32  # sequences
Z = 1.96  # standard deviations on either side


@dataclass(frozen=True, slots=True)
class TokensPerRound:
    """The mean over rounds, and the variance of that mean."""

    mean: float
    variance: float
    num_rounds: int

    @classmethod
    def of(cls, completions: Sequence[Sequence[Round]], k: int) -> TokensPerRound:
        """A ratio of sums over completions, by linearisation."""
        accepted = [[r.commit.num_accepted for r in rounds if r.commit.num_drafted == k] for rounds in completions]
        tokens = np.array([sum(counts) + len(counts) for counts in accepted], dtype=np.float64)  # [completions]
        rounds = np.array([len(counts) for counts in accepted], dtype=np.float64)  # [completions]
        mean = tokens.sum() / rounds.sum()
        return cls(mean, float(((tokens - mean * rounds) ** 2).sum() / rounds.sum() ** 2), int(rounds.sum()))


def gain_of(blocks: TokensPerRound, tokens: TokensPerRound) -> tuple[float, float]:
    """The ratio of two means less 1, and half its interval's width."""
    ratio = blocks.mean / tokens.mean
    spread = math.sqrt(blocks.variance / blocks.mean**2 + tokens.variance / tokens.mean**2)
    return ratio - 1, Z * ratio * spread


def decode(
    engines: Colocated, prompts: Sequence[Sequence[int]], num_samples: int, rule: AcceptanceRule,
    sampling: SamplingParams, k: int,
) -> TokensPerRound:  # fmt: skip
    """Completions of every prompt."""
    requests = [
        Open(0, tuple(ids), sampling, acceptance=rule, seed=seed, completion=completion)
        for completion in range(num_samples)
        for seed, ids in enumerate(prompts)
    ]
    some = [requests[first : first + AT_ONCE] for first in range(0, len(requests), AT_ONCE)]
    rounds = [found for batch in some for found in engines.decode(batch, Policy(k, 60_000))]
    return TokensPerRound.of(rounds, k)


def main() -> None:
    """The table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pair", type=Path, default=None, help="folder with target/ and draft/; the embedded pair")
    parser.add_argument("--tokens", type=int, default=160, help="tokens of a completion")
    parser.add_argument("--samples", type=int, default=16, help="completions of a prompt")
    options = parser.parse_args()
    folders = pair_path() if options.pair is None else None
    target, draft = (folders.target, folders.draft) if folders else (options.pair / "target", options.pair / "draft")
    engines = Colocated.of(target, draft, threads=1, cut_windows=False)
    prompts = read_prompts(Tokenizer.load(target), None, 16)
    print("| temperature | k | rounds | token by token | by blocks | gain |\n|---|---|---|---|---|---|", flush=True)
    for temperature, k in product(TEMPERATURES, WINDOWS):
        sampling = SamplingParams(temperature=temperature, max_tokens=options.tokens, ignore_eos=True)
        tokens, blocks = (
            decode(engines, prompts, options.samples, rule, sampling, k)
            for rule in (AcceptanceRule.REJECTION, AcceptanceRule.BLOCK)
        )
        gain, half = gain_of(blocks, tokens)
        counts = f"{tokens.num_rounds:,} and {blocks.num_rounds:,}"
        print(
            f"| {temperature:g} | {k} | {counts} | {tokens.mean:.3f} | {blocks.mean:.3f} | "
            f"{gain:+.1%} ({gain - half:+.1%} to {gain + half:+.1%}) |",
            flush=True,
        )


if __name__ == "__main__":
    main()
