"""Clients that go away, read slowly, or ask from another page.

The npm `openai` client against the gateway. `npm install --global openai`, or a NODE_PATH that has it, makes this
test run."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from support.fakes import ToyDraft, ToyTarget, expected, target_info, until
from support.gateways import PROMPT, gateway, stream_events, text_of
from support.tools import tool_tokenizer, writes

from outrider.gateway.http.app import build_app
from outrider.gateway.http.protocol import HttpOptions

LIVE = {"prompt": "x", "max_tokens": "2"}
LONG: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 240, "temperature": 0}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
async def test_a_client_that_goes_away_ends_its_sequences(stream: bool, n: int) -> None:
    target, draft = ToyTarget(step_s=0.02), ToyDraft()
    async with gateway(target, draft) as served, served.client() as client:
        request = client.build_request("POST", "/v1/completions", json={**LONG, "stream": stream, "n": n})
        sending = asyncio.create_task(client.send(request, stream=True))
        if stream:
            response = await sending
            async with aclosing(response.aiter_lines()) as lines:
                await anext(lines)
            await response.aclose()
        else:
            await until(lambda: len(target.opens) == n)
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
        await until(lambda: target.num_closed == draft.num_closed == n)
        await until(lambda: served.engine.admission.num_active == 0)
        aborted = f'request_success_total{{finished_reason="abort"}} {n}.0'
        await until(lambda: aborted in served.engine.metrics.render("")[0].decode())


async def test_a_client_that_goes_away_while_it_waits_leaves_the_queue() -> None:
    async with gateway(ToyTarget(step_s=0.02), max_active=1) as served, served.client() as client:
        async with client.stream("POST", "/v1/completions", json={**LONG, "stream": True}):
            waiting = asyncio.create_task(client.post("/v1/completions", json=LONG))
            await until(lambda: served.engine.admission.num_waiting == 1)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            await until(lambda: served.engine.admission.num_waiting == 0)
            assert served.engine.admission.num_active == 1 and len(served.target.opens) == 1
        await until(lambda: served.engine.admission.num_active == 0)


async def test_a_client_that_never_reads_is_granted_no_credit() -> None:
    """Straight to the application, whose third send never returns, as with a full socket."""
    target = ToyTarget(info=target_info(max_model_len=100_000))
    async with gateway(target) as served:
        stuck, never = asyncio.Event(), asyncio.Event()
        body = [{"type": "http.request", "body": b'{"prompt": [11], "max_tokens": 90000, "stream": true}'}]

        async def receive() -> dict[str, Any]:
            if body:
                return body.pop()
            await never.wait()
            return {"type": "http.disconnect"}

        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)
            if len(sent) == 3:
                stuck.set()
                await never.wait()

        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers, "query_string": b""}
        task = asyncio.create_task(build_app(served.engine)({**scope, "root_path": ""}, receive, send))  # type: ignore[arg-type]
        await stuck.wait()
        sequence = target.links[0].sequence
        before = -1
        while before != len(sequence.tokens):
            before = len(sequence.tokens)
            await asyncio.sleep(0.1)
        assert before < 600, "the target went on although nobody reads"
        never.set()
        await task
        await until(lambda: target.num_closed == 1)


async def test_a_silent_stream_says_that_it_lives() -> None:
    """Before the first token, between tokens, and to a live page; clients see tokens alone."""
    options = HttpOptions(sse_keep_alive_s=0.03)
    target = ToyTarget(step_s=0.4)
    async with gateway(target, options=options) as served, served.client() as client, served.openai() as openai:
        body = {"prompt": PROMPT, "max_tokens": 2, "temperature": 0, "stream": True}
        for method, path, ask in (("POST", "/v1/completions", {"json": body}), ("GET", "/live", {"params": LIVE})):
            async with client.stream(method, path, **ask) as response:
                text = (await response.aread()).decode()
            kinds = [block.partition(":")[0] for block in text.split("\n\n") if block]
            data = "data" if path.startswith("/v1") else "event"
            assert kinds[:2] == ["", ""] and "" in kinds[kinds.index(data) : -1], text
            assert text.count(": keep-alive\n\n") == kinds.count("") < 100
        stream = await openai.completions.create(model="toy", prompt=PROMPT, max_tokens=2, stream=True)
        assert len([chunk async for chunk in stream]) == 2


async def test_an_error_after_a_sign_of_life_is_an_event() -> None:
    options = HttpOptions(sse_keep_alive_s=0.05)
    async with gateway(ToyTarget(step_s=1), options=options) as served, served.client() as client:
        body = {"prompt": PROMPT, "stream": True, "timeout_ms": 150}
        comment, error, done = (await stream_events(client, "/v1/completions", body))[-3:]
        assert comment == ": keep-alive" and done == "[DONE]"
        assert json.loads(error)["error"]["code"] == "deadline_exceeded"
        body = {**body, "temperature": -1}
        assert (await client.post("/v1/completions", json=body)).status_code == 400


async def test_who_goes_away_before_the_first_token_ends_its_sequence() -> None:
    target = ToyTarget(step_s=30)
    async with gateway(target, options=HttpOptions(sse_keep_alive_s=0.05)) as served, served.client() as client:
        async with client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response:
            assert await anext(response.aiter_lines()) == ": keep-alive"
        await until(lambda: target.num_closed == len(target.opens) == 1)


async def test_an_answer_s_body_does_not_wait_for_its_head() -> None:
    """They are two writes: with Nagle's algorithm the second waits for the first's acknowledgement, 40 ms."""
    async with gateway() as served:
        assert served.http._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def test_another_site_s_page_cannot_ask() -> None:
    async with gateway() as served, served.client() as client:
        foreign = await client.get("/live", params={"prompt": "x"}, headers={"sec-fetch-site": "cross-site"})
        assert foreign.status_code == 403 and not served.target.opens
        form = await client.post("/v1/completions", content='{"prompt": "x"}', headers={"content-type": "text/plain"})
        assert form.status_code == 400 and not served.target.opens


SCRIPT = """
const OpenAI = require("openai");
const client = new OpenAI({ baseURL: process.argv[1], apiKey: "none", maxRetries: 0 });
(async () => {
  const out = {};
  const ask = { model: "toy", prompt: [11, 12, 13], max_tokens: 20, temperature: 0 };
  out.whole = await client.completions.create({ ...ask, logprobs: 1, speculation: { num_draft_tokens: 2 } });
  out.pieces = [];
  const pieces = await client.completions.create({ ...ask, stream: true });
  for await (const chunk of pieces) out.pieces.push(chunk.choices[0].text);
  const chat = { model: "toy", messages: [{ role: "user", content: "hello" }], max_completion_tokens: 6, n: 2 };
  out.chat = "";
  const options = { stream: true, stream_options: { include_usage: true } };
  const stream = await client.chat.completions.create({ ...chat, ...options });
  for await (const chunk of stream) {
    for (const choice of chunk.choices) if (choice.index === 1) out.chat += choice.delta.content || "";
    if (chunk.usage) out.usage = chunk.usage;
  }
  out.models = (await client.models.list()).data.map((model) => model.id);
  try {
    await client.completions.create({ ...ask, temperature: -1 });
  } catch (error) {
    out.refused = { kind: error.constructor.name, status: error.status, param: error.param, type: error.type };
  }
  console.log(JSON.stringify(out));
})();
"""


@pytest.fixture(scope="module")
def node(repository: Path) -> tuple[str, dict[str, str]]:
    program = shutil.which("node")
    if program is None:
        pytest.skip("no node on this machine")
    prefixes = (Path(program).parents[1] / "lib", Path("/usr/local/lib"), repository)
    places = [os.environ.get("NODE_PATH", ""), *(str(prefix / "node_modules") for prefix in prefixes)]
    environment = {**os.environ, "NODE_PATH": os.pathsep.join(filter(None, places))}
    found = subprocess.run([program, "-e", 'require("openai")'], env=environment, capture_output=True, timeout=60)
    if found.returncode:
        pytest.skip("node has no package openai: npm install --global openai")
    return program, environment


TOOLS_SCRIPT = """
const OpenAI = require("openai");
const client = new OpenAI({ baseURL: process.argv[1], apiKey: "none", maxRetries: 0 });
(async () => {
  const tools = [{ type: "function", function: { name: "add", parameters: { type: "object" } } }];
  const ask = { model: "toy", messages: [{ role: "user", content: "hi" }], temperature: 0, max_tokens: 60, tools };
  const whole = (await client.chat.completions.create(ask)).choices[0];
  const streamed = [];
  for await (const chunk of await client.chat.completions.create({ ...ask, stream: true })) {
    for (const call of chunk.choices[0].delta.tool_calls || []) {
      streamed[call.index] = streamed[call.index] || { name: call.function.name, arguments: "" };
      streamed[call.index].arguments += call.function.arguments;
    }
  }
  const answer = { role: "tool", tool_call_id: whole.message.tool_calls[0].id, content: "3" };
  const messages = [...ask.messages, whole.message, answer];
  const next = await client.chat.completions.create({ ...ask, messages, tool_choice: "none" });
  console.log(JSON.stringify({ whole, streamed, next: next.usage.prompt_tokens }));
})();
"""


async def test_the_npm_client_calls_tools(node: tuple[str, dict[str, str]]) -> None:
    program, environment = node
    output = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    toy = ToyTarget(rule=writes("hermes", output))
    async with gateway(toy, tokenizer=tool_tokenizer("hermes")) as served:
        process = await asyncio.create_subprocess_exec(
            *(program, "-e", TOOLS_SCRIPT, f"{served.url}/v1"), env=environment, stdout=-1, stderr=-1
        )
        out, err = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode == 0, err.decode()
        answer: dict[str, Any] = json.loads(out)
        assert answer["whole"]["finish_reason"] == "tool_calls"
        assert answer["whole"]["message"]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
        assert answer["streamed"] == [{"name": "add", "arguments": '{"a": 1}'}]
        assert answer["next"] == len(toy.opens[-1].prompt_ids)


async def test_the_npm_client(node: tuple[str, dict[str, str]]) -> None:
    program, environment = node
    async with gateway(ToyTarget(), ToyDraft(wrong_every=3)) as served:
        process = await asyncio.create_subprocess_exec(
            *(program, "-e", SCRIPT, f"{served.url}/v1"), env=environment, stdout=-1, stderr=-1
        )
        out, err = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode == 0, err.decode()
        answer: dict[str, Any] = json.loads(out)
        text = text_of(expected(PROMPT, 20))
        whole = answer["whole"]["choices"][0]
        assert whole["text"] == "".join(answer["pieces"]) == text and len(answer["pieces"]) > 2
        assert len(whole["logprobs"]["tokens"]) == 20 and whole["speculation"]["num_accepted_tokens"] > 0
        assert answer["chat"] and answer["usage"]["completion_tokens"] == 12 and answer["models"] == ["toy"]
        assert answer["refused"] == {
            "kind": "BadRequestError",
            "status": 400,
            "param": "temperature",
            "type": "invalid_request_error",
        }
