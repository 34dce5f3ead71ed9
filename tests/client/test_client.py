"""The client and the servicer, over gRPC on the loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest
from support.fakes import ToyDraft, ToyTarget, expected, target_info, until
from support.gateways import over_grpc, toy_tokenizer

from outrider import client as client_module
from outrider.client import NO_RETRY, Client, build_request
from outrider.client.types import decode_response
from outrider.gateway.engine import EngineConfig, GenerationEngine
from outrider.gateway.servicer import GenerationServicer
from outrider.rpc.errors import DeadlineExceeded, InvalidArgument, ResourceExhausted, Unavailable
from outrider.rpc.words.sampling_params import AcceptanceRule, FinishReason, LogprobsMode, SamplingParams
from outrider.rpc.words.structured import StructuredOutput
from outrider.v1 import generation_pb2

PROMPT = (11, 12, 13)


@asynccontextmanager
async def gateway(
    target: ToyTarget, draft: ToyDraft | None = None, **config: Any
) -> AsyncIterator[tuple[str, GenerationEngine]]:
    engine = GenerationEngine(toy_tokenizer(), target, draft, EngineConfig(**config))
    async with over_grpc(GenerationServicer(engine)) as address:
        yield address, engine


async def test_generates() -> None:
    target = ToyTarget(num_cached=1)
    async with gateway(target, ToyDraft(wrong_every=3)) as (address, _), Client(address) as client:
        sampling = SamplingParams(temperature=0.0, max_tokens=20, logprobs=0, prompt_logprobs=0, stop_token_ids=(1,))
        parts = [part async for part in client.generate(token_ids=PROMPT, sampling=sampling, request_id="r7")]
        assert [token for part in parts for token in part.token_ids] == expected(PROMPT, 20)
        last = parts[-1]
        assert last.finish_reason is FinishReason.LENGTH and last.stop_reason is None
        assert last.usage is not None and last.usage.completion_tokens == 20 and last.usage.cached_tokens == 1
        assert last.speculation is not None and last.speculation.num_drafts > 0
        assert 0 < last.speculation.acceptance_rate < 1 < last.speculation.mean_acceptance_length
        assert last.speculation.acceptance is AcceptanceRule.BLOCK
        assert parts[0].seed is not None and parts[0].prompt_token_ids == ()
        assert all(part.request_id == "r7" for part in parts)
        assert sum(len(part.prompt_logprobs) for part in parts) == 3
        assert all(len(part.logprobs) == len(part.token_ids) == len(part.origins) for part in parts)


async def test_text_stops_and_completions() -> None:
    target = ToyTarget()
    async with gateway(target, ToyDraft()) as (address, _), Client(address) as client:
        parts = [part async for part in client.generate("the quick", n=3, temperature=0.0, max_tokens=9, stop="~~")]
        assert {part.index for part in parts} == {0, 1, 2} and target.opens[0].sampling.max_tokens == 9
        assert len(parts[0].prompt_token_ids) == len(target.opens[0].prompt_ids)
        stop = expected(target.opens[0].prompt_ids, 5)[4]
        parts = [
            part async for part in client.generate("the quick", max_tokens=9, stop_token_ids=[stop], speculate=False)
        ]
        assert parts[-1].finish_reason is FinishReason.STOP and parts[-1].stop_reason == stop
        assert parts[-1].speculation is not None and parts[-1].speculation.num_drafts == 0


async def test_defaults_are_the_models() -> None:
    info = target_info(default_sampling=SamplingParams(temperature=0.7, top_k=20, max_tokens=16))
    target = ToyTarget(info=info)
    async with gateway(target) as (address, _), Client(address) as client:
        async for _ in client.generate("the quick", top_k=5):
            pass
        sampling = target.opens[0].sampling
        assert (sampling.temperature, sampling.top_k, sampling.max_tokens) == (0.7, 5, 16)


async def test_errors_are_the_gateways() -> None:
    target = ToyTarget(step_s=0.05)
    async with (
        gateway(target, max_active=1, max_waiting=0) as (address, engine),
        Client(address, retry=NO_RETRY) as client,
    ):
        with pytest.raises(InvalidArgument) as invalid:
            _ = [part async for part in client.generate("x", temperature=-1.0, top_p=3.0)]
        assert [violation.field for violation in invalid.value.violations] == ["sampling.temperature", "sampling.top_p"]
        async with aclosing(client.generate(token_ids=PROMPT, max_tokens=200)) as parts:
            await anext(parts)
            with pytest.raises(ResourceExhausted) as exhausted:
                _ = [part async for part in client.generate("x")]
            assert exhausted.value.retry_after_ms == 1000
        await until(lambda: not any(link.open for link in target.links))  # the client went away
        await until(lambda: engine.admission.num_active == 0)
        with pytest.raises(DeadlineExceeded):
            _ = [part async for part in client.generate(token_ids=PROMPT, max_tokens=200, timeout=0.2)]
        await until(lambda: not any(link.open for link in target.links))
    async with Client("127.0.0.1:1") as client:
        with pytest.raises(Unavailable):
            await client.info(5)


async def test_a_trace_context_passes_through() -> None:
    target, context = ToyTarget(), "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with gateway(target, trust_traceparent=True) as (address, _), Client(address) as client:
        _ = [part async for part in client.generate("x", traceparent=context)]
    assert target.opens[0].traceparent == context


async def test_info() -> None:
    async with (
        gateway(ToyTarget(), ToyDraft(), num_draft_tokens=7, model_name="mine") as (address, _),
        Client(address) as client,
    ):
        info = await client.info()
        assert info.target.name == "mine" and info.draft is not None and info.draft.name == "toy-draft"
        assert info.num_draft_tokens == 7 and info.methods == ("draft_model",)
    async with gateway(ToyTarget()) as (address, _), Client(address) as client:
        assert (await client.info()).draft is None


async def test_without_an_event_loop() -> None:
    async with gateway(ToyTarget(), ToyDraft()) as (address, _):
        parts = await asyncio.to_thread(
            lambda: list(client_module.generate(address, token_ids=PROMPT, temperature=0.0, max_tokens=12))
        )
        assert [token for part in parts for token in part.token_ids] == expected(PROMPT, 12)
        with pytest.raises(InvalidArgument, match="max_tokens"):
            await asyncio.to_thread(lambda: list(client_module.generate(address, "x", max_tokens=0)))


def test_every_sampling_field_is_encoded() -> None:
    request = build_request(
        messages=[{"role": "user", "content": "hello"}],
        add_generation_prompt=False,
        logit_bias={3: 0.5},
        bad_words=["a"],
        bad_words_ids=[[1, 2]],
        allowed_token_ids=(4,),
        logprobs_mode=LogprobsMode.PROCESSED_LOGITS,
        structured_output=StructuredOutput(choice=("a", "b")),
        seed=7,
        min_tokens=None,
        output_ids=[[1]],
        acceptance=AcceptanceRule.COUPLED,
        num_draft_tokens=0,
    )
    sampling = request.sampling
    assert dict(sampling.logit_bias) == {3: 0.5} and sampling.bad_words_ids[0].ids == [1, 2] and sampling.seed == 7
    assert sampling.logprobs_mode == 4 and sampling.structured_output.choice.values == ["a", "b"]
    assert not sampling.HasField("max_tokens") and request.chat.omit_generation_prompt
    assert request.speculation.HasField("num_draft_tokens") and not request.speculation.HasField("enabled")
    assert request.speculation.acceptance == 2


@pytest.mark.parametrize(
    "options",
    [{}, {"prompt": "x", "token_ids": (1,)}, {"prompt": "x", "temprature": 1.0},
     {"prompt": "x", "sampling": SamplingParams(), "top_p": 1.0}],
)  # fmt: skip
def test_misuse_is_a_type_error(options: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        build_request(**options)


def test_an_enum_of_a_newer_gateway_reads_as_unspecified() -> None:
    answer = generation_pb2.GenerateResponse(token_ids=[5], origins=[9], finish_reason=8)  # type: ignore[list-item, arg-type]
    answer.speculation.acceptance = 7  # type: ignore[assignment]
    part = decode_response(answer)
    assert part.origins[0].name == "UNSPECIFIED"
    assert part.finish_reason is not None and part.finish_reason.name == "UNSPECIFIED"
    assert part.speculation is not None and part.speculation.acceptance is AcceptanceRule.AUTO


def test_an_unknown_option_names_the_near_one() -> None:
    with pytest.raises(TypeError, match=r"temprature \(is temperature meant\?\), zzz$"):
        build_request("x", zzz=1, temprature=1.0)


WRONG_TYPES: list[tuple[str, dict[str, Any]]] = [
    ("sampling.max_tokens: is a text; allowed: a whole number, 0 to 2**32 - 1", {"max_tokens": "a"}),
    ("sampling.max_tokens: is 1.5; allowed: a whole number, 0 to 2**32 - 1", {"max_tokens": 1.5}),
    ("sampling.temperature: is a text; allowed: a number", {"temperature": "hot"}),
    ("sampling.temperature: is a text; allowed: a number", {"sampling": SamplingParams(temperature="x")}),  # type: ignore[arg-type]
    ("sampling.seed: is -1; allowed: a whole number, 0 to 2**64 - 1", {"seed": -1}),
    ("sampling.stop: is 5; allowed: a text or a list of texts", {"stop": 5}),
    ("sampling.stop_token_ids: is a text; allowed: a list, each entry ", {"stop_token_ids": "abc"}),
    ("sampling.stop_token_ids: is 3; allowed: a list, each entry ", {"stop_token_ids": 3}),
    ("sampling.logit_bias: is a list; allowed: an object of token ids and numbers", {"logit_bias": [1]}),
    ("sampling.logprobs_mode: is 'raw'; allowed: LogprobsMode.RAW_LOGPROBS", {"logprobs_mode": "raw"}),
    ("sampling.structured_output: is a text; allowed: a StructuredOutput", {"structured_output": "json"}),
    ("speculation.acceptance: is 'foo'; allowed: AcceptanceRule.AUTO, ", {"acceptance": "foo"}),
    ("speculation.num_draft_tokens: is a text; allowed: a whole number", {"num_draft_tokens": "a"}),
    ("speculation.methods: is 3; allowed: a text or a list of texts", {"methods": 3}),
    ("model: is 3; allowed: a text of whole characters", {"model": 3}),
    ("request_id: is 5; allowed: a text", {"request_id": 5}),
    ("output_ids: is a list; allowed: a list of lists of token ids", {"output_ids": [["a"]]}),
    ("n: is 0; allowed: a whole number, 1 to 64", {"n": 0}),
    ("prompt: is 5; allowed: a text", {"prompt": 5}),
    ("token_ids: is a list; allowed: a list of token ids", {"prompt": None, "token_ids": ["a"]}),
    ("messages: is a text; allowed: a list of messages", {"prompt": None, "messages": "hello"}),
    ("messages[0]: has not the shape of a message; allowed: ", {"prompt": None, "messages": [{"role": "user"}]}),
]


@pytest.mark.parametrize(("message", "options"), WRONG_TYPES)
def test_a_wrong_type_is_refused_by_name(message: str, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument) as raised:
        build_request(**{"prompt": "x", **options})
    (violation,) = raised.value.violations
    assert str(violation).startswith(message)


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan"), "soon"])
async def test_a_timeout_that_is_over_is_refused(timeout: Any) -> None:
    async with Client("127.0.0.1:1") as client:
        with pytest.raises(InvalidArgument, match=r"^timeout: is .*; allowed: "):
            await client.info(timeout)
        with pytest.raises(InvalidArgument, match=r"^timeout: is .*; allowed: "):
            _ = [part async for part in client.generate("x", timeout=timeout)]
