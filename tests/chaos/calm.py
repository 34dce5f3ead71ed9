"""No fault at all, on a machine that has more to do than it can, and beside steps that take seconds: whoever takes a
service for lost then was too quick."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chaos.asks import Ask, expectations
from chaos.campaign import WHOLE_S
from chaos.fleet import Fleet, Member, View
from chaos.streams import Readers, Stream
from prometheus_client.parser import text_string_to_metric_families
from support.gateways import save_toy_tokenizer
from support.models import save_tiny

from outrider.cli.local_services import LOOPBACK, Services
from outrider.client import Client

LOOK_S = 1.0  # between two looks at the metrics
PROMPT_TOKENS = 2048
VOCAB = 400
# A step with such a prompt takes longer than the silence that a stream bears.
HEAVY: dict[str, Any] = {
    "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 6,
    "num_key_value_heads": 6, "max_position_embeddings": 2 * PROMPT_TOKENS, "vocab_size": VOCAB,
}  # fmt: skip


@dataclass
class Calm:
    """What was seen in a while without faults."""

    alarms: list[str]  # each a gateway that took a service for lost
    streams: list[Stream]
    step_s: float  # the mean step with a long prompt in it
    num_prefills: int

    @property
    def problems(self) -> list[str]:
        """What is wrong; none: nobody was taken for lost, nothing came out otherwise, and steps took long."""
        found = list(self.alarms)
        found += [f"lost: {one.ask.name}: {one.error}" for one in self.streams if one.error]
        found += [f"changed: {one.ask.name}: {one.change}" for one in self.streams if one.change]
        return found + ([] if self.num_prefills else ["no long prompt was read"])


@contextmanager
def load(num_processes: int) -> Iterator[None]:
    """So many processes that only compute, each of which the kernel schedules like a service."""
    busy = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True)
        for _ in range(num_processes)
    ]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


async def stay_calm(fleet: Fleet, asks: Sequence[Ask], duration_s: float, times_load: float) -> Calm:
    """Reads for so long, with `times_load` busy processes a core."""
    expected = await expectations(asks, fleet)
    with tempfile.TemporaryDirectory() as folder, Services() as services:
        target, gateway = await _heavy(Path(folder), services)
        with load(round(times_load * (os.cpu_count() or 1))):
            readers = Readers(fleet, asks, expected, 5)
            prefills = asyncio.create_task(_prefill(gateway.service.address))
            alarms = await watch(fleet, [*fleet.gateways, gateway], duration_s)
            prefills.cancel()
            await readers.stop()
            step_s, num_prefills = _long_steps(await fleet.metrics_of(target))
    return Calm(alarms, readers.streams, step_s, num_prefills)


async def _heavy(folder: Path, services: Services) -> tuple[Member, Member]:
    """A target whose prompts take a second and more, and a gateway before it."""
    save_toy_tokenizer(save_tiny(folder, **HEAVY))
    common = ["--listen", LOOPBACK, "--metrics", LOOPBACK]
    rows = ["--max-rows", str(PROMPT_TOKENS), "--cache-mb", "512"]
    target, gateway = Member(services, "target", 2), Member(services, "gateway", 2)
    target.arguments = ["target", *common, "--model", str(folder), *rows, "--threads", "1"]
    await target.start()
    gateway.arguments = ["gateway", *common, "--target", target.service.address, "--tokenizer", str(folder)]
    await gateway.start()
    return target, gateway


async def _prefill(address: str) -> None:
    """One long prompt after another, each a new one."""
    number = 0
    async with Client([address]) as client:
        while True:
            number += 1
            prompt = [1 + (number * place) % (VOCAB - 1) for place in range(PROMPT_TOKENS - 8)]
            async for _ in client.generate(token_ids=prompt, max_tokens=4, ignore_eos=True, temperature=0.0):
                pass


async def watch(fleet: Fleet, gateways: Sequence[Member], duration_s: float) -> list[str]:
    """Every time that one of these gateways took a replica for lost."""
    first: dict[str, View] = {}
    alarms: list[str] = []
    await fleet.whole(WHOLE_S)
    until = time.monotonic() + duration_s
    while time.monotonic() < until:
        for gateway in gateways:
            view = await fleet.view(gateway)
            if view is None:
                continue
            before = first.setdefault(gateway.name, view)
            lost = [address for address in view.up if view.lost([address], before)]
            alarms += [f"{gateway.name} took {address} for lost" for address in lost]
            first[gateway.name] = view
        await asyncio.sleep(LOOK_S)
    return alarms


def _long_steps(metrics: str) -> tuple[float, int]:
    """Of the steps that held a long prompt the mean time, and their number."""
    total_s, count = 0.0, 0
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            if family.name == "outrider_target_step_seconds" and int(sample.labels["rows"]) >= PROMPT_TOKENS // 2:
                total_s += sample.value if sample.name.endswith("_sum") else 0.0
                count += int(sample.value) if sample.name.endswith("_count") else 0
    return total_s / max(1, count), count
