"""A draft is tried when it meets its target: the pair's is believed, one whose weights are noise drafts no more once
that is known, and neither changes an answer."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from support.environment import START_S
from support.metrics import samples_of
from support.models import other_weights
from support.services import wait_for_draft

from outrider.cli.local_services import Services
from outrider.client import Client, GatewayInfo
from outrider.gateway.peers.remote import reload_model
from outrider.pairs import PairPaths, pair_path
from outrider.rpc.channel import connect

HTTP = re.compile(r"gateway http on (\S+)")


@dataclass
class Running:
    pair: PairPaths
    noise: Path
    draft: str
    gateway: str
    http: str

    async def until(self, holds: Callable[[GatewayInfo], bool]) -> GatewayInfo:
        """What the gateway says of itself, once that holds."""
        async with Client(self.gateway) as client, asyncio.timeout(START_S):
            while True:
                info = await client.info()
                if holds(info):
                    return info
                await asyncio.sleep(0.1)

    async def told(self) -> list[int]:
        """A greedy answer, with drafts as the gateway has them."""
        async with Client(self.gateway) as client:
            parts = client.generate("def parse_args(argv):", temperature=0.0, max_tokens=32, mode="sequential")
            return [token async for part in parts for token in part.token_ids]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    pair = pair_path()
    noise = other_weights(pair.draft, tmp_path_factory.mktemp("models") / "noise", noise=8.0)
    with Services() as services:
        common = ["--listen", "127.0.0.1:0", "--threads", "1"]
        draft = services.start("draft", ["draft", *common, "--model", str(pair.draft), "--allow-reload"])
        target = services.start("target", ["target", *common, "--model", str(pair.target)])
        for service in (draft, target):
            services.wait(service, START_S)
        peers = ["--target", target.address, "--draft", draft.address, "--tokenizer", str(pair.target)]
        flags = ["--http", "127.0.0.1:0", "--draft-trial", "refuse"]
        gateway = services.start("gateway", ["gateway", "--listen", "127.0.0.1:0", *peers, *flags])
        services.wait(gateway, START_S)
        wait_for_draft(gateway.address, START_S, services.check)
        yield Running(pair, noise, draft.address, gateway.address, gateway.find(HTTP))


async def test_a_draft_is_believed_until_another_is_none(running: Running) -> None:
    info = await running.until(lambda info: bool(info.trials))
    (trial,) = info.trials
    assert trial.method == "draft_model" and not trial.refused
    assert trial.accepted[0] > 0.5 > trial.guess and len(trial.accepted) >= 4
    before = await running.told()
    async with connect(running.draft) as channel:
        await reload_model(channel, str(running.noise))
    info = await running.until(lambda info: any(trial.refused for trial in info.trials))
    good, bad = info.trials
    assert good == trial and bad.refused and bad.accepted[0] <= bad.guess and info.draft is None
    assert await running.told() == before

    async with httpx.AsyncClient(base_url=f"http://{running.http}") as client:
        samples = samples_of((await client.get("/metrics")).text)
    found = {name: value for (name, labels), value in samples.items() if ("method", "draft_model") in labels}
    assert found["draft_trial_refused"] == 1.0

    async with connect(running.draft) as channel:
        await reload_model(channel, str(running.pair.draft))
    await running.until(lambda info: info.draft is not None)
    assert await running.told() == before
