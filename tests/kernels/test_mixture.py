"""Mixtures of experts: which rows go to which, and what they give together, by the reference and by the C pass."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from support.quantized import matrix_of, random_blocks
from torch import Tensor
from torch.nn import functional as F

from outrider.kernels.cpu.decoder import (
    CpuDecoder,
    FeedWeights,
    Kind,
    LayerWeights,
    MixtureWeights,
    RaggedRows,
    Weight,
    kind_for,
)
from outrider.kernels.cpu.library import cpu_library
from outrider.kernels.layers.reference import gated_clamped, gated_silu, rotary_table
from outrider.kernels.mixture.reference import mix, mix_stacked, route

HIDDEN, WIDTH, SHARED, DIM, EXPERTS, VOCAB, BLOCK = 64, 96, 160, 16, 9, 80, 4
NAN = float("nan")


def test_the_highest_scores_choose_and_of_equal_ones_the_lowest_expert() -> None:
    scores = torch.tensor([[1.0, 3.0, 3.0, 0.0, 3.0], [0.0, 0.0, 0.0, 0.0, 0.0], [-5.0, 2.0, -9.0, 2.5, 2.0]])
    chosen, weights = route(scores, 2, normalised=False)
    assert chosen.tolist() == [[1, 2], [0, 1], [1, 3]]
    torch.testing.assert_close(weights, scores.softmax(-1).gather(1, chosen))
    normalised = route(scores, 2, normalised=True)[1]
    torch.testing.assert_close(normalised, weights / weights.sum(1, keepdim=True))


def test_the_shared_expert_is_last_with_a_gate_of_its_own() -> None:
    scores = torch.tensor([[0.5, 2.0, 1.0, -0.7], [3.0, 0.0, 1.0, 90.0]])
    chosen, weights = route(scores, 1, normalised=True, has_shared=True)
    assert chosen.tolist() == [[1, 3], [0, 3]]
    torch.testing.assert_close(weights, torch.tensor([[1.0, torch.sigmoid(torch.tensor(-0.7)).item()], [1.0, 1.0]]))


def test_experts_see_their_own_rows_alone() -> None:
    seen: dict[int, Tensor] = {}

    def expert(number: int) -> Any:
        def compute(rows: Tensor) -> Tensor:
            seen[number] = rows
            return rows * (number + 1)

        return compute

    x = torch.arange(12.0).view(4, 3)
    chosen = torch.tensor([[0, 2], [2, 3], [0, 2], [1, 2]])
    weights = torch.tensor([[0.5, 0.25], [1.0, 0.0], [0.1, 0.9], [0.3, 0.7]])
    found = mix(x, chosen, weights, [expert(number) for number in range(5)])
    torch.testing.assert_close(found, x * (weights * (chosen + 1)).sum(1, keepdim=True))
    assert {number: len(rows) for number, rows in seen.items()} == {0: 2, 1: 1, 2: 4, 3: 1}


class Model:
    """A layer of experts by the C pass, and its weights; what attention gives is nothing."""

    def __init__(
        self, kind: str, has_shared: bool, normalised: bool, num_chosen: int = 3, rounds: bool = False
    ) -> None:
        if cpu_library() is None:
            pytest.skip("no C compiler")
        self.generator = torch.Generator().manual_seed(5)
        self.kind, self.has_shared, self.normalised, self.num_chosen = kind, has_shared, normalised, num_chosen
        widths = [WIDTH] * EXPERTS + [SHARED] * has_shared
        self.router = (self.numbers(len(widths), HIDDEN) * 3).bfloat16().float()
        self.router[3] = self.router[5] = self.router[1]  # they are always told apart by their numbers alone
        self.experts = [
            FeedWeights(self.matrix(width, HIDDEN), self.matrix(width, HIDDEN), self.matrix(HIDDEN, width))
            for width in widths
        ]
        self.embeddings, self.norm = self.numbers(VOCAB, HIDDEN) * 5, torch.linspace(0.5, 1.5, HIDDEN)
        nothing = torch.zeros(4 * DIM, HIDDEN), torch.zeros(HIDDEN, 2 * DIM)
        rotary = rotary_table(1e4 ** -(torch.arange(0, DIM, 2) / DIM), 1.0, 64, torch.float32)
        mixture = MixtureWeights(self.router, self.experts, num_chosen, normalised, has_shared)
        layer = LayerWeights(*nothing, mixture, torch.ones(HIDDEN), self.norm, rotary)
        kinds = {"halves": kind_for(True), "floats": Kind.FLOATS, "packed": None}
        self.kernel = CpuDecoder(
            self.embeddings, [layer], torch.ones(HIDDEN), self.numbers(VOCAB, HIDDEN), kind=kinds[kind], rounds=rounds,
            heads=2, kv_heads=1, eps=1e-5, scale=DIM**-0.5,
        )  # fmt: skip

    def numbers(self, *shape: int) -> Tensor:
        return (torch.randn(*shape, generator=self.generator) * 0.2).bfloat16().float()

    def matrix(self, outputs: int, inputs: int) -> Weight:
        if self.kind != "packed":
            return self.numbers(outputs, inputs) + (1e-5 if self.kind == "floats" else 0.0)
        seed = int(torch.randint(1000, (), generator=self.generator))
        return matrix_of("Q8_0", random_blocks("Q8_0", outputs, inputs, seed))

    def states(self, ids: Sequence[int]) -> Tensor:  # [rows, hidden]: behind the layer
        count = len(ids)
        table = torch.arange(-(-count // BLOCK))[None]
        places = torch.arange(count)
        rows = RaggedRows(places, places, table, [0, count], [count])
        caches = [torch.zeros(table.shape[1], BLOCK, 1, DIM) for _ in range(2)]
        states = torch.empty(count, 1, HIDDEN)
        # Zero attention of any rows is zero: a row's state is of its own id alone.
        self.kernel.forward(torch.tensor(ids), rows, caches[:1], caches[1:], places, ([1], states))
        return states[:, 0]

    def expected(self, ids: Sequence[int]) -> Tensor:  # [rows, hidden]
        hidden = self.embeddings[torch.tensor(ids)]
        normed = F.rms_norm(hidden, (HIDDEN,), self.norm, 1e-5)
        shapes = {"normalised": self.normalised, "has_shared": self.has_shared}
        chosen, weights = route(normed @ self.router.t(), self.num_chosen, **shapes)
        hidden = hidden + mix(normed, chosen, weights, [feed_of(expert) for expert in self.experts])
        return F.rms_norm(hidden, (HIDDEN,), None, 1e-5)


def feed_of(expert: FeedWeights) -> Any:
    gate, up, down = (
        weight if isinstance(weight, Tensor) else weight.decode()  # type: ignore[union-attr]
        for weight in (expert.gate, expert.up, expert.down)
    )
    return lambda rows: (F.silu(rows @ gate.t()) * (rows @ up.t())) @ down.t()


KINDS = ("halves", "floats", "packed")
IDS = torch.randint(0, VOCAB, (60,), generator=torch.Generator().manual_seed(2)).tolist()


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("has_shared", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_chosen", [1, 3, EXPERTS])
def test_the_pass_gives_what_the_reference_gives(
    kind: str, has_shared: bool, normalised: bool, num_chosen: int
) -> None:
    model = Model(kind, has_shared, normalised, num_chosen)
    for count in (1, 2, 13, 60):
        torch.testing.assert_close(model.states(IDS[:count]), model.expected(IDS[:count]), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_neighbours_and_threads_change_no_bit(kind: str, rounds: bool) -> None:
    """However rows are grouped: each is the sum that it is alone."""
    model, threads = Model(kind, True, True, rounds=rounds), torch.get_num_threads()
    alone = torch.cat([model.states([token]) for token in IDS])
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            assert torch.equal(model.states(IDS), alone)
            for start, end in ((0, 5), (5, 31), (17, 60)):
                assert torch.equal(model.states(IDS[start:end]), alone[start:end])
    finally:
        torch.set_num_threads(threads)


def test_nan_harms_nobody_else() -> None:
    model = Model("halves", False, True)
    alone = model.states([3])
    model.embeddings[4] = NAN
    found = model.states([3, 4])
    assert found[1].isnan().all() and torch.equal(found[:1], alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "experts", "ways"), [(1, 5, 2), (7, 9, 3), (40, 6, 6), (33, 16, 1)])
def test_the_accelerators_kernels_give_the_references(
    interpreter: None, triton_device: torch.device, dtype: torch.dtype, rows: int, experts: int, ways: int
) -> None:
    from outrider.kernels.mixture import triton as launched

    generator = torch.Generator().manual_seed(rows)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(triton_device)

    scores = drawn(rows, experts)
    scores[0, :2] = scores[0].max() + 1  # a tie
    for has_shared in (False, True):
        for normalised in (False, True):
            count = min(ways, experts - has_shared)
            options: dict[str, Any] = {"normalised": normalised, "has_shared": has_shared}
            found, expected = launched.route(scores, count, **options), route(scores, count, **options)
            assert torch.equal(found[0], expected[0])
            torch.testing.assert_close(found[1], expected[1])
    x, gate_up, down = (drawn(rows, 96), drawn(experts, 160, 96) * 0.1, drawn(experts, 96, 80) * 0.1)
    x, gate_up, down = x.to(dtype), gate_up.to(dtype), down.to(dtype)
    chosen, weights = route(scores, ways, normalised=True)
    each = [lambda part, one=one: gated_silu(part @ gate_up[one].t()) @ down[one].t() for one in range(experts)]
    close = 1e-5 if dtype == torch.float32 else 2e-2
    mixed = launched.mix(x, chosen, weights, gate_up, down, gated_silu)
    torch.testing.assert_close(mixed, mix(x, chosen, weights, each), atol=close, rtol=close)
    biases = drawn(experts, 160).to(dtype), drawn(experts, 96).to(dtype)
    gate = partial(gated_clamped, slope=1.702, limit=1.0)
    mixed = launched.mix(x, chosen, weights, gate_up, down, gate, biases)
    if triton_device.type == "cpu":  # else the same
        reference = mix_stacked(x, chosen, weights, gate_up, down, gate, biases)
        torch.testing.assert_close(mixed, reference, atol=close, rtol=close)
