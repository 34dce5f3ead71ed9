"""Grammars under vLLM, through the three services: a tiny random checkpoint, whose output is none of its own choice."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from openai import AsyncOpenAI
from support.environment import START_S
from support.fakes import until
from support.models import tiny_hf_model
from support.services import children_of, wait_for_draft
from support.tools import save_tool_tokenizer, tool_tokenizer

from outrider.cli.local_services import LOOPBACK, Service, Services
from outrider.cli.serve import HTTP
from outrider.gateway.peers.remote import RemoteDrafts, RemoteTargets
from outrider.gateway.speculation.loop import speculate
from outrider.planner.policy import Policy, Round
from outrider.rpc.channel import connect
from outrider.rpc.messages import Open
from outrider.rpc.words.sampling_params import SamplingParams
from outrider.rpc.words.structured import StructuredOutput
from outrider.v1 import generation_pb2 as pb
from outrider.v1 import generation_pb2_grpc

VOCAB, EOS = 400, 0
SHAPE = {"vocab_size": VOCAB, "head_dim": 32, "eos_token_id": EOS}
PROMPTS = [[11, 12, 13], [70, 80, 90, 100], [5, 6, 5, 6, 5, 6], [200, 300]]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"enum": ["ada", "grace"]},
        "born": {"type": "integer", "minimum": 1800, "maximum": 1999},
        "tags": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3},
    },
    "required": ["name", "born", "tags"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},  # else a random model writes white space for ever
}
TAG = json.dumps({
    "type": "structural_tag",
    "format": {"type": "tag", "begin": "<n>", "content": {"type": "json_schema", "json_schema": {"type": "boolean"}},
               "end": "</n>"},
})  # fmt: skip
LONG = {"type": "array", "items": {"type": "boolean"}, "minItems": 16, "maxItems": 24}
JSON = {"json_schema": json.dumps(SCHEMA)}
LONG_JSON: Any = {"json_schema": json.dumps({**SCHEMA, "properties": {**SCHEMA["properties"], "tags": LONG}})}
FORMAT = "hermes"  # of calls: their marks are tokens
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "of": {"enum": ["x", "y"]}},
    "required": ["a", "of"],
    "additionalProperties": False,
}
ADD: Any = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}


@dataclass
class Started:
    """The services of the module."""

    services: Services
    folder: Path
    target: Service
    draft: Service
    gateway: Service


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    folder = tmp_path_factory.mktemp("grammars")
    for name, layers in (("target", 2), ("half", 1)):
        hf = tiny_hf_model("llama", 1, num_hidden_layers=layers, **SHAPE)
        with torch.no_grad():
            hf.lm_head.weight *= 4
        hf.save_pretrained(folder / name)
        save_tool_tokenizer(FORMAT, folder / name)
    with Services() as services:
        draft = services.start(
            "draft", ["draft", "--model", str(folder / "half"), "--threads", "1", "--listen", LOOPBACK]
        )
        target = services.start("target", vllm_arguments(folder / "target"))
        services.wait(draft, START_S)
        services.wait(target, START_S)
        yield Started(services, folder, target, draft, gateway(services, folder, draft, target))


def vllm_arguments(model: Path) -> list[str]:
    arguments = ["target", "--engine", "vllm", "--model", str(model), "--num-blocks", "32", "--max-model-len", "400"]
    return [*arguments, "--engine-args", '{"block_size": 32}', "--listen", LOOPBACK]


def gateway(services: Services, folder: Path, draft: Service, *targets: Service) -> Service:
    peers = [word for target in targets for word in ("--target", target.address)]
    # A draft that is late on a busy machine has drafted nothing: it is waited for.
    patient = ["--draft-patience-ms", "20000"]
    arguments = ["gateway", "--draft", draft.address, *peers, *patient, "--tokenizer", str(folder / "target")]
    made = services.start("gateway", [*arguments, "--listen", LOOPBACK, "--http", LOOPBACK])
    wait_for_draft(services.wait(made, START_S), START_S, services.check)
    return made


@pytest.fixture
async def stub(started: Started) -> AsyncIterator[Any]:
    channel = connect(started.gateway.address)
    yield generation_pb2_grpc.GenerationServiceStub(channel)
    await channel.close()


def request(
    constraint: dict[str, Any], prompt: Sequence[int], k: int = 4, output: Sequence[int] = (), **sampling: Any
) -> Any:
    sampling = {"temperature": 0.0, "max_tokens": 200, **sampling}
    choices = constraint.get("choice")
    constraint = constraint if choices is None else {"choice": {"values": choices}}
    made = pb.GenerateRequest(token_ids={"ids": prompt}, sampling={**sampling, "structured_output": constraint})
    made.speculation.num_draft_tokens, made.speculation.enabled = k, k > 0
    made.speculation.mode = "sequential" if k else ""
    if output:
        made.output_ids.add(ids=output)
    return made


async def generate(stub: Any, *arguments: Any, **sampling: Any) -> list[Any]:
    call = stub.Generate(request(*arguments, **sampling), timeout=120, wait_for_ready=True)
    return [response async for response in call]


async def rest_of(stream: Any) -> list[int]:
    responses = []
    while (response := await stream.read()) is not grpc.aio.EOF:
        responses.append(response)
    return tokens_of(responses)


def tokens_of(responses: list[Any]) -> list[int]:
    return [token for response in responses for token in response.token_ids]


def text_of(ids: Sequence[int]) -> str:
    return tool_tokenizer(FORMAT).decode([token for token in ids if token != EOS])


def is_valid(ids: Sequence[int]) -> bool:
    found = json.loads(text_of(ids))
    return (
        set(found) == {"name", "born", "tags"}
        and found["name"] in ("ada", "grace")
        and 1800 <= found["born"] <= 1999
        and 2 <= len(found["tags"]) <= 3
        and all(isinstance(one, bool) for one in found["tags"])
    )


async def test_json_is_valid_and_greedily_the_same_with_and_without_drafts(started: Started, stub: Any) -> None:
    plain = [tokens_of(await generate(stub, JSON, prompt, 0)) for prompt in PROMPTS]
    depths = [4, 1, 8, 2]
    drafted = await asyncio.gather(*(generate(stub, JSON, p, k) for p, k in zip(PROMPTS, depths, strict=True)))
    assert all(map(is_valid, plain))
    assert [tokens_of(responses) for responses in drafted] == plain
    assert {responses[-1].finish_reason for responses in drafted} == {pb.FINISH_REASON_STOP}
    assert sum(responses[-1].speculation.num_accepted_tokens for responses in drafted) > 0  # the draft masks, too


async def test_drawn_json_is_valid_with_drafts_that_are_one_hot(started: Started, stub: Any) -> None:
    calls = [generate(stub, JSON, p, k, temperature=1.0, seed=k) for p in PROMPTS for k in (0, 4, 8)]
    results = await asyncio.gather(*calls)
    assert all(is_valid(tokens_of(responses)) for responses in results)
    assert sum(responses[-1].speculation.num_accepted_tokens for responses in results) > 0


@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        ({"regex": "[a-f]{3}-[0-9]{2,4}"}, "[a-f]{3}-[0-9]{2,4}"),
        ({"choice": ["yes", "no", "maybe"]}, "yes|no|maybe"),
        ({"grammar": 'start: "<" WORD ">"\nWORD: /[a-z]{2,5}/'}, "<[a-z]{2,5}>"),
        ({"grammar": 'root ::= "<" [a-z]{2,5} ">"'}, "<[a-z]{2,5}>"),
        ({"structural_tag": TAG}, "<n>(true|false)</n>"),
    ],
    ids=["regex", "choice", "grammar", "ebnf", "structural_tag"],
)
async def test_every_kind_of_constraint_holds(stub: Any, constraint: dict[str, Any], pattern: str) -> None:
    for k, temperature in ((0, 0.0), (4, 0.0), (4, 1.0)):
        responses = await generate(stub, constraint, PROMPTS[0], k, temperature=temperature, seed=3)
        assert re.fullmatch(pattern, text_of(tokens_of(responses)))
        assert responses[-1].finish_reason == pb.FINISH_REASON_STOP


async def test_a_continuation_goes_on_in_mid_json(stub: Any) -> None:
    whole = tokens_of(await generate(stub, JSON, PROMPTS[0], 0))
    for at in (1, len(whole) // 2, len(whole) - 2):
        for k in (0, 4):
            assert tokens_of(await generate(stub, JSON, PROMPTS[0], k, whole[:at])) == whole[at:]


@pytest.mark.parametrize(
    ("constraint", "output", "sampling", "field"),
    [
        ({"json_schema": '{"type": "nothing"}'}, (), {}, "[Gg]rammar|structured_output"),
        ({"json_schema": "{"}, (), {}, "[Gg]rammar|structured_output"),
        ({"regex": "(a"}, (), {}, "[Gg]rammar|structured_output"),
        ({"grammar": "start: nowhere"}, (), {}, "[Gg]rammar|structured_output"),
        ({"regex": "[0-9]+"}, (100, 101), {}, "sampling.structured_output"),
        ({"regex": "[0-9]+"}, (), {"min_tokens": 4}, "sampling.min_tokens"),
        ({"regex": "[0-9]+"}, (), {"allowed_token_ids": [5]}, "sampling.allowed_token_ids"),
    ],
)
async def test_a_bad_grammar_costs_its_own_request(
    stub: Any, constraint: dict[str, Any], output: tuple[int, ...], sampling: dict[str, Any], field: str
) -> None:
    others = [asyncio.create_task(generate(stub, JSON, prompt)) for prompt in PROMPTS]
    with pytest.raises(grpc.aio.AioRpcError, match=field) as refused:
        await generate(stub, constraint, PROMPTS[0], 4, output, **sampling)
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT, refused.value.details()
    assert all(is_valid(tokens_of(responses)) for responses in await asyncio.gather(*others))


async def test_where_vllm_dies_in_mid_json_another_vllm_goes_on(started: Started, stub: Any) -> None:
    whole = [tokens_of(await generate(stub, LONG_JSON, prompt)) for prompt in PROMPTS]
    with Services() as services:
        first = services.start("first", vllm_arguments(started.folder / "target"))
        await asyncio.to_thread(services.wait, first, START_S)
        own = await asyncio.to_thread(gateway, services, started.folder, started.draft, first, started.target)
        channel = connect(own.address)
        both = generation_pb2_grpc.GenerationServiceStub(channel)
        streams = [both.Generate(request(LONG_JSON, prompt), timeout=120) for prompt in PROMPTS]
        begun = [tokens_of([await stream.read()]) for stream in streams]
        os.kill(first.pid, signal.SIGKILL)
        for pid in children_of(first.pid):
            os.kill(pid, signal.SIGKILL)
        rest = [await rest_of(stream) for stream in streams]
        assert [one + other for one, other in zip(begun, rest, strict=True)] == whole
        await channel.close()


@dataclass
class Reader:
    """A completion by the gateway's loop in this process, which is held a little behind its first tokens."""

    ids: list[int]
    has_moved: bool = False

    async def read(self, drafts: RemoteDrafts, targets: RemoteTargets, asked: Open, go_on: asyncio.Event) -> None:
        async for item in speculate(drafts, targets, asked, Policy(4, plain_ahead=4, max_unread=8)):
            assert isinstance(item, Round)
            self.ids += item.commit.ids
            self.has_moved = self.has_moved or item.moved
            await go_on.wait()


async def fail_over(started: Started, dies: Service, goes_on: Service) -> dict[float, list[list[int]]]:
    """By temperature, each prompt's tokens, of streams that began at both targets, of which one dies in mid-JSON."""
    async with (
        RemoteTargets([dies.address, goes_on.address]) as targets,
        RemoteDrafts([started.draft.address]) as drafts,
    ):
        await until(lambda: drafts.usable and all(replica.usable for replica in targets.replicas))
        on_dying, on_other = targets.replicas
        go_on = asyncio.Event()
        readers: dict[float, list[Reader]] = {0.0: [], 1.0: []}
        constraint, digest = StructuredOutput(**LONG_JSON), targets.info.model.digest
        tasks = []
        for temperature, own in readers.items():
            for prompt in PROMPTS:
                sampling = SamplingParams(temperature=temperature, max_tokens=200, structured_output=constraint)
                asked = Open(0, tuple(prompt), sampling, model_digest=digest, seed=7, one_hot=not temperature)
                own.append(Reader([]))
                tasks.append(asyncio.create_task(own[-1].read(drafts, targets, asked, go_on)))
        everyone = [reader for own in readers.values() for reader in own]
        await until(lambda: all(reader.ids for reader in everyone))
        num_dying = on_dying.num_sequences
        assert num_dying and on_other.num_sequences
        for pid in (dies.pid, *children_of(dies.pid)):
            os.kill(pid, signal.SIGKILL)
        go_on.set()
        await asyncio.gather(*tasks)
    assert sum(reader.has_moved for reader in everyone) == num_dying
    return {temperature: [reader.ids for reader in own] for temperature, own in readers.items()}


@pytest.fixture
async def own(started: Started) -> AsyncIterator[Service]:
    """The same target on our engine."""
    with Services() as services:
        arguments = ["--model", str(started.folder / "target"), "--threads", "1", "--listen", LOOPBACK]
        made = services.start("own", ["target", *arguments])
        await asyncio.to_thread(services.wait, made, START_S)
        yield made


def check_moved(written: dict[float, list[list[int]]], whole: list[list[int]]) -> None:
    """Greedily the same text. Drawn tokens have other noise at another target; the JSON stays what its schema says."""
    assert written[0.0] == whole
    for ids in written[1.0]:
        found = json.loads(text_of(ids))
        assert set(found) == {"name", "born", "tags"} and 16 <= len(found["tags"]) <= 24


async def test_where_our_engine_dies_in_mid_json_vllm_goes_on(started: Started, stub: Any, own: Service) -> None:
    whole = [tokens_of(await generate(stub, LONG_JSON, prompt)) for prompt in PROMPTS]
    check_moved(await fail_over(started, own, started.target), whole)


async def test_a_tool_that_is_required_is_called(started: Started) -> None:
    """A model of random weights knows no tools: all that it does right is the grammar's doing."""
    named = {"type": "function", "function": {"name": "add"}}
    url = f"http://{started.gateway.find(HTTP)}/v1"
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as client:
        model = (await client.models.list()).data[0].id
        for choice, temperature in (("required", 0), (named, 1)):
            fields: dict[str, Any] = {
                "model": model, "messages": [{"role": "user", "content": "hi"}], "tools": [ADD], "max_tokens": 120,
                "tool_choice": choice, "temperature": temperature, "seed": 4, "parallel_tool_calls": False,
            }  # fmt: skip
            written = []
            for enabled in (True, False):
                answer = await client.chat.completions.create(
                    **fields, extra_body={"speculation": {"enabled": enabled}}
                )
                message, reason = answer.choices[0].message, answer.choices[0].finish_reason
                (call,) = message.tool_calls or []
                assert message.content is None and reason == "tool_calls" and call.function.name == "add"
                arguments = json.loads(call.function.arguments)
                assert set(arguments) == {"a", "of"} and 0 <= arguments["a"] <= 99 and arguments["of"] in ("x", "y")
                written.append(arguments)
            assert temperature or written[0] == written[1]


async def test_where_vllm_dies_in_mid_json_our_engine_goes_on(started: Started, stub: Any, own: Service) -> None:
    """The last: the module's own vLLM is the one that dies."""
    whole = [tokens_of(await generate(stub, LONG_JSON, prompt)) for prompt in PROMPTS]
    check_moved(await fail_over(started, started.target, own), whole)
