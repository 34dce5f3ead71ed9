"""The tools of others in their own environments (tests/tools/install.sh), and a gateway for them: what the command of
docs/benchmarking.md starts, with the embedded pair, whose chat template here shows tools, calls and their results."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from openai import OpenAI
from support.environment import START_S

from outrider.cli.local_services import Services
from outrider.pairs import pair_path

HTTP = re.compile(r"^ *OpenAI +(\S+)", re.MULTILINE)
NAME = "large"  # what the page calls the model and its folder
ADDRESS = "127.0.0.1:8000"  # the page's
TOOL_S = 540
TEMPLATE = (
    "{% if tools %}<|user|>{% for tool in tools %}{{ tool.function | tojson }}{% endfor %}{% endif %}"
    "{% for message in messages %}{{ '<|assistant|>' if message.role == 'assistant' else '<|user|>' }}"
    """{% for call in message.tool_calls or [] %}{"name": "{{ call.function.name }}", "arguments": """
    "{{ call.function.arguments | tojson }}}{% endfor %}{{ message.content or '' }}"
    "{% if message.role == 'assistant' %}<|endoftext|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
Run = Callable[..., str]


@dataclass(frozen=True)
class Served:
    """A gateway: its URL with `/v1`, the model's name, and its folder."""

    url: str
    model: str
    folder: Path

    def client(self) -> OpenAI:
        return OpenAI(base_url=self.url, api_key="none", max_retries=0, timeout=TOOL_S)

    def command(self, line: str) -> list[str]:
        """A command of the page as it is here."""
        here = line.replace(ADDRESS, self.url.removeprefix("http://").removesuffix("/v1"))
        return shlex.split(here.replace(f"models/{NAME}", str(self.folder)))


@pytest.fixture(scope="session")
def commands(repository: Path) -> dict[str, list[str]]:
    """The lines of the page's shell blocks, by what they run."""
    text = (repository / "docs" / "benchmarking.md").read_text(encoding="utf-8")
    lines = [
        line
        for block in re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        for line in block.splitlines()
    ]
    return {tool: [line for line in lines if line.split()[0] == tool] for tool in {line.split()[0] for line in lines}}


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory, commands: dict[str, list[str]]) -> Iterator[Served]:
    """What the page starts; by itself a gateway may find that drafts do not pay on this machine."""
    pair, folder = pair_path(), tmp_path_factory.mktemp("models") / NAME
    folder.mkdir()
    for path in pair.target.iterdir():
        (folder / path.name).symlink_to(path.resolve())
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    (folder / "tokenizer_config.json").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}), encoding="utf-8")
    (line,) = commands["outrider"]
    line = line.replace("models/small", str(pair.draft)).replace(ADDRESS, "127.0.0.1:0")
    arguments = Served("", NAME, folder).command(line)[1:]
    with Services() as services:
        started = [*arguments, "--gateway.listen", "127.0.0.1:0", "--gateway.mode", "sequential", "--plain"]
        serve = services.start("serve", started)
        end = time.monotonic() + START_S
        while not serve.find(HTTP):
            serve.check()
            assert time.monotonic() < end, serve.tail()
            time.sleep(0.1)
        yield Served(serve.find(HTTP), NAME, folder)


@pytest.fixture(scope="session")
def run(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs a program of an environment in a folder, without a hub, and returns what it printed; skips where the
    environment has not been made."""
    home = tmp_path_factory.mktemp("home")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    offline = dict.fromkeys(("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"), "1")
    own = {"HOME": str(home), "XDG_CACHE_HOME": str(home), "HF_HOME": str(home), "HF_ENDPOINT": "http://127.0.0.1:9"}

    def run(environment: str, command: Sequence[str | Path], cwd: Path, **more: str) -> str:
        folder = repository / environment
        if not (folder / ".installed").exists():
            pytest.skip(f"{environment} is not there: make test-tools")
        path = os.pathsep.join([str(folder / "bin"), os.environ["PATH"]])
        variables = kept | offline | own | {"PATH": path, "OPENAI_API_KEY": "none"} | more
        done = subprocess.run(
            [str(part) for part in command], cwd=cwd, env=variables, stdin=subprocess.DEVNULL, capture_output=True,
            text=True, timeout=TOOL_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        return done.stdout

    return run
