"""What the two links of the gateway carry for each committed token: bytes of the frames, and gRPC's five for each."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import grpc.aio
import pytest
from support.environment import SEED
from support.services import Trio

from outrider.bench.prompts import read_prompts
from outrider.gateway.peers import replicas
from outrider.gateway.peers.remote import RemoteDrafts, RemoteTargets
from outrider.gateway.speculation.loop import speculate
from outrider.gateway.text.tokenizer import Tokenizer
from outrider.planner.policy import Policy, Round
from outrider.rpc.codec import StreamKind
from outrider.rpc.messages import Open
from outrider.rpc.stream import FrameStream, client_stream
from outrider.rpc.words.sampling_params import AcceptanceRule, SamplingParams

K, NUM_TOKENS = 4, 192
GRPC_HEADER = 5
CASES = {  # temperature, rule, policy, most bytes a token on each link
    "greedy": (0.0, AcceptanceRule.COUPLED, Policy(K), 60),
    "greedy, branches": (0.0, AcceptanceRule.COUPLED, Policy(K, windows_ahead=1, max_branches=6), 150),
    "coupled, branches": (1.0, AcceptanceRule.COUPLED, Policy(K, windows_ahead=1, max_branches=6), 150),
    "rejection": (1.0, AcceptanceRule.REJECTION, Policy(K), 9000),  # 4 vectors of at most 512 entries a round
}


class Counted:
    """A call, and the bytes of its frames by the link's kind and direction."""

    def __init__(self, call: Any, total: Counter[str]) -> None:
        self._call, self._total = call, total
        self.cancel = call.cancel

    async def read(self) -> Any:
        frame = await self._call.read()
        if frame is not grpc.aio.EOF:
            self._total[type(frame).__name__] += frame.ByteSize() + GRPC_HEADER
        return frame

    async def write(self, frame: Any) -> None:
        self._total[type(frame).__name__] += frame.ByteSize() + GRPC_HEADER
        await self._call.write(frame)


@pytest.fixture
def carried(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Bytes of all frames of the gateway's streams."""
    total: Counter[str] = Counter()

    def counting(kind: StreamKind, call: Any, **options: Any) -> FrameStream:
        return client_stream(kind, Counted(call, total), **options)

    monkeypatch.setattr(replicas, "client_stream", counting)
    return total


@pytest.mark.parametrize("name", CASES)
async def test_bytes_for_each_committed_token(trio: Trio, carried: Counter[str], name: str) -> None:
    temperature, rule, policy, most = CASES[name]
    (prompt,) = read_prompts(Tokenizer.load(trio.pair.target), None, 1)
    sampling = SamplingParams(temperature=temperature, max_tokens=NUM_TOKENS, ignore_eos=True)
    opened = Open(0, tuple(prompt), sampling, acceptance=rule, seed=SEED, one_hot=not temperature)
    async with RemoteTargets([trio.target]) as targets, RemoteDrafts([trio.draft]) as drafts:
        async with asyncio.timeout(30):
            await asyncio.gather(targets.wait_usable(), drafts.wait_usable())
            rounds = [item async for item in speculate(drafts, targets, opened, policy) if isinstance(item, Round)]
    num_tokens = sum(len(closed.commit.ids) for closed in rounds)
    draft = (carried["ProposeRequest"] + carried["ProposeResponse"]) / num_tokens
    target = (carried["VerifyRequest"] + carried["VerifyResponse"]) / num_tokens
    print(f"{name}: {draft:.0f} bytes a token at the draft, {target:.0f} at the target: {dict(carried)}")
    assert num_tokens == NUM_TOKENS and any(closed.commit.num_accepted for closed in rounds)
    assert draft < most and target < most
