"""Adapters of our own decoder, and of transformers' models: outputs are those of weights that have them merged in,
whatever shares the batch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.adapters import ALL, ATTENTION, merged, save_adapter
from support.models import (
    FAMILIES,
    KERNELS,
    MIXTURES,
    TINY,
    build_decoder,
    cpu_kernels,
    hf_logits,
    tiny_config,
    tiny_hf_model,
    tiny_state,
)
from support.quantized import rounded_state
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from outrider.engine.adapters.config import UnsupportedAdapter
from outrider.engine.adapters.loader import LoadedAdapter, load_adapter
from outrider.engine.adapters.resident import AdapterRoom, ResidentAdapters
from outrider.engine.batch import BatchEntry, PreparedAdapter
from outrider.engine.loader import LoadedModel
from outrider.engine.model_runner import ModelRunner
from outrider.engine.models.base import LowRank
from outrider.engine.models.hooked_adapters import HookedAdapters, hooked_linears
from outrider.engine.models.transformers import RegistryModel
from outrider.engine.quantized.rounding import Rounding

IDS = [(31 * index + 7) % 97 for index in range(40)]
FUSED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")


def targets_of(family: str) -> Sequence[str]:
    if family in MIXTURES:
        return ATTENTION
    return FUSED if family == "phi3" else ALL


class Case:
    """A tiny base, with room for adapters."""

    def __init__(
        self,
        family: str = "llama",
        slots: int = 2,
        invariant: bool = True,
        rounding: Rounding | None = None,
        **options: Any,
    ) -> None:
        state = tiny_state(tiny_hf_model(family, **options))
        stored = state if rounding is None else rounded_state(state, rounding)
        self.state = dict(stored)  # the numbers
        self.config = tiny_config(family, **options)
        self.invariant = invariant
        self.loaded = self._decoder(stored)
        self.resident = ResidentAdapters(self.loaded.model, AdapterRoom(slots, 16))
        self.runner = ModelRunner(self.loaded.model, 32, adapters=self.resident)

    def _decoder(self, state: Mapping[str, Tensor]) -> LoadedModel:
        return build_decoder(self.config, state, batch_invariant=self.invariant, activations="float32")

    def load(self, folder: Path) -> LoadedAdapter:
        return load_adapter(folder, self.loaded.model, "base")

    def prepared(self, folder: Path) -> PreparedAdapter:
        return self.resident.prepare(self.load(folder))

    def logits(self, adapter: PreparedAdapter | None, ids: Sequence[int] = IDS) -> Tensor:  # [ids, vocab]
        return self.runner.forward([BatchEntry(ids, 0, [0, 1, 2], len(ids), adapter=adapter)])

    def merged_logits(self, folder: Path, scaling: Any = 2.0, ids: Sequence[int] = IDS) -> Tensor:  # [ids, vocab]
        runner = ModelRunner(self._decoder(merged(self.state, folder, scaling)).model, 4)
        return runner.forward([BatchEntry(ids, 0, [0, 1, 2], len(ids))])


def differ(logits: Tensor, expected: Tensor) -> float:
    return float((logits - expected).abs().max() / expected.std())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kernels", KERNELS)
def test_logits_are_those_of_merged_weights(kernels: str, family: str, tmp_path: Path) -> None:
    options: Any = {"partial_rotary_factor": 0.75} if family == "phi3" else {}
    with cpu_kernels(kernels):
        case = Case(family, **options)
        folder = save_adapter(tmp_path / "adapter", case.state, targets_of(family))
        adapter, expected = case.prepared(folder), case.merged_logits(folder)
        logits = case.logits(adapter)
        assert differ(logits, expected) < 1e-4 and torch.equal(logits.argmax(1), expected.argmax(1))
        assert differ(case.logits(None), expected) > 0.1, "the adapter shows"


@pytest.mark.parametrize("family", [family for family in MIXTURES if family != "gpt_oss"])  # which has one tensor
def test_experts_are_not_for_adapters(family: str, tmp_path: Path) -> None:
    case = Case(family)
    of_all = tuple({name.rsplit(".", 2)[-2] for name in case.state if name.endswith("proj.weight")})
    folder = save_adapter(tmp_path / "adapter", case.state, (*of_all, "w1"))
    with pytest.raises(UnsupportedAdapter, match=r"experts\.0\.\w+\.lora_A\.weight is there, which no targeted module"):
        case.load(folder)


IN_FEW_BITS = pytest.mark.parametrize("rounding", ["int8", "int4"])
PACKED: dict[str, Any] = {"intermediate_size": 128}  # packed products have inputs by 32


@IN_FEW_BITS
@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("kernels", KERNELS)
def test_adapters_of_weights_in_few_bits(kernels: str, family: str, rounding: Rounding, tmp_path: Path) -> None:
    """What an adapter adds is added to the products of the numbers, which are not rounded anew."""
    with cpu_kernels(kernels):
        case = Case(family, rounding=rounding, **PACKED)
        folder = save_adapter(tmp_path / "adapter", case.state)
        adapter, expected = case.prepared(folder), case.merged_logits(folder)
        assert differ(case.logits(adapter), expected) < 1e-4
        assert differ(case.logits(None), expected) > 0.1, "the adapter shows"
        fine = Case(family, **PACKED)
        assert differ(fine.logits(fine.prepared(folder)), expected) > 1e-3, "so do few bits"


@pytest.mark.parametrize("kernels", KERNELS)
def test_ranks_and_factors_of_single_modules(kernels: str, tmp_path: Path) -> None:
    first, second = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"
    with cpu_kernels(kernels):
        case = Case()
        folder = save_adapter(
            tmp_path / "adapter", case.state, ("q_proj", "down_proj"), ranks={first: 7, second: 16},
            rank_pattern={"layers.0.self_attn.q_proj": 7, r"layers\.1\.mlp\.[a-z]+_proj": 16},
            alpha_pattern={"down_proj": 3}, use_rslora=True,
        )  # fmt: skip
        scalings = {
            "model.layers.0.self_attn.q_proj": 8 / math.sqrt(7), "model.layers.1.self_attn.q_proj": 8 / math.sqrt(4),
            "model.layers.0.mlp.down_proj": 3 / math.sqrt(4), "model.layers.1.mlp.down_proj": 3 / math.sqrt(16),
        }  # fmt: skip
        assert case.load(folder).rank == 16
        assert differ(case.logits(case.prepared(folder)), case.merged_logits(folder, scalings)) < 1e-4


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(
    ("family", "rounding"), [("llama", None), ("gemma2", None), ("phi3", None), ("llama", "int8"), ("gemma2", "int4")]
)
def test_mixed_batches_equal_single_ones_bit_for_bit(
    kernels: str, family: str, rounding: Rounding | None, tmp_path: Path
) -> None:
    with cpu_kernels(kernels):
        case = Case(family, rounding=rounding, **PACKED)
        targets = targets_of(family)
        one = case.prepared(save_adapter(tmp_path / "one", case.state, targets, seed=1))
        other = case.prepared(save_adapter(tmp_path / "other", case.state, targets[:2], seed=2, r=11))
        adapters = [one, None, other, one, None]
        tables, texts = [[3 * index, 3 * index + 1, 3 * index + 2] for index in range(5)], [IDS[i:] for i in range(5)]

        def run(chosen: Sequence[int], start: int, end: int) -> list[Tensor]:
            entries = [
                BatchEntry(texts[i][start:end], start, tables[i], end - start, adapter=adapters[i]) for i in chosen
            ]
            return list(case.runner.forward(entries).split(end - start))

        alone = [[run([index], *span)[0].clone() for span in ((0, 20), (20, 21), (21, 26))] for index in range(5)]
        together = [run(range(5), *span) for span in ((0, 20), (20, 21), (21, 26))]
        for step in range(3):
            for index in range(5):
                assert torch.equal(together[step][index], alone[index][step]), (step, index)
        plain = Case(family, rounding=rounding, **PACKED)
        for index in (1, 4):  # a row without an adapter has the bits of a model that knows none
            expected = plain.runner.forward([BatchEntry(texts[index][:20], 0, tables[index], 20)])
            assert torch.equal(alone[index][0], expected)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("rounding", [None, "int8", "int4"])
def test_a_drafted_tree_has_the_bits_of_its_paths(kernels: str, rounding: Rounding | None, tmp_path: Path) -> None:
    with cpu_kernels(kernels):
        case = Case(rounding=rounding, **PACKED)
        adapter = case.prepared(save_adapter(tmp_path / "adapter", case.state))
        case.logits(adapter, IDS[:20])
        drafted, parents = [5, 6, 7], (0, 0, 1)  # the second follows the root, too, the third the first
        tree = case.runner.forward([BatchEntry([9, *drafted], 20, [0, 1, 2], 4, parents, adapter)]).clone()
        for path, nodes in (([5, 7], [0, 1, 3]), ([6], [0, 2])):
            chain = case.runner.forward([BatchEntry([9, *path], 20, [0, 1, 2], 1 + len(path), adapter=adapter)])
            assert torch.equal(chain, tree[nodes])


@pytest.mark.parametrize("kernels", KERNELS)
def test_the_least_wanted_adapter_makes_room(kernels: str, tmp_path: Path) -> None:
    with cpu_kernels(kernels):
        case = Case(slots=2)
        targets = (ATTENTION[:1], ATTENTION[:2], ATTENTION, ATTENTION)  # what one leaves alone others may change
        folders = [
            save_adapter(tmp_path / str(seed), case.state, names, seed=seed) for seed, names in enumerate(targets)
        ]
        adapters = [case.prepared(folder) for folder in folders]
        expected = [case.merged_logits(folder) for folder in folders]
        for turn in (0, 1, 2, 0, 3, 3, 2, 1):  # one that left comes back whole
            assert differ(case.logits(adapters[turn]), expected[turn]) < 1e-4, turn
        assert case.resident.num_swaps == 7 and [one in case.resident for one in adapters] == [False, True, True, False]
        case.logits(adapters[2])  # which came before the first, and is now wanted after it
        case.logits(adapters[3])
        assert [one in case.resident for one in adapters] == [False, False, True, True]
        entries = [BatchEntry(IDS[:3], 0, [at], 1, adapter=adapters[at]) for at in (0, 2, 3)]
        with pytest.raises(ValueError, match="a step of 3 adapters; allowed: at most 2"):
            case.runner.forward(entries)
        case.runner.forward(entries[:2])  # 2 was wanted longer ago than 3, but this step wants it
        assert [one in case.resident for one in adapters] == [True, False, True, False]
        case.resident.forget(adapters[2])
        assert adapters[2] not in case.resident
        swaps = case.resident.num_swaps
        assert differ(case.logits(adapters[1]), expected[1]) < 1e-4 and adapters[0] in case.resident
        assert case.resident.num_swaps == swaps + 1


REGISTRY: dict[str, tuple[str, ...]] = {
    "qwen3": ALL,
    "gpt_neox": ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
    "opt": ("q_proj", "out_proj", "fc1", "fc2"),
    "mixtral": ("q_proj", "v_proj"),
}


@pytest.mark.parametrize("kind", REGISTRY)
def test_models_of_transformers_have_adapters_by_hooks(kind: str, tmp_path: Path) -> None:
    config = AutoConfig.for_model(kind, **{name: value for name, value in TINY.items() if name != "pad_token_id"})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        hf = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
        for parameter in hf.parameters():
            torch.nn.init.normal_(parameter, std=0.12)
    state = {name: tensor.clone() for name, tensor in hf.state_dict().items()}
    one, two = (save_adapter(tmp_path / str(seed), state, REGISTRY[kind], seed=seed) for seed in (1, 2))
    hf.load_state_dict(merged(state, one))
    expected = hf_logits(hf, IDS)
    hf.load_state_dict(state)
    plain = hf_logits(hf, IDS)
    model = RegistryModel(hf, 256)
    resident = ResidentAdapters(model, AdapterRoom(2, 16))
    runner = ModelRunner(model, 8, adapters=resident)
    first, second = (resident.prepare(load_adapter(folder, model, "")) for folder in (one, two))
    entries = [
        BatchEntry(IDS[:9], 0, [3], 1, adapter=second), BatchEntry(IDS, 0, [0, 1, 2], len(IDS), adapter=first),
        BatchEntry(IDS, 0, [4, 5, 6], len(IDS)),
    ]  # fmt: skip
    _, logits, without = runner.forward(entries).split([1, len(IDS), len(IDS)])
    assert differ(logits, expected) < 1e-4 and torch.equal(logits.argmax(1), expected.argmax(1))
    assert differ(without, plain) < 1e-4 and differ(plain, expected) > 0.1
    assert not any(module._forward_hooks for module in hf.modules()), "the next pass has none"


def test_experts_take_no_adapter(tmp_path: Path) -> None:
    """Their rows are some of a step's, in an order of their own."""

    class Expert(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList([nn.Linear(4, 4)])
            self.gate, self.head = nn.Linear(4, 4), nn.Linear(4, 4)

    model = nn.ModuleDict({"mlp": Expert()})
    head = model["mlp"].head
    assert isinstance(head, nn.Module) and list(hooked_linears(model, head)) == ["mlp.gate"]
    adapters = HookedAdapters(hooked_linears(model, head))
    adapters.make_room(1, 4)
    adapters.put(0, adapters.prepare({"mlp.gate": LowRank(torch.ones(1, 4), torch.ones(4, 1), 1.0)}))
    gate = model["mlp"].gate
    assert isinstance(gate, nn.Linear)
    with adapters.hooked(torch.zeros(3, dtype=torch.int32)), pytest.raises(ValueError, match="computes 2 rows of 3"):
        gate(torch.ones(2, 4))


def test_an_adapters_identity_is_its_content_and_its_base(tmp_path: Path) -> None:
    case = Case()
    folder = save_adapter(tmp_path / "one", case.state)
    same = save_adapter(tmp_path / "same", case.state, base_model_name_or_path="elsewhere")
    digest = case.load(folder).digest
    assert case.load(same).digest == digest, "where it came from is no part of it"
    assert load_adapter(folder, case.loaded.model, "another base").digest != digest
    changes: Any = ({"seed": 2}, {"lora_alpha": 9}, {"use_rslora": True}, {"targets": ATTENTION})
    for number, options in enumerate(changes):
        assert case.load(save_adapter(tmp_path / f"{number}", case.state, **options)).digest != digest, options


def test_a_rank_without_room_is_refused(tmp_path: Path) -> None:
    case = Case()
    adapter = case.load(save_adapter(tmp_path / "adapter", case.state, r=17))
    with pytest.raises(ValueError, match="rank: is 17; allowed here: at most 16"):
        case.resident.prepare(adapter)
