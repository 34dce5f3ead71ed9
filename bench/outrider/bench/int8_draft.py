"""What a draft gains and loses by weights of 8 bits on a CPU:

    python bench/outrider/bench/int8_draft.py [--repeats 60] [--threads N] [--samples 4]

First a step of one row, of drafts of random bfloat16 weights, read as 16 bits and as 8 in turn. Then how much of what
the embedded pair's target writes its draft guesses, as it is and rounded. Prints two tables in Markdown."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from itertools import product

import torch

from outrider.bench.colocated import Colocated
from outrider.bench.machine import describe
from outrider.bench.prompts import read_prompts
from outrider.bench.results import bracketed, spread
from outrider.cli.agreement import compare_models, mean
from outrider.engine.batch import BatchEntry
from outrider.engine.loader import Quantization
from outrider.engine.model_runner import ModelRunner
from outrider.engine.models.decoder_config import DecoderConfig, parse_config
from outrider.engine.models.decoder_cpu import NativeDecoder
from outrider.engine.models.weights import expected_shapes, num_parameters
from outrider.gateway.text.tokenizer import Tokenizer
from outrider.pairs import pair_path
from outrider.planner.policy import Policy
from outrider.rpc.messages import Open
from outrider.rpc.sampling_params import SamplingParams

SIZES = {
    "0.1B": (768, 2048, 12, 12, 4),  # hidden and intermediate size, layers, heads, key-value heads
    "0.3B": (1024, 4096, 16, 16, 8),
}
CONTEXT, BLOCKS = 100, 16
K, TOKENS = 4, 160
KINDS: tuple[Quantization | None, ...] = (None, "int8")
RULES = {"matches": "accepted where greedy", "overlaps": "accepted at temperature 1, under rejection"}


def config_of(size: str) -> DecoderConfig:
    """A Llama with as many parameters as its name says."""
    hidden, intermediate, layers, heads, kv_heads = SIZES[size]
    return parse_config({
        "model_type": "llama", "vocab_size": 32_000, "hidden_size": hidden, "intermediate_size": intermediate,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "max_position_embeddings": 2048, "tie_word_embeddings": True,
    })  # fmt: skip


def step_times(config: DecoderConfig, repeats: int) -> tuple[list[float], list[float]]:
    """Seconds of a step of one row with 16 bits and with 8, in turn."""
    generator = torch.Generator().manual_seed(0)
    state = {
        name: (0.02 * torch.randn(shape, generator=generator)).bfloat16()
        for name, shape in expected_shapes(config).items()
    }
    runners = [ModelRunner(NativeDecoder(config, state, int8=int8), BLOCKS) for int8 in (False, True)]
    times: tuple[list[float], list[float]] = ([], [])
    for repeat in range(repeats + 2):
        for index in (0, 1) if repeat % 2 else (1, 0):
            started = time.perf_counter()
            runners[index].forward([BatchEntry([1], CONTEXT, range(BLOCKS), 1)])
            if repeat >= 2:
                times[index].append(time.perf_counter() - started)
    return times


def written(samples: int) -> list[int]:
    """What the embedded target writes after the bench's prompts, one after another: what both drafts shall guess."""
    folders = pair_path()
    prompts = read_prompts(Tokenizer.load(folders.target), None, 16)
    sampling = SamplingParams(temperature=1.0, max_tokens=TOKENS, ignore_eos=True)
    requests = [Open(0, tuple(ids), sampling, seed=seed) for seed in range(samples) for ids in prompts]
    rounds = Colocated.of(folders.target, folders.draft, threads=1).decode(requests, Policy(K))
    return [token for found in rounds for one in found for token in one.commit.ids]


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float | None]:
    """Of what was measured one after the other."""
    return [first / second for first, second in zip(above, below, strict=True)]


def main() -> None:
    """The tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=60, help="steps of each kind (default: 60)")
    parser.add_argument("--threads", type=int, default=describe().cores, help="threads (default: all cores)")
    parser.add_argument("--samples", type=int, default=4, help="sampled completions of a prompt (default: 4)")
    options = parser.parse_args()
    print("| draft | threads | 16 bits, ms a step | 8 bits | times as fast |\n|---|---|---|---|---|", flush=True)
    for size, threads in product(SIZES, sorted({1, options.threads})):
        torch.set_num_threads(threads)
        config = config_of(size)
        halves, bytes_ = step_times(config, options.repeats)
        cells = [bracketed(spread([1e3 * value for value in values])) for values in (halves, bytes_)]
        gain = bracketed(spread(ratios(halves, bytes_)))
        print(f"| {num_parameters(config) / 1e9:.2f}B | {threads} | {' | '.join(cells)} | {gain} |", flush=True)
    ids, folders = written(options.samples), pair_path()
    plain, rounded = (compare_models(folders.target, folders.draft, ids, quantization=kind) for kind in KINDS)
    print(f"\n| of {len(ids) - 1:,} tokens | draft as it is | int8 | change |\n|---|---|---|---|")
    for name in ("matches", "overlaps"):
        before, after = mean(getattr(plain, name)), mean(getattr(rounded, name))
        print(f"| {RULES[name]} | {before:.4f} | {after:.4f} | {after / before - 1:+.2%} |")


if __name__ == "__main__":
    main()
