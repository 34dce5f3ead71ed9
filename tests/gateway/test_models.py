"""Several models behind one address: the name that a request says chooses one, each is as it would be alone, and what
is wrong with one harms no other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from pydantic import ValidationError
from safetensors.torch import load_file
from support.adapters import save_adapter
from support.fakes import until
from support.gateways import save_toy_tokenizer
from support.metrics import samples_of
from support.models import save_tiny

from outrider.client import Client
from outrider.draft_service import boot as draft_boot
from outrider.draft_service.engine import DraftEngine
from outrider.draft_service.settings import DraftSettings
from outrider.gateway.boot import GatewayParts, build_gateway
from outrider.gateway.peers.remote import TARGET_SERVICE, load_adapter
from outrider.gateway.settings import GatewaySettings, by_model
from outrider.llm import LLM, SamplingParams, TokensPrompt
from outrider.rpc.channel import connect
from outrider.rpc.errors import FailedPrecondition
from outrider.rpc.server import Server
from outrider.target_service import boot as target_boot
from outrider.target_service.boot import TargetService
from outrider.target_service.settings import TargetSettings
from outrider.v1 import generation_pb2 as pb
from outrider.v1 import generation_pb2_grpc

VOCAB = 400
PROMPT = [11, 12, 13]


class Fleet:
    """Targets of two models, one draft for both, and gateways before them."""

    def __init__(self, stack: AsyncExitStack, folders: dict[str, Path], targets: dict[str, TargetService]) -> None:
        self._stack, self.folders, self.targets = stack, folders, targets
        self.draft = ""

    async def gateway(self, connect: bool = True, **given: Any) -> GatewayParts:
        """One that is connected and serves."""
        settings = GatewaySettings(listen="127.0.0.1:0", http="127.0.0.1:0", draft_trial="off", **given)
        parts = build_gateway(settings, None)
        assert parts.http is not None
        await parts.http.start()
        self._stack.push_async_callback(parts.http.stop, 0)
        for model in parts.models:
            await self._stack.enter_async_context(model.targets)
        if connect:
            await parts.connect(self._stack)
        await parts.server.start()
        self._stack.push_async_callback(parts.server.stop, 0)
        return parts

    async def drafted_by(self, **how: Any) -> DraftEngine:
        """Has another draft draft for gateways from now on; its engine."""
        given = {"listen": "127.0.0.1:0", "num_blocks": 256, "threads": 1} | how
        service = await draft_boot.start(DraftSettings(model=self.folders["draft"], **given))
        await service.server.start()
        self._stack.push_async_callback(service.stop)
        self.draft = service.server.address
        return service.engine

    def two(self, default: bool = False) -> dict[str, Any]:
        """The settings of both; the first of them without a name, if it is the `default`."""
        first = "" if default else "one="
        address = {name: target.server.address for name, target in self.targets.items()}
        return {
            "target": [first + address["one"], f"other={address['other']}"],
            "draft": [first + self.draft, f"other={self.draft}"],
            "tokenizer": [Path(f"{first}{self.folders['one']}"), Path(f"other={self.folders['other']}")],
        }


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    folders = {
        name: save_toy_tokenizer(save_tiny(tmp_path / name, seed=seed, vocab_size=VOCAB))
        for name, seed in (("one", 1), ("other", 5), ("draft", 2))
    }
    common: dict[str, Any] = {"listen": "127.0.0.1:0", "num_blocks": 256, "threads": 1}
    async with AsyncExitStack() as stack:
        targets = {}
        for name in ("one", "other"):
            service = await target_boot.start(TargetSettings(model=folders[name], **common))
            await service.server.start()
            stack.push_async_callback(service.stop)
            targets[name] = service
        made = Fleet(stack, folders, targets)
        await made.drafted_by()
        yield made


async def tokens_of(server: Server, model: str = "", **fields: Any) -> tuple[list[int], pb.SpeculationStats]:
    async with connect(server.address) as channel:
        stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
        given: dict[str, Any] = {
            "token_ids": {"ids": PROMPT}, "sampling": {"temperature": 1, "seed": 3, "max_tokens": 12},
            "speculation": {"num_draft_tokens": 3, "acceptance": 2}, "model": model,
        } | fields  # fmt: skip
        said = [part async for part in stub.Generate(pb.GenerateRequest(**given), timeout=60)]
        return [token for part in said for token in part.token_ids], said[-1].speculation


@asynccontextmanager
async def http_of(parts: GatewayParts) -> AsyncIterator[httpx.AsyncClient]:
    assert parts.http is not None
    async with httpx.AsyncClient(base_url=f"http://{parts.http.address}", timeout=60) as client:
        yield client


async def test_each_model_is_as_it_would_be_alone(fleet: Fleet) -> None:
    """Its tokens, drafted by the one draft that both have; over gRPC and HTTP."""
    both, found = await fleet.gateway(**fleet.two()), {}
    for name in ("one", "other"):
        address = fleet.targets[name].server.address
        alone = await fleet.gateway(target=[address], draft=[fleet.draft], tokenizer=fleet.folders[name])
        await until(lambda parts=alone: parts.models[0].engine.drafter.info is not None)
        found[name], _ = await tokens_of(alone.server)
        tokens, stats = await tokens_of(both.server, name)
        assert tokens == found[name] and stats.num_draft_tokens > 0
        async with http_of(both) as client:
            body = {"model": name, "prompt": PROMPT, "seed": 3, "max_tokens": 12, "return_token_ids": True}
            said = (await client.post("/v1/completions", json=body)).json()
            assert said["model"] == name and said["choices"][0]["token_ids"] == found[name]
    assert found["one"] != found["other"]


async def test_models_are_listed_and_described_by_name(fleet: Fleet) -> None:
    parts = await fleet.gateway(**fleet.two(default=True), model_name="large")
    digests = {}
    for name, target in fleet.targets.items():
        async with connect(target.server.address) as channel:
            digests[name] = (await TARGET_SERVICE.get_info(channel)).model.digest
    async with Client(parts.server.address) as client:
        default = await client.info()
    assert default.target.name == "large" and default.target.digest == digests["one"]
    async with connect(parts.server.address) as channel:
        stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
        told = await stub.GetGatewayInfo(pb.GetGatewayInfoRequest(model="other"))
        assert (told.target.name, told.target.digest) == ("other", digests["other"])
        assert list(told.models) == ["large", "other"]
    async with http_of(parts) as client:
        listed = (await client.get("/v1/models")).json()["data"]
        assert [card["id"] for card in listed] == ["large", "other"]
        assert (await client.get("/v1/models/other")).json()["id"] == "other"
        missing = await client.post("/v1/completions", json={"model": "absent", "prompt": "x"})
        assert missing.status_code == 404 and "'large', 'other'" in missing.json()["error"]["message"]
        default_answer = await client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
        assert default_answer.json()["model"] == "large"
        for path in ("/tokenize", "/detokenize"):
            refused = await client.post(path, json={"model": "absent", "prompt": "x", "tokens": [1]})
            assert refused.status_code == 404
        assert (await client.post("/tokenize", json={"model": "other", "prompt": "x"})).json()["count"] > 0


async def test_a_draft_shares_its_room_among_models(fleet: Fleet) -> None:
    """One that floods it gives way to another that comes, and its requests go on, with the tokens that they have
    alone."""
    engine = await fleet.drafted_by(max_sequences=2)
    parts = await fleet.gateway(**fleet.two())
    alone, _ = await tokens_of(parts.server, "one", sampling={"temperature": 0, "max_tokens": 150})
    flood = [
        asyncio.ensure_future(tokens_of(parts.server, "one", sampling={"temperature": 0, "max_tokens": 150}))
        for _ in range(4)
    ]
    await until(lambda: engine.sequences_by_model.get("one") == 2)
    _, stats = await tokens_of(parts.server, "other")
    assert stats.num_draft_tokens > 0 and engine.num_displaced
    assert {tuple(tokens) for tokens, _ in await asyncio.gather(*flood)} == {tuple(alone)}
    await until(lambda: not engine.sequences_by_model)


async def test_without_a_default_a_model_has_to_be_named(fleet: Fleet) -> None:
    parts = await fleet.gateway(**fleet.two())
    async with http_of(parts) as client:
        refused = await client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]})
        assert refused.status_code == 400 and "model: is not given; allowed: one, other" in refused.text
    with pytest.raises(grpc.aio.AioRpcError, match="model: is not given"):
        await tokens_of(parts.server)
    with pytest.raises(grpc.aio.AioRpcError, match="served here: 'one', 'other'"):
        await tokens_of(parts.server, "absent")
    async with Client(parts.server.address) as client:
        told = [(await client.info(model=model)).target.name for model in ("", "one", "other")]
    assert told == ["one", "one", "other"], "what a gateway is may be asked all the same"


async def test_an_llm_asks_for_one_of_several(fleet: Fleet) -> None:
    parts = await fleet.gateway(**fleet.two())
    sampling: dict[str, Any] = {"temperature": 0, "max_tokens": 12}

    def answer(name: str) -> list[int]:
        with LLM(gateway=parts.server.address, served_model_name=name) as made:
            asked = [TokensPrompt(prompt_token_ids=PROMPT)]
            (output,) = made.generate(asked, SamplingParams(**sampling), use_tqdm=False)
        return list(output.outputs[0].token_ids)

    found = [await asyncio.to_thread(answer, name) for name in ("one", "other")]
    assert found == [(await tokens_of(parts.server, name, sampling=sampling))[0] for name in ("one", "other")]
    assert found[0] != found[1]


async def test_one_model_is_described_while_the_default_is_away(fleet: Fleet) -> None:
    settings = fleet.two(default=True)
    parts = await fleet.gateway(connect=False, **settings | {"target": ["127.0.0.1:1", settings["target"][1]]})
    await parts.models[1].targets.wait_usable()
    async with Client(parts.server.address) as client:
        assert (await client.info(model="other")).target.name == "other"


async def test_a_model_whose_targets_are_gone_harms_no_other(fleet: Fleet) -> None:
    parts = await fleet.gateway(**fleet.two())
    before, _ = await tokens_of(parts.server, "other")
    await fleet.targets["one"].stop()
    await until(lambda: not parts.models[0].targets.usable)
    assert (await tokens_of(parts.server, "other"))[0] == before
    async with http_of(parts) as client:
        assert (await client.get("/readyz")).status_code == 200
        gone = await client.post("/v1/completions", json={"model": "one", "prompt": "x", "max_tokens": 1})
        assert gone.status_code == 503
        assert [card["id"] for card in (await client.get("/v1/models")).json()["data"]] == ["one", "other"]


async def test_tokens_may_be_bound_to_models(fleet: Fleet, tmp_path: Path) -> None:
    (tmp_path / "tokens.yaml").write_text(
        "all: aaaaaaaaaaaaaaaaaaaa\nbound:\n  token: bbbbbbbbbbbbbbbbbbbb\n  models: [other]\n"
    )
    (tmp_path / "tokens.yaml").chmod(0o600)
    parts = await fleet.gateway(**fleet.two(default=True), model_name="large", tokens=tmp_path / "tokens.yaml")
    async with http_of(parts) as client:
        for token, status, names in (("a", 200, ["large", "other"]), ("b", 403, ["other"])):
            head = {"authorization": f"Bearer {token * 20}"}
            asked = {"prompt": "x", "max_tokens": 1}
            answer = await client.post("/v1/completions", json=asked, headers=head)
            assert answer.status_code == status
            if status == 403:
                assert "model: large is not for bound; allowed: other" in answer.text
            named = await client.post("/v1/completions", json=asked | {"model": "other"}, headers=head)
            assert named.status_code == 200
            assert [card["id"] for card in (await client.get("/v1/models", headers=head)).json()["data"]] == names


async def test_the_series_say_of_which_model_they_are(fleet: Fleet) -> None:
    parts = await fleet.gateway(**fleet.two(default=True))
    for model in ("", "other", "other"):
        await tokens_of(parts.server, model)
    async with http_of(parts) as client:
        for accept in ("text/plain", "application/openmetrics-text; version=1.0.0"):
            text = (await client.get("/metrics", headers={"accept": accept})).text
            assert text.endswith("# EOF\n") is accept.startswith("application")
            assert text.count("# TYPE outrider_generation_tokens") == 1
            assert text.count("\nprocess_cpu_seconds_total") == 1
    series = samples_of((parts.metrics.render("") if parts.metrics else (b"", ""))[0].decode())
    counted = {labels: value for (name, labels), value in series.items() if name == "generation_tokens_total"}
    assert counted == {(("served_model", ""),): 12.0, (("served_model", "other"),): 24.0}


def settings_of(**given: Any) -> GatewaySettings:
    return GatewaySettings(**({"target": ["a=h:1", "b=h:2"], "tokenizer": ["a=x", "b=y"]} | given))


def test_names_stand_before_addresses() -> None:
    given = settings_of(
        target=["h:1,h:2", "a=h:3", "a=h:4,h:5", "b/c=unix:/x=y"], tokenizer=["x=y", "a=z", "b/c=w"], draft=["a=h:9"]
    )
    assert given.models == ["", "a", "b/c"]
    default, first, second = map(given.of_model, given.models)
    assert (default.target, default.draft, default.tokenizer) == (["h:1,h:2"], [], [Path("x=y")])
    assert (first.target, first.draft, first.model_name) == (["h:3", "h:4,h:5"], ["h:9"], "a")
    assert (second.target, second.tokenizer, second.model_name) == (["unix:/x=y"], [Path("w")], "b/c")
    assert by_model(["dns:///name=x:1", "unix:/a=b"]) == {"": ["dns:///name=x:1", "unix:/a=b"]}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tokenizer": ["a=x"]}, "tokenizer: none is given for the model b"),
        ({"tokenizer": ["a=x", "a=z", "b=y"]}, "tokenizer: several are given for the model a"),
        ({"tokenizer": ["a=x", "b=y", "z"]}, "tokenizer: the default is no model of target"),
        ({"draft": ["c=h:1"]}, "draft: c is no model of target; allowed: a, b"),
        ({"draft": ["h:1"]}, "draft: the default is no model of target"),
        ({"draft": ["a=ngram", "b=ngram,h:1"]}, "would run in this process"),
        ({"target": ["a=h:1", "a=h:x", "b=h:2"]}, "target"),
        ({"model_name": "a"}, "model_name is a, as a model of target is called"),
    ],
)
def test_what_names_no_model_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        settings_of(**given)


async def test_an_adapter_that_is_called_as_another_model_is_refused_where_its_target_is_met_first(
    fleet: Fleet, tmp_path: Path
) -> None:
    """Of one that comes later, who asks for the name alone."""
    state = load_file(fleet.folders["other"] / "model.safetensors")
    adapter = save_adapter(tmp_path / "adapter", state)
    given: dict[str, Any] = {"listen": "127.0.0.1:0", "num_blocks": 256, "threads": 1, "allow_adapter_changes": True}
    changing = await target_boot.start(TargetSettings(model=fleet.folders["other"], **given))
    await changing.server.start()
    try:
        async with connect(changing.server.address) as channel:
            two = fleet.two()
            two["target"][1] = f"other={changing.server.address}"
            parts = await fleet.gateway(**two)
            await load_adapter(channel, "one", str(adapter))
            engine = parts.models[1].engine
            await until(lambda: engine.known is not None and bool(engine.known.adapters))
            plain, _ = await tokens_of(parts.server, "other")
            assert plain and (await tokens_of(parts.server, "one"))[0], "both serve on"
            with pytest.raises(FailedPrecondition, match=r"one of the target of other is called as one or an"):
                await fleet.gateway(**two)
    finally:
        await changing.stop()
