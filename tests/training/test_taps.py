"""A tap is the target's hidden states of the whole corpus, however often it was cut short, and heads learn from it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.models import save_tiny, save_with_tokenizer
from transformers import AutoModelForCausalLM

from outrider.engine.loader import load_model
from outrider.training.course import CoursePlan, Tap
from outrider.training.drafts import read_corpus
from outrider.training.heads import HeadPlan, make_head
from outrider.training.lessons import Lesson, num_windows
from outrider.training.tap_command import main
from outrider.training.taps import TapPlan, cut, tap
from outrider.training.train_command import main as train_main

VOCAB, LENGTH = 400, 24


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_with_tokenizer(tmp_path_factory.mktemp("target"), VOCAB, num_hidden_layers=4)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "corpus.txt"
    path.write_text(" ".join(f"def main{number}(self): return {number * number}" for number in range(150)))
    return path


def test_windows_follow_one_another() -> None:
    assert cut(torch.arange(10), 4).tolist() == [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8]]
    with pytest.raises(ValueError, match=r"the corpus has 4 tokens; allowed: at least 5"):
        cut(torch.arange(4), 4)


def test_shards_have_the_states_of_every_token_and_a_run_goes_on(target: Path, corpus: Path, tmp_path: Path) -> None:
    plan = TapPlan(target, corpus, tmp_path / "tap", (1, 4), LENGTH, num_windows=20, max_tokens=1100)

    def interrupted(done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tap(plan, interrupted)
    assert not plan.out.exists()
    with pytest.raises(ValueError, match=r"tap.partial holds a run of other settings"):
        tap(replace(plan, max_tokens=1000), interrupted)
    kept = plan.out.with_name("tap.partial") / "00000.safetensors"
    written, seen = kept.stat().st_mtime_ns, list[tuple[int, int]]()
    said = tap(plan, lambda done, total: seen.append((done, total)))
    assert seen == [(0, 3), (1, 3), (2, 3), (3, 3)] and said["num_tokens"] == 45 * LENGTH
    assert (plan.out / kept.name).stat().st_mtime_ns == written

    shards = Tap.read(plan.out, load_model(target).digest).shards
    lessons = [Lesson.joined([Lesson.read(path, index) for index in range(num_windows(path))]) for path in shards]
    ids = torch.cat([lesson.ids for lesson in lessons])
    assert torch.equal(ids, cut(read_corpus(corpus, target)[:1100], LENGTH))
    model = AutoModelForCausalLM.from_pretrained(target)
    for lesson in lessons:
        with torch.no_grad():
            found = model(lesson.ids[:, :-1], output_hidden_states=True)
        expected = torch.stack([found.hidden_states[layer] for layer in (1, 4)], dim=2)
        torch.testing.assert_close(lesson.features.float(), expected.float(), atol=1e-2, rtol=1e-2)
        best = found.logits.softmax(-1).max(-1).values
        torch.testing.assert_close(lesson.top_probs[..., 0], best, atol=1e-3, rtol=1e-2)


def test_a_head_learns_from_a_tap(
    target: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made, out = tmp_path / "tap", tmp_path / "head"
    arguments = [str(target), str(corpus), "--out", str(made), "--length", "24", "--taps", "2,4"]
    threads = torch.get_num_threads()
    try:
        assert main([*arguments, "--threads", "1"]) == 0
        printed = capsys.readouterr().out
        assert "shard 1 of 1: 256 windows each" in printed and "with the states of layers 2, 4" in printed
        assert main(arguments) == 1
        assert "tap exists; nothing is overwritten" in capsys.readouterr().err
        trained = ["--out", str(out), "--steps", "3", "--threads", "1"]
        assert train_main(["eagle3", str(target), str(made), *trained]) == 1
        assert "tap has layers [2, 4]; the head reads [2, 1]" in capsys.readouterr().err
        assert train_main(["mtp", str(target), str(tmp_path), *trained]) == 1
        assert "holds no tap.json" in capsys.readouterr().err
    finally:
        torch.set_num_threads(threads)
    course = CoursePlan(length=LENGTH, num_windows=8, prompt=8, batch_size=4, steps=2, num_kept=2, num_measured=8)
    plan, losses = HeadPlan(method="mtp", target=target, corpus=made, out=out, steps=3, course=course), list[float]()
    (measured,) = make_head(plan, lambda step, loss: losses.append(loss))
    assert len(losses) == 3 and len(measured.greedy) == 8
    other = save_tiny(tmp_path / "other", seed=1, vocab_size=VOCAB)
    with pytest.raises(ValueError, match="was written by another target"):
        Tap.read(made, load_model(other).digest)


@pytest.mark.parametrize("taps", ["5", "1,1", "-1"])
def test_layers_that_are_not_there(
    target: Path, corpus: Path, tmp_path: Path, taps: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(target), str(corpus), "--out", str(tmp_path / "tap"), f"--taps={taps}"]) == 1
    assert "allowed: layers from 0 to 4, each once" in capsys.readouterr().err
