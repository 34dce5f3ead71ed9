"""Quantised weights on a GPU: products of every form, of few and of many rows, against the numbers that they stand for
and against the time that the reading of their bytes takes; and steps of a model whose weights have 4 bits beside those
of the same shape in bfloat16. `make gpu ARGS="--only quantized"` runs it."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from outrider.bench.gpu import Shape, State, captured_runner, finish, measure_steps
from outrider.bench.kernels import Probe, measure
from outrider.bench.kernels_cases import CUDA, FOUR_BITS, SMALL_FLOATS, Model, Place, packed_product, random_codes
from outrider.bench.results import Json, markdown, median_of, new_result
from outrider.engine.cuda_graphs import CudaGraphs, GraphDevice
from outrider.kernels.quantized.form import Form, QuantizedMatrix
from outrider.kernels.quantized.packed import pack

FORMS = {
    "4 bits by 32": FOUR_BITS,
    "4 bits by 128": Form(4, 128, torch.bfloat16, zero=8),
    "as Q4_K": Form(4, 256, part=32, has_minima=True),
    "as Q5_K": Form(5, 256, part=32, has_minima=True),
    "as Q6_K": Form(6, 256, part=16, zero=32),
    "8 bits by 32": Form(8, 32, zero=128),
    "floats of 8 bits by 128": SMALL_FLOATS,
}
MATRICES = (
    (28672, 4096),
    (4096, 14336),
    (6144, 4096),
)  # outputs and inputs: gate and up, down, query with key and value
ROWS = (1, 5, 40, 160)
# Of 6.3 billion parameters.
LARGE = Shape(Model("8B-like, heads of 64", 4096, 32, 8, 64, 14336), 32, 32000, 1024, (1, 8, 32), 256)
BITS = FOUR_BITS.bits + 8 * FOUR_BITS.dtype.itemsize / FOUR_BITS.span  # of a weight, with its scale
TIMES = ("device_us", "replayed_us", "floor_us")


class FewBits(Mapping[str, Tensor]):
    """Tensors of a checkpoint whose matrices are random codes of 4 bits."""

    def __init__(self, state: State) -> None:
        self.meta = {name: tensor.to("meta") for name, tensor in state.items()}
        self._norms = {name: tensor for name, tensor in state.items() if tensor.dim() == 1}

    def __getitem__(self, name: str) -> Tensor:
        return self._norms[name] if name in self._norms else self.packed(name).decode()

    def __iter__(self) -> Iterator[str]:
        return iter(self.meta)

    def __len__(self) -> int:
        return len(self.meta)

    def packed(self, name: str) -> QuantizedMatrix:
        """A matrix as its codes."""
        outputs, inputs = self.meta[name].shape
        return random_codes(FOUR_BITS, outputs, inputs)


def measure_products(place: Place, probe: Probe, matrices: Sequence[tuple[int, int]], repeats: int) -> Iterator[Json]:
    """A row for every form, matrix and number of rows. Raises Differs where a product is not that of the numbers."""
    for name, form in FORMS.items():
        for outputs, inputs in matrices:
            weight = pack(random_codes(form, outputs, inputs), torch.device(place.device))
            for rows in ROWS:
                found = measure(place, probe, partial(packed_product, place, weight, rows), repeats, rows)
                yield {"form": name, "matrix": [outputs, inputs], "rows": rows} | found


def measure_both(shape: Shape, place: Place, graphs: GraphDevice, repeats: int) -> Json:
    """Steps of one shape in the place's type, and in 4 bits."""
    found: Json = {}
    for name, kept, bits in (("plain", dict, None), ("4 bits", FewBits, BITS)):
        one = dataclasses.replace(shape, weight_bits=bits)
        runner, capture = captured_runner(one, place, graphs, kept)
        found[name] = measure_steps(one, place, runner, repeats) | {"capture": capture}
    return found


def render(result: Json) -> Iterator[str]:
    """The tables."""
    yield f"Products with packed weights on {result['device']['name']}; medians, microseconds."
    yield ""
    rows = [
        (
            row["form"], "x".join(map(str, row["matrix"])), str(row["rows"]),
            *(median_of(row[name], 1) for name in ("us", "floor_us")),
            *(median_of(row[name], 2) for name in ("share_of_floor", "times_as_fast")),
        )
        for row in result["products"]
    ]  # fmt: skip
    head = ("form", "matrix", "rows", "us", "floor us", "share of floor", "times bfloat16")
    yield from markdown(head, rows, words=(0, 1))
    yield ""
    yield f"Steps of {result['setup']['model']}; medians, milliseconds."
    yield ""
    steps = [
        (str(row["batch"]), name, *(f"{row[column]['median'] / 1e3:.3f}" for column in TIMES))
        for name, found in result["steps"].items()
        for row in found["rows"]
    ]
    yield from markdown(("batch", "weights", "on the device", "replayed", "floor"), steps, words=(1,))


def main() -> int:
    """2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=20)
    repeats = parser.parse_args().repeats
    if not torch.cuda.is_available():
        print("there is no GPU here, and nothing was measured", file=sys.stderr)
        return 2
    products = list(measure_products(CUDA, Probe(CUDA), MATRICES, repeats))
    steps = measure_both(LARGE, CUDA, CudaGraphs(torch.device("cuda")), repeats)
    setup = {"repeats": repeats, "model": LARGE.model.name, "context": LARGE.context}
    device = {"name": torch.cuda.get_device_name()}
    result = new_result(setup) | {"device": device, "products": products, "steps": steps}
    finish(result, "quantized", render(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
