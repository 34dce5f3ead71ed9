"""The gRPC face of the gateway: which model and methods a request may name, and what is said of its speculation. A
client whose stubs are of the first protocol goes on as ever; its image is kept in data/."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from threading import get_ident
from typing import Any

import grpc.aio
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from support.fakes import ToyDraft, ToyTarget, draft_info, expected, target_info
from support.gateways import PROMPT, gateway, ids_of, text_of, toy_tokenizer

from outrider.client import Client, Part
from outrider.gateway import servicer
from outrider.gateway.admission import SLOW_REQUEST_BYTES
from outrider.rpc.errors import InvalidArgument, NotFound
from outrider.rpc.generation_codec import decode_request
from outrider.rpc.messages import DraftMethod
from outrider.v1 import generation_pb2 as pb
from outrider.v1 import generation_pb2_grpc

FIRST_PROTOCOL = Path(__file__).parent / "data" / "outrider-1.0.binpb"
GREEDY: dict[str, Any] = {"token_ids": PROMPT, "temperature": 0.0, "max_tokens": 20}


class OldClient:
    """Calls made from the descriptors of the first protocol alone: no stub of today's knows of them."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel, self._pool = channel, DescriptorPool()
        for file in FileDescriptorSet.FromString(FIRST_PROTOCOL.read_bytes()).file:
            self._pool.Add(file)

    def message(self, name: str) -> Any:
        return GetMessageClass(self._pool.FindMessageTypeByName(f"outrider.v1.{name}"))

    async def generate(self, **fields: Any) -> list[Any]:
        call = self._channel.unary_stream(
            "/outrider.v1.GenerationService/Generate",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=self.message("GenerateResponse").FromString,
        )
        return [response async for response in call(self.message("GenerateRequest")(**fields), timeout=60)]

    async def info(self) -> Any:
        call = self._channel.unary_unary(
            "/outrider.v1.GenerationService/GetGatewayInfo",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=self.message("GetGatewayInfoResponse").FromString,
        )
        return await call(self.message("GetGatewayInfoRequest")(), timeout=60)


async def test_a_client_of_the_first_protocol() -> None:
    target, draft = ToyTarget(num_cached=1), ToyDraft(wrong_every=3)
    async with gateway(target, draft) as served, grpc.aio.insecure_channel(served.grpc_address) as channel:
        client = OldClient(channel)
        assert "model" not in client.message("GenerateRequest").DESCRIPTOR.fields_by_name
        parts = await client.generate(
            token_ids={"ids": PROMPT},
            sampling={"temperature": 0, "max_tokens": 20, "logprobs": 0, "seed": 7},
            speculation={"num_draft_tokens": 2, "method": "draft_model", "acceptance": 2, "mode": "sequential"},
            request_id="old",
            n=2,
        )
        first = [part for part in parts if part.index == 0]
        ids = [token for part in first for token in part.token_ids]
        assert ids == expected(PROMPT, 20) and "".join(part.text for part in first) == text_of(ids)
        assert all(len(part.token_ids) == len(part.origins) == len(part.logprobs) for part in first)
        last = first[-1]
        assert (last.request_id, last.finish_reason, first[0].seed) == ("old", 2, 7)
        assert (last.usage.prompt_tokens, last.usage.completion_tokens, last.usage.cached_tokens) == (3, 20, 1)
        stats = last.speculation
        assert stats.num_rounds > 0 and 0 < stats.num_accepted_tokens < stats.num_draft_tokens and stats.acceptance == 2
        assert [request.method for request in draft.opens] == ["draft_model"] * 2

        resumed = await client.generate(
            token_ids={"ids": PROMPT},
            sampling={"temperature": 0, "max_tokens": 20, "seed": 7},
            output_ids=[{"ids": ids[:12]}],
            model_digest=first[0].model_digest,
        )
        assert [token for part in resumed for token in part.token_ids] == ids[12:]
        assert "".join([part.text for part in await client.generate(text="the quick")])
        info = await client.info()
        assert (info.target.name, list(info.methods)) == ("toy", ["draft_model"])
        with pytest.raises(grpc.aio.AioRpcError, match=r"sampling\.temperature: is -1\.0"):
            await client.generate(text="x", sampling={"temperature": -1})
    assert target.opens[0].seed == 7 and target.opens[0].sampling.logprobs == 0


async def generate(address: str, **options: Any) -> list[Part]:
    async with Client(address) as client:
        return [part async for part in client.generate(**GREEDY, **options)]


async def test_the_prompt_s_ids_are_told_once_to_who_has_them_not() -> None:
    text = "the quick brown fox"
    ids = toy_tokenizer().encode(text)
    async with gateway() as served, Client(served.grpc_address) as client:
        parts = [part async for part in client.generate(text, n=2, max_tokens=2)]
        assert [part.prompt_token_ids for part in parts if part.index == 0] == [tuple(ids), ()]
        parts += [part async for part in client.generate(token_ids=tuple(ids), max_tokens=2)]
    assert sum(bool(part.prompt_token_ids) for part in parts) == 1


async def test_a_model_is_named_as_it_is_served() -> None:
    target = ToyTarget()
    async with gateway(target, model_name="mine") as served:
        for name in ("", "mine"):
            assert ids_of(await generate(served.grpc_address, model=name)) == expected(PROMPT, 20)
        for other in ("toy", "x" * 1000):
            with pytest.raises(
                NotFound, match=r"the model '(toy|x{97}\.\.\.)' does not exist; served here: 'mine'$"
            ) as no:
                await generate(served.grpc_address, model=other)
            assert no.value.reason == "MODEL_NOT_FOUND"
    assert len(target.opens) == 2


@pytest.mark.parametrize(
    "options",
    [{"method": "ngram"}, {"methods": ["ngram"]}, {"methods": "ngram"}, {"method": "ngram", "methods": ["ngram"]}],
)
async def test_a_method_travels_in_either_field(options: dict[str, Any]) -> None:
    info = replace(draft_info(), methods=(DraftMethod("draft_model"), DraftMethod("ngram")))
    draft = ToyDraft(info=info)
    async with gateway(draft=draft) as served:
        (*_, last) = await generate(served.grpc_address, **options)
    assert draft.opens[0].method == "ngram"
    assert last.speculation is not None and last.speculation.method == "ngram"


async def test_the_stats_say_how_was_drafted() -> None:
    draft = ToyDraft()
    async with gateway(draft=draft) as served:
        for options, method, mode in (
            ({}, "draft_model", "sequential"),
            ({"mode": "chains"}, "draft_model", "chains"),
            ({"speculate": False}, "", "off"),
        ):
            (*_, last) = await generate(served.grpc_address, **options)
            stats = last.speculation
            assert stats is not None and (stats.method, stats.mode) == (method, mode)
            assert stats.num_rounds_by_mode == {mode: stats.num_rounds}
    assert [request.method for request in draft.opens] == ["", ""]  # a draft service's default is its own to choose


METHODS_REFUSED = [
    (
        {"methods": ["draft_model", "ngram"]},
        "speculation.methods[1]: is 'ngram', which the draft does not know; allowed: draft_model",
    ),
    ({"methods": ["ngram"] * 9}, "speculation.methods: has 9 entries; allowed: at most 8"),
    ({"method": "ngram,ngram"}, "speculation.method: names 'ngram' twice; allowed: each method once"),
    ({"methods": [""]}, "speculation.methods[0]: is empty; allowed: at least one character"),
    (
        {"methods": ["medusa"]},
        "speculation.methods[0]: is 'medusa', a head that the target does not have; allowed: draft_model",
    ),
    (
        {"method": "ngram", "methods": ["draft_model"]},
        "speculation.method: is 'ngram' beside speculation.methods; allowed: 'draft_model', as there, or none",
    ),
]


@pytest.mark.parametrize(("options", "message"), METHODS_REFUSED)
async def test_methods_that_are_not_served_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    async with gateway(draft=ToyDraft()) as served:
        with pytest.raises(InvalidArgument, match=re.escape(message)):
            await generate(served.grpc_address, **options)
        async with served.client() as client:
            answer = await client.post("/v1/completions", json={"prompt": PROMPT, "speculation": options})
        assert message in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("lists", "problem"),
    [
        ({"chat": {"messages": [{}] * 40_000}}, "chat: has 40000 messages; allowed: at most 256, the"),
        ({"text": "x", "tools": ["{}"] * 40_000}, "tools: has 40000 entries; allowed: at most 128"),
        ({"text": "x", "media": [{}] * 40_000}, "media: has 40000 entries; allowed: at most 64"),
        ({"text": "x", "output_ids": [{}] * 40_000}, "output_ids: has 40000 entries; allowed: at most 64"),
    ],
)
async def test_lists_that_no_request_has_are_refused_before_they_are_decoded(
    lists: dict[str, Any], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servicer, "decode_request", None)
    with pytest.raises(InvalidArgument, match=re.escape(problem)):
        await servicer.decoded(pb.GenerateRequest(**lists), target_info().model)


async def test_a_large_request_is_decoded_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []

    def seen(*arguments: Any) -> Any:
        threads.append(get_ident())
        return decode_request(*arguments)

    monkeypatch.setattr(servicer, "decode_request", seen)
    async with gateway() as served, grpc.aio.insecure_channel(served.grpc_address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        for num_chars in (100, SLOW_REQUEST_BYTES):
            asked = pb.GenerateRequest(text="x" * num_chars, sampling={"max_tokens": 1, "truncate_prompt_tokens": 1})
            assert [answer async for answer in stub.Generate(asked, timeout=60)]
    small, large = threads
    assert small == get_ident() != large
