"""The network bench: a small run of every part. Nothing here judges a speed.

The networks of the network bench: their names, delays and stalls, and the delay proxy against a clock."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from support.bench import Measured, run_bench, texts_of
from support.environment import SEED

from outrider.bench.figures import draw_network, write_figure
from outrider.bench.network import NetworkSettings, render
from outrider.bench.network_fleet import Network, summarise_rounds
from outrider.bench.network_workers import DelayProxy, LinkDirection, Stalls, new_loop
from outrider.planner.policy import Round
from outrider.rpc.messages import Commit, StepTimings

NETWORKS = ("0", "0v", "0.2v")
MODES = ("plain", "sequential", "chains", "branches", "auto")
FLAGS = {
    "networks": ",".join(NETWORKS), "modes": ",".join(MODES), "costs": "0.2", "repeats": "1", "max-tokens": "24",
}  # fmt: skip


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """What a small run prints, and its result."""
    flags = [part for name, value in FLAGS.items() for part in (f"--{name}", value)]
    flags += ["--no-expand", "--no-store"]
    return run_bench(tmp_path_factory.mktemp("network"), "network", *flags)


def test_every_mode_meets_every_network_that_matters_to_it(small: Measured) -> None:
    (block,) = small[1]["blocks"]
    cells = {(cell["mode"], cell["network"]) for cell in block["cells"]}
    assert cells == {(mode, name) for mode in MODES for name in (("0",) if mode == "plain" else NETWORKS)}
    for cell in block["cells"]:
        speculates, mode = cell["costs"]["acceptance"] > 0, cell["mode"]
        always = mode == "sequential"  # the others may find that waiting for the draft does not pay
        assert cell["ms_per_token"]["median"] > 0
        assert (speculates or not always) and not (speculates and mode == "plain")
        assert (cell["form_ms"] is not None) == (mode not in ("plain", "auto"))
        assert cell["hits"] is None or mode in ("chains", "branches", "auto")


def test_the_table_and_the_plot(small: Measured, tmp_path: Path) -> None:
    text, result = small
    assert text.splitlines() == list(render(result))
    for mode in MODES:
        assert f"  {mode}, 0 " in text
    write_figure(tmp_path / "plot.svg", lambda: draw_network(result))
    assert {*MODES, "1 stream, greedy, draft cost 0.2"} <= texts_of(tmp_path / "plot.svg")


def rounds_of(*parts: tuple[int | None, int, int]) -> list[Round]:
    """Rounds of 20 ms each: chain, drafted, accepted; the first one commits a plain token."""
    timings = StepTimings(verify_us=9000, sample_us=1000)
    commits = [Commit(1, 0, (1,), timings=timings)]
    for chain, drafted, accepted in parts:
        ids = (1,) * (accepted + 1)
        commits.append(Commit(1, 0, ids, chain=chain, num_drafted=drafted, num_accepted=accepted, timings=timings))
    return [
        Round(index, commit, 4, 0.02 * index, 0.02 * (index + 1), draft_us=4000 * bool(commit.num_drafted))
        for index, commit in enumerate(commits)
    ]


def test_a_digest_leaves_out_the_prompt_and_counts_hits() -> None:
    rounds = rounds_of((0, 4, 4), (0, 4, 2), (5, 4, 0), (7, 4, 1), (None, 0, 0))
    found = summarise_rounds([rounds], [{5}])
    assert found.ms_per_token == pytest.approx(1e3 * 0.1 / 12)
    assert found.tokens_per_round == pytest.approx((5 + 3 + 1 + 2) / 4)  # the last round is cut
    assert (found.accepted, found.tested) == (7, 4 + 3 + 1 + 2)
    assert found.verify_ms == 10.0 and found.pass_ms == 1.0
    assert found.hits == 2 / 4  # after the prompt: the same chain, then a branch; 7 is new, the last has none
    assert summarise_rounds([rounds]).hits is None
    with pytest.raises(ValueError, match="more tokens"):
        summarise_rounds([rounds[:1]])


def test_networks_by_name() -> None:
    assert Network.parse("0").is_direct and Network.parse("5").delay_ms(40.0) == 5.0
    through = Network.parse("0v")
    assert not through.is_direct and through.delay_ms(40.0) == 0.0 == through.round_trip_ms(40.0)
    near = Network.parse("0.2v")
    assert near.delay_ms(40.0) == 8.0 and near.round_trip_ms(40.0) == 32.0 and near.steady
    assert Network.parse("5~2!100") == Network("5~2!100", 5.0, False, 2.0, 100.0)
    assert not Network.parse("0!100").is_direct
    for wrong in ("", "-1", "5ms", "5~", "v", "5!~2"):
        with pytest.raises(ValueError, match="is no network"):
            Network.parse(wrong)
    with pytest.raises(ValueError, match="is no network"):
        NetworkSettings.model_validate({"networks": "0,fast"})


def test_jitter_keeps_the_order_and_the_mean() -> None:
    link = LinkDirection(0.010, 0.004, Stalls(0.0, 0.0, SEED), SEED)
    entered = [index * 0.02 for index in range(2000)]
    late = [link.due(when) - when for when in entered]
    assert 0.006 <= min(late) < 0.0065 and 0.0135 < max(late) <= 0.014
    assert sum(late) / len(late) == pytest.approx(0.010, abs=0.0003)
    crowded = [link.due(100.0 + index * 1e-5) for index in range(500)]
    assert crowded == sorted(crowded)


def test_stalls_hold_both_directions_until_their_end() -> None:
    stalls = [Stalls(0.3, 5.0, SEED) for _ in range(2)]
    ends = [[one.after(5.0 + index * 0.01) for index in range(4000)] for one in stalls]
    assert ends[0] == ends[1]  # one seed, one weather
    held = [end - (5.0 + index * 0.01) for index, end in enumerate(ends[0])]
    assert max(held) == pytest.approx(0.3, abs=0.011) and min(held) == 0.0
    share = sum(late > 0 for late in held) / len(held)
    assert 0.05 < share < 0.3  # 0.3 of 2.3 s on average


@asynccontextmanager
async def echo_through(proxy_of: Callable[[str], DelayProxy]) -> AsyncIterator[tuple[DelayProxy, str]]:
    """A proxy in front of a service that says everything again."""

    async def say_again(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
        writer.close()

    server = await asyncio.start_server(say_again, "127.0.0.1", 0)
    proxy = proxy_of(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
    try:
        yield proxy, await proxy.start()
    finally:
        await proxy.stop()
        server.close()


def run(work: Callable[[], Any]) -> None:
    """On the loop that the proxies use, whose timers are exact."""
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(work())


async def round_trips(address: str, count: int) -> list[float]:
    """Seconds of each."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    times = []
    for index in range(count):
        began = time.monotonic()
        writer.write(bytes([index]) * 8)
        assert await reader.readexactly(8) == bytes([index]) * 8
        times.append(time.monotonic() - began)
    writer.close()
    return times


def test_the_proxy_delays_each_way_from_the_next_message_on() -> None:
    async def work() -> None:
        async with echo_through(DelayProxy) as (proxy, address):
            assert min(await round_trips(address, 20)) < 0.040
            proxy.set_conditions(20.0, 0.0, 0.0, SEED)
            times = await round_trips(address, 10)
            assert 0.040 <= min(times) < 0.080  # a busy machine may be late, never early

    run(work)


def test_the_proxy_loses_nothing_and_passes_the_end_on() -> None:
    async def work() -> None:
        data = random.Random(SEED).randbytes(1_000_000)
        async with echo_through(DelayProxy) as (proxy, address):
            proxy.set_conditions(2.0, 2.0, 20.0, SEED)
            host, _, port = address.rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            for start in range(0, len(data), 10_000):
                writer.write(data[start : start + 10_000])
            assert await reader.readexactly(len(data)) == data
            writer.write_eof()
            assert await asyncio.wait_for(reader.read(), 30) == b""
            writer.close()

    run(work)
