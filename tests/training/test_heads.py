"""A head of any target: what is trained is what drafts, a run that was cut short ends as one that was not, and its
folder drafts beside the target and beside the target's expansion."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engines import TargetHarness, opened
from support.models import save_tiny
from torch import Tensor

from outrider.engine.batch import BatchEntry, build_batch
from outrider.engine.kv_cache import KVCache
from outrider.engine.loader import LoadedModel, load_model
from outrider.pairs.expansion import expand_llama
from outrider.proposers.heads.block import MASK, BlockChains, BlockHead
from outrider.proposers.heads.loading import AnyHead, load_head
from outrider.rpc.messages import Credit
from outrider.training import heads
from outrider.training.course import CoursePlan
from outrider.training.distill import DistillWeights
from outrider.training.heads import (
    MOST_SPREAD,
    HeadMethod,
    HeadPlan,
    HeadTarget,
    export_head,
    likeliest_tokens,
    make_head,
    new_head,
    spread,
)
from outrider.training.parallel import acceptance, window_loss
from outrider.training.teacher import Teacher
from outrider.training.train_command import main

VOCAB, LENGTH, LAYERS = 400, 24, 6
COURSE = CoursePlan(length=LENGTH, num_windows=8, prompt=8, batch_size=4, steps=2, num_kept=2, num_measured=8)
METHODS: tuple[HeadMethod, ...] = get_args(HeadMethod)
SERVED = {"mlp": "mlp_speculator"}


def plan_of(method: HeadMethod, target: Path, corpus: Path, out: Path, **options: Any) -> HeadPlan:
    return HeadPlan(method=method, target=target, corpus=corpus, out=out, **{"steps": 5, "course": COURSE, **options})


def exported(folder: Path, target: Path) -> tuple[AnyHead, LoadedModel]:
    loaded = load_model(target)
    weights = HeadTarget.read(target, loaded).weights
    return load_head(folder, weights, torch.float32, torch.device("cpu")), loaded


def drafted(head: AnyHead, ids: Sequence[int], features: Tensor, end: int, num_tokens: int) -> Tensor:
    """[tokens, vocabulary]: what it gives after the place `end` when it drafts the text itself, and behind that how
    sure it is, if it tells; features: [length, taps, hidden]."""
    blocks = range(len(ids) // 16 + 1)
    cache = KVCache.allocate(head.layers, len(blocks), torch.float32, "cpu", 16)
    rows = BatchEntry(ids[1 : end + 1], 1, blocks, 1)
    if isinstance(head, BlockHead):
        head.fill(build_batch([rows], 16), features[:end], cache)
        block = BatchEntry([ids[end], *[MASK] * (head.rows - 1)], end + 1, blocks, head.most_tokens)
        guess = head.draft(build_batch([block], 16), cache)
        before = torch.tensor(ids[end : end + num_tokens])
        chains = BlockChains(torch.arange(num_tokens), before, None, lambda logits: logits)
        sure = head.confidence(guess, chains)
        logits = head.at(guess, chains)[0]
        return logits if sure is None else torch.cat([logits, sure[:, None]], dim=-1)
    logits, state = head.first(build_batch([rows], 16), features[:end], cache)
    found = [logits]
    for depth in range(1, num_tokens):
        rows = BatchEntry([ids[end + depth]], end + depth, blocks, 1)
        logits, state = head.next(depth, build_batch([rows], 16), state, cache)
        found.append(logits)
    return torch.cat(found)


@pytest.mark.parametrize("draft_vocab", [None, 90])
@pytest.mark.parametrize("method", METHODS)
@torch.no_grad()
def test_what_was_trained_is_what_drafts(
    target: Path, corpus: Path, tmp_path: Path, method: HeadMethod, draft_vocab: int | None
) -> None:
    plan = plan_of(method, target, corpus, tmp_path / "head", draft_vocab=draft_vocab)
    generator = torch.Generator().manual_seed(1)
    stream = torch.randint(VOCAB, (4000,), generator=generator)
    taken = HeadTarget.read(target, load_model(target))
    config, module = new_head(plan, taken, stream)
    for weight in module.parameters():  # what starts as zero does something, and the folder holds it all
        weight.add_(0.1 * torch.randn(weight.shape, generator=generator))
        weight.copy_(weight.bfloat16())
    export_head(config, module, plan.out)
    head, _ = exported(plan.out, target)
    assert (head.name, head.taps) == (SERVED.get(method, method), module.taps)
    ids = torch.randint(VOCAB, (2, LENGTH), generator=generator)
    hidden = taken.weights.output.shape[1]
    features = torch.randn(2, LENGTH, len(module.taps), hidden, generator=generator)
    ends = torch.tensor([1, 9, 17])
    says = module.language_head
    states = module(ids, features, ends, plan.depth)
    expected = says.logits(states).detach()  # [2, 3, tokens, outputs]
    if module.sureness is not None:
        assert method == "dspark"
        expected = torch.cat([expected, module.sureness(states).sigmoid()[..., None]], dim=-1)
    for window in range(2):
        for index, end in enumerate(ends.tolist()):
            found = drafted(head, ids[window].tolist(), features[window], end, plan.depth)
            said = found if says.ids is None else found[:, says.ids]
            torch.testing.assert_close(said, expected[window, index], atol=1e-3, rtol=1e-3)
            assert (found > -torch.inf).sum() == said.numel()
    if method == "eagle3":
        assert expected.shape[-1] == (draft_vocab or VOCAB)


def test_features_of_a_lesson_are_the_targets(target: Path) -> None:
    loaded, generator = load_model(target), torch.Generator().manual_seed(1)
    prompts = torch.randint(3, VOCAB, (3, 9), generator=generator)
    (lesson,) = Teacher(loaded, LENGTH, (1, LAYERS)).lessons("", prompts, 0.0)
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        states = AutoModelForCausalLM.from_pretrained(target)(lesson.ids[:, :-1], output_hidden_states=True)
    for index, layer in enumerate((1, LAYERS)):
        torch.testing.assert_close(
            lesson.features[:, :, index], states.hidden_states[layer].float(), atol=1e-4, rtol=1e-3
        )


def test_an_expansions_features_and_weights_begin_with_the_targets(target: Path) -> None:
    """So that a head reads the same beside it."""
    sizes: Any = {"hidden_size": 96, "intermediate_size": 160, "num_layers": 9, "num_heads": 8, "num_kv_heads": 4}
    small, large = load_model(target), load_model(target, expand=lambda c, state: expand_llama(c, state, **sizes))
    prompts = torch.randint(3, VOCAB, (2, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    hidden = small.model.hidden_size
    one, other = (
        next(Teacher(loaded, LENGTH, taps).lessons("", prompts, None)).features
        for loaded, taps in ((small, (2, 3, LAYERS)), (large, (2, 3, 9)))
    )
    assert other.shape[-1] == 96 and not other[..., hidden:].any()
    torch.testing.assert_close(other[..., :hidden], one, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("method", METHODS)
def test_a_run_goes_on_and_leaves_a_head_that_drafts(
    target: Path, corpus: Path, tmp_path: Path, method: HeadMethod, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.training.train.CHECKPOINT_EVERY", 2)
    plan, losses = plan_of(method, target, corpus, tmp_path / "whole"), list[float]()
    (measured,) = make_head(plan, lambda step, loss: losses.append(loss))
    assert len(losses) == 5 and not plan.work.exists()
    assert (
        len(measured.greedy)
        == len(measured.sampled)
        == {"medusa": 4, "mlp": 4, "dflash": 7, "dspark": 7}.get(method, 8)
    )
    assert all(0 <= share <= 1 for share in (*measured.greedy, *measured.sampled))

    cut, seen = replace(plan, out=tmp_path / "cut"), list[float]()

    def interrupted(step: int, loss: float) -> None:
        if step == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_head(cut, interrupted)
    with pytest.raises(ValueError, match=r"cut.work holds a run of other settings"):
        make_head(replace(cut, num_tokens=2), interrupted)
    make_head(cut, lambda step, loss: seen.append(loss))
    assert seen == pytest.approx(losses[2:], abs=1e-3)
    one, other = (load_file(folder / "model.safetensors") for folder in (plan.out, cut.out))
    assert (
        all((one[name].float() - other[name].float()).abs().max() < 0.02 for name in one) and one.keys() == other.keys()
    )

    head, loaded = exported(plan.out, target)
    prompt = random.Random(2).choices(range(3, VOCAB), k=20)
    alone = TargetHarness.of(loaded).decode_plain(1, opened(1, prompt, max_tokens=20))
    harness = TargetHarness.of(loaded, head=head)
    harness.send(opened(1, prompt, method=head.name, max_tokens=20), Credit(1, 1 << 20, 3))
    harness.run()
    assert harness.output(1) == alone
    assert max(commit.num_drafted for commit in harness.commits(1)) == 3


@pytest.mark.parametrize("method", METHODS)
def test_a_longer_run_learns(target: Path, corpus: Path, tmp_path: Path, method: HeadMethod) -> None:
    losses: list[float] = []
    course = replace(COURSE, batch_size=8, steps=20)
    plan = plan_of(method, target, corpus, tmp_path / "head", steps=20, course=course)
    make_head(plan, lambda step, loss: losses.append(loss))
    assert sum(losses[-4:]) < sum(losses[:4]) - LEARNT[method]


LEARNT: dict[HeadMethod, float] = {  # over four steps
    "eagle3": 0.8, "medusa": 0.04, "mlp": 0.2, "mtp": 0.2, "dflash": 0.2, "dspark": 0.2
}  # fmt: skip


def test_a_confidence_head_learns_what_is_accepted(target: Path, corpus: Path, tmp_path: Path) -> None:
    """From half, with which it begins, to each place's own share; what the head says learns nothing by it."""
    loaded = load_model(target)
    plan = plan_of("dspark", target, corpus, tmp_path / "head")
    _, module = new_head(plan, HeadTarget.read(target, loaded), torch.arange(VOCAB))
    prompts = torch.randint(3, VOCAB, (6, LENGTH + 1), generator=torch.Generator().manual_seed(3))
    lesson = next(Teacher(loaded, LENGTH, module.taps).lessons("", prompts, None))
    places = torch.tensor([2, 9])[:, None] + torch.arange(plan.depth)
    states = module(lesson.ids[:, :-1], lesson.features.float().clone(), places[:, 0], plan.depth)
    given = lesson, places, module.language_head, states, DistillWeights()
    accepted = acceptance(*given[:4], greedy=False)  # [windows, ends, tokens]
    own = {name: weight for name, weight in module.named_parameters() if not name.startswith("confidence_head.")}
    alone, beside = (
        torch.autograd.grad(window_loss(*given, sureness), list(own.values()), retain_graph=True, allow_unused=True)
        for sureness in (None, module.sureness)
    )
    assert all(torch.equal(one, other) for one, other in zip(alone, beside, strict=True) if one is not None)

    assert module.sureness is not None and bool((module.sureness(states).sigmoid() == 0.5).all())
    told = list(module.get_submodule("confidence_head").parameters())
    optimizer, held = torch.optim.Adam(told, lr=0.02), states.detach()
    for _ in range(400):
        optimizer.zero_grad()
        window_loss(*given[:3], held, DistillWeights(), module.sureness).backward()
        optimizer.step()
    assert bool((module.sureness(held).sigmoid() - accepted).abs().mean() < 0.02)


def test_the_likeliest_tokens() -> None:
    assert likeliest_tokens(torch.tensor([7, 7, 1, 3, 3, 3, 5, 1]), 9, 3).tolist() == [1, 3, 7]


@pytest.mark.parametrize("family", ["qwen3", "gemma"])
def test_a_heads_last_norm_begins_as_the_targets(family: str, tmp_path: Path) -> None:
    """Also where that one's factors are stored less one."""
    loaded = load_model(save_tiny(tmp_path / family, family))
    stored = load_file(tmp_path / family / "model.safetensors")["model.norm.weight"]
    assert torch.equal(HeadTarget.read(tmp_path / family, loaded).norm, stored + (family == "gemma"))


def test_a_head_begins_with_no_certainties(tmp_path: Path) -> None:
    """Whatever the target's last norm: of one that is ten times as loud the first logits are no further apart, and what
    the head has to say of any token still has a gradient."""
    weights = [torch.randn(40, 3, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    whole, picked = torch.zeros(40), (torch.cat(weights, dim=1) - 90.0).requires_grad_()
    picked.data[:, 0] = -torch.inf  # what it cannot say
    loss, overlap = DistillWeights().apart(whole, picked, torch.full((40, 5), 0.2))
    (gradient,) = torch.autograd.grad(loss.sum(), picked)
    assert bool((gradient[:, 1:] != 0).all()) and bool((gradient[:, 0] == 0).all()) and bool(loss.isfinite().all())
    assert bool((overlap < 1e-12).all())
    folder = save_tiny(tmp_path / "loud", "gemma")
    state = load_file(folder / "model.safetensors")
    loud = {name: 60 * weight if name == "model.norm.weight" else weight for name, weight in state.items()}
    save_file(loud, folder / "model.safetensors", {"format": "pt"})
    target = HeadTarget.read(folder, load_model(folder))
    assert spread(target) > 2 * MOST_SPREAD
    plan = HeadPlan(target=folder, corpus=folder, out=folder, method="eagle3")
    _, head = new_head(plan, target, torch.arange(97))
    logits = head.language_head.logits(torch.randn(500, 64) * head.get_parameter("norm.weight"))
    assert MOST_SPREAD / 2 < logits.std(-1).mean() < 2 * MOST_SPREAD


def test_a_target_of_other_names_is_refused(tmp_path: Path, target: Path) -> None:
    loaded = load_model(target)
    (tmp_path / "config.json").write_text("{}")
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"has no tensor model.norm.weight"):
        HeadTarget.read(tmp_path, loaded)


def test_a_block_drafter_may_be_narrow(
    target: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(heads, "HeadPlan", partial(HeadPlan, course=COURSE))
    arguments = ["dspark", str(target), str(corpus), "--out", str(tmp_path / "made"), "--steps", "1", "--inner", "24"]
    threads = torch.get_num_threads()
    assert main([*arguments, "--rank", "5", "--threads", "1"]) == 0
    torch.set_num_threads(threads)
    state = load_file(tmp_path / "made" / "model.safetensors")
    assert {len(state[name]) for name in state if name.endswith("up_proj.weight")} == {24}
    assert state["markov_head.markov_w1.weight"].shape == (VOCAB, 5)
    exported(tmp_path / "made", target)
    whole, narrow = (
        heads.head_needs(plan_of("dspark", target, corpus, tmp_path / "made", **sizes))
        for sizes in ({}, {"inner": 24, "rank": 5})
    )
    assert narrow.trained < whole.trained
    capsys.readouterr()
    assert main(["dflash", *arguments[1:], "--rank", "5"]) == 1
    assert "rank: is for dspark; the method is dflash" in capsys.readouterr().err


def test_the_command(
    target: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(heads, "HeadPlan", partial(HeadPlan, course=COURSE))
    arguments = ["mlp", str(target), str(corpus), "--out", str(tmp_path / "made"), "--steps", "2", "--tokens", "3"]
    threads = torch.get_num_threads()
    assert main([*arguments, "--threads", "1"]) == 0
    torch.set_num_threads(threads)
    out = capsys.readouterr().out
    assert "step 2 of 2: loss" in out and "made  greedy" in out and "made  temperature 1" in out
    assert json.loads((tmp_path / "made" / "config.json").read_text())["n_predict"] == 3
    assert main([*arguments, "--draft", str(target)]) == 1
    assert "draft: is for draft and pard" in capsys.readouterr().err
