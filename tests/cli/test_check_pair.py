"""`outrider model check`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from support.heads import random_head_of
from support.models import save_tiny, save_words, train_byte_level
from support.services import outrider, succeed

from outrider.cli import agreement
from outrider.cli.agreement import tokens_per_round
from outrider.pairs import pair_path

TEXT = "the quick brown fox jumps over the lazy dog; def main(): return 42\n" * 3


def checkpoint(folder: Path, seed: int = 0, vocab_size: int = 400, tokens: int = 400) -> Path:
    save_tiny(folder, seed=seed, vocab_size=vocab_size)
    train_byte_level(tokens).save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def test_a_model_is_its_own_best_draft(tmp_path: Path, text: Path) -> None:
    folder = str(checkpoint(tmp_path / "one"))
    out = succeed("model", "check", "--target", folder, "--draft", folder, "--text", str(text))
    assert "358 tokens each, identical" in out
    assert "1.000 greedy (same argmax), 1.000 at temperature 1" in out
    assert "5.00 greedy, 5.00 at temperature 1 (estimates for 4 drafted tokens" in out


def test_a_draft_of_8_bits_is_compared(tmp_path: Path, text: Path) -> None:
    folder = str(checkpoint(tmp_path / "one"))
    arguments = ("model", "check", "--target", folder, "--draft", folder, "--text", str(text))
    out = succeed(*arguments, "--draft-quantization", "int8")
    assert "1.000 greedy (same argmax), 1.000 at temperature 1" not in out and ", 0.99" in out


def test_padded_vocabularies_are_a_pair(tmp_path: Path, text: Path) -> None:
    target = checkpoint(tmp_path / "target", vocab_size=416)
    draft = checkpoint(tmp_path / "draft", seed=1, vocab_size=408)
    out = succeed("model", "check", "--target", str(target), "--draft", str(draft), "--text", str(text))
    assert "416 and 408 logits" in out


def test_without_a_text_no_model_is_loaded(tmp_path: Path) -> None:
    target, draft = checkpoint(tmp_path / "target"), checkpoint(tmp_path / "draft")
    for folder in (target, draft):
        (folder / "model.safetensors").unlink()
    assert "give --text FILE" in succeed("model", "check", "--target", str(target), "--draft", str(draft))


@pytest.mark.parametrize(
    ("level", "way"),
    [
        ("auto", "string-level for greedy requests, token-level for sampled ones"),
        ("token", "token-level\n"),
        ("string", "string-level\n"),
    ],
)
def test_another_vocabulary_is_joined(tmp_path: Path, text: Path, level: str, way: str) -> None:
    target, draft = checkpoint(tmp_path / "target"), checkpoint(tmp_path / "draft", tokens=300)
    folders = ("--target", str(target), "--draft", str(draft), "--text", str(text))
    out = succeed("model", "check", *folders, "--vocabulary-level", level)
    assert f"358 and 300 tokens: 83.8% of the target's tokens have a counterpart; drafted {way}" in out
    assert "29.4% have a counterpart; the draft reads 2." in out
    assert "at temperature 1 (overlap)" in out and "nan" not in out


def test_a_mismatch_names_both(tmp_path: Path) -> None:
    target, draft = tmp_path / "target", tmp_path / "draft"
    for folder, word in ((target, "left"), (draft, "right")):
        folder.mkdir()
        save_words(folder, [word])
    done = outrider("model", "check", "--target", str(target), "--draft", str(draft))
    assert done.returncode == 1 and "not a pair" in done.stderr
    assert str(target) in done.stderr and str(draft) in done.stderr


def test_ids_beyond_the_logits_are_named(tmp_path: Path, text: Path) -> None:
    target, draft = checkpoint(tmp_path / "target"), checkpoint(tmp_path / "draft", vocab_size=280)
    done = outrider("model", "check", "--target", str(target), "--draft", str(draft), "--text", str(text))
    assert done.returncode == 1 and f"{draft} has 280 logits" in done.stderr


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    done = outrider("model", "check", "--target", str(tmp_path / "no"), "--draft", str(tmp_path / "no"))
    assert done.returncode == 1 and "is not a folder" in done.stderr and "Traceback" not in done.stderr


def test_what_cannot_be_read_is_one_line_with_its_flag(tmp_path: Path, text: Path) -> None:
    folder, bare = checkpoint(tmp_path / "one"), tmp_path / "bare"
    bare.mkdir()
    done = outrider("model", "check", "--target", str(folder), "--draft", str(bare))
    assert done.returncode == 1 and done.stderr.startswith(f"outrider model check: error: --draft: {bare} has no tok")
    (bare / "tokenizer.json").write_text("{")
    broken = outrider("model", "check", "--target", str(bare), "--draft", str(folder))
    assert broken.returncode == 1 and f"--target: cannot load a tokenizer from {bare}: " in broken.stderr
    (bare / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    no_model = outrider("model", "check", "--target", str(bare), "--draft", str(folder), "--text", str(text))
    assert no_model.returncode == 1 and f"--target: {bare} has no config.json" in no_model.stderr
    text.write_bytes(b"a\xff\n")
    no_text = outrider("model", "check", "--target", str(folder), "--draft", str(folder), "--text", str(text))
    assert no_text.returncode == 1 and f"--text: {text} is not UTF-8" in no_text.stderr
    lost = outrider("model", "check", "--target", str(folder), "--draft", str(folder), "--text", str(tmp_path / "none"))
    assert lost.returncode == 1
    assert lost.stderr == f"outrider model check: error: {tmp_path / 'none'}: no such file or directory\n"
    for one in (done, broken, no_model, no_text, lost):
        assert one.stderr.count("\n") == 1 and not one.stdout


def test_the_embedded_pair(repository: Path) -> None:
    pair = pair_path()
    held_out = repository / "tests/pairs/data/held_out_sched.txt"
    out = succeed("model", "check", "--target", str(pair.target), "--draft", str(pair.draft), "--text", str(held_out))
    loss = next(line for line in out.splitlines() if line.startswith("loss")).split()
    assert float(loss[1]) < float(loss[3])
    overlap = re.search(r"([\d.]+) at temperature 1 \(overlap\)", out)
    one_hot = re.search(r"one-hot +([\d.]+) at temperature 1 .* these bring ([-+][\d.]+)", out)
    assert overlap is not None and one_hot is not None
    assert float(one_hot[2]) == pytest.approx(float(overlap[1]) - float(one_hot[1]), abs=2e-3) and one_hot[2][0] == "+"
    assert json.loads((pair.target / "config.json").read_text())["vocab_size"] == 4096


def test_weights_are_worth_what_overlap_and_argmax_differ_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: a draft that is right about the law gains what its argmax leaves; one that is not may lose."""
    laws = {"target": torch.tensor([[0.6, 0.4], [0.2, 0.8]]), "draft": torch.tensor([[0.6, 0.4], [0.9, 0.1]])}
    monkeypatch.setattr(agreement, "_probs", lambda model, ids, mapping=None: iter([laws[model]]))
    result = agreement.Agreement(2, 2, 8, 8)
    agreement._read_window(result, ("target", "draft"), [0, 1, 1], None)  # type: ignore[arg-type]
    assert result.overlaps == pytest.approx([1.0, 0.3]) and result.one_hots == pytest.approx([0.6, 0.2])


@pytest.mark.parametrize(
    ("acceptance", "tokens", "expected"),
    [([0.0] * 8, 4, 1.0), ([1.0] * 8, 4, 5.0), ([0.5] * 8, 2, 1.75), ([1.0, 0.0] * 4, 1, 1.5), ([1.0], 4, 2.0)],
)
def test_tokens_per_round(acceptance: list[float], tokens: int, expected: float) -> None:
    assert tokens_per_round(acceptance, tokens) == pytest.approx(expected)


def test_a_head_beside_its_target(tmp_path: Path, text: Path) -> None:
    """Random weights are hardly ever right; one for another width is no pair."""
    target = checkpoint(tmp_path / "target")
    head = str(random_head_of(target, "eagle3", tmp_path / "head"))
    arguments = ("model", "check", "--target", str(target), "--head", head)
    assert "give --text FILE" in succeed(*arguments)
    out = succeed(*arguments, "--text", str(text), "--num-draft-tokens", "3")
    assert re.search(
        r"head +eagle3, from layers 0, 1, 2 of the target; it drafts one after the other, at most 128", out
    )
    assert re.search(r"read +16 places of the text", out)
    for name in ("greedy", "at temperature 1"):
        assert re.search(
            rf"acceptance +0\.\d+.* {name} \(by position, of those tested\); [12]\.\d+ tokens a round", out
        ), out
    wide = random_head_of(pair_path().target, "medusa", tmp_path / "wide")
    done = outrider("model", "check", "--target", str(target), "--head", str(wide))
    assert done.returncode == 1 and f"head (--head {wide}) does not fit the model" in done.stderr
    done = outrider(*arguments, "--draft", str(target))
    assert done.returncode == 2 and "give --draft DIR, or --head DIR" in done.stderr
