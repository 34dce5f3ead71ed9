"""A line of the log for each request, with its ids, and without its prompt unless that is asked for."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from support.fakes import ToyDraft, ToyTarget
from support.gateways import toy_tokenizer

from outrider.gateway.engine import EngineConfig, GenerationEngine
from outrider.gateway.text.chat_template import ChatTemplate
from outrider.gateway.text.tokenizer import Tokenizer
from outrider.rpc.errors import InvalidArgument, OutriderError
from outrider.rpc.logs import JsonFormatter
from outrider.rpc.words.request import GenerationRequest
from outrider.rpc.words.sampling_params import SamplingParams

TEXT = "a secret prompt"
LOGGER = "outrider.gateway.request_log"


async def logged(
    caplog: pytest.LogCaptureFixture,
    log_requests: str,
    target: ToyTarget | None = None,
    take: int | None = None,
    model: str = "",
) -> list[dict[str, Any]]:
    """What one request leaves in the log, as JSON has it. It ends after `take` deltas."""
    caplog.set_level(logging.INFO, logger=LOGGER)
    config = EngineConfig(log_requests=log_requests)
    tracer = TracerProvider(shutdown_on_exit=False).get_tracer("test")
    engine = GenerationEngine(toy_tokenizer(), target or ToyTarget(), ToyDraft(), config, tracer)
    sampling = SamplingParams(temperature=0.0, max_tokens=20)
    deltas = engine.generate(GenerationRequest(text=TEXT, sampling=sampling, request_id="r1", model=model))
    try:
        count = 0
        async for _ in deltas:
            count += 1
            if count == take:
                break
    except OutriderError:
        pass
    await deltas.aclose()
    formatter = JsonFormatter("outrider-gateway")
    return [json.loads(formatter.format(one)) for one in caplog.records if one.name == LOGGER]


async def test_a_line_has_ids_and_counts_and_no_prompt(caplog: pytest.LogCaptureFixture) -> None:
    (line,) = await logged(caplog, "counts")
    assert (line["request_id"], line["status"], line["level"]) == ("r1", "OK", "INFO")
    assert line["num_output_tokens"] == 20 and line["finish_reasons"] == ["length"]
    assert line["num_prompt_tokens"] == len(toy_tokenizer().encode(TEXT))
    assert 0 < line["num_accepted_tokens"] <= line["num_draft_tokens"] and line["num_rounds"] > 1
    assert line["num_forced_tokens"] == line["num_reasoning_tokens"] == 0
    assert 0 < line["first_token_s"] <= line["duration_s"]
    assert len(line["trace_id"]) == 32 and len(line["span_id"]) == 16
    assert TEXT not in json.dumps(line) and "secret" not in json.dumps(line)


async def test_the_prompt_is_there_where_it_is_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    (line,) = await logged(caplog, "prompts")
    assert line["prompt"] == TEXT and TEXT in line["message"]


async def test_nothing_unless_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    assert await logged(caplog, "off") == []


async def test_how_it_ended(caplog: pytest.LogCaptureFixture) -> None:
    (gone,) = await logged(caplog, "counts", take=1)
    assert (gone["status"], gone["level"]) == ("CANCELLED", "INFO") and gone["num_output_tokens"] < 20
    caplog.clear()
    (failed,) = await logged(caplog, "counts", ToyTarget(available=False))
    assert (failed["status"], failed["level"]) == ("UNAVAILABLE", "WARNING") and "target" in failed["error"]


async def test_what_is_refused_before_it_runs(caplog: pytest.LogCaptureFixture) -> None:
    (line,) = await logged(caplog, "counts", model="another")
    assert (line["request_id"], line["status"], line["level"]) == ("r1", "NOT_FOUND", "INFO")
    assert "another" in line["error"] and len(line["trace_id"]) == 32 and line["duration_s"] >= 0
    assert "secret" not in json.dumps(line)
    caplog.clear()
    (line,) = await logged(caplog, "prompts", model="another")
    assert line["prompt"] == TEXT
    caplog.clear()
    assert await logged(caplog, "off", model="another") == []


async def refused(caplog: pytest.LogCaptureFixture, **fields: Any) -> tuple[InvalidArgument, str]:
    """What the client and the log are told."""
    caplog.set_level(logging.INFO, logger=LOGGER)
    tokenizer = toy_tokenizer()
    template = ChatTemplate("{{ raise_exception('no: ' + messages[0].content) }}")
    tokenizer = Tokenizer(tokenizer.backend, "refusing", {}, template)
    engine = GenerationEngine(tokenizer, ToyTarget(), config=EngineConfig(log_requests="counts"))
    with pytest.raises(InvalidArgument) as error:
        await anext(engine.generate(GenerationRequest(**fields)))
    (record,) = [one for one in caplog.records if one.name == LOGGER]
    return error.value, JsonFormatter("outrider-gateway").format(record)


async def test_an_id_that_is_none_is_cut(caplog: pytest.LogCaptureFixture) -> None:
    """It stands in the line as it came, and may be as long as a request."""
    error, line = await refused(caplog, text="x", request_id="\x1b[2J" + "i" * (1 << 20))
    assert "request_id" in error.message and len(line) < 2000
    assert json.loads(line)["request_id"].startswith("\x1b[2Jiii") and "\x1b" not in line


async def test_a_template_s_words_are_the_client_s_alone(caplog: pytest.LogCaptureFixture) -> None:
    """They may be the conversation's. Of a long text they are the beginning; what else is wrong is told to both."""
    message = {"role": "user", "content": TEXT + "z" * 100_000}
    error, line = await refused(caplog, messages=(message,), priority=2**31)
    assert TEXT in error.message and "priority" in error.message and len(error.message) < 2000
    assert TEXT not in line and "chat: the chat template refused the conversation" in json.loads(line)["error"]
    assert "priority" in json.loads(line)["error"]
