"""Chains, branches and trees of a draft model at the same number of target rows:

    python -m outrider.bench.trees [--tree "[(0,), (1,), (0, 0)]"] [--streams 1 4 16] [--temperature 0 1] [--runs 5]

The embedded pair in this process. A chain is as long as the tree has nodes, and the draft of branches goes on past it
while it is verified. Runs of the three take turns; a run's tokens a second are compared with the chain's of its turn.
Prints a table in Markdown."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from outrider.bench.machine import describe
from outrider.bench.prompts import PROMPTS
from outrider.bench.results import Json, bracketed, markdown, spread
from outrider.engine.token_tree import TokenTree
from outrider.llm import LLM, SamplingParams
from outrider.pairs import pair_path

TREE = "[(0,), (1,), (2,), (0, 0), (0, 1), (0, 0, 0)]"
FORMS = ("chains", "branches", "trees")


@dataclass(slots=True)
class Form:
    """One way to draft, started."""

    made: LLM
    params: list[SamplingParams]

    def tokens_per_s(self) -> float:
        """Of all streams together."""
        prompts = [PROMPTS[index % len(PROMPTS)] for index in range(len(self.params))]
        began = perf_counter()
        outputs = self.made.generate(prompts, self.params, use_tqdm=False)
        return sum(len(one.outputs[0].token_ids) for one in outputs) / (perf_counter() - began)

    def per_round(self) -> tuple[float, float]:
        """Committed and drafted tokens of a round with a draft, since the start."""
        found: dict[str, Any] = {metric.name.split(":")[-1]: metric for metric in self.made.get_metrics()}
        drafts, drafted, accepted = (
            found[f"spec_decode_{name}"].value for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
        )
        return 1 + accepted / max(1, drafts), drafted / max(1, drafts)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=TokenTree.checked, default=TREE, help=f"paths (default: {TREE})")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16], help="at once (default: 1 4 16)")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0], help="(default: 0 1)")
    parser.add_argument("--tokens", type=int, default=64, help="of a stream (default: 64)")
    parser.add_argument("--runs", type=int, default=5, help="of each form (default: 5)")
    parser.add_argument("--threads", type=int, default=describe().cores, help="threads (default: all cores)")
    options = parser.parse_args()
    print(
        "\n".join(table([row for t in options.temperature for n in options.streams for row in measure(options, t, n)]))
    )


def measure(options: argparse.Namespace, temperature: float, streams: int) -> list[Json]:
    """A row a form."""
    with ExitStack() as stack:
        forms = {name: stack.enter_context(started(name, options, temperature, streams)) for name in FORMS}
        speeds: dict[str, list[float]] = {name: [] for name in forms}
        for form in forms.values():
            form.tokens_per_s()  # warms caches
        for _ in range(options.runs):
            for name, form in forms.items():
                speeds[name].append(form.tokens_per_s())
        return [
            {
                "temperature": temperature,
                "streams": streams,
                "form": name,
                "per_round": form.per_round(),
                "speed": spread(speeds[name]),
                "ratio": spread([own / chain for own, chain in zip(speeds[name], speeds["chains"], strict=True)]),
            }
            for name, form in forms.items()
        ]


@contextmanager
def started(name: str, options: argparse.Namespace, temperature: float, streams: int) -> Iterator[Form]:
    """A form, which is closed at the end."""
    pair, k = pair_path(), len(TokenTree.parse(options.tree))
    config: Json = {"method": "draft_model", "model": str(pair.draft), "num_speculative_tokens": k}
    if name == "trees":
        config["speculative_token_tree"] = options.tree
    mode: Json = {"mode": "branches"} if name == "branches" else {}
    params = [
        SamplingParams(temperature=temperature, seed=index, max_tokens=options.tokens, ignore_eos=True)
        for index in range(streams)
    ]
    with LLM(pair.target, threads=options.threads, speculative_config=config, max_num_seqs=streams, **mode) as made:
        yield Form(made, params)


def table(rows: Sequence[Json]) -> Iterator[str]:
    """Medians, with the least and the greatest run in brackets."""
    head = ("temperature", "streams", "form", "tokens/round", "drafted/round", "tokens/s", "x chains")
    cells: list[tuple[str, ...]] = []
    for row in rows:
        counts = [f"{value:.2f}" for value in row["per_round"]]
        what = f"{row['temperature']:g}", str(row["streams"]), row["form"]
        cells.append((*what, *counts, bracketed(row["speed"], 0), bracketed(row["ratio"])))
    return markdown(head, cells, words=(0, 1, 2))


if __name__ == "__main__":
    main()
