"""The bench runs, prints its tables and writes JSON that says the same; nothing here judges a speed."""

from __future__ import annotations

import copy
import sys
import time
from pathlib import Path

import pytest
from support.bench import Measured, run_bench, texts_of
from support.environment import START_S

from outrider.bench import peers
from outrider.bench.figures import draw_pair, write_figure
from outrider.bench.harness import BenchWorker, BenchWorkerFailed
from outrider.bench.pair import Run, last_result, moved, rows_of_step, steady
from outrider.bench.results import store
from outrider.client import SpeculationStats
from outrider.pairs import pair_path
from outrider.rpc.words.sampling_params import AcceptanceRule

WAYS = {"outrider plain", "outrider rejection"}


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """What --quick prints, and its result."""
    smaller = ("--modes", "plain,rejection,coupled", "--floor-passes", "1", "--no-transformers")
    return run_bench(tmp_path_factory.mktemp("bench"), "--quick", *smaller)


def test_quick_measures_every_way(quick: Measured) -> None:
    text, result = quick
    greedy, sampled = result["blocks"]
    assert greedy["ways"].keys() >= WAYS and sampled["ways"].keys() >= WAYS | {"outrider coupled"}
    assert "outrider coupled" not in greedy["ways"]  # the same as rejection there
    drafted = greedy["ways"]["outrider rejection"]
    assert len(drafted["tested"]) == 4 and drafted["share_of_floor"]["median"] > 0
    assert drafted["rows"]["median"] in (4, 5)  # the last windows are short
    assert greedy["ways"]["outrider plain"]["rows"]["median"] == 1
    assert greedy["ratios"]["outrider rejection / outrider plain"]["median"] > 0
    assert "1 stream, greedy" in text and "share of floor" in text and "accepted/tested" in text


def test_stored_plotted_compared(quick: Measured, tmp_path: Path) -> None:
    result = quick[1]
    path = store(tmp_path, result)
    write_figure(path.with_suffix(".svg"), lambda: draw_pair(result))
    assert {"1 stream, greedy", "outrider rejection", "outrider coupled"} <= texts_of(path.with_suffix(".svg"))
    found = last_result(tmp_path, result["machine"], result["setup"])
    assert found == result
    assert last_result(tmp_path, result["machine"] | {"cores": 999}, result["setup"]) is None
    assert moved(result, result) == []


def test_what_moved_beyond_the_spread_is_named(quick: Measured) -> None:
    old, new = copy.deepcopy(quick[1]), copy.deepcopy(quick[1])
    name = "outrider rejection / outrider plain"
    old["blocks"][0]["ratios"][name] = {"median": 1.5, "min": 1.4, "max": 1.6, "values": [1.4, 1.5, 1.6]}
    new["blocks"][0]["ratios"][name] = {"median": 1.2, "min": 1.1, "max": 1.3, "values": [1.1, 1.2, 1.3]}
    assert moved(old, new) == [f"1 stream, greedy: {name}: 1.50 -> 1.20, worse"]
    new["blocks"][0]["ratios"][name] = {"median": 1.45, "min": 1.1, "max": 1.5, "values": [1.1, 1.45, 1.5]}
    assert moved(old, new) == []


def test_steady_counts_while_all_streams_decode() -> None:
    first = [(0.0, 1), (1.0, 3), (2.0, 2), (3.0, 4)]
    second = [(0.5, 1), (1.5, 5), (2.5, 1)]
    rate, per_round = steady([first, second])
    assert rate == (3 + 2 + 5 + 1) / 2.0 and per_round == 11 / 4
    assert steady([[(0.0, 1)], [(1.0, 1)]]) == (None, None)


def test_share_of_the_floor() -> None:
    run = Run(seconds=2.0, num_tokens=100, steady_tokens_per_s=60.0, tokens_per_round=3.0, products_ms=40.0)
    assert run.tokens_per_s == 50.0
    assert run.share_of_floor(1) == pytest.approx(0.8)  # 3 tokens in 40 ms would be 75 a second
    assert run.share_of_floor(2) == pytest.approx(0.4)


def test_the_floor_has_the_rows_that_were_verified() -> None:
    """Not those of the windows asked for: the target cuts them where that pays."""

    def stream(num_rounds: int, num_draft_tokens: int) -> SpeculationStats:
        return SpeculationStats(num_rounds, num_rounds, num_draft_tokens, 0, (), (), AcceptanceRule.REJECTION, 0)

    assert rows_of_step([stream(100, 400)]) == 5
    assert rows_of_step([stream(100, 160), stream(50, 100), stream(10, 0)]) == 7  # 2.6 + 3 + 1
    assert rows_of_step([stream(0, 0)]) == 1


def test_a_pausing_worker_stands_still_between_questions() -> None:
    code = (
        "import sys, threading, time\nfrom outrider.bench.harness import serve_requests\nticks = []\n"
        "def tick():\n  while True: ticks.append(0); time.sleep(0.001)\n"
        "threading.Thread(target=tick, daemon=True).start()\n"
        "sys.exit(serve_requests(lambda: lambda question: {'ticks': len(ticks)}))"
    )
    with BenchWorker("ticking", [sys.executable, "-c", code], pauses=True) as worker:
        worker.receive(START_S)
        before = worker.ask({})["ticks"]
        time.sleep(0.5)
        assert worker.ask({})["ticks"] < before + 200  # of 500 that it would have made


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_transformers_decodes_in_every_way(temperature: float) -> None:
    pair = pair_path()
    handle, _ = peers.make_transformers("plain", pair.target, pair.draft, 1, 4)
    for mode in ("plain", "assisted", "prompt-lookup"):
        question = {"mode": mode, "prompts": [[5, 6, 7, 8]], "max_tokens": 8, "temperature": temperature, "seed": 0}
        answer = handle(question)
        assert answer["num_tokens"] == 8 and answer["seconds"] > 0


@pytest.mark.parametrize("peer", ["vllm", "llama.cpp"])
def test_a_peer_that_is_not_installed_says_so(repository: Path, tmp_path: Path, peer: str) -> None:
    script = repository / "outrider-bench/outrider/bench/peers.py"
    command = [sys.executable, str(script), peer, "plain", str(tmp_path), str(tmp_path), "1", "4"]
    with (
        BenchWorker(peer, command) as worker,
        pytest.raises(BenchWorkerFailed, match=f"{peer}: ModuleNotFoundError: No module"),
    ):
        worker.receive(START_S)
