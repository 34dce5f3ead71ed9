"""`outrider learn` as a process: it learns from a draft that serves, tells its series, and ends when it is told to."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from pathlib import Path

import httpx
import pytest
from support.fakes import until

from outrider.draft_service import boot
from outrider.draft_service.settings import DraftSettings
from outrider.learning.learn_command import main
from outrider.rpc.messages import Lesson
from outrider.rpc.words.sampling_params import AcceptanceRule, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=16)


def niceness_of(pid: int) -> tuple[int, str]:
    """Of a process, and of its session, where these have one that may be changed."""
    autogroup = Path(f"/proc/{pid}/autogroup")
    may_change = autogroup.is_file() and os.access(autogroup, os.W_OK)
    return os.getpriority(os.PRIO_PROCESS, pid), autogroup.read_text().split()[-1] if may_change else ""


async def test_a_process_learns_and_tells_its_series(draft: Path, tmp_path: Path) -> None:
    given = {"model": draft, "listen": "127.0.0.1:0", "threads": 1, "num_blocks": 16, "learn_from": ["unsalted"]}
    service = await boot.start(DraftSettings(**given))
    await service.server.start()
    for number in range(40):
        text = [30 + (7 * number + 5 * place) % 60 for place in range(16)]
        lesson = Lesson("d" * 64, "", [number + 100, 40], text, GREEDY, AcceptanceRule.COUPLED, number)
        service.engine.lessons.add(lesson)
    arguments = [
        "--model", str(draft), "--draft", service.server.address, "--folder", str(tmp_path / "learned"),
        "--metrics", "127.0.0.1:0", "--rank", "4", "--niceness", "5",
    ]  # fmt: skip
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "outrider", "learn", *arguments, stdout=asyncio.subprocess.PIPE, start_new_session=True
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(120):
            line = (await process.stdout.readline()).decode()
        assert line.startswith("learner metrics on ")
        address = line.split()[-1]
        assert niceness_of(process.pid) in [(5, ""), (5, "5")]
        async with httpx.AsyncClient(base_url=f"http://{address}") as client:
            steps, series = 0.0, ""
            async with asyncio.timeout(120):
                while steps == 0:
                    series = (await client.get("/metrics")).text
                    found = re.search(
                        r'^outrider_learner_steps_total{group="",target="d{12}"} (.*)$', series, re.MULTILINE
                    )
                    steps = float(found[1]) if found else 0.0
                    await asyncio.sleep(0.2)
            assert 'outrider_learner_lessons_total{group="",target="dddddddddddd"} 40.0' in series
            async with asyncio.timeout(30):  # health is asked for in turns
                ready = await client.get("/readyz")
                while ready.status_code != 200:
                    await asyncio.sleep(0.2)
                    ready = await client.get("/readyz")
        process.terminate()
        assert await asyncio.wait_for(process.wait(), 30) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await service.stop()
    await until(lambda: not service.thread.is_alive)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--draft", "nonsense"], "draft"),
        (["--rank", "65"], "rank"),
        (["--error", "1.5"], "error"),
        (["--hold-out", "1"], "--hold-out"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(
    draft: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    with pytest.raises(SystemExit):
        main(["--model", str(draft), "--folder", str(tmp_path), *arguments])
    assert said in capsys.readouterr().err
