"""At 262,144 ids no tensor of a run holds more rows of the vocabulary than it may, losses and gradients are those of
the plain form, and a run that cannot fit says so at once."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from support.models import tiny_hf_model
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from outrider.cli.terminal import Painter
from outrider.engine.loader import load_model
from outrider.training import budget, drafts, heads, language_head, taps, teacher
from outrider.training.course import CoursePlan
from outrider.training.distill import LEAST_LOG_PROB, DistillWeights
from outrider.training.drafts import DraftPlan, make_draft, new_draft
from outrider.training.heads import HeadMethod, HeadPlan, HeadTarget, head_loss, make_head, new_head
from outrider.training.language_head import LanguageHead
from outrider.training.lessons import TOP, Lesson, num_windows, write_lessons
from outrider.training.parallel import parallel_loss
from outrider.training.tap_command import main as tap_main
from outrider.training.taps import TapPlan, tap
from outrider.training.teacher import Teacher, drawn
from outrider.training.train_command import main

VOCAB, LENGTH, LAYERS = 400, 24, 6
ROWS = 80  # of the vocabulary, at once: more than a weight has, transposed, and less than a lesson or a loss has
COURSE = CoursePlan(length=LENGTH, num_windows=8, prompt=8, batch_size=4, steps=2, num_kept=2, num_measured=8)
HEADS: tuple[HeadMethod, ...] = get_args(HeadMethod)
METHODS = ("draft", "pard", *HEADS)


@contextmanager
def logits_of(num_rows: int) -> Iterator[None]:
    """Inside, so many rows of the vocabulary may be there at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(language_head, "LOGITS_BYTES", num_rows * VOCAB * 4)
        yield


class MostRows(TorchDispatchMode):
    """The most rows of any tensor that is as wide as the vocabulary."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for each in made if isinstance(made, tuple | list) else [made]:
            if isinstance(each, Tensor) and each.ndim and each.shape[-1] in (VOCAB, VOCAB + 1):  # with a mask token
                self.most = max(self.most, each.numel() // each.shape[-1])
        return made


def run_of(method: str, target: Path, corpus: Path, out: Path) -> Callable[..., Any]:
    """Makes it."""
    options: Any = {"target": target, "corpus": corpus, "out": out, "steps": 3, "course": COURSE}
    if method in HEADS:
        return partial(make_head, HeadPlan(method=method, **options))
    return partial(make_draft, DraftPlan(parallel=method == "pard", **options))


@pytest.mark.parametrize("method", METHODS)
def test_no_tensor_of_a_run_has_more_rows_of_the_vocabulary(
    target: Path, corpus: Path, tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafts, "MEASURED_EVERY", 1)
    with logits_of(ROWS), MostRows() as seen:
        run_of(method, target, corpus, tmp_path / "made")(lambda step, loss: None)
    assert 0 < seen.most <= ROWS


def test_no_tensor_of_a_tap_has_more_rows_of_the_vocabulary(target: Path, corpus: Path, tmp_path: Path) -> None:
    with logits_of(ROWS), MostRows() as seen:
        tap(TapPlan(target, corpus, tmp_path / "tap", length=LENGTH), lambda done, total: None)
    assert 0 < seen.most <= ROWS


def lesson_of(features: Tensor) -> Lesson:
    """Random, with these hidden states, [windows, LENGTH, taps, hidden]."""
    generator, count = torch.Generator().manual_seed(3), len(features)
    ids = torch.randint(VOCAB, (count, LENGTH + 1), generator=generator)
    probs, tokens = torch.randn(count, LENGTH, VOCAB, generator=generator).mul_(3).softmax(-1).topk(TOP)
    return Lesson(ids, tokens, probs, features)


def loss_of(method: str, target: Path, out: Path) -> tuple[torch.nn.Module, Callable[[Lesson], Tensor], Lesson]:
    """What is trained, its loss, and a lesson; of eagle3, of a part of the vocabulary."""
    options: Any = {"target": target, "corpus": out, "out": out, "course": COURSE}
    loaded, generator = load_model(target), torch.Generator().manual_seed(1)
    if method in HEADS:
        plan = HeadPlan(method=method, draft_vocab=90 if method == "eagle3" else None, **options)
        stream = torch.randint(VOCAB, (4000,), generator=generator)
        _, head = new_head(plan, HeadTarget.read(target, loaded), stream)
        features = torch.randn(4, LENGTH, len(head.taps), loaded.model.hidden_size, generator=generator)
        return stirred(head), head_loss(head, plan.depth), lesson_of(features)
    parallel = method == "pard"
    draft, mask_id = new_draft(DraftPlan(parallel=parallel, **options), loaded, None)
    num_tokens, num_ends = (8, 12) if parallel else (1, LENGTH)
    loss = parallel_loss(draft, mask_id, num_tokens, num_ends, DistillWeights())
    return stirred(draft), loss, lesson_of(torch.empty(4, LENGTH, 0, 0))


def stirred(module: torch.nn.Module) -> torch.nn.Module:
    """With no weight that is zero."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in module.parameters():
            weight.add_(0.1 * torch.randn(weight.shape, generator=generator))
    return module


@pytest.mark.parametrize("method", METHODS)
def test_a_loss_in_parts_has_the_value_and_gradients_of_the_whole(target: Path, tmp_path: Path, method: str) -> None:
    module, loss, lesson = loss_of(method, target, tmp_path)
    found: list[tuple[Tensor, dict[str, Tensor]]] = []
    for num_rows in (1 << 20, 7):
        module.zero_grad()
        with logits_of(num_rows):
            value = loss(lesson)
            torch.autograd.backward(value)
        gradients = {name: weight.grad.clone() for name, weight in module.named_parameters() if weight.grad is not None}
        found.append((value.detach(), gradients))
    (whole, plain), (sum_of_parts, bounded) = found
    torch.testing.assert_close(sum_of_parts, whole, atol=1e-5, rtol=1e-5)
    assert plain.keys() == bounded.keys() and plain
    for name, gradient in plain.items():  # the products may be of bfloat16
        assert (bounded[name] - gradient).norm() <= 0.01 * gradient.norm(), name


@pytest.mark.parametrize("kind", ["whole", "some-ids", "frozen", "capped"])
def test_what_a_head_says_is_what_its_logits_say(kind: str) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.nn.Parameter(torch.randn(VOCAB, 32, generator=generator), requires_grad=kind != "frozen")
    states = torch.randn(3, 5, 32, generator=generator, requires_grad=True)
    ids = torch.randint(VOCAB, (3, 5, 9), generator=generator)
    ids[..., 1] = ids[..., 0]  # the text's own token is mostly among the likeliest
    weights, some = () if kind == "frozen" else (weight,), torch.arange(0, VOCAB, 3)

    def product(rows: Tensor) -> Tensor:
        logits = F.linear(rows, weight[some] if kind == "some-ids" else weight)
        return 20.0 * torch.tanh(logits / 20.0) if kind == "capped" else logits

    head = LanguageHead(product, VOCAB, weights)
    if kind == "some-ids":
        head = LanguageHead.of_ids(product, weights, some, VOCAB)
    logits = product(states)
    if kind == "some-ids":
        logits = torch.full((3, 5, VOCAB), -torch.inf).index_copy(2, some, logits)
    expected = (logits.logsumexp(-1), logits.gather(-1, ids))
    with logits_of(2):
        found = head.said(states, ids)
        assert torch.equal(head.best(states), logits.argmax(-1))
    factor = torch.randn(3, 5, 9, generator=generator)
    asked = (states, *weights)
    one, other = (
        torch.autograd.grad((factor * (picked - whole[..., None]).clamp_min(LEAST_LOG_PROB)).sum(), asked)
        for whole, picked in (expected, found)
    )
    for left, right in ((expected, found), (one, other)):
        torch.testing.assert_close(left, right, atol=1e-4, rtol=1e-4)


def test_logits_that_are_made_otherwise_are_refused() -> None:
    from outrider.training.parallel import draft_head

    def scaled(module: torch.nn.Module, given: Any, output: Any) -> None:
        output.logits.mul_(2)

    draft_head(tiny_hf_model("gemma2"))  # which caps them
    draft = tiny_hf_model()
    draft.lm_head.register_forward_hook(lambda module, given, logits: 2 * logits)
    draft_head(draft)  # a part of the head
    draft.register_forward_hook(scaled)
    with pytest.raises(ValueError, match="llama: its logits are not the product of its states and its head alone"):
        draft_head(draft)


@pytest.mark.parametrize("temperature", [0.0, 1.0, None])
def test_how_many_windows_are_written_at_once_changes_nothing(
    target: Path, temperature: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, generator = load_model(target), torch.Generator().manual_seed(1)
    prompts = torch.randint(3, VOCAB, (5, 9 if temperature is not None else LENGTH + 1), generator=generator)
    found: list[Lesson] = []
    for at_once, rows in ((16, 1 << 20), (2, 3)):
        monkeypatch.setattr(teacher, "MOST_WINDOWS", at_once)
        with logits_of(rows):
            parts = Teacher(loaded, LENGTH, (1,)).lessons("", prompts, temperature, generator.manual_seed(4))
            found.append(Lesson.joined(list(parts)))
    whole, parted = found
    assert torch.equal(whole.ids, parted.ids)
    torch.testing.assert_close(whole.top_probs, parted.top_probs, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(whole.features, parted.features, atol=1e-4, rtol=1e-3)


def test_tokens_are_drawn_by_their_probabilities() -> None:
    logits = torch.tensor([0.5, 0.0, 0.3, 0.2, 0.0]).log().expand(1000, -1)
    tokens = drawn(logits, 1.0, torch.arange(1000) / 1000)
    assert torch.bincount(tokens, minlength=5).tolist() == pytest.approx([500, 0, 300, 200, 0], abs=1)
    assert drawn(logits[:1], 1.0, torch.tensor([1.0 - 1e-7])).item() == 3
    assert drawn(torch.tensor([[-torch.inf, 1.0, 1.0]]), 1.0, torch.zeros(1)).item() == 1
    assert (drawn(logits, 0.0, torch.rand(1000)) == 0).all()


def test_a_file_is_written_part_by_part_whole_or_not_at_all(tmp_path: Path) -> None:
    whole = lesson_of(torch.randn(7, LENGTH, 2, 16))
    parts = [
        Lesson(*(tensor[rows] for tensor in (whole.ids, whole.top_ids, whole.top_probs, whole.features)))
        for rows in (slice(0, 3), slice(3, 6), slice(6, 7))
    ]

    def cut_short() -> Iterator[Lesson]:
        yield parts[0]
        raise KeyboardInterrupt

    path = tmp_path / "lesson.safetensors"
    with pytest.raises(KeyboardInterrupt):
        write_lessons(path, 7, cut_short())
    assert not path.exists()
    write_lessons(path, 7, parts)
    stored, found = whole.stored(), load_file(path)
    assert num_windows(path) == 7 and found.keys() == stored.keys()
    assert all(torch.equal(found[name], stored[name]) for name in stored)
    one = Lesson.read(path, 4, (1,))
    assert torch.equal(one.ids, whole.ids[4:5]) and torch.equal(one.top_ids, whole.top_ids[4:5])
    assert torch.equal(one.features, whole.features[4:5, :, 1:].bfloat16())


@pytest.mark.parametrize(
    ("method", "free_mb", "remedy"),
    [
        ("eagle3", 1, "no flag makes it fit"),
        ("eagle3", None, r"allowed: --draft-vocab 8192 \([\d,]+ MB\)"),
        ("pard", None, r"allowed: --batch 1 \([\d,]+ MB\)"),
        ("mlp", 1, "no flag makes it fit"),
    ],
)
def test_a_run_that_cannot_fit_says_so_at_once(
    target: Path,
    corpus: Path,
    tmp_path: Path,
    method: str,
    free_mb: int | None,
    remedy: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    large = tmp_path / "large"  # a configuration alone: nothing is loaded
    large.mkdir()
    said = json.loads((target / "config.json").read_text()) | {"vocab_size": 262_144, "hidden_size": 640}
    (large / "config.json").write_text(json.dumps(said))
    (large / "model.safetensors").write_bytes(b"")
    options: Any = {"target": large, "corpus": corpus, "out": tmp_path / "made"}
    if free_mb is None and method == "pard":
        plan = DraftPlan(parallel=True, **options)
        free = drafts.draft_needs(plan).target + drafts.draft_needs(plan).beside - 1
    elif free_mb is None:
        needs = heads.head_needs(HeadPlan(method="eagle3", **options))
        free = needs.target + needs.beside - 1
    else:
        free = free_mb * 1_000_000
    monkeypatch.setattr(budget, "free_bytes", lambda device: free)
    assert main([method, str(large), str(corpus), "--out", str(tmp_path / "made")]) == 1
    printed = capsys.readouterr()
    assert "needs about" in printed.out and f"and {free // 1_000_000:,} MB are free" in printed.err
    assert re.search(remedy, " ".join(printed.err.split())), printed.err
    assert not (tmp_path / "made.work").exists()


@pytest.mark.parametrize("method", ["eagle3", "mtp", "medusa"])
def test_what_is_the_targets_is_kept_as_it_is_stored(
    target: Path, corpus: Path, tmp_path: Path, method: HeadMethod
) -> None:
    model = tiny_hf_model(vocab_size=VOCAB, tie_word_embeddings=True).bfloat16()
    shutil.copytree(target, tmp_path / "half", ignore=shutil.ignore_patterns("*.safetensors"))
    model.save_pretrained(tmp_path / "half")
    weights = HeadTarget.read(tmp_path / "half", load_model(tmp_path / "half")).weights
    assert weights.embeddings.dtype == torch.bfloat16 and weights.output is weights.embeddings
    assert torch.equal(weights.embeddings, model.model.embed_tokens.weight)
    options: Any = {"target": tmp_path / "half", "corpus": corpus, "out": tmp_path / "made", "steps": 1}
    losses: list[float] = []
    make_head(HeadPlan(method=method, course=COURSE, **options), lambda step, loss: losses.append(loss))
    assert len(losses) == 1 and (tmp_path / "made").is_dir()


def test_a_tap_that_cannot_fit_says_so_at_once(
    target: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    needs, short = (taps.tap_needs(TapPlan(target, corpus, tmp_path, length=length)) for length in (4096, 64))
    assert needs.beside > short.beside
    monkeypatch.setattr(budget, "free_bytes", lambda device: needs.target + needs.beside - 1)
    assert tap_main([str(target), str(corpus), "--out", str(tmp_path / "tap"), "--length", "4096"]) == 1
    assert "allowed: --length 64" in " ".join(capsys.readouterr().err.split())


def test_what_a_run_of_gemma_needs(target: Path, corpus: Path, tmp_path: Path) -> None:
    """Of 262,144 ids and 640 channels: 2 GB beside the model for lessons and losses, whatever is trained."""
    said = json.loads((target / "config.json").read_text()) | {
        "vocab_size": 262_144, "hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 18,
        "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "tie_word_embeddings": True,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(said))
    (tmp_path / "model.safetensors").write_bytes(b"")
    options: Any = {"target": tmp_path, "corpus": corpus, "out": tmp_path / "made"}
    found = [heads.head_needs(HeadPlan(method=method, **options)) for method in HEADS]
    found += [drafts.draft_needs(DraftPlan(parallel=parallel, **options)) for parallel in (False, True)]
    found.append(taps.tap_needs(TapPlan(tmp_path, corpus, tmp_path)))
    assert all(needs.cache + max(needs.lessons, needs.losses) < 2e9 for needs in found)
    assert heads.head_needs(HeadPlan(method="eagle3", draft_vocab=8192, **options)).beside < 2e9


def test_what_a_run_does_shows_before_its_second_lesson(
    target: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(heads, "HeadPlan", partial(HeadPlan, course=COURSE))
    written: list[tuple[str, int]] = []

    def noted(self: Any, text: str) -> None:
        written.append((text, len(list((tmp_path / "made.work" / "lessons").glob("*.safetensors")))))

    monkeypatch.setattr(Painter, "note", noted)
    assert main(["medusa", str(target), str(corpus), "--out", str(tmp_path / "made"), "--steps", "3"]) == 0
    capsys.readouterr()
    before_any = [text for text, count in written if not count]
    assert before_any[0].startswith("needs about ") and before_any[1] == "step 0 of 3: reads the target and the corpus"
    assert "step 0 of 3: lesson 1, windows 1 to 8 of 8: 0 of 24 tokens" in before_any
    assert ("step 1 of 3", 1) in [(text.split(":")[0], count) for text, count in written]
    assert any(text.startswith("step 3 of 3: held out, sampled, windows 1 to 8 of 8") for text, _ in written)


def test_what_a_tap_does_shows_before_its_first_shard(target: Path, corpus: Path, tmp_path: Path) -> None:
    words: list[str] = []
    plan = TapPlan(target, corpus, tmp_path / "tap", length=LENGTH, num_windows=40, max_tokens=1100)
    tap(plan, lambda done, total: words.append(f"{done}/{total}"), words.append)
    assert words[:3] == ["0/2", *(f"shard 1 of 2, windows {first} to {last} of 40: 0 of 24 tokens"
                                  for first, last in ((1, 16), (17, 32)))]  # fmt: skip
