"""The P-EAGLE head of random weights is one, and a short run fills the table. No speed is judged."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outrider.bench.p_eagle import MASK_TOKEN, main
from outrider.engine.loader import load_model
from outrider.pairs import pair_path
from outrider.proposers.heads.loading import load_head
from outrider.proposers.heads.target import target_weights


@pytest.mark.parametrize("num_layers", [1, 3])
def test_the_head_drafts_all_in_one_pass(num_layers: int, tmp_path: Path) -> None:
    assert main(["--save", str(tmp_path / "head"), "--layers", str(num_layers)]) == 0
    target = pair_path().target
    weights = target_weights(target, load_model(target).model)
    head = load_head(tmp_path / "head", weights, torch.float32, torch.device("cpu"))
    trained = load_head(pair_path().head_by("eagle3"), weights, torch.float32, torch.device("cpu"))
    assert head.name == "eagle3" and head.taps == trained.taps and head.layers == trained.layers * num_layers
    assert head.mask is not None and head.mask.token_id == MASK_TOKEN and trained.mask is None


def test_a_short_run(capsys: pytest.CaptureFixture[str]) -> None:
    short = ["--prompts", "1", "--max-tokens", "12", "--repeats", "1", "--threads", "1"]
    assert main([*short, "--layers", "2", "--num-draft-tokens", "3"]) == 0
    head, _, *rows, _, what, others = capsys.readouterr().out.splitlines()
    assert head == "| drafts by | layers | drafting, ms a round | tokens a round |"
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert [row[:2] for row in cells] == [["draft_model", ""], ["P-EAGLE", "2"]]
    assert all(float(row[2].split()[0]) > 0 for row in cells)
    assert what.startswith("3 tokens drafted a round") and others.startswith("2 layers: other programs")
