"""A draft that lacks the target's vocabulary is given it, in slices, before it is used."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import grpc.aio

from outrider.gateway.peers.replicas import HANDSHAKE_S
from outrider.rpc.messages import DraftInfo
from outrider.rpc.status import from_rpc_error
from outrider.rpc.vocabulary import TokenizerFile
from outrider.v1 import draft_pb2, draft_pb2_grpc

log = logging.getLogger(__name__)

SLICE_BYTES = 48 * 1024  # of a tokenizer.json
PUT_S = 180.0  # until a draft has read a vocabulary

Offer = Callable[[DraftInfo], TokenizerFile | None]  # what a draft is to be given


async def introduced(
    get_info: Callable[[grpc.aio.Channel], Awaitable[DraftInfo]], offer: Offer, channel: grpc.aio.Channel
) -> DraftInfo:
    """What a draft says of itself once it knows the target's vocabulary, if it takes that."""
    async with asyncio.timeout(HANDSHAKE_S):
        info = await get_info(channel)
    file = offer(info)
    if file is None:
        return info
    stub: Any = draft_pb2_grpc.DraftServiceStub(channel)
    try:
        await stub.PutVocabulary(_slices(file))
    except grpc.aio.AioRpcError as error:
        log.warning("a draft did not take the target's vocabulary: %s", from_rpc_error(error).message)
        return info
    return await get_info(channel)


def _slices(file: TokenizerFile) -> Iterator[draft_pb2.PutVocabularyRequest]:
    yield draft_pb2.PutVocabularyRequest(
        tokenizer_fingerprint=file.fingerprint, num_bytes=len(file.layout), special_tokens=file.special
    )
    for start in range(0, len(file.layout), SLICE_BYTES):
        yield draft_pb2.PutVocabularyRequest(data=file.layout[start : start + SLICE_BYTES])
