"""docs/tour.md: the files that it lists are the ones that one plain token passes, which is measured: a request runs
through a gateway and a target in this process, and every file of the project that runs for it is noted."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from support.models import save_tiny, train_byte_level

from outrider.gateway.engine import EngineConfig, GenerationEngine
from outrider.gateway.peers.remote import RemoteTargets
from outrider.gateway.servicer import SERVICE_NAME, GenerationServicer
from outrider.gateway.text.tokenizer import Tokenizer
from outrider.kernels.cpu.library import cpu_library
from outrider.rpc.channel import connect
from outrider.rpc.server import build_server
from outrider.target_service.boot import build, load
from outrider.target_service.settings import TargetSettings
from outrider.v1 import generation_pb2 as pb
from outrider.v1 import generation_pb2_grpc

REPOSITORY = Path(__file__).parents[1]
TOUR = REPOSITORY / "docs/tour.md"
TEXT = TOUR.read_text(encoding="utf-8")
VOCAB = 400
MOST_STOPS = 15
# Health checks, the look at the process's connections and the beats of both, which run while a request does.
BESIDE = {f"rpc/outrider/rpc/{name}.py" for name in ("server", "engine_service", "connections", "beats")}


def listed() -> set[str]:
    """The files of the tour's last table, folder by folder."""
    table = TEXT[TEXT.index("## The whole path") :]
    rows = re.findall(r"^\| `([\w/]+)/` \| (.+?) \|", table, re.MULTILINE)
    return {f"{folder}/{name}" for folder, cell in rows for name in re.findall(r"`(\w+\.py)`", cell)}


def test_the_stops_are_few_and_each_says_what_goes_in_and_out() -> None:
    stops = re.split(r"^### \d+\. ", TEXT, flags=re.MULTILINE)[1:]
    assert 8 <= len(stops) <= MOST_STOPS
    for stop in stops:
        body = stop.split("\n## ")[0]
        assert re.search(r"\]\(\.\./", body) and "**In:**" in body and "**Out:**" in body, stop
    assert len(re.findall(r"^### (\d+)\.", TEXT, re.MULTILINE)) == len(stops)


class Passed:
    """The project's files in which a function has run while `noting`, a dataclass's generated ones, too."""

    def __init__(self) -> None:
        self.noting = False
        self._found: set[str] = set()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if self.noting:
            self._found.add(str(frame.f_globals.get("__file__")))

    @property
    def files(self) -> set[str]:
        """From the repository's root; without stubs."""
        inside = [Path(name) for name in self._found if Path(name).is_relative_to(REPOSITORY)]
        names = {path.relative_to(REPOSITORY).as_posix() for path in inside}
        return {name for name in names if "/outrider/" in name and "/v1/" not in name} - BESIDE


@contextmanager
def watched(passed: Passed) -> Iterator[None]:
    """Threads that start in here, and this one, tell of every function that they call."""
    before = sys.gettrace(), threading.gettrace()
    sys.settrace(passed)
    threading.settrace(passed)
    try:
        yield
    finally:
        sys.settrace(before[0])
        threading.settrace(before[1])


@pytest.fixture(scope="module")
async def passed(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The files that a greedy request of three plain tokens passes. The one before it met what is done once."""
    if cpu_library() is None:
        pytest.skip("no compiled kernels: the reference's path is another one")
    folder = save_tiny(tmp_path_factory.mktemp("tiny"), vocab_size=VOCAB)
    train_byte_level(VOCAB).save(str(folder / "tokenizer.json"))
    settings = TargetSettings(model=folder, listen="127.0.0.1:0", num_blocks=64, threads=1)
    request = pb.GenerateRequest(text="def main():")
    request.sampling.temperature, request.sampling.max_tokens = 0, 3
    passed = Passed()
    with watched(passed):
        target = build(settings, load(settings))
        await target.server.start()
        async with RemoteTargets([target.server.address]) as targets:
            await targets.wait_usable()
            engine = GenerationEngine(Tokenizer.load(folder), targets, None, EngineConfig())
            server = build_server("127.0.0.1:0", [SERVICE_NAME], GenerationServicer(engine).register)
            await server.start()
            async with connect(server.address) as channel:
                stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
                for noting in (False, True):
                    passed.noting = noting
                    ids = [
                        token for response in [r async for r in stub.Generate(request)] for token in response.token_ids
                    ]
                passed.noting = False
            await server.stop(0)
        await target.stop()
    assert len(ids) == 3
    return passed.files


def test_the_list_is_what_a_token_passes(passed: set[str]) -> None:
    more, fewer = sorted(passed - listed()), sorted(listed() - passed)
    assert not more and not fewer, f"docs/tour.md, The whole path: these ran, too: {more}; these did not: {fewer}"
