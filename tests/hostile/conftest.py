"""The services that hostile peers talk to: they have to be after each test what they were before it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from support.deployment import Deployment, deployed


@pytest.fixture(scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Deployment]:
    async with deployed(
        tmp_path_factory.mktemp("models"), allow_adapter_changes=True, allow_target_reload=True, learn_from=["unsalted"]
    ) as deployment:
        yield deployment


@pytest.fixture
async def unharmed(served: Deployment) -> AsyncIterator[Deployment]:
    """Answers to the bit as before, nothing left open, and no error logged."""
    before = await served.answers()
    yield served
    await served.settled()
    assert await served.answers() == before
