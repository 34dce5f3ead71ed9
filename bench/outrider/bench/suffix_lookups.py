"""What suffix decoding's lookups cost beside a full store:

    python bench/outrider/bench/suffix_lookups.py [--tokens 10000000] [--rounds 5000] [--json FILE]

The store is filled with made-up outputs: phrases that come again, as often as words do, between tokens of their own.
Then outputs are decoded again with every twentieth token replaced, at most `--draft-tokens` a round, and the processor
time of a round is taken: the lookup, and what the sequence's own index needs for its new tokens. Prints that by round,
by drafted and by committed token, what a stored token takes, in time and bytes, and how long a file takes."""

from __future__ import annotations

import argparse
import gc
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from outrider.bench.machine import describe
from outrider.bench.results import Json, dump, new_result
from outrider.proposers.base import SequenceContext
from outrider.proposers.suffix.proposer import SuffixProposer

VOCAB = 50_000
OUTPUT = 500  # tokens
NUM_PHRASES = 20_000
REPLACED = 0.05  # share of an output's tokens, where it is decoded again
KEPT = 4000  # outputs, of the latest ones


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=10_000_000, help="tokens in the store (default: 10000000)")
    parser.add_argument("--rounds", type=int, default=5000, help="rounds that are measured (default: 5000)")
    parser.add_argument("--draft-tokens", type=int, default=8, help="most drafted tokens a round (default: 8)")
    parser.add_argument("--json", type=Path, help="where to store the result")
    options = parser.parse_args()
    setup = {name: value for name, value in vars(options).items() if name != "json"}
    result: Json = new_result(describe(), setup) | measure(options)
    print(dump({name: value for name, value in result.items() if name not in ("machine", "setup", "when")}))
    if options.json is not None:
        options.json.write_text(dump(result), encoding="utf-8")


def measure(options: argparse.Namespace) -> Json:
    """Microseconds of processor time, and bytes."""
    rng = random.Random(0)
    outputs = _outputs(rng)
    with tempfile.TemporaryDirectory() as folder:
        proposer = SuffixProposer(
            suffix_decoding_max_cached_requests=10**9,
            suffix_store_mb=max(1, options.tokens * 16 >> 20),
            suffix_store_file=Path(folder) / "store",
        )
        latest: list[list[int]] = []
        spent = 0.0
        for _ in range(options.tokens // OUTPUT):
            latest = [*latest[-KEPT:], next(outputs)] if len(latest) == 2 * KEPT else [*latest, next(outputs)]
            started = time.process_time()
            proposer.learn(latest[-1], SequenceContext())
            spent += time.process_time() - started
        started = time.perf_counter()
        proposer.close()
        saved = time.perf_counter() - started
    gc.collect()
    gc.freeze()  # as in a service that has run for a while
    stored = proposer.held()
    return {
        "stored_tokens": stored["sequences"] * OUTPUT,
        "bytes_a_stored_token": stored["bytes"] / (stored["sequences"] * OUTPUT),
        "us_a_learned_token": spent / options.tokens * 1e6,
        "s_to_save": saved,
        **_decode_again(proposer, latest, options, rng),
    }


def _decode_again(
    proposer: SuffixProposer, outputs: Sequence[list[int]], options: argparse.Namespace, rng: random.Random
) -> Json:
    num_rounds = num_drafted = num_committed = 0
    spent = 0.0
    while num_rounds < options.rounds:
        text = [rng.randrange(VOCAB) if rng.random() < REPLACED else token for token in rng.choice(outputs)]
        state, at = proposer.open(text[:20]), 20
        state.propose(1)  # indexes the prompt
        while at < len(text):
            started = time.process_time()
            drafted = state.propose(options.draft_tokens)
            state.append(drafted)
            spent += time.process_time() - started
            pairs = zip(drafted, text[at:], strict=False)
            held = next((place for place, (left, right) in enumerate(pairs) if left != right), len(drafted))
            held = min(held, len(text) - at)
            new = text[at + held : at + held + 1]
            started = time.process_time()
            state.truncate(at + held)
            state.append(new)
            spent += time.process_time() - started
            at += held + 1
            num_rounds, num_drafted, num_committed = (
                num_rounds + 1,
                num_drafted + len(drafted),
                num_committed + held + 1,
            )
    return {
        "us_a_round": spent / num_rounds * 1e6,
        "us_a_drafted_token": spent / max(1, num_drafted) * 1e6,
        "us_a_committed_token": spent / num_committed * 1e6,
        "drafted_a_round": num_drafted / num_rounds,
        "committed_a_round": num_committed / num_rounds,
    }


def _outputs(rng: random.Random) -> Iterator[list[int]]:
    """Without end. Tokens and phrases are the likelier the lower their number (the n-th by about 1/n)."""

    def token() -> int:
        return int(VOCAB ** rng.random()) - 1

    phrases = [[token() for _ in range(rng.randrange(4, 40))] for _ in range(NUM_PHRASES)]
    while True:
        text: list[int] = []
        while len(text) < OUTPUT:
            own = rng.random() < 0.3
            text += [token() for _ in range(10)] if own else phrases[int(NUM_PHRASES ** rng.random()) - 1]
        yield text[:OUTPUT]


if __name__ == "__main__":
    main()
