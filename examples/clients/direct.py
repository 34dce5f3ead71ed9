"""Draft and target without a gateway: python direct.py TARGET DRAFT TOKENIZER_JSON [PROMPT]. One greedy completion by
the loop that docs/protocol.md describes; a gateway adds failures, credit by what a client reads, and many sequences."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
from tokenizers import Tokenizer

from outrider.v1 import common_pb2 as pb
from outrider.v1 import draft_pb2, draft_pb2_grpc, generation_pb2, target_pb2, target_pb2_grpc

K = 4  # drafted tokens a round


class Stream:
    """One side of Propose or Verify: frames are numbered, and an idle side sends an empty one every half second."""

    def __init__(self, method: Any, frame: Any, command: Any) -> None:
        self.frame, self.command, self.last_seen = frame, command, 0
        self.waiting: asyncio.Queue[list[Any]] = asyncio.Queue()
        self.call = method(self._frames())

    def send(self, **messages: Any) -> None:
        """Sends messages by their names, in one frame."""
        self.waiting.put_nowait([self.command(**{name: message}) for name, message in messages.items()])

    async def _frames(self) -> AsyncIterator[Any]:
        number = 0
        while number := number + 1:
            try:
                messages = await asyncio.wait_for(self.waiting.get(), 0.5)
            except TimeoutError:
                messages = []
            yield self.frame(header=pb.FrameHeader(number=number, last_seen=self.last_seen), messages=messages)

    async def events(self) -> AsyncIterator[Any]:
        """What the service says, message by message."""
        async for frame in self.call:
            self.last_seen = frame.header.number
            for message in frame.messages:
                yield message


async def forward(draft: Stream, target: Stream) -> None:
    """Hands what is drafted to the target; a draft that fails costs speed only."""
    async for event in draft.events():
        if event.HasField("piece"):
            target.send(piece=event.piece)


async def complete(draft: Stream, target: Stream, prompt: list[int], max_tokens: int) -> tuple[list[int], int]:
    """(the ids, how many of them were drafted)."""
    sampling = generation_pb2.SamplingParams(temperature=0, max_tokens=max_tokens)
    opened = pb.Open(sequence_id=1, num_prompt_ids=len(prompt), prompt_ids=prompt, sampling=sampling, first_chain=1)
    opened.acceptance, opened.one_hot = generation_pb2.ACCEPTANCE_RULE_REJECTION, True
    length, ids, num_accepted = len(prompt), [], 0
    draft.send(open=opened, credit=pb.Credit(sequence_id=1, until=length + K, max_window=K))
    target.send(open=opened, credit=pb.Credit(sequence_id=1, until=length + K + 1, max_window=K, patience_ms=500))
    async for event in target.events():
        if event.HasField("failure"):
            raise RuntimeError(event.failure.status.message)
        commit = event.commit
        ids += commit.ids
        num_accepted += commit.num_accepted
        if commit.finish_reason:
            break
        if commit.ids:
            length += len(commit.ids)
            draft.send(commit=commit, credit=pb.Credit(sequence_id=1, until=length + K, max_window=K))
            target.send(credit=pb.Credit(sequence_id=1, until=length + K + 1, max_window=K, patience_ms=500))
    return ids, num_accepted


async def main(target: str, draft: str, tokenizer_json: str, prompt: str = "Once upon a time") -> None:
    tokenizer = Tokenizer.from_file(tokenizer_json)
    async with grpc.aio.insecure_channel(target) as to_target, grpc.aio.insecure_channel(draft) as to_draft:
        propose, verify = draft_pb2_grpc.DraftServiceStub(to_draft), target_pb2_grpc.TargetServiceStub(to_target)
        drafting = Stream(propose.Propose, draft_pb2.ProposeRequest, draft_pb2.DraftCommand)
        verifying = Stream(verify.Verify, target_pb2.VerifyRequest, target_pb2.TargetCommand)
        forwarding = asyncio.create_task(forward(drafting, verifying))
        ids, num_accepted = await complete(drafting, verifying, tokenizer.encode(prompt).ids, max_tokens=24)
        forwarding.cancel()  # ends the stream, and so the sequence; a Close would end the sequence alone
        print(tokenizer.decode(ids))
        print(f"{len(ids)} tokens, {num_accepted} of them drafted")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
