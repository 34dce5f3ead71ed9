"""The npm `openai` client against the gateway. `npm install --global openai`, or a NODE_PATH that has it, makes this
test run."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from gateway.http_harness import PROMPT, gateway, text_of
from gateway.toys import ToyDraft, ToyTarget, expected

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
