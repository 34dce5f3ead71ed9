"""Identity with adapters: through the gateway's loop, with a draft of the base and a target that swaps its adapters,
sequences of several adapters and of none emit the very tokens of plain decoding, greedy and coupled, at the first
attempt; on weights in 8 and 4 bits, too, which draft for themselves."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from lossless.identity import MAX_UNREAD, Services, serving
from lossless.plain import (
    Arithmetic,
    Prompt,
    Weights,
    draft_model,
    hf_model,
    make_prompt,
    rounded_draft,
    target_model,
)
from support.adapters import save_adapter
from support.engines import TargetHarness
from support.models import tiny_state
from support.proofs import mostly_long

from outrider.engine.adapters.loader import load_adapter
from outrider.engine.adapters.resident import AdapterRoom, ResidentAdapters
from outrider.engine.loader import LoadedModel
from outrider.gateway.speculation.loop import speculate
from outrider.planner.policy import Policy, Round
from outrider.rpc.messages import Adapter

NAMES = ("", "one", "two", "three")
NUM_TOKENS = 40
POLICIES = {
    "sequential": Policy(4, windows_ahead=0, max_branches=0, max_unread=MAX_UNREAD),
    "branches": Policy(4, windows_ahead=2, max_branches=6, max_unread=MAX_UNREAD),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder, state = tmp_path_factory.mktemp("adapters"), tiny_state(hf_model())
    return {name: save_adapter(folder / name, state, seed=seed) for seed, name in enumerate(NAMES) if name}


def plain(target: LoadedModel, folders: dict[str, Path], prompts: list[tuple[str, Prompt]]) -> list[list[int]]:
    """Each by an engine of its own, one token a step."""
    outputs = []
    for name, prompt in prompts:
        resident = ResidentAdapters(target.model, AdapterRoom(1, 16))
        harness = TargetHarness.of(target, adapters=resident)
        if name:
            adapter = load_adapter(folders[name], target.model, target.digest)
            harness.engine.adapters.table.add(Adapter(name, adapter.digest, adapter.rank), resident.prepare(adapter))
        outputs.append(harness.decode_plain(0, replace(prompt.open("draft_model"), adapter=name)))
    return outputs


async def decoded(services: Services, name: str, prompt: Prompt, policy: Policy) -> tuple[list[int], int]:
    """Its tokens, and how many were drafted and accepted."""
    request = replace(prompt.open("draft_model"), adapter=name)
    rounds = [
        item async for item in speculate(services.drafts, services.targets, request, policy) if isinstance(item, Round)
    ]
    ids = [token for closed in rounds for token in closed.commit.ids]
    return ids, sum(closed.commit.num_accepted for closed in rounds)


CASES = list(product(("float32", "int8", "int4"), (False, True), POLICIES))
SHORT = [case for case in CASES if case[0] == "float32" or case[1] == (case[0] == "int4") == (case[2] == "branches")]


@pytest.mark.parametrize("case", mostly_long(CASES, SHORT), ids=lambda case: "-".join(map(str, case)))
async def test_tokens_are_plain_decodings(folders: dict[str, Path], case: tuple[Weights, bool, str]) -> None:
    weights, coupled, mode = case
    target = target_model(Arithmetic.C, weights)
    draft = draft_model() if weights == "float32" else rounded_draft(weights)
    prompts = [(NAMES[n % 4], make_prompt(n % 3, coupled, NUM_TOKENS)) for n in range(8)]  # some have equal texts
    expected = plain(target, folders, prompts)
    options: dict[str, Any] = {"adapter": [f"{name}={folder}" for name, folder in folders.items()], "max_adapters": 2}
    sizes: Any = {"num_blocks": 60, "draft_blocks": 200, "max_rows": 40, "cut_windows": True}
    async with asyncio.timeout(120), serving(target, draft, {}, **sizes, **options) as services:
        done = await asyncio.gather(*(decoded(services, *prompt, POLICIES[mode]) for prompt in prompts))
        await services.check_blocks()
        assert services.target.engine.adapters.num_swaps >= 3
    assert [ids for ids, _ in done] == expected
    assert sum(accepted for _, accepted in done) > 10, "drafts of the base hold now and then"
    assert len({tuple(ids) for ids in expected}) == len(prompts), "texts of equal prompts differ by their adapters"
