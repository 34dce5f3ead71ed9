"""A target, a draft and a gateway of today, each of which takes its peers for another release: what all can do comes
out as among equals, and what one cannot is refused by its name, or done without."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from chaos.versions import BEFORE_CONSTRAINTS, FIRST, RELEASES, Newer, Older, Relay, Release
from support.deployment import PROMPT, deployed

from outrider.rpc.channel import connect
from outrider.v1 import draft_pb2, draft_pb2_grpc
from outrider.v1 import generation_pb2 as pb
from outrider.v1 import target_pb2 as target


async def asked(folder: Path, make: Callable[[], Release] | None) -> tuple[list[Any], list[Relay]]:
    """What requests of every rule and mode bring, for one completion and two; and the relays that they passed."""
    found: list[Any] = []
    relays: list[Relay] = []
    async with AsyncExitStack() as stack:

        async def through(role: str, address: str) -> str:
            if make is None:
                return address
            relays.append(await stack.enter_async_context(Relay(role, make())))
            await relays[-1].before(address)
            return str(relays[-1].address)

        deployment = await stack.enter_async_context(deployed(folder, through, method="ngram,draft_model"))
        gateway = await through("gateway", deployment.gateway.grpc_address)
        deployment.to_gateway = await stack.enter_async_context(connect(gateway))
        found += map(known, await deployment.answers())
        for fields in REQUESTS:
            parts = await deployment.generate(token_ids={"ids": PROMPT}, **fields)
            for index in range(fields.get("n", 1)):
                mine = [part for part in parts if part.index == index]
                found.append([token for part in mine for token in part.token_ids])
                found.append(["".join(part.text for part in mine), mine[-1].finish_reason])
        await deployment.settled()
    return found, relays


def known(answer: Any) -> Any:
    """Log probabilities without what only a newer gateway says of them; anything else as it is."""
    if not isinstance(answer, list) or not answer or not isinstance(answer[0], bytes):
        return answer
    positions = [pb.PositionLogprobs.FromString(data) for data in answer]
    for position in positions:
        position.DiscardUnknownFields()
    return positions


SAMPLING = {"temperature": 1, "max_tokens": 30, "seed": 11, "ignore_eos": True}
REQUESTS: list[dict[str, Any]] = [
    {"sampling": SAMPLING, "speculation": {"acceptance": 2, "mode": mode}, "n": 2}
    for mode in ("sequential", "chains", "branches", "auto")
] + [
    {"sampling": SAMPLING | {"temperature": 0}, "speculation": {"method": "ngram"}},
    {"sampling": SAMPLING | {"temperature": 0, "presence_penalty": 0.5, "min_p": 0.1}, "speculation": {}},
    {"sampling": SAMPLING | {"structured_output": {"regex": "[a-z]{9}"}}, "speculation": {"acceptance": 2}},
]


@pytest.fixture(scope="module")
async def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return (await asked(tmp_path_factory.mktemp("here"), None))[0]


@pytest.mark.parametrize("make", RELEASES.values(), ids=RELEASES)
async def test_what_all_releases_know_comes_out_the_same(
    make: Callable[[], Release], undisturbed: list[Any], tmp_path: Path
) -> None:
    found, relays = await asked(tmp_path, make)
    assert found == undisturbed
    for relay in relays[:2]:  # what a gateway says to its clients the later two have in common
        assert relay.release.changed.total(), relay.release.changed


def test_an_older_release_says_what_it_has() -> None:
    first, before = Older(FIRST), Older(BEFORE_CONSTRAINTS)
    assert first.says("sampling.min_p") and first.says("acceptance.coupled") and not first.says("acceptance.block")
    assert before.says("acceptance.block") and not before.says("reasoning") and Newer().says("reasoning")
    info = target.GetTargetInfoResponse(capabilities=["sampling.min_p", "acceptance.block", "reasoning"], version="2")
    name = "outrider.v1.GetTargetInfoResponse"
    then = target.GetTargetInfoResponse.FromString(first.translate(info.SerializeToString(), name, True))
    assert list(then.capabilities) == ["sampling.min_p"] and not then.version


def test_a_newer_release_says_more() -> None:
    request = target.VerifyRequest(messages=[{"open": {"sequence_id": 1, "sampling": {"top_k": 3}}}])
    data = Newer().translate(request.SerializeToString(), "outrider.v1.VerifyRequest", False)
    found = target.VerifyRequest.FromString(data)
    assert [one.WhichOneof("command") for one in found.messages] == ["open", None]
    opened = found.messages[0].open
    more = opened.ByteSize() - request.messages[0].open.ByteSize()
    opened.sampling.DiscardUnknownFields()
    assert opened.sampling == request.messages[0].open.sampling
    assert more > 40  # in Open and in its SamplingParams
    response = target.VerifyResponse(messages=[{"commit": {"ids": [5, 6], "origins": [1, 4]}}])
    data = Newer().translate(response.SerializeToString(), "outrider.v1.VerifyResponse", True)
    assert list(target.VerifyResponse.FromString(data).messages[0].commit.origins) == [77, 4]


async def test_a_call_of_a_later_release_is_unimplemented() -> None:
    async with AsyncExitStack() as stack:
        relay = await stack.enter_async_context(Relay("draft", Older(FIRST)))
        await relay.before("127.0.0.1:1")
        channel = await stack.enter_async_context(connect(relay.address))
        stub: Any = draft_pb2_grpc.DraftServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.ReloadModel(draft_pb2.ReloadModelRequest(model="x"), timeout=30)
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
        with pytest.raises(grpc.aio.AioRpcError) as absent:
            await stub.GetDraftInfo(draft_pb2.GetDraftInfoRequest(), timeout=30)
        assert absent.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_what_an_older_target_cannot_do_is_refused_by_its_name(tmp_path: Path) -> None:
    """Blocks are younger than the first protocol, which reads them as a number that no rule has."""
    async with AsyncExitStack() as stack:

        async def through(role: str, address: str) -> str:
            relay = await stack.enter_async_context(Relay(role, Older(FIRST)))
            await relay.before(address)
            return str(relay.address)

        deployment = await stack.enter_async_context(deployed(tmp_path, through))
        with pytest.raises(grpc.aio.AioRpcError, match="acceptance") as refused:
            speculation = pb.SpeculationParams(acceptance=pb.ACCEPTANCE_RULE_BLOCK)
            await deployment.generate(token_ids={"ids": PROMPT}, speculation=speculation)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
