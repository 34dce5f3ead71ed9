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
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from support.fakes import ToyDraft, ToyTarget, expected, target_info, until
from support.gateways import PROMPT, gateway, stream_events, text_of, toy_tokenizer
from support.tools import tool_tokenizer, writes

from outrider.gateway.auth import Tokens
from outrider.gateway.engine import EngineConfig, GenerationEngine
from outrider.gateway.http import hardening, protocol
from outrider.gateway.http import server as http_server
from outrider.gateway.http.protocol import HttpOptions
from outrider.gateway.http.server import HttpServer, build_app
from outrider.gateway.text.tokenizer import TextStream
from outrider.rpc.messages import Failure
from outrider.rpc.words.sampling_params import CAPABILITIES
from outrider.rpc.words.structured import StructuredOutput

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
            async with aclosing(cast(AsyncGenerator[str, None], response.aiter_lines())) as lines:
                await anext(lines)
            await response.aclose()
        else:
            await until(lambda: len(target.opens) == n)
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
        await until(lambda: target.num_closed == draft.num_closed == n)
        await until(lambda: served.engine.admission.num_active == 0)
        aborted = f'request_success_total{{finished_reason="abort"}} {n}.0'
        await until(lambda: aborted in served.metrics.render("")[0].decode())


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
        task = asyncio.create_task(build_app(served.engine)({**scope, "root_path": ""}, receive, send))
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
    target = ToyTarget(step_s=60.0)  # it takes its steps when it is told to
    async with gateway(target, options=options) as served, served.client() as client, served.openai() as openai:
        body = {"prompt": PROMPT, "max_tokens": 2, "temperature": 0, "stream": True}
        for method, path, ask in (("POST", "/v1/completions", {"json": body}), ("GET", "/live", {"params": LIVE})):
            lines = list[str]()
            async with client.stream(method, path, **ask) as response:
                async for line in response.aiter_lines():
                    lines.append(line)
                    if line == ": keep-alive" and lines.count(line) % 2 == 0:
                        for link in target.links:
                            link.sequence.step()
            text = "\n".join([*lines, ""])
            kinds = [block.partition(":")[0] for block in text.split("\n\n") if block]
            data = "data" if path.startswith("/v1") else "event"
            assert kinds[:2] == ["", ""] and "" in kinds[kinds.index(data) : -1], text
            assert text.count(": keep-alive\n\n") == kinds.count("") < 100
        target.step_s = 0.1
        stream = await openai.completions.create(model="toy", prompt=PROMPT, max_tokens=2, stream=True)
        assert len([chunk async for chunk in stream]) == 2


async def test_an_error_after_a_sign_of_life_is_an_event() -> None:
    options, target = HttpOptions(sse_keep_alive_s=0.05), ToyTarget(step_s=60.0)
    async with gateway(target, options=options) as served, served.client() as client:
        body, lines = {"prompt": PROMPT, "stream": True}, list[str]()
        async with client.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                lines += [line.removeprefix("data: ")] if line else []
                if lines == [": keep-alive"]:
                    target.links[0].emit(Failure(0, 4, "the request's time ran out"))
        comment, error, done = lines[-3:]
        assert comment == ": keep-alive" and done == "[DONE]"
        assert json.loads(error)["error"]["code"] == "deadline_exceeded"
        body = {**body, "temperature": -1}
        assert (await client.post("/v1/completions", json=body)).status_code == 400


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
async def test_a_stream_that_the_gateway_cannot_go_on_with_ends_with_an_error(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Since it stops, and its grace period is over; or by a bug."""
    field = {"/v1/completions": "prompt", "/v1/chat/completions": "messages", "/v1/responses": "input"}[path]
    body: dict[str, Any] = {field: [{"role": "user", "content": "x"}] if field == "messages" else "x", "stream": True}
    body |= {"max_output_tokens": 200} if field == "input" else {"max_tokens": 200, "ignore_eos": True}

    async def last_words(bug: bool) -> str:
        async with gateway(ToyTarget(step_s=0.05)) as served, served.client() as client:
            async with client.stream("POST", path, json=body) as response:
                lines = response.aiter_lines()
                seen = [await anext(lines) for _ in range(6)]
                if bug:
                    monkeypatch.setattr(TextStream, "push", None)
                stopping = None if bug else asyncio.create_task(served.http.stop(0))
                seen += [line async for line in lines]
            if stopping is not None:
                await stopping
            monkeypatch.undo()
        return "\n".join(seen[6:])

    for bug, said in ((False, "the gateway stops"), (True, "unexpected TypeError")):
        words = await last_words(bug)
        assert said in words and ("response.failed" if field == "input" else "[DONE]") in words


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


def events_of(text: str) -> list[tuple[str, Any]]:
    """The named events of a stream, with their data."""
    blocks = [block.split("\n") for block in text.split("\n\n") if block.startswith("event")]
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in blocks]


async def test_a_live_page_learns_what_a_constraint_did() -> None:
    capabilities = (*CAPABILITIES, "sampling.structured_output")
    target = ToyTarget(info=replace(target_info(), capabilities=capabilities), num_forced=2)
    async with gateway(target, ToyDraft(wrong_every=5)) as served, served.client() as client:
        asked = {**LIVE, "max_tokens": "40", "temperature": "0"}
        answer = await client.get("/live", params={**asked, "constraint": "json", "match": '{"type": "object"}'})
        (_, start), *rounds, (name, end) = events_of(answer.text)
        assert target.opens[0].sampling.structured_output == StructuredOutput(json_schema='{"type": "object"}')
        assert start["constraint"] == "json_schema" and name == "end"
        for one, total in (("forced", "num_forced_tokens"), ("forced_accepted", "num_accepted_forced_tokens")):
            assert sum(told[one] for _, told in rounds) == end[total] > 0
        assert [told["compile_us"] for _, told in rounds] == [1500, *[0] * (len(rounds) - 1)]
        assert {told["mask_us"] for _, told in rounds} == {20}

        await client.get("/live", params={**asked, "constraint": "json_object"})
        assert target.opens[1].sampling.structured_output == StructuredOutput(json_object=True)
        (_, start), *rounds, _ = events_of((await client.get("/live", params={**asked, "constraint": ""})).text)
        assert start["constraint"] is None and not any(told["forced"] or told["mask_us"] for _, told in rounds)
        ((name, refusal),) = events_of((await client.get("/live", params={**asked, "constraint": "rhyme"})).text)
        assert name == "failure" and "structured_outputs" in refusal["message"]


async def test_another_site_s_page_cannot_ask() -> None:
    async with gateway() as served, served.client() as client:
        foreign = await client.get("/live", params={"prompt": "x"}, headers={"sec-fetch-site": "cross-site"})
        assert foreign.status_code == 403 and not served.target.opens
        form = await client.post("/v1/completions", content='{"prompt": "x"}', headers={"content-type": "text/plain"})
        assert form.status_code == 400 and not served.target.opens


SITE = "https://app.example.com"


async def test_pages_of_the_sites_that_are_allowed_may_ask(tmp_path: Path) -> None:
    """None by default; with tokens too: who asks whether it may ask shows none."""
    wants = {"origin": SITE, "access-control-request-method": "POST"}
    wants["access-control-request-headers"] = "authorization,content-type,x-request-id"
    async with gateway() as served, served.client() as client:
        assert (await client.options("/v1/completions", headers=wants)).status_code == 405
        answer = await client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 1}, headers=wants)
        assert not [name for name in answer.headers if name.startswith("access-control")]
    (tmp_path / "tokens.yaml").write_text("alice: alice-has-this-token")
    engine: Any = GenerationEngine(toy_tokenizer(), ToyTarget(), None, EngineConfig())
    made = build_app(engine, options=HttpOptions(allowed_origins=(SITE,)), tokens=Tokens(tmp_path / "tokens.yaml"))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=made), base_url="http://gateway.example") as client:
        may = await client.options("/v1/completions", headers=wants)
        assert may.status_code == 200 and may.headers["access-control-allow-origin"] == SITE
        assert may.headers["access-control-allow-headers"] == wants["access-control-request-headers"]
        other = await client.options("/v1/completions", headers=wants | {"origin": "https://evil.example"})
        assert other.status_code == 400 and "access-control-allow-origin" not in other.headers
        for token, status in (("alice-has-this-token", 200), ("nobody", 401)):
            given = {"origin": SITE, "authorization": f"Bearer {token}"}
            answer = await client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 1}, headers=given)
            assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (status, SITE)
        live = {"origin": SITE, "sec-fetch-site": "cross-site", "authorization": "Bearer alice-has-this-token"}
        assert (await client.get("/live", params=LIVE, headers=live)).status_code == 403


async def test_a_page_whose_name_stands_for_this_machine_cannot_ask(tmp_path: Path) -> None:
    """DNS rebinding: to the browser it is one site, so that neither the page's origin nor the content type is odd."""
    async with gateway() as served, served.client() as client:
        port = served.http.address.rpartition(":")[2]
        for host in ("evil.example", f"evil.example:{port}", "localhost.evil.example", "127.0.0.1.evil.example"):
            for path in ("/v1/completions", "/tokenize"):
                answer = await client.post(path, json={"prompt": PROMPT}, headers={"host": host})
                assert answer.status_code == 421 and not served.target.opens, host
                assert answer.json()["error"]["type"] == "invalid_request_error"
                assert f"host: is '{host}'; allowed: localhost" in answer.json()["error"]["message"]
            for path in ("/metrics", "/v1/models", "/readyz"):
                assert (await client.get(path, headers={"host": host})).status_code == 421, host
        for host in ("localhost", f"LocalHost:{port}", f"127.0.0.1:{port}", "[::1]", f"[::1]:{port}"):
            assert (await client.get("/v1/models", headers={"host": host})).status_code == 200, host
        reader, writer = await raw(served.http.address, b"GET /readyz HTTP/1.0\r\n\r\n")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        writer.close()


async def test_who_has_a_token_or_is_reached_by_others_is_called_by_any_name(tmp_path: Path) -> None:
    """No page knows the token, and a gateway for others has a name that is not known here."""
    tokens = tmp_path / "tokens.yaml"
    tokens.write_text("alice: alice-has-this-token")
    engine: Any = GenerationEngine(toy_tokenizer(), ToyTarget(), None, EngineConfig())
    for listen, known, status in (("127.0.0.1:0", Tokens(tokens), 401), ("0.0.0.0:0", None, 200)):
        http = HttpServer(engine, listen, grace_s=1, tokens=known)
        await http.start()
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{http.address.rpartition(':')[2]}") as client:
            assert (await client.get("/v1/models", headers={"host": "models.example"})).status_code == status
        await http.stop(0)


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
    prefixes = (Path(program).parents[1] / "lib", Path("/usr/local/lib"), repository, repository / "build/clients/node")
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


async def test_what_is_for_operators_is_not_at_an_address_for_all() -> None:
    async with gateway(options=HttpOptions(operator_paths=False)) as served, served.client() as client:
        for path in ("/", "/live?prompt=x", "/metrics"):
            assert (await client.get(path)).status_code == 404
        assert (await client.get("/readyz")).status_code == 200
        assert (await client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 1})).status_code == 200


async def raw(address: str, sent: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(sent)
    return reader, writer


@pytest.mark.parametrize("sent", [b"", b"GET /readyz HTTP/1.1\r\nhost: localhost\r\n", b"POST /v1/comp"])
async def test_a_head_that_does_not_come_ends_its_connection(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardening, "HEAD_S", 0.3)
    async with gateway() as served:
        reader, writer = await raw(served.http.address, sent)
        assert await asyncio.wait_for(reader.read(), 20) == b""
        writer.close()


async def test_one_that_drips_after_a_good_request_does_not_stay_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardening, "HEAD_S", 0.3)
    async with gateway() as served:
        good = b"GET /readyz HTTP/1.1\r\nhost: localhost\r\n\r\n"
        reader, writer = await raw(served.http.address, good)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        await asyncio.sleep(0.6)
        writer.write(good)  # the first head's time does not count
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        ended = asyncio.create_task(reader.read())
        for _ in range(200):
            writer.write(b"G")
            await asyncio.wait((ended,), timeout=0.1)
            if ended.done():
                break
        assert ended.done() and not ended.exception()
        writer.close()


async def test_a_connection_that_asks_nothing_more_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "KEEP_ALIVE_S", 1)
    async with gateway() as served:
        reader, writer = await raw(served.http.address, b"GET /readyz HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        assert await asyncio.wait_for(reader.read(), 20) == b""
        writer.close()


async def test_a_body_that_does_not_come_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "BODY_S", 0.2)
    async with gateway() as served:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        head += b"content-length: 9\r\n\r\n{"
        reader, writer = await raw(served.http.address, head)
        assert (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)).startswith(b"HTTP/1.1 408")
        writer.close()


@pytest.mark.parametrize(
    ("version", "headers"),
    [
        ("1.1", "content-length: 4\r\ntransfer-encoding: chunked"),
        ("1.1", "Transfer-Encoding: Chunked\r\nContent-Length: 4"),
        ("1.1", "content-length: 0\r\ntransfer-encoding: chunked"),
        ("1.0", "connection: keep-alive\r\ntransfer-encoding: chunked"),
    ],
)
async def test_what_ends_in_two_ways_is_refused_and_nothing_behind_it_is_read(version: str, headers: str) -> None:
    """A proxy that went by the length took what follows for the body's rest."""
    async with gateway() as served:
        hidden = "GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n"
        head = f"POST /v1/completions HTTP/{version}\r\nhost: localhost\r\n{headers}\r\n\r\n"
        reader, writer = await raw(served.http.address, f"{head}0\r\n\r\n{hidden}".encode())
        answer = (await asyncio.wait_for(reader.read(), 20)).decode()
        assert answer.startswith("HTTP/1.1 400") and "connection: close" in answer.lower()
        assert answer.count("HTTP/1.1") == 1
        assert json.loads(answer.partition("\r\n\r\n")[2])["error"]["message"].startswith("transfer-encoding: ")
        writer.close()


async def test_a_body_in_chunks_is_taken() -> None:
    async with gateway() as served:
        head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ntransfer-encoding: chunked"
        head += "\r\ncontent-type: application/json"
        body = json.dumps({"prompt": PROMPT, "max_tokens": 1})
        reader, writer = await raw(served.http.address, f"{head}\r\n\r\n{len(body):x}\r\n{body}\r\n0\r\n\r\n".encode())
        assert (await asyncio.wait_for(reader.read(), 20)).startswith(b"HTTP/1.1 200")
        writer.close()


async def test_a_long_stream_is_not_cut_by_the_times_of_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardening, "HEAD_S", 2.0)
    monkeypatch.setattr(protocol, "BODY_S", 2.0)
    async with gateway(ToyTarget(step_s=0.05)) as served, served.client() as client:
        events = await stream_events(client, "/v1/completions", {**LONG, "max_tokens": 60, "stream": True})
        assert events[-1] == "[DONE]"
