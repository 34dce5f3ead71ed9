"""Mixtures of experts decode with drafts what they decode plainly, token for token, whatever drafts and however rows
are grouped by expert: greedy and coupled, in 16 and in few bits, cold and over a warm prefix cache."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support.heads import random_head_of
from support.models import KERNELS, MIXTURES, save_tiny, train_byte_level

from outrider.gateway.text.tokenizer import Tokenizer
from outrider.llm import LLM, SamplingParams, TokensPrompt
from outrider.pairs import pair_path

VOCAB, LENGTH, NUM_PROMPTS = 400, 40, 6
HELD_OUT = Path(__file__).parents[1] / "pairs" / "data" / "held_out_sched.txt"
TREE = "[(0,), (1,), (0, 0), (1, 0)]"
HEADS = ("eagle3", "dflash", "dspark", "medusa")
WAYS = ("draft_model", "suffix", "self:int4", "a tree", *HEADS)
PROMPTS = [TokensPrompt(prompt_token_ids=[3 + (7 * i + 5 * j) % 390 for j in range(14)]) for i in range(NUM_PROMPTS)]


class Pair:
    """Folders of a mixture, of a draft of its first layer, and of heads, which know nothing."""

    def __init__(self, family: str, folder: Path) -> None:
        options: dict[str, Any] = {"vocab_size": VOCAB, "eos_token_id": None}
        self.target = save_tiny(folder / "target", family, seed=1, **options)
        self.draft = save_tiny(folder / "draft", family, seed=1, **options, num_hidden_layers=1)
        for made in (self.target, self.draft):
            train_byte_level(VOCAB).save(str(made / "tokenizer.json"))
        self.heads = {name: random_head_of(self.target, name, folder / name) for name in HEADS}

    def config(self, way: str) -> dict[str, Any]:
        """What `LLM` is told."""
        if way == "suffix":
            return {"method": "suffix"}
        model = {"draft_model": str(self.draft), "a tree": str(self.draft), "self:int4": "self:int4"}.get(way)
        model = str(self.heads[way]) if model is None else model
        tree = {"speculative_token_tree": TREE} if way == "a tree" else {}
        return {"model": model, "num_speculative_tokens": 4, "draft_trial": "off", **tree}


@pytest.fixture(scope="module", params=MIXTURES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(request.param, tmp_path_factory.mktemp(request.param))


def decoded(pair: Pair, way: str = "", rounds: int = 1, **options: Any) -> tuple[list[Any], int]:
    """The tokens of all prompts together, greedy and coupled, and how many drafted ones were accepted."""
    config = pair.config(way) if way else None
    found: list[Any] = []
    accepted = 0
    for temperature in (0.0, 1.0):
        sampling = [
            SamplingParams(temperature=temperature, max_tokens=LENGTH, seed=seed) for seed in range(NUM_PROMPTS)
        ]
        rule = "coupled" if temperature else "auto"
        with LLM(
            pair.target, threads=2, batch_invariant=True, acceptance=rule, speculative_config=config,
            max_model_len=128, **options,
        ) as llm:  # fmt: skip
            for _ in range(rounds):
                outputs = llm.generate(PROMPTS, sampling, use_tqdm=False)
                found.append([output.outputs[0].token_ids for output in outputs])
            counts: Mapping[str, Any] = {metric.name: metric for metric in llm.get_metrics()}
            accepted += int(counts["vllm:spec_decode_num_accepted_tokens"].value) if way else 0
    return found, accepted


@pytest.mark.parametrize("kernels", KERNELS)
def test_tokens_are_those_of_plain_decoding(
    pair: Pair, kernels: str, prove: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernels == "pytorch":
        monkeypatch.setattr("outrider.kernels.cpu.library._loaded", lambda: None)
    short = ("a tree",) if kernels == "pytorch" else ("draft_model", "a tree", "dspark")
    plain, _ = decoded(pair)
    accepted = 0
    for way in WAYS if prove else short:
        found, number = decoded(pair, way)
        assert found == plain, way
        accepted += number
    assert accepted > 0


@pytest.mark.slow
@pytest.mark.parametrize("rounding", ["int8", "int4"])
def test_in_few_bits(pair: Pair, rounding: str) -> None:
    plain, _ = decoded(pair, quantization=rounding)
    for way in ("draft_model", "dflash"):
        assert decoded(pair, way, quantization=rounding)[0] == plain


@pytest.mark.timeout(1800)  # the long form decodes a million tokens
def test_a_trained_mixture_says_the_same_with_drafts(prove: bool) -> None:
    """The pair's, by the pair's draft, by itself in 4 bits and by what it wrote; in batches that share experts."""
    pair, sampling = pair_path(), SamplingParams(temperature=0.0, max_tokens=256 if prove else 48, ignore_eos=True)
    ids = Tokenizer.load(pair.mixture).encode(HELD_OUT.read_text())
    count = 1000 if prove else 24
    starts = [place * (len(ids) - 48) // count for place in range(count)]
    texts = [ids[start : start + 8 + place % 40] for place, start in enumerate(starts)]
    prompts = [TokensPrompt(prompt_token_ids=text) for text in texts]
    assert len(set(map(tuple, texts))) == count
    found = []
    for config in (None, {"model": "python/draft"}, {"model": "self:int4"}, {"method": "suffix"}):
        drafts = None if config is None else config | {"num_speculative_tokens": 4, "draft_trial": "off"}
        with LLM("python/mixture", threads=2, speculative_config=drafts, max_model_len=512) as llm:
            outputs = llm.generate(prompts, sampling, use_tqdm=False)
            found.append([output.outputs[0].token_ids for output in outputs])
            counts: Mapping[str, Any] = {metric.name: metric for metric in llm.get_metrics()}
            backend: Any = llm._backend
            costs = backend.target.info.expert_costs
        assert costs is not None and costs.num_layers == 4 and costs.along > 0
        if drafts is not None:
            drafted, accepted = (counts[f"vllm:spec_decode_num_{kind}_tokens"].value for kind in ("draft", "accepted"))
            assert accepted > 0.1 * drafted, (config, drafted, accepted)
    assert all(tokens == found[0] for tokens in found[1:])
    assert len({tuple(tokens) for tokens in found[0]}) > 0.8 * count


def test_a_warm_cache_changes_no_token(pair: Pair) -> None:
    (greedy, again, coupled, once_more), _ = decoded(pair, "draft_model", rounds=2)
    assert greedy == again and coupled == once_more
