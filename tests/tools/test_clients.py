"""Libraries that people call models by, asked for the same things: a text whole and as a stream, a value of a schema, a
call of a tool, and, with its result, a value of a schema beside tools. What comes of it is what OpenAI's client gets in
this process, and each value is one of its schema."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tools.clients.scenario import MAX_TOKENS, MESSAGES, PROMPT, Event, Place
from tools.conftest import Run, Served

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
FOLDER = Path(__file__).parent / "clients"
PYTHON = [("openai",), ("litellm",), ("langchain",), ("langchain", "responses"), ("pydantic_ai",), ("instructor",)]
OF_THEIR_OWN = {"instructor"}  # which has an environment of its own
NPM = ["openai", "ai_sdk"]
NPM_FOLDER = "build/tools/npm"


@pytest.fixture(scope="session")
def text(served: Served) -> str:
    """What all of them get; its prompt is in the cache from now on."""
    with served.client() as client:
        asked: dict[str, Any] = {"model": served.model, "messages": MESSAGES, "temperature": 0}
        return client.chat.completions.create(**asked, max_tokens=MAX_TOKENS).choices[0].message.content or ""


@pytest.mark.parametrize("how", PYTHON, ids="-".join)
def test_python(how: tuple[str, ...], served: Served, text: str, run: Run, repository: Path, tmp_path: Path) -> None:
    name, *rest = how
    command = ["python", FOLDER / f"with_{name}.py", served.url, served.model, *rest]
    more = {"PYTHONPATH": str(repository / "tests"), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # else it asks the web
    environment = f"build/tools/{name if name in OF_THEIR_OWN else 'clients'}"
    check(run(environment, command, tmp_path, **more), text)


@pytest.mark.parametrize("name", NPM)
def test_npm(name: str, served: Served, text: str, run: Run, repository: Path) -> None:
    folder = repository / NPM_FOLDER  # node finds packages from where a script lies
    if folder.is_dir():
        for script in FOLDER.glob("*.mjs"):
            shutil.copy(script, folder)
    command = ["node", f"with_{name}.mjs", served.url, served.model]
    check(run(NPM_FOLDER, command, folder, SCENARIO=json.dumps({"PROMPT": PROMPT, "MAX_TOKENS": MAX_TOKENS})), text)


def check(printed: str, text: str) -> None:
    """What a library's user has in hand."""
    found = json.loads(printed.splitlines()[-1])
    print(found.pop("versions"))
    plain = found.pop("usage")
    assert {"parsed", "parsed_after_result"} <= set(found)
    if "text" in found:
        assert found.pop("text") == found.pop("streamed") == text != ""
        assert plain == found.pop("streamed_usage") and plain["completion"] == MAX_TOKENS
        assert 0 < plain["cached"] < plain["prompt"]
    if "call" in found:
        call = found.pop("call")
        assert call[0] == "forecast" and Place.model_validate_json(call[1])
        assert found.pop("streamed_call", call) == call
    after = found.pop("usage_after_result")
    assert after["prompt"] > plain["prompt"] and 0 < after["cached"] < after["prompt"]
    for name in [name for name in found if "parsed" in name]:
        Event.model_validate(found.pop(name))
    assert found == {name: EXPECTED[name] for name in found}


# Of single libraries: an answer of a form or a call, never both; that the first answer was not good enough; a text of
# the completions endpoint, and its tokens.
EXPECTED: dict[str, Any] = {"either": 1, "answers": 2, "completed": [True, MAX_TOKENS]}
