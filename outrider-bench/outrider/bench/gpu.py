"""Everything that waits for a GPU and needs nobody to look on, on a machine that has one:

    python outrider-bench/outrider/bench/gpu.py [--only tests|kernels|llm|batches|quantized|steps] [--repeats N]

The tests marked `gpu`, the kernel bench, an `LLM` from end to end, batches of many streams (gpu_batches), quantised
weights (gpu_quantized), and a whole step replayed against the same step launched kernel by kernel, with the judging and
the drafting behind it, stored in outrider-bench/results. Exits with 2 where there is no GPU. A step is measured against
the bytes that it must read; drafting with one wait against a wait for each token."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from outrider.bench.harness import RESULTS
from outrider.bench.kernels import Probe, timed
from outrider.bench.kernels_cases import BLOCK_SIZE, CUDA, ROWS, SMALL, TINY, K, Model, Place
from outrider.bench.prompts import PROMPTS
from outrider.bench.results import Json, bracketed, markdown, median_of, new_result, spread, store
from outrider.engine.batch import BatchEntry, StepLimits, build_batch
from outrider.engine.cuda_graphs import CudaGraphs, GraphDevice
from outrider.engine.kv_cache import bytes_per_block
from outrider.engine.kv_cache_manager import CachedSequence
from outrider.engine.model_runner import ModelRunner
from outrider.engine.models.decoder import Decoder
from outrider.engine.models.decoder_config import parse_config
from outrider.engine.models.weights import expected_shapes
from outrider.engine.random import RandomKey
from outrider.engine.sampler import SequenceSampler
from outrider.llm import LLM
from outrider.llm import SamplingParams as LLMSamplingParams
from outrider.pairs import pair_path
from outrider.pairs.expansion import write_expanded
from outrider.proposers.draft_model import DraftModelProposer
from outrider.proposers.draft_rows import DraftRows, DraftRule, DraftSampling
from outrider.proposers.draft_text import DraftText
from outrider.rpc.messages import Open, TokenWeights
from outrider.rpc.words.sampling_params import AcceptanceRule, SamplingParams
from outrider.target_service.device_verifier import verifier_of
from outrider.target_service.draft_buffer import Window
from outrider.target_service.scheduler import ScheduledSequence
from outrider.target_service.sequence import TargetLimits, admit
from outrider.target_service.verifier import VerifyRule

PARTS = {  # modules with their arguments, each a process of its own
    "tests": ("pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "tests"),
    "kernels": ("outrider.bench.kernels", "--device", "cuda"),
    "llm": ("outrider.bench.gpu", "--only", "llm"),
    "batches": ("outrider.bench.gpu_batches",),
    "quantized": ("outrider.bench.gpu_quantized",),
}
WARM_UP = 3
ENTRIES = 64  # of a drafted token's weights
LARGE = {  # as an 8B model's; heads stay as wide as they are, so that it has 6.3 billion parameters
    "hidden_size": 4096, "intermediate_size": 14336, "num_layers": 32, "num_heads": 32, "num_kv_heads": 8,
}  # fmt: skip
BATCHES, TEMPERATURES = (1, 8, 32), (0.0, 1.0)
NUM_TOKENS = 128  # of each completion
SHARE = 0.9  # of the device's memory, for all ways together
TIMES = ("replayed_us", "launched_us", "device_us", "floor_us")


Timed = dict[str, Callable[[], object]]


@dataclass(frozen=True, slots=True)
class Shape:
    """A model of random weights, with one matrix for embedding and head."""

    model: Model
    num_layers: int
    vocab_size: int
    context: int
    batches: tuple[int, ...]
    max_rows: int  # of a captured step
    weight_bits: float | None = None  # that a step reads of a weight; None: those of the type that it computes in


REAL = Shape(SMALL, 16, 128256, 1024, (1, 8, 32), 256)
QUICK = Shape(TINY, 1, 211, 40, (1, 2), 16)


State = Mapping[str, torch.Tensor]


def build(shape: Shape, place: Place, kept: Callable[[State], State] = dict) -> Decoder:
    """The decoder, of weights that are kept so."""
    model = shape.model
    config = parse_config({
        "model_type": "llama", "vocab_size": shape.vocab_size, "hidden_size": model.hidden,
        "intermediate_size": model.intermediate, "num_hidden_layers": shape.num_layers,
        "num_attention_heads": model.heads, "num_key_value_heads": model.kv_heads, "head_dim": model.head_dim,
        "max_position_embeddings": 8192, "tie_word_embeddings": True,
    })  # fmt: skip
    state = {  # norms are about 1, so that logits differ as a model's do
        name: torch.empty(size, dtype=place.dtype, device=place.device).normal_(float(len(size) == 1), 0.02)
        for name, size in expected_shapes(config).items()
    }
    return Decoder(config, kept(state), dtype=place.dtype, device=torch.device(place.device))


def captured_runner(
    shape: Shape, place: Place, capture: GraphDevice, kept: Callable[[State], State] = dict
) -> tuple[ModelRunner, Json]:
    """A runner whose steps are captured, and what that took."""
    model = build(shape, place, kept)
    blocks = -(-(shape.context + ROWS) // BLOCK_SIZE)
    runner = ModelRunner(model, blocks * max(shape.batches), BLOCK_SIZE)
    before, started = capture.reserved_bytes(), time.perf_counter()
    runner.capture(StepLimits(shape.max_rows, max(shape.batches), ROWS), capture)
    seconds = round(time.perf_counter() - started, 2)
    return runner, {"seconds": seconds, "bytes": capture.reserved_bytes() - before}


def measure_steps(shape: Shape, place: Place, runner: ModelRunner, repeats: int) -> Json:
    """A row for every batch."""
    probe = Probe(place, quick=shape is QUICK)
    return {"rows": [_row(shape, place, runner, probe, batch, repeats) for batch in shape.batches]}


def render(result: Json) -> Iterator[str]:
    """The table."""
    yield f"Steps of {ROWS} rows a sequence (k = {K}) on {result['device']['name']}; medians, milliseconds."
    yield ""
    rows = [(str(row["batch"]), *_times_ms(row, TIMES), median_of(row["share_of_floor"], 2)) for row in result["rows"]]
    yield from markdown(("batch", "replayed", "launched", "on the device", "floor", "share of floor"), rows, words=())


@torch.inference_mode()
def _row(shape: Shape, place: Place, runner: ModelRunner, probe: Probe, batch: int, repeats: int) -> Json:
    entries = _entries(shape, batch)
    ways: dict[str, Callable[[], object]] = {
        "replayed_us": lambda: runner.forward(entries),
        "launched_us": lambda: runner.model.forward(build_batch(entries, BLOCK_SIZE, place.device), runner.cache),
    }
    num_bytes = _bytes(runner, shape, batch)
    found: dict[str, list[float]] = defaultdict(list)
    for repeat in range(WARM_UP + repeats):
        times = {name: _wall_us(place.device, way) for name, way in ways.items()}
        _wall_us(place.device, ways["replayed_us"])
        times["device_us"] = runner.last_pass()
        fastest = min(timed(place, probe.copy)() / 2, timed(place, probe.read)())  # the copy reads and writes
        times["floor_us"] = num_bytes / (probe.num_bytes / fastest)
        times["share_of_floor"] = times["floor_us"] / times["replayed_us"]
        if repeat >= WARM_UP:
            for name, value in times.items():
                found[name].append(value)
    return {"batch": batch, "bytes": num_bytes} | {name: spread(values) for name, values in found.items()}


def _entries(shape: Shape, batch: int) -> Sequence[BatchEntry]:
    ids = [7919 * index % shape.vocab_size for index in range(ROWS)]
    return [BatchEntry(ids, shape.context, _table(shape, index), ROWS) for index in range(batch)]


def _bytes(runner: ModelRunner, shape: Shape, batch: int) -> int:
    """Every weight once, the keys and values of the contexts, and the logits that are written."""
    model, size = shape.model, runner.model.dtype.itemsize
    attention = model.hidden * model.head_dim * 2 * (model.heads + model.kv_heads)
    layer = attention + 3 * model.hidden * model.intermediate
    bits = shape.weight_bits or 8 * size
    weights = int((shape.num_layers * layer + shape.vocab_size * model.hidden) * bits / 8)
    cached = shape.context * bytes_per_block(runner.model.layers, runner.model.dtype, 1)
    return weights + batch * (cached + ROWS * shape.vocab_size * torch.float32.itemsize)


def _wall_us(device: str, call: Callable[[], object]) -> float:
    """Until the device is done, as a service waits for the logits."""
    started = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - started) * 1e6


def measure_rounds(shape: Shape, runner: ModelRunner, repeats: int) -> Json:
    """Rows for every batch: of judging by rule, and of drafting by rule."""
    verifier, proposer = verifier_of(runner, shape.vocab_size), DraftModelProposer(runner)
    judging, drafting = [], []
    for batch in shape.batches:
        for rule in VerifyRule:
            windows = [_scheduled(shape, index, rule) for index in range(batch)]
            entries = [window.batch_entry() for window in windows]
            ways: Timed = {
                "pass_us": lambda entries=entries: runner.forward(entries)[-1, 0].item(),  # type: ignore[misc]
                "round_us": lambda entries=entries, windows=windows: verifier.launch(  # type: ignore[misc]
                    runner.forward(entries), windows
                ).read(),
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
        head = ("batch", name, *(column.removesuffix("_us").replace("_", " ") for column in columns))
        rows = [(str(row["batch"]), row["rule"], *_times_ms(row, columns)) for row in result[name]]
        yield from markdown(head, rows, words=(1,))


def _times_ms(row: Json, names: Sequence[str]) -> list[str]:
    return [f"{row[name]['median'] / 1e3:.3f}" for name in names]


def _medians(ways: Timed, repeats: int) -> Json:
    found: dict[str, list[float]] = defaultdict(list)
    for repeat in range(WARM_UP + repeats):
        for name, way in ways.items():
            elapsed = _wall_us("cpu", way)  # each way ends by waiting for its tokens
            if repeat >= WARM_UP:
                found[name].append(elapsed)
    return {name: spread(values) for name, values in found.items()}


def _scheduled(shape: Shape, index: int, rule: VerifyRule) -> ScheduledSequence:
    """A window of K tokens after a long context."""
    prompt = tuple(7919 * place % shape.vocab_size for place in range(shape.context + 1))
    rules = {VerifyRule.COUPLED: AcceptanceRule.COUPLED, VerifyRule.BLOCK: AcceptanceRule.BLOCK}
    acceptance = rules.get(rule, AcceptanceRule.REJECTION)
    sampling = SamplingParams(temperature=0.0 if rule == VerifyRule.GREEDY else 1.0, max_tokens=2 * K)
    limits = TargetLimits(shape.vocab_size, 8192, (), 1 << 20)
    request = Open(index, prompt, sampling, acceptance=acceptance, seed=index)
    target = admit(request, None, (1, index), print, limits, index, 0.0)
    ids = tuple(range(K))
    vector = TokenWeights.of(range(ENTRIES), [32767] * ENTRIES)
    target.sequence.tokens += ids
    target.sequence.block_table = _table(shape, index)
    window = Window(0, ids, (vector,) * K, False)
    return ScheduledSequence(target, shape.context + 1, shape.context, ROWS, window, True, ROWS, index * ROWS)


def _draft(shape: Shape, proposer: DraftModelProposer, batch: int, rule: DraftRule, at_once: int) -> None:
    """K tokens of every sequence."""
    sampling: Any = SamplingParams(temperature=0.0 if rule == DraftRule.ARGMAX else 1.0)
    rows = []
    for index in range(batch):
        prompt = [7919 * place % shape.vocab_size for place in range(shape.context)]
        sequence = CachedSequence(prompt, "", shape.context - 1, _table(shape, index))
        sampler = SequenceSampler(sampling, prompt, (), (), shape.vocab_size)
        draft_sampling = DraftSampling(rule, RandomKey(index, 0))
        rows.append(DraftRows(DraftText(sequence), 1, shape.context, sampler, draft_sampling, shape.context + K))
    for _ in range(K // at_once):
        proposer.run(rows, proposer.tokens_at_once(rows, [at_once] * batch))


def _table(shape: Shape, index: int) -> list[int]:
    blocks = -(-(shape.context + ROWS) // BLOCK_SIZE)
    return list(range(blocks * index, blocks * (index + 1)))


def ways() -> dict[str, dict[str, Any]]:
    """How an LLM decodes, by name: plainly, with k drafted tokens a round, and with as many as the controller takes."""
    speculation = {"model": str(pair_path().draft), "num_speculative_tokens": K}
    return {
        "plain": {},
        "in turn": {"speculative_config": speculation},
        "auto": {"speculative_config": speculation, "mode": "auto"},
    }


def measure_llms(llms: Mapping[str, LLM], batch: int, temperature: float, repeats: int, num_tokens: int) -> Json:
    """A row: tokens a second by way, and times the first one's in the same repeat."""
    prompts = [PROMPTS[index % len(PROMPTS)] for index in range(batch)]
    params = LLMSamplingParams(temperature=temperature, max_tokens=num_tokens, ignore_eos=True)
    rates: dict[str, list[float]] = defaultdict(list)
    for repeat in range(repeats + 1):
        for name, llm in llms.items():
            started = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            rate = batch * num_tokens / (time.perf_counter() - started)
            if repeat:  # the first one compiles
                rates[name].append(rate)
    plain = next(iter(rates.values()))
    by_way = {
        name: {"tokens_s": spread(found), "times": spread([o / p for o, p in zip(found, plain, strict=True)])}
        for name, found in rates.items()
    }
    return {"batch": batch, "temperature": temperature, "ways": by_way}


def render_llms(result: Json) -> Iterator[str]:
    """The table."""
    setup = result["setup"]
    yield f"Tokens a second on {result['device']['name']}, {setup['tokens']} a completion, k = {setup['k']}; medians."
    yield ""
    names = list(result["rows"][0]["ways"])
    rows = [
        (
            str(row["batch"]), f"{row['temperature']:g}",
            *(median_of(row["ways"][name]["tokens_s"], 0) for name in names),
            *(bracketed(row["ways"][name]["times"]) for name in names[1:]),
        )
        for row in result["rows"]
    ]  # fmt: skip
    yield from markdown(("streams", "temperature", *names, *(f"{n}, times plain" for n in names[1:])), rows, words=())


def main() -> int:
    """0 if all went well, 1 if a part failed, 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, help="timed steps of each kind and batch (30), or runs of an LLM (5)")
    parser.add_argument("--only", choices=(*PARTS, "steps"), help="one part of it")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("there is no GPU here, and nothing was checked", file=sys.stderr)
        return 2
    if options.only == "llm":
        _llms(options.repeats or 5)
        return 0
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    codes = [
        subprocess.run([sys.executable, "-m", *part], env=environment, check=False).returncode
        for name, part in PARTS.items()
        if options.only in (None, name)
    ]
    if options.only in (None, "steps"):
        _steps(options.repeats or 30)
    return int(any(codes))


def _llms(repeats: int) -> None:
    """Each way is an LLM of its own, all in this process at once; what a caller waits for, the host's part in it."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "target"
        write_expanded(Path(pair_path().target), folder, noise_device="cuda", **LARGE)
        common: Json = {"model": str(folder), "dtype": "bfloat16", "max_model_len": 1024, "max_num_seqs": max(BATCHES)}
        llms = dict[str, LLM]()
        for number, (name, options) in enumerate(ways().items(), start=1):
            share = SHARE * number / len(ways())
            llms[name] = stack.enter_context(LLM(**common, gpu_memory_utilization=share, **options))
        rows = [measure_llms(llms, b, t, repeats, NUM_TOKENS) for b in BATCHES for t in TEMPERATURES]
    setup = {"repeats": repeats, "k": K, "tokens": NUM_TOKENS, "target": LARGE}
    result = new_result(setup) | {"device": {"name": torch.cuda.get_device_name()}, "rows": rows}
    finish(result, "llm", render_llms(result))


def _steps(repeats: int) -> None:
    """A model of random weights, whose steps are captured."""
    runner, capture = captured_runner(REAL, CUDA, CudaGraphs(torch.device("cuda")))
    setup = {"repeats": repeats, "k": K, "model": REAL.model.name, "context": REAL.context}
    device = {"name": torch.cuda.get_device_name(), "cuda": torch.version.cuda, "dtype": "bfloat16"}
    result = new_result(setup) | {"device": device, "capture": capture}
    result |= measure_steps(REAL, CUDA, runner, repeats) | measure_rounds(REAL, runner, repeats)
    finish(result, "steps", [*render(result), "", *render_rounds(result)])


def finish(result: Json, name: str, page: Iterable[str]) -> None:
    """Prints a part's page, and stores its result by the device's name."""
    print("\n".join(page))
    path = store(RESULTS / name, result, result["device"]["name"])
    print(f"\nstored in {path}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
