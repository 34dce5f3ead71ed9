"""A real Chromium for the tests of the live page. Where there is none, a test that asks for it is skipped."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# Root may use no sandbox, and a browser that looks for updates waits on a closed network.
FLAGS = ("--no-sandbox", "--disable-dev-shm-usage", "--disable-background-networking", "--disable-component-update")


@pytest.fixture(scope="module")
async def browser() -> AsyncIterator[Any]:
    reason = "no package playwright: pip install playwright"
    playwright = pytest.importorskip("playwright.async_api", reason=reason)
    async with playwright.async_playwright() as driver:
        program = next(filter(None, map(shutil.which, (driver.chromium.executable_path, *PROGRAMS))), None)
        if program is None:
            pytest.skip("no Chromium on this machine: playwright install chromium, or the system's package chromium")
        running = await driver.chromium.launch(executable_path=program, args=list(FLAGS))
        try:
            yield running
        finally:
            await running.close()


@pytest.fixture(scope="module")
def pictures(pytestconfig: pytest.Config) -> Path:
    """Where screenshots stay: pytest's cache folder, .pytest_cache/d/page."""
    return Path(pytestconfig.cache.mkdir("page"))
