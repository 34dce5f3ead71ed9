"""An id of the hub wherever a checkpoint's folder may stand, with a cache that has the embedded pair."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.hub import CACHED_COMMIT, cached

from outrider.cli.check_pair import main as check_pair
from outrider.cli.serve import ServeSettings
from outrider.draft_service import boot as draft_boot
from outrider.draft_service.settings import DraftSettings
from outrider.gateway.boot import load_tokenizer
from outrider.llm import LLM, SamplingParams
from outrider.pairs import pair_path
from outrider.rpc.hub import model_name
from outrider.target_service import boot as target_boot
from outrider.target_service.__main__ import main as target_main
from outrider.target_service.settings import TargetSettings

TARGET, DRAFT = "tests/large", "tests/small"


@pytest.fixture(autouse=True)
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The cache."""
    pair = pair_path()
    cached(monkeypatch, tmp_path, large=pair.target, small=pair.draft)
    return tmp_path


def snapshot(hub: Path, name: str) -> Path:
    return hub / f"models--tests--{name}" / "snapshots" / CACHED_COMMIT


def test_services_and_commands(hub: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = target_boot.located(TargetSettings(model=Path(TARGET)))
    assert target.model == snapshot(hub, "large") and model_name(target.model) == TARGET
    draft = draft_boot.located(DraftSettings(model=Path(f"{DRAFT}@main")))
    assert draft.model == snapshot(hub, "small")
    assert load_tokenizer(Path(TARGET)).num_tokens == load_tokenizer(pair_path().target).num_tokens
    served = ServeSettings.model_validate({"target": {"model": TARGET}, "draft": {"model": DRAFT}}).located()
    assert served.draft is not None
    assert (served.target.model, served.draft.model) == (snapshot(hub, "large"), snapshot(hub, "small"))
    assert check_pair(["--target", TARGET, "--draft", DRAFT]) == 0 and "identical" in capsys.readouterr().out


def test_the_embedded_pairs_name(capsys: pytest.CaptureFixture[str]) -> None:
    pair, python = pair_path(), Path("python")
    target = target_boot.located(TargetSettings(model=python, head=Path("python/mtp")))
    assert (target.model, target.head) == (pair.target, pair.heads["mtp"])
    for method, folder in (("draft_model", pair.draft), ("ngram,pard", pair.pard)):
        draft = draft_boot.located(DraftSettings(model=python, method=method, target_tokenizer=[python]))
        assert (draft.model, draft.target_tokenizer) == (folder, [pair.target])
    assert load_tokenizer(python).num_tokens == load_tokenizer(pair.target).num_tokens
    assert check_pair(["--target", "python", "--draft", "python"]) == 0 and "identical" in capsys.readouterr().out


def test_one_that_is_nowhere_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert target_main(["--model", "tests/nowhere", "--listen", "localhost:0"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(
        "outrider target: error: tests/nowhere: there is no such folder, and tests/nowhere is not in"
    )


def test_llm() -> None:
    speculation = {"model": DRAFT, "num_speculative_tokens": 2}
    with LLM(TARGET, speculative_config=speculation, kv_cache_memory_bytes=32 << 20) as llm:
        output = llm.generate("def", SamplingParams(temperature=0.0, max_tokens=4))[0]
    assert len(output.outputs[0].token_ids) == 4
    with pytest.raises(ValueError, match="tests/nowhere is not in the cache"):
        LLM(TARGET, speculative_config={**speculation, "model": "tests/nowhere"})
