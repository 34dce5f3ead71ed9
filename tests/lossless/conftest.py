"""What several files prove by: the outputs of plain decoding, and services over a small pair.

Plain decoding of the identity proof's prompts keeps a core busy for most of a minute: it begins with the proof's
first test, in a process of its own, and in the one worker that runs that file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from lossless.plain import PlainOutputs
from lossless.statistics import VOCAB, Pair, serving

WORKS = ("invariant_work", "ordinary_work")  # parameters that hold an arithmetic and prompts


@pytest.fixture(scope="session")
def plain(request: pytest.FixtureRequest) -> Iterator[PlainOutputs]:
    """Decodes all prompts of the tests that were asked for, in their order."""
    with PlainOutputs() as outputs:
        for item in request.session.items:
            params: dict[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
            for name in WORKS:
                if name in params:
                    arithmetic, work = params[name]
                    outputs.start(work.prompts, arithmetic, work.cell.weights)
        yield outputs


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, prove: bool) -> Iterator[Pair]:
    drafts = ("opposite", "tempered", "mapped", "reencoded", "parallel")
    with serving(tmp_path_factory.mktemp("narrow"), drafts, cutting=prove, head=True, vocab_size=VOCAB) as running:
        yield running
