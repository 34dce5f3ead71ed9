"""Heads beside the target through LLM: every public layout is found by its folder, and changes no token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from llm.test_llm import QUIET, ids_of, metrics_of, prompts_of
from support.heads import LAYOUTS, METHOD_OF, SHAPES, in_speculators, random_head_of, save_head, save_mimo
from support.pairs import VOCAB, TinyPair, greedy_ids

from outrider.llm import LLM, SamplingParams
from outrider.llm.config import SpeculativeConfig

K = 4


@pytest.fixture(scope="module")
def head_of(tiny_pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("heads")
    for layout in LAYOUTS:
        random_head_of(tiny_pair.target, layout, folder / layout)
    return lambda layout: folder / layout


def started(pair: TinyPair, head: Path | None, **options: Any) -> LLM:
    """Without a method: it follows from the folder."""
    given: dict[str, Any] = {"num_speculative_tokens": K, **options.pop("speculative", {})}
    config = None if head is None else {"model": str(head), "draft_trial": "off", **given}
    return LLM(pair.target, batch_invariant=True, threads=1, speculative_config=config, **options)


SAMPLED = [
    SamplingParams(n=3, seed=5, max_tokens=24),
    SamplingParams(temperature=0.7, top_p=0.9, seed=6, max_tokens=24, presence_penalty=0.5),
    SamplingParams(temperature=1.3, min_p=0.02, seed=7, max_tokens=24, stop=["e", "th"]),
    SamplingParams(seed=8, max_tokens=24, logprobs=2, logit_bias={9: 3.0}),
]


def told(made: LLM) -> list[Any]:
    """Several completions, cuts, penalties, a stop: what the target alone would say, by the coupled rule."""
    outputs = made.generate(prompts_of(len(SAMPLED), seed=3), SAMPLED, **QUIET)
    return [
        [(one.index, one.token_ids, one.text, one.finish_reason, one.stop_reason) for one in output.outputs]
        for output in outputs
    ]


@pytest.fixture(scope="module")
def plainly(tiny_pair: TinyPair) -> list[Any]:
    with started(tiny_pair, None) as made:
        return told(made)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_token_changes(layout: str, tiny_pair: TinyPair, head_of: Callable[[str], Path], plainly: list[Any]) -> None:
    """Greedy and coupled, in a batch, and again on what the cache holds; the metrics count what the head drafted."""
    prompts = prompts_of(6, seed=1)
    greedy = SamplingParams(temperature=0, max_tokens=32)
    with started(tiny_pair, head_of(layout)) as made:
        for _ in range(2):
            assert ids_of(made.generate(prompts, greedy, **QUIET)) == [greedy_ids(tiny_pair, p, 32) for p in prompts]
            assert told(made) == plainly
        found = metrics_of(made)
        info = made._backend.engine.verifier.info  # type: ignore[attr-defined]
    assert [own.name for own in info.methods] == [METHOD_OF[layout]]
    assert found["num_drafts"].value > 0 and found["num_draft_tokens"].value > found["num_drafts"].value
    assert len(found["num_accepted_tokens_per_pos"].values) == K
    assert sum(found["num_accepted_tokens_per_pos"].values) == found["num_accepted_tokens"].value


TREE = "[(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]"


@pytest.mark.parametrize("layout", ["eagle3", "medusa"])
def test_trees_change_no_token(
    layout: str, tiny_pair: TinyPair, head_of: Callable[[str], Path], plainly: list[Any]
) -> None:
    prompts = prompts_of(6, seed=1)
    greedy = SamplingParams(temperature=0, max_tokens=32)
    speculative = {"num_speculative_tokens": None, "speculative_token_tree": TREE}
    with started(tiny_pair, head_of(layout), speculative=speculative) as made:
        assert ids_of(made.generate(prompts, greedy, **QUIET)) == [greedy_ids(tiny_pair, p, 32) for p in prompts]
        assert told(made) == plainly
        unseeded = SamplingParams(temperature=0.9, max_tokens=32)
        before = metrics_of(made)["num_draft_tokens"].value, metrics_of(made)["num_drafts"].value
        made.generate(prompts, unseeded, **QUIET)
        after = metrics_of(made)["num_draft_tokens"].value, metrics_of(made)["num_drafts"].value
    assert after[0] - before[0] > 4 * (after[1] - before[1]) > 0, "sampled requests have trees, too"


def test_trees_of_a_draft_model_change_no_token(tiny_pair: TinyPair, plainly: list[Any]) -> None:
    prompts = prompts_of(6, seed=1)
    greedy = SamplingParams(temperature=0, max_tokens=32)
    speculative = {"num_speculative_tokens": None, "speculative_token_tree": TREE}
    with started(tiny_pair, tiny_pair.draft, speculative=speculative) as made:
        assert ids_of(made.generate(prompts, greedy, **QUIET)) == [greedy_ids(tiny_pair, p, 32) for p in prompts]
        assert told(made) == plainly
        found = metrics_of(made)
    assert found["num_draft_tokens"].value > 4 * found["num_drafts"].value > 0
    assert found["num_accepted_tokens"].value > 0


def test_a_tree_that_the_head_cannot_draft(tiny_pair: TinyPair, head_of: Callable[[str], Path]) -> None:
    with pytest.raises(ValueError, match="speculative_token_tree: this eagle3 head drafts all tokens in one pass"):
        started(tiny_pair, head_of("p-eagle"), speculative={"speculative_token_tree": TREE})
    with pytest.raises(NotImplementedError, match="is a tree, and method pard drafts chains"):
        started(tiny_pair, tiny_pair.draft, speculative={"speculative_token_tree": TREE, "method": "pard"})


def test_auto_turns_a_head_off_that_is_never_right(tiny_pair: TinyPair, head_of: Callable[[str], Path]) -> None:
    prompt, params = prompts_of(1, seed=2)[0], SamplingParams(temperature=0, max_tokens=200)
    options: dict[str, Any] = {"mode": "auto", "per_request_spec_decode_metrics": "detailed"}
    with started(tiny_pair, head_of("eagle"), **options) as made:
        (output,) = made.generate([prompt], params, **QUIET)
    assert output.outputs[0].token_ids == greedy_ids(tiny_pair, prompt, 200)
    metrics = output.outputs[0].spec_decode_metrics
    assert metrics is not None and 0 < metrics.num_spec_steps < 100


def test_the_number_of_requests_decides(tiny_pair: TinyPair, head_of: Callable[[str], Path]) -> None:
    """Nothing is drafted above `disable_by_batch_size`, and again below it."""
    prompts = prompts_of(3, seed=4)
    with started(tiny_pair, head_of("eagle3"), speculative={"disable_by_batch_size": 2}) as made:
        greedy = SamplingParams(temperature=0, max_tokens=24)
        assert ids_of(made.generate(prompts, greedy, **QUIET)) == [greedy_ids(tiny_pair, p, 24) for p in prompts]
        few = metrics_of(made)["num_drafts"].value
        assert few < 20  # of 69: the last rounds of two, once one has ended
        params = [SamplingParams(temperature=0, max_tokens=count) for count in (60, 4, 4)]
        outputs = made.generate(prompts, params, **QUIET)
        assert ids_of(outputs)[0] == greedy_ids(tiny_pair, prompts[0], 60)
        assert metrics_of(made)["num_drafts"].value > few + 30


def test_mtp_of_the_targets_own_checkpoint(tiny_pair: TinyPair, tmp_path: Path) -> None:
    """Without a model, by vLLM's older name; its one layer drafts as many tokens as are asked for."""
    folder, prompts = save_mimo(tmp_path, tiny_pair.target), prompts_of(3, seed=5)
    params = [SamplingParams(temperature=0, max_tokens=16), *[SamplingParams(seed=9, max_tokens=16)] * 2]
    with LLM(folder, batch_invariant=True, threads=1) as made:
        plain = ids_of(made.generate(prompts, params, **QUIET))
    config: dict[str, Any] = {"method": "mimo_mtp", "draft_trial": "off"}
    for k in (None, 3):
        with pytest.warns(DeprecationWarning, match="an old name of 'mtp'"):
            made = LLM(
                folder, batch_invariant=True, threads=1, speculative_config=config | {"num_speculative_tokens": k}
            )
        with made:
            assert ids_of(made.generate(prompts, params, **QUIET)) == plain
            found = metrics_of(made)
        assert found["num_drafts"].value > 0 and len(found["num_accepted_tokens_per_pos"].values) == (k or 1)


@pytest.mark.parametrize("given", [{"draft_sample_method": "greedy"}, {"rejection_sample_method": "block"}])
def test_how_a_head_draws_and_is_judged(
    given: dict[str, Any], tiny_pair: TinyPair, head_of: Callable[[str], Path], plainly: list[Any]
) -> None:
    with started(tiny_pair, head_of("eagle"), speculative=given) as made:
        if "rejection_sample_method" not in given:
            assert told(made) == plainly
        prompts = prompts_of(2, seed=6)
        outputs = made.generate(prompts, SamplingParams(max_tokens=24), **QUIET)
        assert all(len(output.outputs[0].token_ids) == 24 for output in outputs)
        found = metrics_of(made)
    assert found["num_draft_tokens"].value > 0
    assert found["num_accepted_tokens"].value > 0 or "draft_sample_method" in given  # its one token is hardly drawn


def test_a_length_that_the_checkpoint_gives(tiny_pair: TinyPair, head_of: Callable[[str], Path]) -> None:
    with started(tiny_pair, head_of("mlp_speculator"), speculative={"num_speculative_tokens": None}) as made:
        made.generate(prompts_of(1), SamplingParams(temperature=0, max_tokens=8), **QUIET)
        assert len(metrics_of(made)["num_accepted_tokens_per_pos"].values) == 4  # n_predict


def test_a_folder_of_speculators_says_all(tiny_pair: TinyPair, tmp_path: Path, plainly: list[Any]) -> None:
    folder = in_speculators(random_head_of(tiny_pair.target, "p-eagle", tmp_path), "peagle", k=3)
    with started(tiny_pair, folder, speculative={"num_speculative_tokens": None}) as made:
        assert told(made) == plainly
        assert len(metrics_of(made)["num_accepted_tokens_per_pos"].values) == 3


def test_a_head_that_is_not_what_is_said(tiny_pair: TinyPair, head_of: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\['method'\] is 'eagle', and .*eagle3 holds a head of method 'eagle3'"):
        started(tiny_pair, head_of("eagle3"), speculative={"method": "eagle"})
    with pytest.raises(ValueError, match=r"'parallel_drafting'.* was not trained for it: its config.json has no para"):
        started(tiny_pair, head_of("eagle3"), speculative={"method": "eagle3", "parallel_drafting": True})
    with pytest.raises(ValueError, match=r"max_model_len=513 is more than the target's 512"):
        started(tiny_pair, head_of("eagle3"), speculative={"max_model_len": 513})
    with pytest.raises(ValueError, match="holds no head"):
        started(tiny_pair, tiny_pair.draft, speculative={"method": "eagle3"})
    config, shapes = SHAPES["medusa"](tiny_pair.hf.config)
    shapes = {name: (VOCAB + 1, size[1]) if name.startswith("lm_heads") else size for name, size in shapes.items()}
    save_head(tmp_path, config, {name: torch.zeros(shape) for name, shape in shapes.items()})
    with pytest.raises(ValueError, match="lm_heads"):
        started(tiny_pair, tmp_path)


def test_memory_counts_the_head(tiny_pair: TinyPair, head_of: Callable[[str], Path]) -> None:
    """A head of a layer has keys and values, and states at the ends of blocks, beside the target's."""
    per_layer = 2 * 2 * 16 * 4 * 16  # keys and values, heads, width, bytes, tokens
    states = 3 * tiny_pair.hf.config.hidden_size * 4
    for method, size in (("medusa", 2 * per_layer), ("eagle3", 3 * per_layer + states)):
        with started(tiny_pair, head_of(method), kv_cache_memory_bytes=5 * size) as made:
            assert made._backend.target.engine.cache.pool.num_blocks == 5  # type: ignore[attr-defined]
        with started(tiny_pair, head_of(method), kv_cache_memory_bytes=5 * size - 1) as made:
            assert made._backend.target.engine.cache.pool.num_blocks == 4  # type: ignore[attr-defined]


def test_a_configuration_may_be_an_object(tiny_pair: TinyPair, head_of: Callable[[str], Path]) -> None:
    config = SpeculativeConfig(method="medusa", model=head_of("medusa"), num_speculative_tokens=2, draft_trial="warn")
    with LLM(tiny_pair.target, threads=1, speculative_config=config) as made:
        made.generate(prompts_of(1), SamplingParams(temperature=0, max_tokens=8), **QUIET)
        assert metrics_of(made)["num_drafts"].value > 0
