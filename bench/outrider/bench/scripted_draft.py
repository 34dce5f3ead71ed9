"""A draft service that drafts nothing of use: to each message of a sequence it answers by a script.

    python -m outrider.bench.scripted_draft SCRIPT TARGET

It says that it has the model of the target at that address, since a gateway takes no draft of another vocabulary, and
prints where it listens. `bad_drafts` starts it."""

from __future__ import annotations

import argparse
import asyncio
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import grpc.aio

from outrider.cli.local_services import LOOPBACK
from outrider.rpc.codec import DRAFT_INFO, DRAFT_STREAM, TARGET_INFO
from outrider.rpc.messages import Close, Closed, Commit, DraftInfo, DraftMethod, DraftTokens, Failure, ModelInfo, Open
from outrider.rpc.server import build_server
from outrider.rpc.stream import server_stream
from outrider.v1 import draft_pb2_grpc, target_pb2, target_pb2_grpc

SERVICE = "outrider.v1.DraftService"
EXHAUSTED, INTERNAL = 8, 13  # gRPC's codes
ID = 5  # is a token


@dataclass
class Sequence:
    """One that a gateway has opened."""

    number: int
    chain: int  # the next one that has not been used
    num_tokens: int
    send: Callable[[Any], object]
    num_heard: int = 0

    def piece(self, ids: tuple[int, ...], position: int | None = None, chain: int | None = None) -> DraftTokens:
        """Of a chain that is given, or of the next one; at the end of what is committed."""
        if chain is None:
            chain, self.chain = self.chain, self.chain + 1
        return DraftTokens(self.number, chain, self.num_tokens if position is None else position, ids)


Script = Callable[[Sequence], None]


def out_of_order(one: Sequence) -> None:
    """A chain's pieces in reverse, twice, with gaps, and from before the prompt."""
    end, chain = one.num_tokens, one.chain
    one.chain += 1
    pieces = [one.piece((ID + place,), end + place, chain) for place in range(3)]
    for piece in (*pieces[::-1], *pieces, one.piece((ID,), end + 200), one.piece((ID,), 0)):
        one.send(piece)


def out_of_memory(one: Sequence) -> None:
    """A chain, and then no block is left."""
    one.send(one.piece((ID,) * 4))
    one.send(Failure(one.number, EXHAUSTED, "no blocks are left", "CACHE_FULL", retry_after_ms=50))


def fails(one: Sequence) -> None:
    """By a bug of its own, each time."""
    one.send(Failure(one.number, INTERNAL, "unexpected RuntimeError"))


def silent(one: Sequence) -> None:
    """It drafts nothing."""


SCRIPTS: Mapping[str, Script] = {script.__name__: script for script in (out_of_order, out_of_memory, fails, silent)}


class ScriptedDraft(draft_pb2_grpc.DraftServiceServicer):
    """Serves a script."""

    def __init__(self, script: Script, model: ModelInfo) -> None:
        self._script, self._info = script, DraftInfo(model, (DraftMethod("draft_model"),))

    async def GetDraftInfo(self, request: Any, context: Any) -> Any:
        """Describes the target as its own."""
        return DRAFT_INFO.encode(self._info)

    async def Propose(self, request_iterator: Any, context: Any) -> None:
        """Serves one gateway's stream until it ends."""
        sequences: dict[int, Sequence] = {}
        stream = server_stream(DRAFT_STREAM, context)
        async with stream:
            async for batch in stream:
                for message in batch:
                    self.take(message, sequences, stream.send)

    def take(self, message: Any, sequences: dict[int, Sequence], send: Callable[[Any], object]) -> None:
        """Has the script answer what a gateway says of a sequence."""
        number = message.sequence_id
        if isinstance(message, Close):
            sequences.pop(number, None)
            send(Closed(number))
            return
        if isinstance(message, Open):
            num_tokens = len(message.prompt_ids) + len(message.output_ids)
            sequences[number] = Sequence(number, message.first_chain, num_tokens, send)
        if (one := sequences.get(number)) is None:
            return
        if isinstance(message, Commit):
            one.num_tokens += len(message.ids)
        one.num_heard += 1
        self._script(one)


async def model_of(target: str) -> ModelInfo:
    """What a target says of its model."""
    async with grpc.aio.insecure_channel(target) as channel:
        said = await target_pb2_grpc.TargetServiceStub(channel).GetTargetInfo(
            target_pb2.GetTargetInfoRequest(), wait_for_ready=True, timeout=60.0
        )
    return TARGET_INFO.decode(said).model


async def serve(script: Script, target: str) -> None:
    """Until SIGTERM."""
    model = await model_of(target)
    servicer = ScriptedDraft(script, replace(model, name=script.__name__, digest=script.__name__))
    server = build_server(
        LOOPBACK, [SERVICE], lambda server: draft_pb2_grpc.add_DraftServiceServicer_to_server(servicer, server)
    )
    await server.start()
    print(f"draft listening on {server.address}", flush=True)
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    await ended.wait()
    await server.stop(0)


def main() -> None:
    """Serves one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("script", choices=sorted(SCRIPTS))
    parser.add_argument("target", help="address of the target whose model it says that it has")
    options = parser.parse_args()
    asyncio.run(serve(SCRIPTS[options.script], options.target))


if __name__ == "__main__":
    main()
