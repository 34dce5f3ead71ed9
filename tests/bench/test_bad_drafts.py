"""Drafts that are bad on purpose, and what of an answer's time counts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from support.engines import new_open
from support.fakes import TargetServicer, ToyTarget, expected, generate, request, serving, until
from torch import Tensor

from outrider.bench import bad_drafts
from outrider.bench.bad_drafts import HARMS, LEARNING, METHODS, all_bad, harmed, not_numbers, tokens_a_second
from outrider.bench.scripted_draft import SCRIPTS, ScriptedDraft, model_of
from outrider.gateway.peers.remote import RemoteDrafts, RemoteTargets
from outrider.pairs import pair_path
from outrider.proposers.base import MAX_ID, SequenceContext
from outrider.proposers.registry import check_method
from outrider.rpc.messages import Close, Closed, Commit, DraftTokens, Failure


@pytest.mark.parametrize("bad", METHODS)
def test_each_is_a_method_and_drafts_what_it_says(bad: type[bad_drafts.Constant]) -> None:
    check_method(f"outrider.bench.bad_drafts.{bad.__name__}", True)
    state = bad().open([1, 2, 3], SequenceContext())
    state.append([9])
    assert state.propose(2) == {"constant": [5, 5], "foreign": [MAX_ID] * 2, "late": [9, 9]}[bad.name]
    state.truncate(2)
    assert state.num_tokens == 2


@dataclass
class _Part:
    token_ids: list[int]


class _Clock:
    """Tells a second more with every part."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += 1.0
        return self.now

    def generate(self, prompt: str, **options: Any) -> Iterator[_Part]:
        yield from (_Part([0] * 4) for _ in range(options["max_tokens"] // 4))


def test_the_first_tokens_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = _Clock()
    monkeypatch.setattr(bad_drafts, "time", clock)
    client: Any = clock
    assert tokens_a_second(client, "", LEARNING + 40) == 4.0


def test_all_have_names_and_harmed_ones_need_a_draft() -> None:
    others = {"not numbers", "noughts"}
    assert set(all_bad(Path("draft"))) - set(all_bad(None)) == others
    assert set(all_bad(None)) == {
        *("constant", "foreign", "late", "out of order", "out of memory", "fails", "silent"),
    }


def test_harmed_weights_are_all_harmed(tmp_path: Path) -> None:
    draft = pair_path().draft
    for harm in HARMS:
        folder = harmed(draft, tmp_path / harm.__name__, harm)
        weights = load_file(folder / "model.safetensors")
        assert weights.keys() == load_file(draft / "model.safetensors").keys()
        are_harmed = Tensor.isnan if harm is not_numbers else Tensor.logical_not
        assert all(bool(are_harmed(tensor).all()) for tensor in weights.values())
        assert (folder / "tokenizer.json").is_file()


@pytest.mark.parametrize(
    ("script", "kinds"),
    [
        ("out_of_order", [DraftTokens] * 8),
        ("out_of_memory", [DraftTokens, Failure]),
        ("fails", [Failure]),
        ("silent", []),
    ],
)
def test_scripts_answer_every_message_until_the_end(script: str, kinds: list[type]) -> None:
    servicer, sequences, sent = ScriptedDraft(SCRIPTS[script], ToyTarget().info.model), {}, []
    for message in (new_open(1, [4, 5, 6]), Commit(1, 3, (7, 8)), Commit(2, 3, (7,))):
        servicer.take(message, sequences, sent.append)
    assert [type(one) for one in sent] == 2 * kinds
    pieces = [one for one in sent if isinstance(one, DraftTokens)]
    half = len(pieces) // 2
    assert {one.chain for one in pieces[:half]}.isdisjoint(one.chain for one in pieces[half:])
    if script == "out_of_order":
        assert [one.position for one in pieces[half:]] == [7, 6, 5, 5, 6, 7, 205, 0]
    servicer.take(Close(1), sequences, sent.append)
    assert sent[-1] == Closed(1) and not sequences


@pytest.mark.parametrize("script", SCRIPTS)
async def test_a_gateway_takes_the_draft_and_no_token_is_another(script: str) -> None:
    asked = request(40)
    async with serving(TargetServicer(ToyTarget())) as target:
        servicer = ScriptedDraft(SCRIPTS[script], await model_of(target.address))
        async with (
            serving(servicer) as draft,
            RemoteTargets([target.address]) as targets,
            RemoteDrafts([draft.address]) as drafts,
        ):
            await until(lambda: targets.usable and drafts.usable)
            assert await generate(drafts, targets, asked) == expected(asked.prompt_ids, 40)
