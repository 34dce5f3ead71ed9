"""What drafts beside a target whose weights stay packed, 8 or 4 bits each, heads and trees, and adapters on top of
them: tokens are those of plain decoding with the same weights and the same adapter."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support.adapters import ATTENTION, save_adapter
from support.engines import COUPLED, VOCAB, TargetHarness, opened
from support.heads import LAYOUTS, random_head
from support.models import build_decoder, cpu_kernels, tiny_config, tiny_hf_model, tiny_state
from support.proofs import on_a_diagonal
from support.quantized import rounded_state
from target_service.test_trees import grow

from outrider.engine.adapters.loader import load_adapter
from outrider.engine.adapters.resident import AdapterRoom, ResidentAdapters
from outrider.engine.loader import LoadedModel
from outrider.engine.models.decoder_cpu import NativeDecoder
from outrider.engine.quantized.rounding import Rounding
from outrider.engine.token_tree import TokenTree
from outrider.kernels.cpu.decoder import Kind
from outrider.proposers.heads.loading import drafts_in_one_pass
from outrider.rpc.messages import Adapter, Credit, Open

ROUNDINGS: tuple[Rounding, ...] = ("int8", "int4")
SAMPLINGS: dict[str, dict[str, Any]] = {"greedy": {}, "coupled": {"temperature": 1.0, "acceptance": COUPLED}}
TREE = TokenTree.parse("[(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0)]")
WITH_ADAPTERS, SMALL = ("", "all", "attention"), {"num_blocks": 14, "max_rows": 24}  # preempts, and cuts prompts
SIZES: dict[str, Any] = {"intermediate_size": 128}  # packed products have inputs by 32


@dataclass(frozen=True)
class Models:
    """In transformers before the rounding, and in few bits."""

    hf: Any
    packed: LoadedModel


@cache
def models(rounding: Rounding) -> Models:
    hf = tiny_hf_model(**SIZES)
    with cpu_kernels("c"):
        packed = build_decoder(tiny_config(**SIZES), rounded_state(tiny_state(hf), rounding))
    assert isinstance(packed.model, NativeDecoder) and packed.model.kernel._layers[1].down.kind == Kind.PACKED
    return Models(hf, packed)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder, state = tmp_path_factory.mktemp("adapters"), tiny_state(tiny_hf_model(**SIZES))
    return {
        "all": save_adapter(folder / "all", state, seed=1, scale=0.3),
        "attention": save_adapter(folder / "attention", state, ATTENTION, seed=2, scale=0.3, r=11),
    }


def harness_of(loaded: LoadedModel, adapters: dict[str, Path], **options: Any) -> TargetHarness:
    """An engine with room for one of the two adapters: they take turns."""
    resident = ResidentAdapters(loaded.model, AdapterRoom(1, 16))
    harness = TargetHarness.of(loaded, adapters=resident, **options)
    for name, folder in adapters.items():
        adapter = load_adapter(folder, loaded.model, "base")
        harness.engine.adapters.table.add(Adapter(name, adapter.digest, adapter.rank), resident.prepare(adapter))
    return harness


def requests_of(sampling: dict[str, Any], method: str = "") -> list[Open]:
    """Some texts twice or more, each with another adapter."""
    rng = random.Random(3)
    prompts = [rng.choices(range(3, VOCAB), k=length) for length in (9, 17, 30)]
    options = {"max_tokens": 20, "method": method, **sampling}
    return [
        opened(1 + at + 3 * number, prompt, seed=at, adapter=name, **options)
        for number, name in enumerate(WITH_ADAPTERS)
        for at, prompt in enumerate(prompts)
    ]


def plain_outputs(loaded: LoadedModel, adapters: dict[str, Path], requests: list[Open]) -> dict[int, list[int]]:
    """Each alone in an engine of its own, a token a step."""
    return {r.sequence_id: harness_of(loaded, adapters).decode_plain(r.sequence_id, r) for r in requests}


@pytest.mark.parametrize(
    ("layout", "rounding", "sampling", "shape"),
    on_a_diagonal(LAYOUTS, ROUNDINGS, list(SAMPLINGS), ["chains", "trees"]),
)
def test_a_head_changes_no_token(
    layout: str, rounding: Rounding, sampling: str, shape: str, adapters: dict[str, Path], tmp_path: Path
) -> None:
    """Beside other sequences, with adapters and none, in chunks and after a preemption."""
    both = models(rounding)
    head = random_head(layout, tmp_path, both.hf, both.packed)
    takes_trees = not drafts_in_one_pass(head)
    tree = TREE if shape == "trees" and takes_trees else None
    requests = requests_of(SAMPLINGS[sampling], head.name)
    harness = harness_of(both.packed, adapters, head=head, tree=tree, **SMALL)
    for request in requests:
        harness.send(request, Credit(request.sequence_id, 1 << 20, 3 if tree is None else 7))
    harness.run()
    found = {request.sequence_id: harness.output(request.sequence_id) for request in requests}
    assert found == plain_outputs(both.packed, adapters, requests)
    assert len({tuple(ids) for ids in found.values()}) == len(found), "adapters show"
    drafted = [commit.num_drafted for number in found for commit in harness.commits(number)]
    assert max(drafted) == (min(3, head.most_tokens) if tree is None else 7) and sum(drafted) > 60


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_trees_change_no_token(rounding: Rounding, sampling: str, adapters: dict[str, Path]) -> None:
    """Of any shape, which hold much of what follows."""
    packed, requests = models(rounding).packed, requests_of(SAMPLINGS[sampling])
    expected = plain_outputs(packed, adapters, requests)
    harness = harness_of(packed, adapters, **SMALL)
    grow(harness, requests, expected, random.Random(5))
    assert {request.sequence_id: harness.output(request.sequence_id) for request in requests} == expected
    assert sum(commit.num_accepted for number in expected for commit in harness.commits(number)) > 60
