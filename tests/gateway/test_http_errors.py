"""What HTTP refuses, and how: the words are those of the one validator, the shape is OpenAI's."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Sequence
from typing import Any, cast

import pytest
from openai import BadRequestError
from support.fakes import ToyDraft, ToyTarget, until
from support.gateways import PANICS, PROMPT, gateway, panicking_tokenizer, stream_events

from outrider.client import Client
from outrider.gateway.http.errors import http_status
from outrider.gateway.http.protocol import HttpOptions
from outrider.gateway.text.chat_template import ChatTemplate
from outrider.gateway.text.tokenizer import LONG_TEXT
from outrider.rpc.errors import Internal, InvalidArgument, ResourceExhausted, Unavailable
from outrider.rpc.messages import Failure, to_failure
from outrider.rpc.words.request import DRAFT_OPTIONS
from outrider.rpc.words.sampling_params import SamplingParams

BOTH = [
    ("temperature", -1.0),
    ("temperature", 101.0),
    ("top_p", 0.0),
    ("top_k", -2),
    ("min_p", 2.0),
    ("repetition_penalty", 0.0),
    ("presence_penalty", 3.0),
    ("frequency_penalty", -3.0),
    ("max_tokens", 254),
    ("max_tokens", 0),
    ("min_tokens", 21),
    ("logprobs", 21),
    ("truncate_prompt_tokens", 0),
]


async def test_one_validator_with_grpc() -> None:
    async with gateway() as served, served.client() as client, Client(served.grpc_address) as other:
        for field, value in BOTH:
            sampling = SamplingParams(**cast(Any, {"max_tokens": 20, field: value}))
            with pytest.raises(InvalidArgument) as raised:
                async for _ in other.generate(token_ids=tuple(PROMPT), sampling=sampling):
                    pass
            answer = await client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 20, field: value})
            error = answer.json()["error"]
            assert answer.status_code == 400 and error["type"] == "invalid_request_error"
            assert error["param"] == field == raised.value.violations[0].field.removeprefix("sampling.")
            code, problem = error["code"], f"{field}: {raised.value.violations[0].problem}"
            assert (error["message"] == problem and code is None) or (
                value == 254 and error["message"].startswith(problem) and code == "context_length_exceeded"
            )
        assert not served.target.opens


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": PANICS, "max_tokens": 1}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": PANICS}], "max_tokens": 1}),
        ("/tokenize", {"prompt": PANICS}),
        ("/tokenize", {"prompt": "x" * LONG_TEXT + PANICS}),
    ],
)
async def test_a_panic_of_the_tokenizers_library_is_its_request_s_alone(path: str, body: dict[str, Any]) -> None:
    """It is no Exception: what goes on after errors would not go on after it."""
    async with gateway(tokenizer=panicking_tokenizer()) as served, served.client() as client:
        answer = await client.post(path, json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["type"], error["code"]) == (500, "server_error", "tokenizer_panic")
        assert "tokenizers library" in error["message"]
        fine = {"prompt": "the quick fox", **({} if path == "/tokenize" else {"max_tokens": 1})}
        answer = await client.post("/v1/completions" if "chat" in path else path, json=fine)
        assert answer.status_code == 200


async def test_such_a_panic_is_internal_over_grpc() -> None:
    async with gateway(tokenizer=panicking_tokenizer()) as served, Client(served.grpc_address) as client:
        with pytest.raises(Internal, match="tokenizers library") as raised:
            async for _ in client.generate(PANICS, max_tokens=1):
                pass
    assert raised.value.reason == "TOKENIZER_PANIC"


# What is said: the field, or the whole message.
COMPLETIONS: list[tuple[str, dict[str, Any]]] = [
    ("prompt: is a number; allowed: a text, token ids, or a list of either", {"prompt": 7}),
    ("prompt: is empty; allowed: a text, token ids, or a list of either", {"prompt": []}),
    ("prompt: is missing; allowed: a text, token ids, or a list of either", {"prompt": None}),
    ("prompt[0]: is 1.5; allowed: a token id, 0 to 399", {"prompt": [1.5]}),
    ("prompt[1]: is a number; allowed: a text or a list of token ids", {"prompt": ["a", 7]}),
    ("stop: is 5; allowed: a text or a list of texts", {"stop": 5}),
    ("stop[0]: is null; allowed: a text", {"stop": [None]}),
    ("stop_token_ids[0]: is a text; allowed: a token id, 0 to 399", {"stop_token_ids": ["a"]}),
    ("temperature: is a text; allowed: a finite number", {"temperature": "hot"}),
    ("temperature: is a list; allowed: a finite number", {"temperature": []}),
    ("stream: is an object; allowed: true or false", {"stream": {}}),
    ("output_ids: is a text; allowed: a list", {"output_ids": "a"}),
    ("output_ids: has 2 entries; allowed: none, or as many as completions (1)", {"output_ids": [[1], [2]]}),
    ("output_ids: has 1 entries; allowed: none, or as many as completions (2)", {"output_ids": [1], "n": 2}),
    ("output_ids[1]: is a number; allowed: a list of token ids", {"output_ids": [[1], 2], "n": 2}),
    ("output_ids[1]: is 400; allowed: a token id, 0 to 399", {"output_ids": [1, 400]}),
    ("output_ids[1][0]: is a text; allowed: a token id, 0 to 399", {"output_ids": [[1], ["a"]], "n": 2}),
    ("output_ids: has 21 entries; allowed: at most max_tokens (20)", {"output_ids": [1] * 21}),
    ("output_ids: is given beside 2 prompts; allowed: one prompt", {"output_ids": [1], "prompt": ["a", "b"]}),
    (
        "output_ids: is given with echo, and the prompt was said; allowed: without echo",
        {"output_ids": [1], "echo": True},
    ),
    ("timeout_ms: is 0; allowed: a whole number, 1 to 86400000", {"timeout_ms": 0}),
    (
        "response_format.type: is 'xml'; allowed: text, json_object, json_schema, structural_tag",
        {"response_format": {"type": "xml"}},
    ),
    (
        "speculation.acceptance: is 'no'; allowed: auto, rejection, coupled, block",
        {"speculation": {"acceptance": "no"}},
    ),
    (
        "speculation.method: is 'medusa', a head that the target does not have; allowed: draft_model",
        {"speculation": {"method": "medusa"}},
    ),
    ("logit_bias[-1]: is for no token id; allowed: token ids, 0 to 399", {"logit_bias": {"-1": 1}}),
    ("logit_bias[x]: is for no token id; allowed: whole numbers as texts", {"logit_bias": {"x": 1}}),
    ("logit_bias[ 1 ]: is for no token id; allowed: whole numbers as texts", {"logit_bias": {" 1 ": 1}}),
    ("logit_bias[1_0]: is for no token id; allowed: whole numbers as texts", {"logit_bias": {"1_0": 1}}),
    ("logit_bias[01]: is for no token id; allowed: whole numbers as texts", {"logit_bias": {"01": 1}}),
    ("prompt", {"prompt": ""}),
    ("prompt", {"prompt": {"text": "x"}}),
    ("prompt[1]", {"prompt": [1, 400]}),
    ("prompt[1][1]", {"prompt": [[1], [1, 400]]}),
    ("prompt[1]", {"prompt": ["a", ""]}),
    ("prompt[1]", {"prompt": [[1], [True] * 300]}),
    ("prompt", {"prompt": ["a"] * 257}),
    ("prompt", {"prompt": [7] * 256}),
    ("prompt", {"prompt": "x" * 200_000}),
    ("max_tokens", {"max_tokens": "many"}),
    ("max_tokens", {"max_tokens": 1.5}),
    ("temperature", {"temperature": True}),
    ("temperature", {"temperature": 10**400}),
    ("seed", {"seed": "seven"}),
    ("seed", {"seed": 2**64}),
    ("n", {"n": 65}),
    ("n", {"n": 0}),
    ("n", {"n": "two"}),
    ("stop[0]", {"stop": [""]}),
    ("stop", {"stop": ["a"] * 17}),
    ("logit_bias", {"logit_bias": [1]}),
    ("logit_bias[400]", {"logit_bias": {"400": 1}}),
    ("logit_bias[5]", {"logit_bias": {"5": 101}}),
    ("logit_bias[5]", {"logit_bias": {"5": "much"}}),
    ("min_tokens", {"min_tokens": "few", "max_tokens": None}),
    ("ignore_eos", {"ignore_eos": 1}),
    ("stream", {"stream": "yes"}),
    ("stream_options", {"stream_options": {"include_usage": True}}),
    ("stream_options.include_usage", {"stream": True, "stream_options": {"include_usage": 1}}),
    ("cache_salt", {"cache_salt": "x" * 129}),
    ("cache_salt", {"cache_salt": 7}),
    ("priority", {"priority": "high"}),
    ("speculation", {"speculation": True}),
    ("speculation.enabled", {"speculation": {"enabled": "yes"}}),
    ("speculation.num_draft_tokens", {"speculation": {"num_draft_tokens": 129}}),
    ("speculation.mode", {"speculation": {"mode": "warp"}}),
    *(
        (f"speculation.{name}", {"speculation": {name: value}})
        for name, bounds in DRAFT_OPTIONS.items()
        for value in (bounds.high + 1, "high")
    ),
    ("speculation.mode", {"speculation": {"mode": 3}}),
    ("speculation.num_speculative_tokens", {"speculation": {"num_speculative_tokens": 3}}),
    ("echo", {"echo": 1}),
    ("prompt[1]", {"echo": True, "prompt": [1, 400]}),
    ("guided_json", {"guided_json": ""}),
    ("guided_regex", {"guided_regex": 7}),
    ("guided_choice", {"guided_choice": []}),
    ("guided_choice", {"guided_choice": ["a"], "response_format": {"type": "json_object"}}),
    ("structured_outputs", {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}),
    ("suffix", {"suffix": "end"}),
    ("best_of", {"best_of": 3}),
    ("response_format.json_schema.schema", {"response_format": {"type": "json_schema"}}),
    ("structured_outputs", {"structured_outputs": {}}),
    ("structured_outputs.json", {"structured_outputs": {"json": ""}}),
    ("allowed_token_ids", {"allowed_token_ids": []}),
    ("request_id", {"request_id": "a\nb"}),
]
CHAT: list[tuple[str, dict[str, Any]]] = [
    ("messages", {"messages": []}),
    ("messages", {"messages": "hello"}),
    ("messages[0]", {"messages": ["hello"]}),
    ("messages[0].content", {"messages": [{"role": "user", "content": 7}]}),
    ("messages[0].content[0]", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
    ("messages[0].tool_calls[0].function", {"messages": [{"role": "assistant", "tool_calls": [{}]}]}),
    ("messages", {"messages": [{"role": "user", "content": "the fox " * 400}]}),
    ("top_logprobs", {"top_logprobs": 2}),
    ("top_logprobs", {"logprobs": True, "top_logprobs": 21}),
    ("logprobs", {"logprobs": 2}),
    ("max_completion_tokens", {"max_completion_tokens": 0}),
    ("max_tokens", {"max_tokens": 1000}),
    ("tools[0]", {"tools": [{"type": "function"}]}),
    ("tool_choice", {"tool_choice": "required"}),
    ("modalities", {"modalities": ["text", "audio"]}),
]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_names_the_field(path: str) -> None:
    chat = path.endswith("chat/completions")
    base: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]} if chat else {"prompt": PROMPT}
    async with gateway(draft=ToyDraft()) as served, served.client() as client:
        for said, fields in CHAT if chat else COMPLETIONS:
            answer = await client.post(path, json={**base, "max_tokens": 20, **fields})
            error, param = answer.json()["error"], said.partition(": ")[0]
            assert (answer.status_code, error["param"]) == (400, param), (fields, error)
            assert error["message"].startswith(f"{param}: ") and said in (param, error["message"]), fields
            assert served.engine.admission.num_active == 0 and len(served.target.opens) == served.target.num_closed


async def test_the_message_names_every_field() -> None:
    """Those of the request, of sampling, of speculation and the prompt, in one refusal."""
    wrong = {"n": 0, "temperature": -1, "top_p": 3, "prompt": [400], "speculation": {"method": "x", "mode": "y"}}
    names = ["n", "speculation.mode", "speculation.method", "temperature", "top_p", "prompt[0]"]
    async with gateway(draft=ToyDraft()) as served, served.client() as client:
        error = (await client.post("/v1/completions", json=wrong)).json()["error"]
        assert re.findall(r"(?:^|; )([a-z_.]+(?:\[0\])?): is ", error["message"]) == names
        assert error["param"] == "n"
        wrong = {"prompt": PROMPT, "max_tokens": 254, "temperature": -1}
        error = (await client.post("/v1/completions", json=wrong)).json()["error"]
        assert error["message"].startswith("temperature: ") and "; max_tokens: is 254 after" in error["message"]


async def test_shapes_are_refused_together_and_by_their_place() -> None:
    wrong = {
        "messages": ["hello", {"content": "x"}, {"role": "user", "content": [{"type": "text", "text": 1}]}],
        "stream": 1,
    }
    async with gateway() as served, served.client() as client:
        error = (await client.post("/v1/chat/completions", json=wrong)).json()["error"]
        assert error["message"].split("; ") == [
            "stream: is 1", "allowed: true or false",
            "messages[0]: is a text", "allowed: an object",
            "messages[1].role: is missing", "allowed: a text",
            "messages[2].content[0]: is no text", 'allowed: {"type": "text", "text": ...}',
        ]  # fmt: skip


@pytest.mark.parametrize("field", ["content", "tool_calls"])
async def test_of_a_long_list_of_what_is_wrong_the_first_is_told(field: str) -> None:
    """A body has room for hundreds of thousands, each of whose errors would take more memory than it."""
    message = {"role": "user", field: [1] * 1000}
    async with gateway() as served, served.client() as client:
        refused = await client.post("/v1/chat/completions", json={"model": "toy", "messages": [message]})
    told = refused.json()["error"]
    assert refused.status_code == 400 and told["param"] == f"messages[0].{field}[0]" and "[1]" not in told["message"]


async def test_a_refused_conversation_says_nothing_of_the_server() -> None:
    async with gateway() as served, served.client() as client:

        async def message(messages: Any) -> str:
            answer = await client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 2})
            return str(answer.json()["error"]["message"])

        long = [{"role": "user", "content": "the fox " * 400}]
        assert await message([]) == "messages: is missing or empty; allowed: at least one message"
        assert " tokens; allowed: at most 255" in await message(long)
        template, tokenizer = served.engine.tokenizer.chat_template, served.engine.tokenizer
        try:
            tokenizer.chat_template = ChatTemplate("{{ raise_exception('no system') }}")
            refused = await message([{"role": "system", "content": "x"}])
            assert refused == "messages: the chat template refused the conversation: no system"
            tokenizer.chat_template = None
            assert tokenizer.name not in await message([{"role": "user", "content": "x"}])
        finally:
            tokenizer.chat_template = template


async def test_what_does_not_fit_says_so_in_openai_s_words() -> None:
    """Libraries that cut a conversation look for the code, or for the sentence."""
    long = "the fox " * 400
    async with gateway() as served, served.openai() as openai, served.client() as client:
        for body in ({"prompt": long}, {"prompt": [7] * 256}, {"prompt": [7] * 250, "max_tokens": 20}):
            error = (await client.post("/v1/completions", json=body)).json()["error"]
            assert (error["code"], error["type"]) == ("context_length_exceeded", "invalid_request_error")
            assert error["message"].endswith(". This model's maximum context length is 256 tokens.")
        with pytest.raises(BadRequestError) as raised:
            await openai.chat.completions.create(model="toy", messages=[{"role": "user", "content": long}])
        assert raised.value.code == "context_length_exceeded" and raised.value.param == "messages"
        async with Client(served.grpc_address) as other:
            with pytest.raises(InvalidArgument) as refused:
                async for _ in other.generate(long):
                    pass
            assert refused.value.reason == "CONTEXT_LENGTH_EXCEEDED"


@pytest.mark.parametrize(
    ("content", "content_type", "param"),
    [
        (b"{", "application/json", "body"),
        (b"[1]", "application/json", "body"),
        (b"[" * 100_000, "application/json", "body"),
        (b'{"prompt": "\\ud800"}', "application/json", "body"),
        (b"\xff\xfe", "application/json", "body"),
        (b'{"prompt": "\xed\xa0\x80"}', "application/json", "body"),  # half a surrogate pair, as bytes
        ('{"prompt": "x"}'.encode("utf-16"), "application/json", "body"),
        (b'{"prompt": "x", "user": NaN}', "application/json", "body"),
        (b'{"prompt": "x", "user": 1e400}', "application/json", "body"),
        (b'{"prompt": "x", "user": ' + b"[" * 101 + b"]" * 101 + b"}", "application/json", "body"),
        (b'{"prompt": "x"}', "text/plain", "content-type"),
    ],
)
async def test_bodies_that_are_no_request(content: bytes, content_type: str, param: str) -> None:
    async with gateway() as served, served.client() as client:
        answer = await client.post("/v1/completions", content=content, headers={"content-type": content_type})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("announced", [True, False])
async def test_a_body_that_is_too_large(announced: bool) -> None:
    large = b'{"prompt": "x"}' + b" " * 1000

    async def chunks() -> AsyncIterator[bytes]:
        yield large

    async with gateway(options=HttpOptions(max_body_bytes=1000)) as served, served.client() as client:
        headers = {"content-type": "application/json"}
        answer = await client.post("/v1/completions", content=large if announced else chunks(), headers=headers)
        assert answer.status_code == 413 and "1000 bytes" in answer.json()["error"]["message"]


async def test_prompts_of_one_request_are_admitted_as_one() -> None:
    async with gateway(max_active=2, max_waiting=2) as served, served.client() as client:
        body = {"prompt": [PROMPT] * 3, "n": 2, "max_tokens": 4}
        answer = await client.post("/v1/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n")
        assert "6 completions; allowed: at most 4 sequences" in answer.json()["error"]["message"]
        assert not served.target.opens and served.engine.admission.num_tokens == 0
        answer = await client.post("/v1/completions", json={**body, "n": 1, "prompt": [PROMPT] * 4})
        assert len(answer.json()["choices"]) == 4


async def test_unknown_fields_are_ignored_and_empty_ones_ask_for_nothing() -> None:
    async with gateway() as served, served.client() as client:
        harmless = {"tools": [], "user": "u", "best_of": 1, "echo": False, "made_up": {"x": 1}, "stop": None, "n": None}
        answer = await client.post("/v1/completions", json={"prompt": PROMPT, **harmless})
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 16


async def test_models_paths_and_methods() -> None:
    async with gateway() as served, served.client() as client:
        wrong = await client.post("/v1/completions", json={"prompt": PROMPT, "model": "gpt-4"})
        assert wrong.status_code == 404 and wrong.json()["error"]["code"] == "model_not_found"
        assert wrong.json()["error"]["param"] == "model" and "toy" in wrong.json()["error"]["message"]
        assert (await client.get("/v1/models/none")).status_code == 404
        card = (await client.get("/v1/models/toy")).json()
        assert card["id"] == "toy" and card["speculation"]["mode"] == "sequential"
        for method, path, status in (
            ("GET", "/v1/completions", 405),
            ("GET", "/nothing", 404),
            ("POST", "/health", 405),
        ):
            answer = await client.request(method, path)
            assert answer.status_code == status and answer.json()["error"]["message"]


async def test_too_many_requests_say_when_to_come_back() -> None:
    async with gateway(ToyTarget(step_s=0.02), max_active=1, max_waiting=0) as served, served.client() as client:
        body = {"prompt": PROMPT, "max_tokens": 100, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as running:
            assert running.status_code == 200
            refused = await client.post("/v1/completions", json={"prompt": PROMPT})
            assert refused.status_code == 429
            assert (refused.headers["retry-after"], refused.headers["retry-after-ms"]) == ("1", "1000")
            error = refused.json()["error"]
            assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        await until(lambda: served.engine.admission.num_active == 0)
        async with served.openai() as openai:
            answer = await openai.completions.create(model="toy", prompt=PROMPT, max_tokens=2)
            assert answer.usage is not None and answer.usage.completion_tokens == 2


async def test_a_target_that_is_full_is_429() -> None:
    target = ToyTarget(full=Failure(0, 8, "256 sequences are open already", "BUSY", 1500))
    async with gateway(target) as served, served.client() as client:
        refused = await client.post("/v1/completions", json={"prompt": PROMPT})
        assert refused.status_code == 429 and refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert (refused.headers["retry-after"], refused.headers["retry-after-ms"]) == ("2", "1500")
        assert len(target.opens) == 1


async def test_a_deadline_ends_a_request() -> None:
    async with gateway(ToyTarget(step_s=0.05)) as served, served.client() as client:
        late = await client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 200, "timeout_ms": 300})
        assert late.status_code == 504 and late.json()["error"]["code"] == "deadline_exceeded"
        assert served.target.num_closed == len(served.target.opens) == 1


async def test_an_error_in_mid_stream_is_an_event() -> None:
    async with gateway(ToyTarget(step_s=0.01)) as served, served.client() as client:
        body = {"prompt": PROMPT, "max_tokens": 200, "stream": True, "timeout_ms": 300}
        *_, before, error, done = await stream_events(client, "/v1/completions", body)
        assert json.loads(before)["choices"] and done == "[DONE]"
        assert json.loads(error)["error"]["code"] == "deadline_exceeded"


async def test_what_the_target_refuses_keeps_its_field() -> None:
    """A target's refusal crosses the wire as text; HTTP still names the field."""
    refusal = InvalidArgument("sampling.structured_output: is not supported by this target; leave it unset")
    target = ToyTarget()
    async with gateway(target) as served, served.client() as client:

        def refuses(tokens: Sequence[int], prompt_len: int) -> int:
            target.links[-1].emit(to_failure(0, refusal))
            return 7

        target.rule = refuses
        body = {"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_object"}}
        answer = await client.post("/v1/chat/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "response_format")


async def test_no_target_is_503() -> None:
    async with gateway(ToyTarget(available=False), ready=False) as served, served.client() as client:
        answer = await client.post("/v1/completions", json={"prompt": PROMPT})
        assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["type"] == "service_unavailable_error"
        statuses = [(await client.get(path)).status_code for path in ("/livez", "/readyz", "/health")]
        assert statuses == [200, 503, 503]


async def test_a_bug_says_nothing_of_itself(caplog: pytest.LogCaptureFixture) -> None:
    async with gateway() as served, served.client() as client:
        served.engine.verifier = None  # type: ignore[assignment]
        answer = await client.post("/v1/completions", json={"prompt": PROMPT})
        assert answer.status_code == 500 and answer.json()["error"]["type"] == "server_error"
        assert "verifier" not in answer.text and "AttributeError" in caplog.text


def test_statuses() -> None:
    assert http_status(Unavailable("gone")) == 503
    assert http_status(ResourceExhausted("busy", retry_after_ms=1)) == 429
    assert http_status(ResourceExhausted("larger than the cache", reason="DOES_NOT_FIT")) == 400


async def test_a_key_that_stands_twice_is_refused() -> None:
    """At any depth, in every endpoint: readers differ in which of the two they take."""
    twice = '{"model": "toy", "prompt": "x", "temperature": 0, "speculation": {"mode": "auto", "mode": "chains"}}'
    async with gateway() as served, served.client() as client:
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize"):
            answer = await client.post(path, content=twice, headers={"content-type": "application/json"})
            assert answer.status_code == 400
            assert answer.json()["error"]["message"] == (
                "body: has the key 'mode' twice; allowed: each key of an object once"
            )
