"""A draft of any target: what is learnt is what the target gives, masks see what they see in drafting, a run that was
cut short ends as one that was not, and the folder drafts."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import TINY, hf_logits, save_tiny, tiny_hf_model, train_byte_level
from transformers import AutoModelForCausalLM

from outrider.engine.loader import load_model
from outrider.engine.model_runner import ModelRunner
from outrider.proposers.pard import PardProposer
from outrider.training import drafts
from outrider.training.course import Course, CoursePlan
from outrider.training.drafts import DraftPlan, make_draft, measure, read_corpus, split_stream
from outrider.training.lessons import TOP, Lesson
from outrider.training.parallel import MaskedRows, deepened, draft_head, parallel_states
from outrider.training.teacher import Teacher
from outrider.training.train_command import main, rounds

VOCAB, LENGTH = 400, 24
COURSE = CoursePlan(length=LENGTH, num_windows=8, prompt=8, batch_size=4, steps=2, num_kept=2, num_measured=8)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_tiny(tmp_path_factory.mktemp("target"), vocab_size=VOCAB, generation={"eos_token_id": 0})
    train_byte_level(VOCAB).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


def plan_of(target: Path, corpus: Path, out: Path, **options: Any) -> DraftPlan:
    return DraftPlan(
        target=target, corpus=corpus, out=out, **{"parallel": True, "steps": 5, "course": COURSE, **options}
    )


def test_masks_see_the_text_up_to_their_end_and_the_masks_before_them(target: Path) -> None:
    model, mask_id = AutoModelForCausalLM.from_pretrained(target), VOCAB - 1
    ids = torch.randint(3, VOCAB, (2, 20), generator=torch.Generator().manual_seed(1))
    ends = torch.tensor([2, 3, 11])
    with torch.no_grad():
        states = parallel_states(model, ids, MaskedRows.of(ends, 20, 4), mask_id)
        found = draft_head(model).logits(states)  # [2, 3, 4, vocab]
    for window, row in enumerate(ids.tolist()):
        for index, end in enumerate(ends.tolist()):
            alone = hf_logits(model, [*row[: end + 1], mask_id, mask_id, mask_id])[end:]
            assert (found[window, index] - alone).abs().max() < 0.1 * alone.std()  # the products may be bfloat16


@pytest.mark.parametrize("temperature", [0.0, 1.0, None])
def test_a_lesson_is_what_the_target_gives(target: Path, temperature: float | None) -> None:
    teacher, generator = Teacher(load_model(target), LENGTH), torch.Generator().manual_seed(1)
    prompts = torch.randint(3, VOCAB, (3, 9 if temperature is not None else LENGTH + 1), generator=generator)
    (lesson,) = teacher.lessons("", prompts, temperature, generator)
    model = AutoModelForCausalLM.from_pretrained(target)
    assert lesson.ids.shape == (3, LENGTH + 1) and torch.equal(lesson.ids[:, : prompts.shape[1]], prompts)
    for index, ids in enumerate(lesson.ids.tolist()):
        probs = hf_logits(model, ids[:-1]).softmax(-1)  # [LENGTH, vocab]
        values, tokens = probs.topk(TOP)
        assert torch.allclose(lesson.top_probs[index], values, atol=1e-5)
        assert (lesson.top_ids[index] == tokens).float().mean() > 0.99  # near-ties
        if temperature == 0.0:
            assert ids[9:] == lesson.top_ids[index, 8:, 0].tolist()


def test_a_course_is_a_function_of_the_step(target: Path, corpus: Path, tmp_path: Path) -> None:
    teacher, stream = Teacher(load_model(target), LENGTH), read_corpus(corpus, target)
    course = Course(teacher, stream, tmp_path / "one", COURSE)
    batches = [course.batch(step) for step in range(8)]
    assert len(list((tmp_path / "one").iterdir())) == 4
    for folder in ("one", "other"):
        again = Course(teacher, stream, tmp_path / folder, COURSE).batch(7)
        assert torch.equal(again.ids, batches[7].ids) and torch.equal(again.top_ids, batches[7].top_ids)
    assert not torch.equal(batches[6].ids, batches[7].ids)


def test_more_layers_compute_the_same_function() -> None:
    draft = tiny_hf_model("qwen2")
    ids = list(range(3, 30))
    assert torch.allclose(hf_logits(deepened(draft, 5), ids), hf_logits(draft, ids), atol=1e-5)
    with pytest.raises(ValueError, match="layers: is 1; allowed: at least those of the draft that is given, 2"):
        deepened(draft, 1)


def test_one_block_in_32_is_held_out() -> None:
    learnt, held_out = split_stream(torch.arange(64 * 25), LENGTH)
    assert len(held_out) == 50 and not set(learnt.tolist()) & set(held_out.tolist())
    with pytest.raises(ValueError, match=r"the corpus has 1599 tokens; allowed: at least 1600"):
        split_stream(torch.arange(64 * 25 - 1), LENGTH)


def test_a_model_accepts_its_own_greedy_text(target: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(target)
    with torch.no_grad():
        model.lm_head.weight.mul_(8)  # few tokens are likely
    ids = torch.randint(3, VOCAB, (2, 8), generator=torch.Generator().manual_seed(1))
    while ids.shape[1] < LENGTH + 1:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    probs, tokens = torch.stack([hf_logits(model, row[:-1]) for row in ids.tolist()]).softmax(-1).topk(TOP)
    lesson = Lesson(ids, tokens, probs, torch.empty(*tokens.shape[:2], 0, 0))
    measured = measure("own", model, None, ([lesson], [lesson]))
    assert sum(measured.greedy) > 0.85 * 8 and min(measured.sampled) > 0.9
    assert rounds((0.5, 0.5, 0.1), 2) == 1.75


@pytest.mark.parametrize("start", [False, True], ids=["new", "from-a-draft"])
@pytest.mark.parametrize("parallel", [False, True], ids=["draft", "pard"])
def test_a_run_goes_on_and_leaves_a_folder_that_drafts(
    target: Path, corpus: Path, tmp_path: Path, parallel: bool, start: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.training.train.CHECKPOINT_EVERY", 2)
    begun = save_tiny(tmp_path / "start", seed=1, vocab_size=VOCAB) if start else None
    plan = plan_of(target, corpus, tmp_path / "whole", parallel=parallel, start=begun)
    losses: list[float] = []
    measured = make_draft(plan, lambda step, loss: losses.append(loss))
    assert [each.name for each in measured] == ["whole", "start"][: 1 + start] and len(losses) == 5
    assert all(len(each.greedy) == 8 and 0 <= min(each.sampled) <= max(each.sampled) <= 1 for each in measured)
    assert not plan.work.exists()

    cut, seen = replace(plan, out=tmp_path / "cut"), list[float]()

    def interrupted(step: int, loss: float) -> None:
        if step == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_draft(cut, interrupted)
    with pytest.raises(ValueError, match=r"cut.work holds a run of other settings"):
        make_draft(replace(cut, steps=6), interrupted)
    make_draft(cut, lambda step, loss: seen.append(loss))
    assert seen == pytest.approx(losses[2:], abs=1e-3)
    one, other = (load_model(folder) for folder in (plan.out, cut.out))
    assert one.mask_token_id == other.mask_token_id == (VOCAB if parallel else None)
    assert one.eos_token_ids == (TINY["eos_token_id"],) if start else (0,)
    if parallel:
        PardProposer.of(ModelRunner(one.model, 4), one)


def test_a_longer_run_learns(target: Path, corpus: Path, tmp_path: Path) -> None:
    losses: list[float] = []
    course = replace(COURSE, batch_size=8, steps=20)
    plan = plan_of(target, corpus, tmp_path / "draft", steps=20, course=course)
    make_draft(plan, lambda step, loss: losses.append(loss))
    assert sum(losses[-4:]) < sum(losses[:4]) - 0.8


def test_the_command(
    target: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(drafts, "DraftPlan", partial(DraftPlan, course=COURSE))
    lines = tmp_path / "corpus.jsonl"
    texts = corpus.read_text().split(" def ")
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    arguments = ["pard", str(target), str(lines), "--out", str(tmp_path / "made"), "--steps", "2", "--threads", "1"]
    threads = torch.get_num_threads()
    assert main(arguments) == 0
    torch.set_num_threads(threads)
    out = capsys.readouterr().out
    assert "step 2 of 2: loss" in out and "made  greedy" in out and "made  temperature 1" in out
    assert main(arguments) == 1
    assert "made exists; nothing is overwritten" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "line 2 is not JSON"),
        ('{"prompt": "a"}', 'line 2 has no text; allowed: an object with "text", a string'),
        ("[1]", "line 2 has no text"),
    ],
)
def test_a_line_that_has_no_text(target: Path, tmp_path: Path, line: str, problem: str) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text(f'{{"text": "a"}}\n{line}\n')
    with pytest.raises(ValueError, match=problem):
        read_corpus(path, target)
