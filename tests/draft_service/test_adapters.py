"""A draft's own adapters: it drafts as a model with their weights merged in would, for the target's adapters of their
names alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from support.adapters import merged, save_adapter
from support.engines import GREEDY, SAMPLED, DraftHarness, commit, credit, new_open
from support.models import build_decoder, save_tiny, tiny_config, tiny_hf_model, tiny_state

from outrider.draft_service.admission import ModelMethod
from outrider.draft_service.boot import build_model_method, load_methods
from outrider.draft_service.settings import DraftSettings
from outrider.engine.adapters.loader import LoadedAdapter, load_adapter
from outrider.engine.loader import LoadedModel
from outrider.engine.model_runner import RunnerOptions
from outrider.engine.models.base import UnsupportedModel
from outrider.engine.token_tree import TokenTree
from outrider.rpc.messages import DraftTokens
from outrider.rpc.words.sampling_params import AcceptanceRule

PROMPT = [(7 * index) % 90 + 3 for index in range(40)]
K = 4


def decoder(state: Any = None) -> LoadedModel:
    """One of its own: what has room for adapters has it for good."""
    return build_decoder(tiny_config(), tiny_state(tiny_hf_model()) if state is None else state, batch_invariant=True)


@dataclass
class Adapted:
    """An adapter, and the weights of the tiny draft with it merged in."""

    folder: Path
    state: Any

    def loaded(self, base: LoadedModel) -> LoadedAdapter:
        return load_adapter(self.folder, base.model, base.digest)


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Adapted]:
    state, found = tiny_state(tiny_hf_model()), {}
    for seed, name in enumerate(("sql", "law")):
        folder = save_adapter(tmp_path_factory.mktemp("adapters") / name, state, seed=seed, scale=0.2)
        found[name] = Adapted(folder, merged(state, folder))
    return found


def harness(adapted: dict[str, Adapted], **options: Any) -> DraftHarness:
    base = decoder()
    return DraftHarness(loaded=base, adapters={name: one.loaded(base) for name, one in adapted.items()}, **options)


REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"sampling": GREEDY, "acceptance": AcceptanceRule.REJECTION, "one_hot": True},
    "weights": {"sampling": SAMPLED, "acceptance": AcceptanceRule.REJECTION},
    "coupled": {"sampling": SAMPLED, "acceptance": AcceptanceRule.COUPLED},
}


def pieces(events: list[Any], number: int) -> list[tuple[int, int, tuple[int, ...], tuple[int, ...]]]:
    """Chain, position, ids and parents of each."""
    found = [event for event in events if isinstance(event, DraftTokens) and event.sequence_id == number]
    return sorted((piece.chain, piece.position, piece.ids, piece.parents) for piece in found)


TREE = TokenTree.parse("[(0,), (1,), (0, 0)]")
HOW: dict[str, tuple[int, dict[str, Any]]] = {  # branches at most, and what the draft is told
    "chains": (0, {}), "branches": (5, {"num_blocks": 128}), "trees": (0, {"tree": TREE}),
}  # fmt: skip


@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize("how", HOW)
def test_it_drafts_as_the_merged_weights_do(adapted: dict[str, Adapted], name: str, how: str) -> None:
    """One that the draft has no adapter for is drafted for by the model alone."""
    (branches, options), asked = HOW[how], {1: "sql", 2: "law", 3: "", 4: "other"}

    def messages(number: int, adapter: str) -> list[Any]:
        opened = new_open(number, PROMPT, seed=7, adapter=adapter, **REQUESTS[name])
        return [opened, credit(number, len(PROMPT) + 2 * (K + 1), K, branches)]

    together = harness(adapted, **options)
    if how == "branches":  # which are drafted hangs on what else there is to draft
        found = {number: pieces(together.run(*messages(number, adapter)), number) for number, adapter in asked.items()}
    else:
        events = together.run(*(message for number, adapter in asked.items() for message in messages(number, adapter)))
        found = {number: pieces(events, number) for number in asked}
        assert any(len({entry.adapter for entry in batch}) == 3 for batch in together.batches), "in one batch"
    for number, adapter in asked.items():
        state = adapted[adapter].state if adapter in adapted else None
        alone = DraftHarness(loaded=decoder(state), **options)
        assert found[number] == pieces(alone.run(*messages(number, "")), number) != []
    assert found[3] == found[4] and len({str(found[number]) for number in (1, 2, 3)}) == 3
    together.check()


def test_no_prefix_is_shared_between_adapters(adapted: dict[str, Adapted]) -> None:
    draft, starts = harness(adapted), []
    for number, adapter in enumerate(("sql", "", "law", "other", "sql"), start=1):
        first = len(draft.batches)
        draft.run(new_open(number, PROMPT, adapter=adapter), credit(number, len(PROMPT) + K, K))
        starts.append(draft.batches[first][0].start)
    assert starts == [0, 0, 0, 32, 32], "one that the draft lacks is the model alone"


def test_another_model_goes_on_with_its_own(adapted: dict[str, Adapted]) -> None:
    """As after a reload: what is open has the new model's adapter of the name, if there is one."""
    draft = harness(adapted)
    for number, adapter in ((1, "sql"), (2, "law")):
        draft.run(new_open(number, PROMPT, adapter=adapter), credit(number, len(PROMPT) + K, K))
    base = decoder()
    one = {"sql": adapted["law"].loaded(base)}  # another content by the name
    method = build_model_method(base, RunnerOptions(num_blocks=64), adapters=one)
    assert draft.engine.replace_model(method) == 2
    for number, state in ((1, adapted["law"].state), (2, None)):
        alone = DraftHarness(loaded=decoder(state))
        alone.send(new_open(9, [*PROMPT, 5]))
        wanted = pieces(alone.run(credit(9, len(PROMPT) + 1 + K, K)), 9)
        told = commit(number, len(PROMPT), 5, chain=0, num_drafted=K, num_accepted=0)
        found = pieces(draft.run(told, credit(number, len(PROMPT) + 1 + K, K)), number)
        assert [ids for _, _, ids, _ in found] == [ids for _, _, ids, _ in wanted]


def test_the_flag(adapted: dict[str, Adapted], tmp_path: Path) -> None:
    save_tiny(tmp_path / "draft")
    flags = [f"{name}={one.folder}" for name, one in adapted.items()]
    methods, _ = load_methods(DraftSettings(model=tmp_path / "draft", draft_adapter=flags, num_blocks=8))
    (method,) = (found for found in methods if isinstance(found, ModelMethod))
    assert list(method.adapters) == ["sql", "law"] and method.proposer.runner.adapters is not None
    with pytest.raises(UnsupportedModel, match="nowhere"):
        load_methods(DraftSettings(model=tmp_path / "draft", draft_adapter=["sql=nowhere"], num_blocks=8))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"draft_adapter": ["sql"]}, r"draft_adapter \(--draft-adapter\): is 'sql'; allowed: NAME=DIR"),
        ({"draft_adapter": ["=dir"]}, "is '=dir'; allowed: NAME=DIR, with a name of 1 to 128"),
        ({"draft_adapter": ["a=x", "a=y"]}, "has 'a' more than once"),
        ({"draft_adapter": ["a=x"], "model": None, "method": "ngram"}, "is for a draft with a model; give --model"),
    ],
)
def test_what_the_flag_refuses(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        DraftSettings(**{"model": "models/small", **given})
