"""Plain decoding of the identity proof's prompts keeps a core busy for most of a minute: it begins with the first test
of this folder, and the proof is the last."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from lossless.plain import PlainOutputs

FOLDER = Path(__file__).parent
WORKS = ("invariant_work", "ordinary_work")  # parameters that hold an arithmetic and prompts


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the identity proof behind the other tests of the folder, which keep their places."""
    places = [index for index, item in enumerate(items) if item.path.parent == FOLDER]
    ours = sorted((items[index] for index in places), key=lambda item: item.path.name == "test_identity.py")
    for index, item in zip(places, ours, strict=True):
        items[index] = item


@pytest.fixture(scope="session", autouse=True)
def plain(request: pytest.FixtureRequest) -> Iterator[PlainOutputs]:
    """Decodes all prompts of the tests that were asked for, in their order."""
    with PlainOutputs() as outputs:
        for item in request.session.items:
            params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
            for name in WORKS:
                if name in params:
                    arithmetic, work = params[name]
                    outputs.start(work.prompts, arithmetic)
        yield outputs
