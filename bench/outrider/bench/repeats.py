"""What a method makes of requests that come again with small changes, as agents' do:

    python bench/outrider/bench/repeats.py [--method suffix] [--draft-tokens 16] [--max-tokens 128] [--json FILE]

The embedded pair's target in this process, greedy, on eight prompts that nothing was trained on. Each is answered once,
which is not measured; then every changed form is answered with the method and plainly, in turns. Prints tokens a round
and plain decoding's time over the method's, in processor time and by the clock: medians over the repeats. A repeat has
an `LLM` of its own, so its store begins empty."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from outrider.bench.machine import describe
from outrider.bench.prompts import PROMPTS
from outrider.bench.results import Json, bracketed, dump, markdown, new_result, spread
from outrider.llm import LLM, SamplingParams
from outrider.llm.metrics import Counter
from outrider.pairs import pair_path

NUM_PROMPTS = 8
CHANGES: Mapping[str, Callable[[str], str]] = {
    "a line before": lambda prompt: f"# Changed in 2026.\n{prompt}",
    "a wrapped docstring": lambda prompt: prompt.replace('"""', '"""\n    ', 1),
    "another first name": lambda prompt: prompt.replace("(", "_again(", 1) if "(" in prompt else prompt + " ",
    "a space at the end": lambda prompt: prompt + " ",
}
ACCEPTED = "vllm:spec_decode_num_accepted_tokens"


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="suffix", help="suffix, ngram or draft_model (default: suffix)")
    parser.add_argument("--draft-tokens", type=int, default=16, help="most drafted tokens a round (default: 16)")
    parser.add_argument("--max-tokens", type=int, default=128, help="tokens of an answer (default: 128)")
    parser.add_argument("--repeats", type=int, default=3, help="how often all is measured (default: 3)")
    parser.add_argument("--threads", type=int, default=1, help="threads of the target (default: 1)")
    parser.add_argument("--json", type=Path, help="where to store the result")
    options = parser.parse_args()
    setup = {name: value for name, value in vars(options).items() if name != "json"}
    result: Json = new_result(describe(), setup) | {"changes": measure(options)}
    print(table(result["changes"]))
    if options.json is not None:
        options.json.write_text(dump(result), encoding="utf-8")


def measure(options: argparse.Namespace) -> Json:
    """By change: tokens a round and the two ratios, over the repeats."""
    prompts = PROMPTS[:NUM_PROMPTS]
    found: dict[str, list[Json]] = {change: [] for change in CHANGES}
    with LLM(model=pair_path().target, threads=options.threads) as plain:
        for _ in range(options.repeats):
            with _drafting(options) as llm:
                for prompt in prompts:
                    _answer(llm, prompt, options)
                for change, apply in CHANGES.items():
                    found[change].append(_compare(llm, plain, [apply(prompt) for prompt in prompts], options))
    return {change: {name: spread([run[name] for run in runs]) for name in runs[0]} for change, runs in found.items()}


def table(changes: Json) -> str:
    """In Markdown."""
    head = ["change", "tokens a round", "plain / method, processor time", "plain / method, by the clock"]
    rows = [[change, *(bracketed(value) for value in each.values())] for change, each in changes.items()]
    return "\n".join(markdown(head, rows))


def _drafting(options: argparse.Namespace) -> LLM:
    config = {"method": options.method, "num_speculative_tokens": options.draft_tokens}
    config |= {"model": str(pair_path().draft)} if options.method == "draft_model" else {}
    return LLM(model=pair_path().target, threads=options.threads, speculative_config=config, mode="sequential")


def _compare(llm: LLM, plain: LLM, prompts: Sequence[str], options: argparse.Namespace) -> Json:
    """Each prompt in turns. ValueError where the answers differ."""
    before, cpu_s, clock_s = _accepted(llm), {llm: 0.0, plain: 0.0}, {llm: 0.0, plain: 0.0}
    for prompt in prompts:
        answers = []
        for each in (llm, plain):
            cpu, clock = time.process_time(), time.perf_counter()
            answers.append(_answer(each, prompt, options))
            cpu_s[each] += time.process_time() - cpu
            clock_s[each] += time.perf_counter() - clock
        if answers[0] != answers[1]:
            raise ValueError(f"{options.method}: the answer to {prompt!r} is not that of plain decoding")
    num_tokens = len(prompts) * options.max_tokens
    return {
        "tokens_a_round": num_tokens / (num_tokens - (_accepted(llm) - before)),
        "cpu_ratio": cpu_s[plain] / cpu_s[llm],
        "ratio": clock_s[plain] / clock_s[llm],
    }


def _answer(llm: LLM, prompt: str, options: argparse.Namespace) -> Sequence[int]:
    params = SamplingParams(temperature=0.0, max_tokens=options.max_tokens, ignore_eos=True)
    return llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids


def _accepted(llm: LLM) -> int:
    return next(metric.value for metric in llm.get_metrics() if isinstance(metric, Counter) and metric.name == ACCEPTED)


if __name__ == "__main__":
    main()
