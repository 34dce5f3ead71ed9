"""The law where a draft lies: about what it drew from, or by choosing what it proposes by coins that it should not
know. Under `--untrusted-draft` it is the target's all the same; without, each of them is seen to harm it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lossless.chi_square import LEAST_P, p_values
from lossless.statistics import BY_BLOCK, MODEL_SEED, TEMPERATURE_1, VOCAB, Setting, draw, exact_laws, target_in_process
from support.fakes import serving
from support.models import tiny_hf_model
from support.proofs import on_a_diagonal
from support.scripted_drafts import Hostile, HostileServicer, Send, packed

from outrider.kernels.random.reference import Purpose, as_int64, words
from outrider.kernels.verify.reference import accept_uniforms
from outrider.rpc.messages import DraftInfo, DraftMethod, ModelInfo, TokenWeights

NUM_SEQUENCES = 700
Script = Callable[[Hostile, Send], None]


@dataclass(frozen=True)
class Model:
    """The target's, in transformers and as a folder."""

    hf: Any
    folder: Path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    hf, folder = tiny_hf_model("llama", MODEL_SEED, vocab_size=VOCAB), tmp_path_factory.mktemp("target")
    hf.save_pretrained(folder)
    yield Model(hf, folder)


def guesses(one: Hostile) -> tuple[int, ...]:
    """By the text alone."""
    return tuple((sum(one.tokens) + place) % VOCAB for place in range(one.window))


def lies(one: Hostile, send: Send) -> None:
    """By its weights what it proposes was all but impossible, so that the target would have to take it."""
    if one.until > len(one.tokens):
        ids = guesses(one)
        send(one.piece(ids, weights=tuple(TokenWeights(packed(15 - id % 2, id), packed(32767, 1)) for id in ids)))


def peeks(one: Hostile, send: Send) -> None:
    """Knowing the seed it knows the coins: where a token's coin is low it proposes one token, else another one."""
    if one.until > len(one.tokens):
        positions = torch.arange(len(one.tokens), len(one.tokens) + one.window)
        seeds = torch.full_like(positions, as_int64(one.request.seed))
        coins = accept_uniforms(words(seeds, positions, Purpose.ACCEPT, torch.zeros_like(positions)))
        send(one.piece(tuple(3 if coin < 0.12 else 8 for coin in coins.tolist())))


async def least_p(script: Script, setting: Setting, model: Model, at_target: bool, at_gateway: bool) -> float:
    """Of all questions to what comes out beside such a draft."""
    info = DraftInfo(ModelInfo("hostile", "hostile", VOCAB, 256), (DraftMethod("draft_model"),))
    async with (
        target_in_process(model.folder, untrusted_draft=at_target) as target,
        serving(HostileServicer(script, info)) as draft,
    ):
        seeds = replace(setting, name=f"untrusted, {script.__name__}, {setting.name}").seeds(NUM_SEQUENCES)
        draws = await draw(setting, target, draft.address, seeds, trusted=not at_gateway)
    assert draws.drafted[:, 0].mean() == 1.0
    return min(p_values(draws, exact_laws(model.hf, setting.prompt, setting.params, setting.depth)).values())


SCRIPTS: dict[str, tuple[Script, bool, bool]] = {
    "lies, the target knows": (lies, True, False),
    "lies, the gateway knows": (lies, False, True),
    "peeks, the gateway knows": (peeks, False, True),
}
SETTINGS = {setting.name: setting for setting in (TEMPERATURE_1, BY_BLOCK)}


@pytest.mark.parametrize(("script", "setting"), on_a_diagonal(list(SCRIPTS), list(SETTINGS)))
async def test_the_law_is_the_targets(script: str, setting: str, model: Model) -> None:
    how, at_target, at_gateway = SCRIPTS[script]
    assert await least_p(how, SETTINGS[setting], model, at_target, at_gateway) > LEAST_P


@pytest.mark.parametrize(("script", "at_target"), [(lies, False), (peeks, True)])
async def test_a_draft_that_is_trusted_harms_it(script: Script, at_target: bool, model: Model) -> None:
    assert await least_p(script, TEMPERATURE_1, model, at_target, False) < LEAST_P
