"""An `LLM` on a GPU: the embedded pair, its target made large, plainly and with its draft:

    python bench/outrider/bench/gpu_llm.py [--repeats N]

Each way is an LLM of its own, all in this process at once; in every repeat each generates the same prompts once. Prints
a table, and stores it in bench/results/llm. What is measured is what a caller waits for: the host's part is in it."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from outrider.bench.prompts import PROMPTS
from outrider.bench.results import Json, bracketed, markdown, median_of, new_result, spread, store
from outrider.llm import LLM, SamplingParams
from outrider.pairs import pair_path
from outrider.pairs.expansion import write_expanded

RESULTS = Path("bench") / "results" / "llm"
LARGE = {  # as an 8B model's; heads stay as wide as they are, so that it has 6.3 billion parameters
    "hidden_size": 4096, "intermediate_size": 14336, "num_layers": 32, "num_heads": 32, "num_kv_heads": 8,
}  # fmt: skip
BATCHES, TEMPERATURES = (1, 8, 32), (0.0, 1.0)
NUM_TOKENS = 128  # of each completion
K = 4
SHARE = 0.9  # of the device's memory, for all ways together


def ways() -> dict[str, dict[str, Any]]:
    """How an LLM decodes, by name: plainly, with k drafted tokens a round, and with as many as the controller takes."""
    speculation = {"model": str(pair_path().draft), "num_speculative_tokens": K}
    return {
        "plain": {},
        "in turn": {"speculative_config": speculation},
        "auto": {"speculative_config": speculation, "mode": "auto"},
    }


def measure(llms: Mapping[str, LLM], batch: int, temperature: float, repeats: int, num_tokens: int) -> Json:
    """A row: tokens a second by way, and times the first one's in the same repeat."""
    prompts = [PROMPTS[index % len(PROMPTS)] for index in range(batch)]
    params = SamplingParams(temperature=temperature, max_tokens=num_tokens, ignore_eos=True)
    rates: dict[str, list[float]] = defaultdict(list)
    for repeat in range(repeats + 1):
        for name, llm in llms.items():
            started = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            rate = batch * num_tokens / (time.perf_counter() - started)
            if repeat:  # the first one compiles
                rates[name].append(rate)
    plain = next(iter(rates.values()))
    by_way = {
        name: {"tokens_s": spread(found), "times": spread([o / p for o, p in zip(found, plain, strict=True)])}
        for name, found in rates.items()
    }
    return {"batch": batch, "temperature": temperature, "ways": by_way}


def render(result: Json) -> Iterator[str]:
    """The table."""
    setup = result["setup"]
    yield f"Tokens a second on {result['device']['name']}, {setup['tokens']} a completion, k = {setup['k']}; medians."
    yield ""
    names = list(result["rows"][0]["ways"])
    rows = [
        (
            str(row["batch"]), f"{row['temperature']:g}",
            *(median_of(row["ways"][name]["tokens_s"], 0) for name in names),
            *(bracketed(row["ways"][name]["times"]) for name in names[1:]),
        )
        for row in result["rows"]
    ]  # fmt: skip
    yield from markdown(("streams", "temperature", *names, *(f"{n}, times plain" for n in names[1:])), rows, words=())


def main() -> int:
    """0 if all went well, 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=5, help="timed runs of each way")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("there is no GPU here, and nothing was measured", file=sys.stderr)
        return 2
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "target"
        write_expanded(Path(pair_path().target), folder, noise_device="cuda", **LARGE)
        llms = {
            name: stack.enter_context(
                LLM(
                    model=str(folder), dtype="bfloat16", max_model_len=1024, max_num_seqs=max(BATCHES),
                    gpu_memory_utilization=SHARE * number / len(ways()), **options_of_way,
                )
            )
            for number, (name, options_of_way) in enumerate(ways().items(), start=1)
        }  # fmt: skip
        rows = [measure(llms, b, t, options.repeats, NUM_TOKENS) for b in BATCHES for t in TEMPERATURES]
    setup = {"repeats": options.repeats, "k": K, "tokens": NUM_TOKENS, "target": LARGE}
    result = new_result(setup) | {"device": {"name": torch.cuda.get_device_name()}, "rows": rows}
    print("\n".join(render(result)))
    print(f"\nstored in {store(RESULTS, result, result['device']['name'])}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
