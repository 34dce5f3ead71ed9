"""A head is tried on known texts before it drafts: one that fits is believed, one that knows nothing of its target is
not, and where its files leave open how it is meant, what the target keeps decides."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support.engines import opened
from support.heads import forgetful_model, knowing_head, random_head_of
from support.models import save_with_tokenizer

from outrider.engine.loader import load_model
from outrider.proposers.heads.conventions import other_conventions
from outrider.rpc.channel import connect
from outrider.rpc.codec import TARGET_INFO, TARGET_STREAM
from outrider.rpc.messages import Credit, DraftTrial
from outrider.rpc.stream import client_stream
from outrider.target_service.boot import believed_head, build, load
from outrider.target_service.settings import TargetSettings
from outrider.v1 import target_pb2, target_pb2_grpc

VOCAB = 400


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Whose next token follows from the last one alone."""
    folder = save_with_tokenizer(tmp_path_factory.mktemp("forgetful"), VOCAB)
    forgetful_model(vocab_size=VOCAB).save_pretrained(folder)
    return folder


def head_for(target: Path, folder: Path, layout: str = "dflash", **changes: Any) -> Path:
    """One that is always right about the token behind the last one, with changes of what it says of itself."""
    knowing_head(layout, folder, forgetful_model(vocab_size=VOCAB), load_model(target))
    config = json.loads((folder / "config.json").read_text())
    config["dflash_config"] = {**config["dflash_config"], **changes}
    config["dflash_config"] = {name: value for name, value in config["dflash_config"].items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def settings_of(target: Path, head: Path, **more: Any) -> TargetSettings:
    common = {"listen": "127.0.0.1:0", "num_blocks": 64, "threads": 1, "max_window": 6}
    return TargetSettings.model_validate({"model": target, "head": head} | common | more)


def tried(target: Path, head: Path, **more: Any) -> tuple[Any, DraftTrial]:
    settings = settings_of(target, head, **more)
    found, trial = believed_head(settings, load(settings))
    assert trial is not None
    return found, trial


def test_a_head_that_is_right_is_believed(target: Path, tmp_path: Path) -> None:
    head, trial = tried(target, head_for(target, tmp_path, "dspark"))
    assert head is not None and trial.method == "dspark" and trial.remark == "" and not trial.refused
    assert trial.accepted == (1.0,) * 6 and trial.num_rounds > 10 and trial.tokens_per_round == 7.0


@pytest.mark.parametrize("method", ["eagle", "eagle3", "medusa", "mlp_speculator", "dflash", "dspark"])
def test_one_that_knows_nothing_does_not_draft(
    method: str, target: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    head, trial = tried(target, random_head_of(target, method, tmp_path, seed=3))
    assert head is None and trial.refused and trial.is_useless and trial.accepted[0] <= trial.guess
    assert f"the {method} head is no draft for this target" in caplog.text


def test_unless_it_is_let(target: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = random_head_of(target, "eagle", tmp_path, seed=3)
    head, trial = tried(target, folder, head_trial="warn")
    assert head is not None and not trial.refused and "It drafts all the same" in caplog.text
    settings = settings_of(target, folder, head_trial="off")
    head, untried = believed_head(settings, load(settings))
    assert head is not None and untried is None


def test_what_its_files_leave_open_is_found(target: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing says that the last token's row gives the first one."""
    folder = head_for(target, tmp_path, sample_from_anchor=None)
    head, trial = tried(target, folder)
    assert head.config.samples_anchor and trial.accepted[0] == 1.0
    assert trial.remark == "the last token's row gives the first token, which its files do not say"
    assert trial.remark in caplog.text


def test_what_they_say_stands_and_better_is_named(target: Path, tmp_path: Path) -> None:
    """By its files it is useless, and nobody reads it otherwise behind their back."""
    head, trial = tried(target, head_for(target, tmp_path, sample_from_anchor=False), head_trial="warn")
    assert not head.config.samples_anchor and trial.is_useless
    assert trial.remark.startswith("its files say otherwise, but if the last token's row gives the first token, 1.00")


def test_without_a_tokenizer_there_are_no_texts(target: Path, tmp_path: Path) -> None:
    model = tmp_path / "mute"
    forgetful_model(vocab_size=VOCAB).save_pretrained(model)
    settings = settings_of(model, random_head_of(target, "eagle", tmp_path / "head"))
    head, untried = believed_head(settings, load(settings))
    assert head is not None and untried is None


async def test_a_target_whose_head_is_refused_says_so_and_decodes_plainly(target: Path, tmp_path: Path) -> None:
    settings = settings_of(target, random_head_of(target, "eagle3", tmp_path, seed=3))
    service = build(settings, load(settings))
    await service.server.start()
    channel = connect(service.server.address)
    try:
        stub: Any = target_pb2_grpc.TargetServiceStub(channel)
        info = TARGET_INFO.decode(await stub.GetTargetInfo(target_pb2.GetTargetInfoRequest()))
        assert info.methods == () and info.trials[0].refused and info.trials[0].method == "eagle3"
        assert info.trials[0].accepted and info.trials[0].guess > 0 and info.trials[0].num_rounds > 0
        async with client_stream(TARGET_STREAM, stub.Verify()) as stream:
            stream.send(opened(1, range(3, 20), max_tokens=4, method="eagle3"), Credit(1, 1 << 20, 5))
            commits: list[Any] = []
            while not commits or commits[-1].finish_reason is None:
                commits += await asyncio.wait_for(anext(stream), 60)
        assert [commit.num_drafted for commit in commits] == [0] * 4
    finally:
        await channel.close()
        await service.stop()


BLOCK = {"architectures": ["DFlashDraftModel"], "dflash_config": {"target_layer_ids": [1, 2], "mask_token_id": 1}}
EAGLE3 = {"architectures": ["LlamaForCausalLMEagle3"]}
SPECULATORS = {"speculators_model_type": "dflash", "aux_hidden_state_layer_ids": [2, 3], "sample_from_anchor": True}


@pytest.mark.parametrize(
    ("config", "found"),
    [
        (BLOCK, {
            "the last token's row gives the first token": True,
            "target_layer_ids is meant as 0, 1": False,
            "rows see what lies before them in a block": False,
        }),
        (BLOCK | {"layer_types": ["sliding_attention"]}, {
            "the last token's row gives the first token": True,
            "target_layer_ids is meant as 0, 1": False,
            "rows see what lies before them in a block": True,
        }),
        (SPECULATORS, {
            "the first mask's row gives the first token": False,
            "aux_hidden_state_layer_ids is meant as 3, 4": False,
            "rows see what lies before them in a block": False,
        }),
        (EAGLE3, {
            "it reads layers 1, 2, 3": True,
            "it reads layers 3, 4, 5": True,
            "the residual stream begins with the normed state": True,
        }),
        (EAGLE3 | {"eagle_aux_hidden_state_layer_ids": [5, 6, 7], "norm_before_residual": True}, {
            "it reads layers 4, 5, 6": False,
            "it reads layers 6, 7, 8": False,
            "the residual stream begins with the state before its norm": False,
        }),
        ({"model_type": "medusa", "num_heads": 5}, {}),
    ],
)  # fmt: skip
def test_how_else_a_head_may_be_meant(config: Mapping[str, Any], found: dict[str, bool]) -> None:
    conventions = list(other_conventions(config, (2, 3, 4)))
    assert {one.name: one.is_open for one in conventions} == found
