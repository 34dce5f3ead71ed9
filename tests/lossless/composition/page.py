"""docs/composition.md, written by a run of the long arrays: `make composition`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import date
from itertools import combinations, product
from pathlib import Path
from typing import Any

from lossless.composition.driver import Outcome, Run
from lossless.composition.on_vllm import EXCLUSIONS as VLLMS_OWN
from lossless.composition.on_vllm import FACTORS as ON_VLLM
from lossless.composition.on_vllm import LEFT_OUT
from lossless.composition.processes import EXCLUSIONS as ACROSS
from lossless.composition.processes import FACTORS as PROCESSES
from lossless.composition.processes import Across
from lossless.composition.table import EXCLUSIONS, FACTORS, Exclusion, exclusion_of

PAGE = Path("docs/composition.md")
LEAST_OUTPUT = 8  # tokens, behind which a draft has had its turn
NAMES = {
    "model": "model", "method": "method", "weights": "weights", "kernels": "kernels", "prompt": "prompt",
    "blocks": "blocks", "rule": "rule", "constraint": "constraint", "adapter": "adapter", "cache": "prefix cache",
    "processors": "processors", "logprobs": "log probabilities", "n": "completions", "stop": "stop", "k": "k",
    "answer": "answer", "fault": "fault", "transport": "transport", "drafts": "drafts", "shape": "request",
}  # fmt: skip
HEAD = """# Everything with everything

What a request asks for, how it is drafted and judged, and what serves it, go together: each pair of values below stood
together in requests that ran, and what came of them is plain decoding's. The rows are those of covering arrays
(covertable), in which every {strength} values of different factors stand together in some row. This page is written by
`make composition`; `make test` runs an array of pairs, every night's run the long ones with a seed of its own.

Of each row is shown, over HTTP as a client sees it, in a batch with others:

* greedy and coupled: token ids, text, reasoning, calls, log probabilities and the end's reason are those of plain
  decoding, alone in its batch and over nothing cached but what the row says;
* under rejection, token by token and by blocks: each window is judged again by the reference, from the weights that the
  draft drew by, the seed's random numbers and the probabilities of a pass of its own; what was committed is that;
* the prompt's tokens that the prefix cache had are as many as without speculation; usage counts what came; and nothing
  is held afterwards: no sequence, no block, no request.

In no table: pictures, which targets on vLLM alone take.
"""


def written(found: Run, across: Across, strength: int, seed: int) -> str:
    """The page."""
    outcomes, problems = found.outcomes, across.problems
    parts = [
        HEAD.format(strength={2: "two", 3: "three"}[strength]),
        f"{date.today().isoformat()}, seed {seed}: {len(outcomes)} rows on {found.num_servers} configurations in one "
        "process, "
        f"{sum(one.num_replayed for one in outcomes):,} windows judged again, "
        f"{sum(one.num_accepted for one in outcomes):,} drafted tokens accepted of "
        f"{sum(one.num_drafted for one in outcomes):,}; {len(problems)} rows across processes, "
        f"{across.num_replayed:,} windows judged again. "
        f"{sum(not one.problems for one in outcomes)} and {sum(not problem for problem in problems.values())} of them "
        "as plain decoding.\n",
        "## In one process\n",
        values_of(FACTORS),
        "Pairs of values that stood together in a row that was as plain decoding, of those that may:\n",
        _pairs(FACTORS, EXCLUSIONS, [asdict(one.row) for one in outcomes if not one.problems]),
        why_not(EXCLUSIONS),
        _plainly(outcomes),
        "## Across processes\n",
        "Two targets, two drafts and two gateways of the embedded pair; what befalls one of them does so while the\n"
        "row's request runs. Greedy and coupled answers are plain decoding's. Under rejection each window is judged\n"
        "again as above, whichever of the targets judged it, killed or not; each token of the answer comes of one.\n",
        values_of(PROCESSES),
        _pairs(PROCESSES, ACROSS, [asdict(row) for row, problem in problems.items() if not problem]),
        why_not(ACROSS),
        "## Targets on vLLM\n",
        "`make test-vllm` runs an array of pairs there, over HTTP, too: greedy answers are those of vLLM's plain\n"
        "decoding, sampled ones come whole. What is judged by rejection is so in vLLM's own process, and not again;\n"
        "its laws have tests of their own (tests/vllm_engine).\n",
        values_of(ON_VLLM),
        left_out(),
        why_not([one for one in VLLMS_OWN if one not in EXCLUSIONS]),
    ]
    return "\n".join(part for part in parts if part)


def values_of(factors: Mapping[str, Sequence[Any]]) -> str:
    """A line a factor."""
    lines = [f"| {NAMES[name]} | {', '.join(map(str, values))} |" for name, values in factors.items()]
    return "\n".join(["| factor | values |", "|---|---|", *lines]) + "\n"


def left_out() -> str:
    """Of targets on vLLM the values that are in no row there, a line for each reason."""
    by_reason: dict[tuple[str, str], list[str]] = {}
    for factor, values in LEFT_OUT.items():
        for value, why in values.items():
            by_reason.setdefault((factor, why), []).append(value)
    lines = [f"| {NAMES[factor]}: {', '.join(values)} | {why} |" for (factor, why), values in by_reason.items()]
    return "\n".join(["| not on vLLM | why |", "|---|---|", *lines]) + "\n"


def _pairs(
    factors: Mapping[str, Sequence[Any]], exclusions: Sequence[Exclusion], rows: Iterable[Mapping[str, Any]]
) -> str:
    """A triangle: of each two factors how many pairs of values were met."""
    met: Counter[tuple[str, str]] = Counter()
    seen = {pair for row in rows for pair in combinations(row.items(), 2)}
    names = list(factors)
    for one, other in seen:
        met[one[0], other[0]] += 1
    lines = [f"| | {' | '.join(NAMES[name] for name in names[1:])} |", f"|---|{'---|' * (len(names) - 1)}"]
    for place, first in enumerate(names[:-1]):
        cells = ["" for _ in names[1 : place + 1]]
        for second in names[place + 1 :]:
            pairs = product(factors[first], factors[second])
            most = sum(exclusion_of({first: a, second: b}, exclusions) is None for a, b in pairs)
            cells.append(f"{met[first, second]}/{most}")
        lines.append(f"| **{NAMES[first]}** | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def why_not(exclusions: Sequence[Exclusion]) -> str:
    """A line each."""
    lines = [f"| {one.what} | {one.why} |" for one in exclusions]
    return "\n".join(["| not together | why |", "|---|---|", *lines]) + "\n"


def _plainly(outcomes: Sequence[Outcome]) -> str:
    """What is served, and drafts nothing: values that stand with a method in no row that drafted, and in some that had
    the tokens for it."""
    drafted = {(one.row.method, name, value) for one in outcomes if one.num_drafted for name, value in _of(one)}
    could = [one for one in outcomes if one.row.method != "none" and one.num_output > LEAST_OUTPUT]
    met = {(one.row.method, name, value) for one in could for name, value in _of(one)}
    lines = [f"| {method} | {NAMES[name]}: {value} |" for method, name, value in sorted(met - drafted)]
    return "\n".join(["| served without drafts | with |", "|---|---|", *lines]) + "\n" if lines else ""


def _of(outcome: Outcome) -> list[tuple[str, str]]:
    return [(name, value) for name, value in asdict(outcome.row).items() if name != "method"]
