"""What the two links of the gateway carry for each committed token: bytes of the frames, and gRPC's five for each."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from support.environment import SEED

from outrider.bench.prompts import read_prompts
from outrider.cli.local_services import Services
from outrider.gateway.peers.remote import RemoteDrafts, RemoteTargets
from outrider.gateway.speculation.loop import speculate
from outrider.gateway.text.tokenizer import Tokenizer
from outrider.pairs import pair_path
from outrider.planner.policy import Policy, Round
from outrider.rpc.messages import Open
from outrider.rpc.sampling_params import AcceptanceRule, SamplingParams
from outrider.rpc.stream import ClientTransport

K, NUM_TOKENS = 4, 192
GRPC_HEADER = 5
CASES = {  # temperature, rule, policy, most bytes a token on each link
    "greedy": (0.0, AcceptanceRule.COUPLED, Policy(K), 60),
    "greedy, branches": (0.0, AcceptanceRule.COUPLED, Policy(K, windows_ahead=1, max_branches=6), 150),
    "coupled, branches": (1.0, AcceptanceRule.COUPLED, Policy(K, windows_ahead=1, max_branches=6), 150),
    "rejection": (1.0, AcceptanceRule.REJECTION, Policy(K), 9000),  # 4 vectors of at most 512 entries a round
}


@pytest.fixture(scope="module")
def addresses() -> Iterator[tuple[str, str]]:
    pair = pair_path()
    with Services() as services:
        arguments = ["--listen", "127.0.0.1:0", "--threads", "1"]
        target = services.start("target", ["target", "--model", str(pair.target), *arguments])
        draft = services.start("draft", ["draft", "--model", str(pair.draft), *arguments])
        for service in (target, draft):
            services.wait(service, 60.0)
        yield target.address, draft.address


@pytest.fixture
def carried(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Bytes of all frames by the link's kind and direction."""
    total: Counter[str] = Counter()
    read, write = ClientTransport.read, ClientTransport.write

    async def counted_read(self: ClientTransport) -> Any:
        frame = await read(self)
        if frame is not None:
            total[type(frame).__name__] += frame.ByteSize() + GRPC_HEADER
        return frame

    async def counted_write(self: ClientTransport, frame: Any) -> None:
        total[type(frame).__name__] += frame.ByteSize() + GRPC_HEADER
        await write(self, frame)

    monkeypatch.setattr(ClientTransport, "read", counted_read)
    monkeypatch.setattr(ClientTransport, "write", counted_write)
    return total


@pytest.mark.parametrize("name", CASES)
async def test_bytes_for_each_committed_token(addresses: tuple[str, str], carried: Counter[str], name: str) -> None:
    temperature, rule, policy, most = CASES[name]
    (prompt,) = read_prompts(Tokenizer.load(pair_path().target), None, 1)
    sampling = SamplingParams(temperature=temperature, max_tokens=NUM_TOKENS, ignore_eos=True)
    opened = Open(0, tuple(prompt), sampling, acceptance=rule, seed=SEED, one_hot=not temperature)
    async with RemoteTargets([addresses[0]]) as targets, RemoteDrafts([addresses[1]]) as drafts:
        async with asyncio.timeout(30):
            await asyncio.gather(targets.wait_usable(), drafts.wait_usable())
            rounds = [item async for item in speculate(drafts, targets, opened, policy) if isinstance(item, Round)]
    num_tokens = sum(len(closed.commit.ids) for closed in rounds)
    draft = (carried["ProposeRequest"] + carried["ProposeResponse"]) / num_tokens
    target = (carried["VerifyRequest"] + carried["VerifyResponse"]) / num_tokens
    print(f"{name}: {draft:.0f} bytes a token at the draft, {target:.0f} at the target: {dict(carried)}")
    assert num_tokens == NUM_TOKENS and any(closed.commit.num_accepted for closed in rounds)
    assert draft < most and target < most
