"""Tokens a round from a prediction that is partly wrong:

    python -m outrider.bench.predicted [--pair DIR] [--tokens 256]

The target writes its answers without a draft. In each, one token in 20 is replaced, joined by another one or left out,
which makes a guess; then it is asked again with that guess as the prediction, 8 tokens a round. Beside it stands an
oracle that knows the edits: it skips what the guess has too much, and always knows where it is in the guess. A first
token is awaited without a draft, by both. Rounds are counted, not timed: the numbers depend on the models alone. Prints
a table in Markdown."""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outrider.bench.prompts import PROMPTS
from outrider.cli.generate import CollectedCompletion
from outrider.cli.local_services import LOOPBACK, Services
from outrider.cli.serve import ServeSettings, start
from outrider.client import SyncClient
from outrider.gateway.text.tokenizer import Tokenizer
from outrider.pairs import pair_path
from outrider.rpc.sampling_params import AcceptanceRule

NUM_DRAFT_TOKENS = 8
EDITS = 20  # one in so many tokens
SEED = 17


def edited(ids: Sequence[int], vocab_size: int, rng: random.Random) -> tuple[list[int], set[int]]:
    """A guess at a text, and which places of the text it lacks: those replaced or left out."""
    guess: list[int] = []
    lacking = set()
    for place, token_id in enumerate(ids):
        edit = rng.choice(("replaced", "joined", "left out")) if rng.randrange(EDITS) == 0 else ""
        if edit in ("replaced", "joined"):
            guess.append(rng.randrange(vocab_size))
        if edit in ("replaced", "left out"):
            lacking.add(place)
        else:
            guess.append(token_id)
    return guess, lacking


def oracle_rounds(num_tokens: int, lacking: set[int], k: int = NUM_DRAFT_TOKENS) -> int:
    """The first token, then rounds of at most `k` tokens that are right, each up to the next place that the guess
    lacks, and the target's own."""
    done = rounds = 1
    while done < num_tokens:
        drafted = next((n for n in range(k) if done + n in lacking or done + n >= num_tokens), k)
        done, rounds = done + drafted + 1, rounds + 1
    return rounds


def ask(client: SyncClient, prompt: str, **options: Any) -> CollectedCompletion:
    """One answer."""
    answer = CollectedCompletion(0)
    for part in client.generate(prompt, acceptance=AcceptanceRule.COUPLED, ignore_eos=True, **options):
        answer.add(part)
    return answer


def measure(client: SyncClient, vocab_size: int, temperature: float, num_tokens: int) -> str:
    """A row of the table."""
    shares, sums = [], [0, 0, 0]  # tokens, the oracle's rounds, ours
    for number, prompt in enumerate(PROMPTS):
        settings = {"temperature": temperature, "max_tokens": num_tokens, "seed": number}
        plain = ask(client, prompt, speculate=False, **settings)
        guess, lacking = edited(plain.token_ids, vocab_size, random.Random(f"{SEED} {number}"))
        how = {"prediction": guess, "mode": "sequential", "num_draft_tokens": NUM_DRAFT_TOKENS}
        predicted = ask(client, prompt, **settings, **how)
        if predicted.token_ids != plain.token_ids or predicted.speculation is None:
            raise SystemExit(f"prompt {number}: the answer is another one with a prediction")
        rounds = oracle_rounds(num_tokens, lacking), predicted.speculation.num_rounds
        shares.append(rounds[0] / rounds[1])
        sums = [total + more for total, more in zip(sums, (num_tokens, *rounds), strict=True)]
    tokens, oracle, ours = sums
    return f"{tokens / oracle:.2f} | {tokens / ours:.2f} | {oracle / ours:.3f} | {min(shares):.3f}"


def main() -> None:
    """The table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--target", type=Path, default=None, help="folder of the target; the embedded pair's")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of each answer")
    options = parser.parse_args()
    target = options.target or pair_path().target
    settings = ServeSettings.model_validate({"target": target, "draft": "ngram", "listen": LOOPBACK})
    vocab_size = Tokenizer.load(target).num_tokens
    print("| temperature | tokens a round: oracle | prediction | share | least of a prompt |\n|---|---|---|---|---|")
    with Services() as services:
        running = start(services, settings, lambda _: None)
        with SyncClient(running.gateway.address) as client:
            for temperature in (0.0, 0.8):
                row = measure(client, vocab_size, temperature, options.tokens)
                print(f"| {temperature:g} | {row} |", flush=True)


if __name__ == "__main__":
    main()
