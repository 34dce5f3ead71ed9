"""Every block of docs/clients.md runs as it stands, on the addresses of services that are there."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import pytest
from clients.conftest import Fleet

from outrider.client import Client

DOCS = Path(__file__).parents[2] / "docs" / "clients.md"
TEXT = DOCS.read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


async def run(code: str, fleet: Fleet) -> str:
    for named in ("127.0.0.1:50050", "127.0.0.1:50060"):
        code = code.replace(named, fleet.gateway)
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


async def test_the_examples(fleet: Fleet) -> None:
    """Both clients print the same; a refusal names its fields; a second gateway is named, and not needed."""
    outputs = [await run(code, fleet) for code in BLOCKS]
    async with Client(fleet.gateway) as client:
        text = [part.text async for part in client.generate("def parse_args(argv):", max_tokens=24, temperature=0.0)]
    assert outputs[0] == outputs[1] == "".join(text) != ""
    assert [line.split()[0] for line in outputs[2].splitlines()] == ["sampling.temperature", "sampling.top_p"]
    assert outputs[3] and len(outputs) == 4


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`([\w/]+\.(?:py|js|go|cc|rb|sh))", TEXT))))
def test_the_programs_are_there(name: str) -> None:
    assert (DOCS.parents[1] / "examples" / "clients" / name).is_file()


def test_no_program_is_forgotten() -> None:
    folder = DOCS.parents[1] / "examples" / "clients"
    programs = [path for path in folder.rglob("*") if path.suffix in {".py", ".js", ".go", ".cc", ".rb"}]
    assert len(programs) == 7 and not [path for path in programs if f"`{path.relative_to(folder)}`" not in TEXT]
