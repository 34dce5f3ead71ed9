"""A draft that is configured, and not asked, costs a round nothing: Python's calls are counted, which no clock and no
other program has a part in."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from support.fakes import ToyDraft, ToyTarget, target_info
from support.models import train_byte_level

from outrider.gateway.engine import EngineConfig, GenerationEngine
from outrider.gateway.text.tokenizer import Tokenizer
from outrider.rpc.words.request import GenerationRequest, SpeculationOptions
from outrider.rpc.words.sampling_params import SamplingParams

PROMPT = (11, 12, 13)
FEW, MANY = 64, 192  # tokens, whose difference is rounds alone
OURS = str(Path("outrider", "gateway"))


class Calls:
    """Counts those of Python functions of a gateway, while it is entered."""

    def __init__(self) -> None:
        self.number = 0

    def __enter__(self) -> Calls:
        sys.setprofile(self._count)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _count(self, frame: FrameType, event: str, _: Any) -> None:
        self.number += event == "call" and OURS in frame.f_code.co_filename


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_byte_level().save(str(folder / "tokenizer.json"))
    return Tokenizer.load(folder)


async def calls_a_token(tokenizer: Tokenizer, draft: ToyDraft | None, speculation: SpeculationOptions) -> float:
    target = ToyTarget(info=target_info(max_model_len=1024))
    engine = GenerationEngine(tokenizer, target, draft, EngineConfig(mode="auto"))
    counted = []
    for max_tokens in (FEW, FEW, MANY):  # the first one fills what is kept
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        request = GenerationRequest(token_ids=PROMPT, sampling=sampling, speculation=speculation)
        with Calls() as calls:
            async for _ in engine.generate(request):
                pass
        counted.append(calls.number)
    assert draft is None or not draft.links
    return (counted[2] - counted[1]) / (MANY - FEW)


@pytest.mark.parametrize("off", [SpeculationOptions(enabled=False), SpeculationOptions(num_draft_tokens=0)])
async def test_a_draft_that_is_not_asked(tokenizer: Tokenizer, off: SpeculationOptions) -> None:
    without = await calls_a_token(tokenizer, None, SpeculationOptions())
    assert without > 10, "they are counted"
    assert await calls_a_token(tokenizer, ToyDraft(), off) == pytest.approx(without, rel=0.01)
