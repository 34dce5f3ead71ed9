"""Faults under many streams, on six processes of the embedded pair: python tests/chaos/run.py --faults 1000 --seed 7

Ends with 0 if every fault took place, and no stream was lost or changed by it. A fault is replayed, up to its timing,
by `--seed SEED --only NUMBER`. Ctrl-C ends the campaign behind the fault under way, and `--first NUMBER` goes on."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
sys.path.insert(0, str(Path(__file__).parents[1]))

from chaos.asks import all_asks
from chaos.calm import Calm, stay_calm
from chaos.campaign import Outcome, Record, run
from chaos.faults import Fault, first_of
from chaos.fleet import Drafting, Fleet
from rich.console import Console
from rich.table import Table

from outrider.cli.local_services import leave_on_signals

SHORT = 16  # faults
FAULTS_A_FLEET = 25  # then another one, with another head and another model of its drafts


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if every fault took place and cost nothing but time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=SHORT, help="how many, one after another")
    parser.add_argument("--first", type=int, default=0, metavar="NUMBER", help="of that seed's faults, from 0")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of faults and of the order of requests")
    parser.add_argument("--only", type=int, help="of the faults of that seed this one alone")
    parser.add_argument("--readers", type=int, default=5, help="streams at a time, beside one over HTTP")
    parser.add_argument("--off", action="store_true", help="strike nobody: then every fault has to be missed")
    parser.add_argument("--strict-times", action="store_true", help="a bound of time that does not hold is a failure")
    parser.add_argument("--calm", type=float, metavar="S", help="no fault for so long, and nobody taken for lost")
    parser.add_argument("--load", type=float, default=2.0, help="with --calm: busy processes a core")
    options = parser.parse_args(arguments)
    console = Console(soft_wrap=True)
    console.width = max(console.width, 150)  # of the table, also where nobody looks
    if options.calm is not None:
        return _told_calm(console, asyncio.run(_calm(options)), options)
    first, count = (options.first, options.faults) if options.only is None else (options.only, 1)
    faults = first_of(options.seed, first + count)[first:]

    def told(record: Record) -> None:
        console.print(_line(record, options.seed), highlight=False, markup=False)

    began = time.monotonic()
    outcome = asyncio.run(_all_of_it(faults, options, told))
    records, streams = outcome.records, outcome.streams
    console.print(_table(records))
    wrong = [record for record in records if record.problems or (options.strict_times and record.late)]
    for record in wrong:
        late = f" ({'; '.join(record.late)})" if options.strict_times else ""
        console.print(f"fault {_line(record, options.seed)}{late}", highlight=False, markup=False)
    lost, changed = sum(bool(stream.error) for stream in streams), sum(bool(stream.change) for stream in streams)
    num_tokens = sum(len(stream.arrivals) for stream in streams)
    console.print(
        f"over HTTP {sum(stream.reader == 'http' for stream in streams)} answers: {len(outcome.errors_told)} streams "
        f"ended with an error and {outcome.broken_off} were cut, by faults at their gateway or at all targets; "
        f"{outcome.num_resumed} went on from tokens of others",
        highlight=False,
    )
    for failure in outcome.failures:
        console.print(failure, highlight=False, markup=False)
    short = [bit for record in records for bit in record.out_of_memory]
    console.print(
        f"out of memory {len(short)} services, of which {sum(short)} ended by it or wrote that they were refused some; "
        "the others lived on in what they had",
        highlight=False,
    )
    console.print(
        f"{len(records)} faults of seed {options.seed} in {time.monotonic() - began:.0f} s: {len(streams)} streams "
        f"with {num_tokens} deliveries, {lost} lost, {changed} changed; {len(wrong)} faults with a problem",
        highlight=False,
    )
    return int(bool(wrong or lost or changed or outcome.failures or len(records) < len(faults)))


async def _all_of_it(faults: Sequence[Fault], options: argparse.Namespace, told: Callable[[Record], None]) -> Outcome:
    """One fleet after another, until the last fault or Ctrl-C."""
    outcome, enough = Outcome(), asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, enough.set)
    wanted = itertools.takewhile(lambda _: not enough.is_set(), faults)
    for number, group in itertools.groupby(wanted, lambda fault: fault.number // FAULTS_A_FLEET):
        drafting = Drafting.of(options.seed + number)
        async with Fleet(drafting=drafting) as fleet:
            outcome = await run(
                fleet,
                group,
                all_asks(options.seed, drafting=drafting),
                num_readers=options.readers,
                injecting=not options.off,
                told=told,
                outcome=outcome,
            )
    return outcome


async def _calm(options: argparse.Namespace) -> Calm:
    drafting = Drafting.of(options.seed)
    async with Fleet(drafting=drafting) as fleet:
        return await stay_calm(fleet, all_asks(options.seed, drafting=drafting), options.calm, options.load)


def _told_calm(console: Console, calm: Calm, options: argparse.Namespace) -> int:
    for problem in calm.problems:
        console.print(problem, highlight=False, markup=False)
    console.print(
        f"{options.calm:g} s without a fault, {options.load:g} busy processes a core: {len(calm.alarms)} services "
        f"taken for lost; {len(calm.streams)} streams; {calm.num_prefills} steps with a long prompt, of "
        f"{calm.step_s:.2f} s",
        highlight=False,
    )
    return int(bool(calm.problems))


def _line(record: Record, seed: int) -> str:
    """What became of a fault."""
    times = [f"{after_s:.2f} s" for after_s in record.notices.values() if after_s is not None]
    noticed = f", noticed after {' and '.join(times)}" if times else ""
    head = f"{record.fault}: {len(record.streams)} streams, longest pause {record.pause_s:.2f} s{noticed}"
    if not record.problems:
        return head
    replay = f"replay: python tests/chaos/run.py --seed {seed} --only {record.fault.number}"
    return "\n    ".join([head, *record.problems, replay])


def _table(records: Sequence[Record]) -> Table:
    """By kind and role of the first victim."""
    table = Table(title="Faults")
    for name in ("fault", "of", "faults", "took place", "streams", "lost", "changed"):
        table.add_column(name, justify="left" if name in ("fault", "of") else "right")
    for name in ("noticed after", "longest pause"):
        table.add_column(f"{name}, s\nmedian / most", justify="right")
        table.add_column("in time", justify="right")
    rows: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        kind = " + ".join(record.fault.kinds)
        roles = " + ".join(victim.split()[0] for victim in record.fault.victims)
        rows.setdefault((kind, roles) if len(record.fault.kinds) == 1 else ("two at once", "any two"), []).append(
            record
        )
    for (kind, roles), group in sorted(rows.items()):
        table.add_row(kind, roles, *_sums(group))
    table.add_section()
    table.add_row("all", "", *_sums(records))
    return table


def _sums(records: Sequence[Record]) -> list[str]:
    counts = (
        len(records),
        sum(record.took_place for record in records),
        *(sum(len(getattr(record, what)) for record in records) for what in ("streams", "lost", "changed")),
    )
    notices = [after_s for record in records for after_s in record.notices.values() if after_s is not None]
    pauses = [record.pause_s for record in records]
    return [
        *map(str, counts),
        *(_middle_and_most(notices), _within([record.noticed_in_time for record in records])),
        *(_middle_and_most(pauses), _within([record.went_on_in_time for record in records])),
    ]


def _within(counts: Sequence[tuple[int, int]]) -> str:
    """Of what has a bound of time, how much was within it."""
    count, of = (sum(column) for column in zip(*counts, strict=True))
    return f"{count} of {of}" if of else "-"


def _middle_and_most(times_s: Sequence[float]) -> str:
    return f"{statistics.median(times_s):.2f} / {max(times_s):.2f}" if times_s else "-"


if __name__ == "__main__":
    leave_on_signals()
    sys.exit(main())
