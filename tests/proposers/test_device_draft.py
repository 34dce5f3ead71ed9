"""A draft on a GPU that is not here: several tokens for one wait, and the same as the host's."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
from support import engines
from support.devices import PretendedDevice, gpu
from support.engines import DraftHarness, commit, credit, naive, new_open
from support.kernels import interpreter
from support.models import SMALLEST, build_decoder, tiny_config, tiny_hf_model, tiny_state

from outrider.draft_service import boot
from outrider.engine.batch import StepLimits
from outrider.engine.loader import LoadedModel
from outrider.engine.model_runner import RunnerOptions
from outrider.rpc.messages import DraftEvent, DraftTokens, Open, TokenWeights
from outrider.rpc.words.sampling_params import AcceptanceRule, SamplingParams

__all__ = ["gpu", "interpreter"]

pytestmark = pytest.mark.compilers

LIMITS = StepLimits(max_rows=8, max_sequences=8, max_query_len=2)
PROMPT = list(range(5, 17))  # with a window a block is full
COUPLED, REJECTION = AcceptanceRule.COUPLED, AcceptanceRule.REJECTION
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"sampling": SamplingParams(temperature=0.0, max_tokens=40)},
    "coupled": {"sampling": SamplingParams(temperature=1.3, top_p=0.9, max_tokens=40), "acceptance": COUPLED},
    "rejection": {"sampling": SamplingParams(temperature=0.9, max_tokens=40), "acceptance": REJECTION},
    "block": {"sampling": SamplingParams(temperature=0.9, max_tokens=40), "acceptance": AcceptanceRule.BLOCK},
}


@dataclass
class Line:
    """A chain or branch, as its pieces tell."""

    position: int
    parent: int | None
    ids: list[int] = field(default_factory=list)
    weights: list[TokenWeights | None] = field(default_factory=list)


def lines_of(events: list[DraftEvent]) -> dict[int, dict[int, Line]]:
    """By sequence and chain. How they are cut into pieces is a matter of time."""
    found: dict[int, dict[int, Line]] = defaultdict(dict)
    for event in events:
        if isinstance(event, DraftTokens) and event.ids:
            line = found[event.sequence_id].setdefault(event.chain, Line(event.position, event.parent))
            assert event.position == line.position + len(line.ids)
            line.ids += event.ids
            line.weights += event.weights or [None] * len(event.ids)
    return found


def play(requests: list[Open], branches: int) -> tuple[DraftHarness, dict[int, dict[int, Line]], dict[int, list[int]]]:
    """Some sequences side by side: windows, one that holds with a token after it, and one that is refused. Returns what
    they drafted, and what was committed."""
    draft, start = DraftHarness(num_blocks=48, watched=False), len(PROMPT) + 1
    events = draft.run(*requests, *(credit(request.sequence_id, start + 6, 3, branches) for request in requests))
    committed = {request.sequence_id: [*request.prompt_ids] for request in requests}
    for number, tokens in committed.items():
        new = [*lines_of(events)[number][0].ids[:3], 1]
        verdict = commit(number, start, *new, num_drafted=3, num_accepted=3, chain=0)
        events += draft.run(verdict, credit(number, start + 9, 3, branches))
        tokens += new
    for number, tokens in committed.items():
        events += draft.run(commit(number, start + 4, 2), credit(number, start + 10, 3))
        tokens.append(2)
    draft.check()
    return draft, lines_of(events), committed


def check(request: Open, number: int, line: Line, before: list[int], host: LoadedModel) -> None:
    """Every token is what the host draws after the same ones; a branch's first is a guess."""
    tokens = [*before]
    for index, (token, weights) in enumerate(zip(line.ids, line.weights, strict=True)):
        if index or line.parent is None:
            expected, entries = naive(request, tokens, host, chain=(number, line.position))
            assert token == expected
            assert (weights is None) == (entries is None)
            if weights is not None and entries is not None:
                assert weights.ids == entries.ids
                ours, theirs = (np.frombuffer(vector.weights, "<u4").astype(int) for vector in (weights, entries))
                assert abs(ours - theirs).max() <= 1  # rounded from probabilities that differ in their last bits
        tokens.append(token)


@pytest.mark.parametrize(
    ("kinds", "branches"),
    [
        pytest.param(["coupled", "greedy"], 3, id="branches"),
        pytest.param(["rejection", "block"], 0, id="weights"),
        pytest.param(["rejection", "coupled"], 0, id="a mixture, token by token", marks=pytest.mark.slow),
    ],
)
def test_the_tokens_are_the_hosts(
    kinds: list[str], branches: int, monkeypatch: pytest.MonkeyPatch, gpu: PretendedDevice | None
) -> None:
    config, state = tiny_config("llama", **SMALLEST), tiny_state(tiny_hf_model("llama", **SMALLEST))
    host = build_decoder(config, state, dtype="float32", device="cpu")
    requests = [new_open(n, [*PROMPT, n], seed=70 + n, **KINDS[kind]) for n, kind in enumerate(kinds, start=1)]
    there = build_decoder(config, state, dtype="float32", device="cuda")
    monkeypatch.setattr(engines, "tiny_draft", lambda *_: there)
    monkeypatch.setattr(engines, "RunnerOptions", partial(RunnerOptions, LIMITS))
    monkeypatch.setattr(boot, "measure_steps", lambda *_: ())  # which waits for the device, too
    draft, lines, committed = play(requests, branches)
    waits = len(gpu.waits) if gpu is not None else 0
    assert draft.method.proposer._chains is not None
    for request in requests:
        known = lines[request.sequence_id]
        for number, line in known.items():
            parent = known[line.parent] if line.parent is not None else None
            before = committed[request.sequence_id][: line.position if parent is None else parent.position]
            if parent is not None:  # whose own parent is the chain that was committed
                before = [*before, *parent.ids[: line.position - parent.position]]
            check(request, number, line, before, host)
    num_tokens = sum(len(line.ids) for known in lines.values() for line in known.values())
    assert num_tokens > 15 + 10 * bool(branches)
    assert any(line.parent is not None for known in lines.values() for line in known.values()) == bool(branches)
    if kinds != ["rejection", "coupled"]:
        assert waits < num_tokens / 1.5
