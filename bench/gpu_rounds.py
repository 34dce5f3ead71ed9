"""What follows a pass on a GPU: judging behind it, and a draft's tokens with one wait against a wait for each."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from gpu_steps import ROWS, WARM_UP, Shape
from kernels_case import BLOCK_SIZE, K

from outrider.commands.bench_result import Json, spread
from outrider.engine.random_ahead import RandomKey
from outrider.engine.runner import ModelRunner
from outrider.engine.sampling import SequenceSampler
from outrider.engine.sequence import Sequence
from outrider.proposers.draft_model import DraftModelProposer
from outrider.proposers.draft_rows import DraftLaw, DraftRows, DraftRule
from outrider.target.admission import TargetLimits, admit
from outrider.target.chains import Window
from outrider.target.rule import Rule
from outrider.target.scheduler import StepEntry
from outrider.target.verifier import Judged
from outrider.target.verifiers import verifier_of
from outrider.wire.messages import Open, TokenWeights
from outrider.wire.sampling import AcceptanceRule, SamplingParams

ENTRIES = 64  # of a drafted token's weights

Ways = dict[str, Callable[[], object]]


def measure_rounds(shape: Shape, runner: ModelRunner, repeats: int) -> Json:
    """Rows for every batch: of judging by rule, and of drafting by rule."""
    verifier, proposer = verifier_of(runner, shape.vocab_size), DraftModelProposer(runner)
    judging, drafting = [], []
    for batch in shape.batches:
        for rule in Rule:
            members = [_judged(shape, index, rule) for index in range(batch)]
            entries = [member.entry.batch_entry() for member in members]
            ways: Ways = {
                "pass_us": lambda entries=entries: runner.forward(entries)[-1, 0].item(),  # type: ignore[misc]
                "round_us": lambda entries=entries, members=members: verifier.verify(  # type: ignore[misc]
                    runner.forward(entries), members
                ),
            }
            judging.append({"batch": batch, "rule": rule.name.lower()} | _medians(ways, repeats))
        for law in DraftRule:
            ways = {
                "one_wait_us": partial(_draft, shape, proposer, batch, law, K),
                "a_wait_each_us": partial(_draft, shape, proposer, batch, law, 1),
            }
            drafting.append({"batch": batch, "rule": law.name.lower()} | _medians(ways, repeats))
    return {"judging": judging, "drafting": drafting}


def render_rounds(result: Json) -> Iterator[str]:
    """The tables."""
    yield f"A pass of {ROWS} rows a sequence, and with its judging; {K} drafted tokens; medians, milliseconds."
    for name, columns in (("judging", ("pass_us", "round_us")), ("drafting", ("one_wait_us", "a_wait_each_us"))):
        yield ""
        yield f"| batch | {name} | {' | '.join(column.removesuffix('_us').replace('_', ' ') for column in columns)} |"
        yield "|--:|:--|--:|--:|"
        for row in result[name]:
            times = " | ".join(f"{row[column]['median'] / 1e3:.3f}" for column in columns)
            yield f"| {row['batch']} | {row['rule']} | {times} |"


def _medians(ways: Ways, repeats: int) -> Json:
    found: dict[str, list[float]] = defaultdict(list)
    for repeat in range(WARM_UP + repeats):
        for name, way in ways.items():
            started = time.perf_counter()
            way()
            if repeat >= WARM_UP:
                found[name].append((time.perf_counter() - started) * 1e6)
    return {name: spread(values) for name, values in found.items()}


def _judged(shape: Shape, index: int, rule: Rule) -> Judged:
    """A window of K tokens after a long context."""
    prompt = tuple(7919 * place % shape.vocab_size for place in range(shape.context + 1))
    acceptance = AcceptanceRule.COUPLED if rule == Rule.COUPLED else AcceptanceRule.REJECTION
    sampling = SamplingParams(temperature=0.0 if rule == Rule.GREEDY else 1.0, max_tokens=2 * K)
    limits = TargetLimits(shape.vocab_size, 8192, (), 1 << 20)
    request = Open(index, prompt, sampling, acceptance=acceptance, seed=index)
    target = admit(request, None, (1, index), print, limits, index, 0.0)
    ids = tuple(range(K))
    vector = TokenWeights.of(range(ENTRIES), [32767] * ENTRIES)
    target.sequence.tokens += ids
    target.sequence.block_table = _table(shape, index)
    entry = StepEntry(target, shape.context + 1, shape.context, ROWS, Window(0, ids, (vector,) * K, False), True, ROWS)
    return Judged(entry, range(index * ROWS, (index + 1) * ROWS))


def _draft(shape: Shape, proposer: DraftModelProposer, batch: int, rule: DraftRule, at_once: int) -> None:
    """K tokens of every sequence."""
    sampling: Any = SamplingParams(temperature=0.0 if rule == DraftRule.ARGMAX else 1.0)
    rows = []
    for index in range(batch):
        prompt = [7919 * place % shape.vocab_size for place in range(shape.context)]
        sequence = Sequence(prompt, "", shape.context - 1, _table(shape, index))
        sampler = SequenceSampler(sampling, prompt, (), (), shape.vocab_size)
        law = DraftLaw(rule, RandomKey(index, 0))
        rows.append(DraftRows(sequence, 1, shape.context, sampler, law, shape.context + K))
    for _ in range(K // at_once):
        proposer.run(rows, proposer.passes_for(rows, at_once))


def _table(shape: Shape, index: int) -> list[int]:
    blocks = -(-(shape.context + ROWS) // BLOCK_SIZE)
    return list(range(blocks * index, blocks * (index + 1)))
