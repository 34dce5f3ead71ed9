"""A head beside the target: what is committed is what the target alone would say, whatever it drafts; its rows are
there for every token; and a head that must be right is."""

from __future__ import annotations

import random
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engines import COUPLED, GRAMMAR_EOS, VOCAB, TargetHarness, grammars_at_once, opened, slow_masks, tiny_model
from support.heads import BLOCKS, LAYOUTS, METHODS, passes_of, perfect_head, random_head
from support.models import ascii_backend, build_decoder, tiny_config, tiny_hf_model, tiny_state

from outrider.engine.batch import Batch
from outrider.engine.kv_cache import KVCache
from outrider.engine.loader import LoadedModel
from outrider.engine.token_tree import TokenTree, path_to
from outrider.proposers.heads.block import BlockHead
from outrider.proposers.heads.layer import LayerHead
from outrider.proposers.heads.loading import AnyHead, drafts_in_one_pass
from outrider.rpc.messages import Credit, DraftTokens, Open
from outrider.rpc.words.sampling_params import AcceptanceRule, TokenOrigin
from outrider.rpc.words.structured import StructuredOutput
from outrider.target_service.boot import expect_confidence
from outrider.target_service.draft_buffer import ChainBuffer, Window
from outrider.target_service.heads.drafter import HeadDrafter
from outrider.target_service.heads.lines import HeadLine
from outrider.target_service.outputs import ComputedStep

SAMPLED = {"temperature": 1.0, "acceptance": COUPLED}


@pytest.fixture(scope="module")
def models() -> tuple[Any, LoadedModel]:
    return tiny_model()


@pytest.fixture(params=LAYOUTS)
def head(request: pytest.FixtureRequest, models: tuple[Any, LoadedModel], tmp_path: Path) -> AnyHead:
    return random_head(request.param, tmp_path, *models)


@pytest.fixture(params=METHODS)
def grower(request: pytest.FixtureRequest, models: tuple[Any, LoadedModel], tmp_path: Path) -> AnyHead:
    """One that drafts trees."""
    return random_head(request.param, tmp_path, *models)


def prompt_of(seed: int, length: int = 20) -> list[int]:
    return random.Random(seed).choices(range(3, VOCAB), k=length)


def asked(number: int, prompt: list[int], head: AnyHead, **sampling: Any) -> Open:
    return opened(number, prompt, method=head.name, **sampling)


@pytest.mark.parametrize("k", [1, 4, 8, *(pytest.param(k, marks=pytest.mark.slow) for k in (2, 3, 5, 6, 7))])
@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "coupled"])
def test_output_is_the_targets_own(models: Any, head: AnyHead, k: int, sampling: dict[str, Any]) -> None:
    loaded, prompt = models[1], prompt_of(k, 13 + k)
    options = {"max_tokens": 40, "seed": 77, **sampling}
    plain = TargetHarness.of(loaded).decode_plain(1, opened(1, prompt, **options))
    harness = TargetHarness.of(loaded, head=head)
    harness.send(asked(1, prompt, head, **options), Credit(1, 1 << 20, k))
    harness.run()
    assert harness.output(1) == plain
    drafted = [commit.num_drafted for commit in harness.commits(1)]
    assert drafted[0] == 0 and max(drafted) == min(k, head.most_tokens)
    assert all(drafted[1:-1]), "every round after the first has a draft"


PROCESSED: dict[str, dict[str, Any]] = {
    "penalties": {"presence_penalty": 0.7, "frequency_penalty": 0.5, "repetition_penalty": 1.3},
    "truncated": {"min_p": 0.05, "top_k": 40, "top_p": 0.95},
    "allowed": {"allowed_token_ids": (5, 6, 7), "logit_bias": {5: 2.0}},
}


def test_drafts_follow_the_processors(models: Any, head: AnyHead, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = models[1]
    options = [sampling | processors for sampling in ({}, SAMPLED) for processors in PROCESSED.values()]
    requests = [
        asked(number, prompt_of(number), head, max_tokens=24, seed=5, **own) for number, own in enumerate(options)
    ]
    drafted: dict[int, set[int]] = {}
    add = ChainBuffer.add

    def watched(self: ChainBuffer, piece: DraftTokens) -> None:
        drafted.setdefault(piece.sequence_id, set()).update(piece.ids)
        add(self, piece)

    monkeypatch.setattr(ChainBuffer, "add", watched)
    harness = TargetHarness.of(loaded, head=head)
    for request in requests:
        harness.send(request, Credit(request.sequence_id, 1 << 20, 3))
    harness.run()
    for request in requests:
        assert harness.output(request.sequence_id) == TargetHarness.of(loaded).decode_plain(
            request.sequence_id, request
        )
        assert drafted[request.sequence_id] <= set(request.sampling.allowed_token_ids or range(VOCAB))


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "coupled"])
def test_drafts_follow_a_constraint(
    models: Any, head: AnyHead, sampling: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    digits = StructuredOutput(regex="[0-9]{30}")
    request = asked(1, prompt_of(3), head, max_tokens=20, seed=5, structured_output=digits, **sampling)
    drafted: set[int] = set()
    add = ChainBuffer.add

    def watched(self: ChainBuffer, piece: DraftTokens) -> None:
        drafted.update(piece.ids)
        add(self, piece)

    monkeypatch.setattr(ChainBuffer, "add", watched)
    options: dict[str, Any] = {"eos_ids": (GRAMMAR_EOS,), "grammars": grammars_at_once()}
    plain = TargetHarness.of(models[1], **options).decode_plain(1, request)
    harness = TargetHarness.of(models[1], head=head, **options)
    harness.send(request, Credit(1, 1 << 20, 3))
    harness.run()
    assert harness.output(1) == plain and len(plain) == 20
    assert drafted and drafted <= set(ascii_backend(VOCAB, GRAMMAR_EOS).encode("0123456789").ids)


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "coupled"])
def test_a_slow_mask_holds_the_step_up_once(
    models: Any, head: AnyHead, sampling: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    digits = StructuredOutput(regex="[0-9]{30}")
    request = asked(1, prompt_of(3), head, max_tokens=20, seed=5, structured_output=digits, **sampling)
    options: dict[str, Any] = {"eos_ids": (GRAMMAR_EOS,), "grammars": grammars_at_once()}
    plain = TargetHarness.of(models[1], **options).decode_plain(1, request)
    drafting, run = [False], HeadDrafter.run

    def watched(self: HeadDrafter, step: ComputedStep) -> None:
        drafting[0] = True
        run(self, step)
        drafting[0] = False

    monkeypatch.setattr(HeadDrafter, "run", watched)
    for behind in (6, 0):
        with monkeypatch.context() as patch:
            made = slow_masks(patch, behind, counts=lambda: drafting[0])
            harness = TargetHarness.of(models[1], head=head, **options)
            harness.send(request, Credit(1, 1 << 20, 3))
            harness.run()
        assert harness.output(1) == plain and len(plain) == 20
        assert (made.count(6), max(made)) == (1, 6) if behind else not made  # from the start: found out before


TREE = TokenTree.parse("[(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0), (0, 1, 1)]")


@pytest.mark.parametrize("k", [9, 4])
@pytest.mark.parametrize(
    "sampling",
    [{}, SAMPLED, {**SAMPLED, "temperature": 0.7, "repetition_penalty": 1.4}],
    ids=["greedy", "coupled", "p"],
)
def test_trees_leave_the_targets_own_output(models: Any, grower: AnyHead, k: int, sampling: dict[str, Any]) -> None:
    loaded, prompt, tree = models[1], prompt_of(k, 13 + k), TREE
    options = {"max_tokens": 40, "seed": 78, **sampling}
    plain = TargetHarness.of(loaded).decode_plain(1, opened(1, prompt, **options))
    harness = TargetHarness.of(loaded, head=grower, tree=tree)
    harness.send(asked(1, prompt, grower, **options), Credit(1, 1 << 20, k))
    harness.run()
    assert harness.output(1) == plain
    drafted = [commit.num_drafted for commit in harness.commits(1)]
    assert drafted[0] == 0 and max(drafted) == min(k, len(tree)) and all(drafted[1:-1])


def test_nodes_are_the_likeliest_tokens_of_their_paths(models: Any, grower: AnyHead) -> None:
    """A tree's first path is the chain, and no two nodes are the same."""
    loaded, prompt = models[1], prompt_of(5)

    def windows(**options: Any) -> list[Window]:
        harness = TargetHarness.of(loaded, head=grower, **options)
        seen: list[Window] = []
        harness.engine._on_step = lambda step: seen.extend(one.window for one in step.scheduled)
        harness.send(asked(1, prompt, grower, max_tokens=12), Credit(1, 1 << 20, 9))
        harness.run()
        return seen

    depth = 3
    tree = TokenTree.of([path for length in range(1, depth + 1) for path in product(range(2), repeat=length)][:9])
    (_, chain, *_), (_, grown, *_) = windows(), windows(tree=tree)
    ids, parents = grown.ids, grown.parents
    first = [path_to(parents, node) for node in range(len(ids))]
    ranks = {node: tree.ranks[node] for node in range(len(ids))}
    likeliest = [ids[path[-1]] for path in first if not any(ranks[node] for node in path)]
    assert likeliest == list(chain.ids[: len(likeliest)]) and len(likeliest) >= min(2, depth)
    siblings = [(parent, token) for parent, token in zip(parents, ids, strict=True)]
    assert len(set(siblings)) == len(siblings) == len(tree)


def test_a_tree_that_cannot_be_drafted_is_refused(models: Any, tmp_path: Path) -> None:
    at_once = random_head("p-eagle", tmp_path / "at once", *models)
    with pytest.raises(ValueError, match="drafts all tokens in one pass, which makes chains alone"):
        TargetHarness.of(models[1], head=at_once, tree=TREE)
    head = random_head("medusa", tmp_path, *models)
    deep = TokenTree.of([(0,) * depth for depth in range(1, head.most_tokens + 2)])
    with pytest.raises(ValueError, match=f"speculative_token_tree: is {deep.depth} tokens deep; medusa drafts"):
        TargetHarness.of(models[1], head=head, tree=deep)


@pytest.mark.parametrize("acceptance", [AcceptanceRule.REJECTION, AcceptanceRule.BLOCK])
def test_chains_of_blocks_have_random_words_of_their_own(
    models: Any, head: AnyHead, acceptance: AcceptanceRule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And weights, but where drafts shall be one-hot. The numbers of chains go on where another target's end."""
    draws: dict[int, set[int]] = {}  # by chain
    add = ChainBuffer.add

    def watched(self: ChainBuffer, piece: DraftTokens) -> None:
        assert len(piece.weights) == len(piece.ids)
        (line,) = [line for line in lines if line.number == piece.chain]
        draws.setdefault(piece.chain, set()).add(line.draft_sampling.key.draw)
        add(self, piece)

    lines: list[Any] = []
    draft = HeadDrafter._draft

    def noted(self: HeadDrafter, found: Any, states: torch.Tensor) -> None:
        lines[:] = found
        draft(self, found, states)

    monkeypatch.setattr(ChainBuffer, "add", watched)
    monkeypatch.setattr(HeadDrafter, "_draft", noted)
    harness = TargetHarness.of(models[1], head=head)
    options = {"temperature": 1.0, "acceptance": acceptance, "first_chain": 7, "max_tokens": 20}
    harness.send(asked(1, prompt_of(1), head, **options), Credit(1, 1 << 20, 3))
    harness.run()
    assert min(draws) == 7 and len(draws) > 4
    words = [draw for found in draws.values() for draw in found]
    assert len(set(words)) == (len(draws) if acceptance == AcceptanceRule.BLOCK else 1)


@pytest.mark.parametrize("tree", [None, TREE], ids=["chains", "trees"])
def test_batch_and_chunks_and_preemption_and_prefixes_change_nothing(
    models: Any, head: AnyHead, tree: TokenTree | None
) -> None:
    loaded = models[1]
    if drafts_in_one_pass(head):
        tree = None  # it drafts chains alone
    requests = [
        asked(n, prompt_of(n % 3, 5 + 5 * n), head, max_tokens=20, temperature=float(n % 2), acceptance=COUPLED, seed=n)
        for n in range(1, 11)
    ]
    alone = {r.sequence_id: TargetHarness.of(loaded).decode_plain(r.sequence_id, r) for r in requests}
    harness = TargetHarness.of(loaded, num_blocks=14, max_rows=24, head=head, tree=tree)
    for request in requests:
        harness.send(
            request, Credit(request.sequence_id, 1 << 20, 1 + request.sequence_id % 4 * (1 if tree is None else 3))
        )
    harness.run()
    assert {r.sequence_id: harness.output(r.sequence_id) for r in requests} == alone
    assert harness.engine.cache.pool.num_free == 14


def partialmethod_of(watched: Any, passing: Any) -> Any:
    return lambda self, *given: watched(passing, self, *given)


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout not in BLOCKS])
def test_where_nothing_is_drafted_a_head_keeps_what_it_would_have(
    models: Any, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decoding plainly takes a pass a block of the cache, of what rows behind will look at alone."""
    head = random_head(layout, tmp_path, *models)
    kind: Any = type(head)
    first, caches, drafts = kind.first, [], []

    def counted(*given: Any) -> Any:
        drafts.append(given)
        return first(*given)

    monkeypatch.setattr(kind, "first", counted)
    for _ in range(2):
        harness = TargetHarness.of(models[1], head=head)
        harness.decode_plain(1, opened(1, prompt_of(1, 20), max_tokens=70))
        (cache,) = [part._cache for part in harness.engine.parts if isinstance(part, HeadDrafter)]
        caches.append([*cache.keys, *cache.values])
        assert len(drafts) == (5 if head.layers and len(caches) == 2 else 0)  # the prompt, and the ends of four blocks
        monkeypatch.setattr(kind, "fill", counted)
    for filled, passed in zip(*caches, strict=True):
        torch.testing.assert_close(filled, passed, atol=1e-5, rtol=1e-5)
        assert filled.abs().sum() > 0


@pytest.mark.parametrize("tree", [None, TokenTree.of([(0,), (1,), (2,)])], ids=["chains", "trees"])
def test_rows_have_the_states_before_their_tokens(
    models: Any, head: AnyHead, tree: TokenTree | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a chunk or a found block ends; every token but the first has its row, whoever computed it."""
    if drafts_in_one_pass(head):
        tree = None  # it drafts chains alone
    hf, loaded = models
    texts = {n: [*prompt_of(8, 33), *prompt_of(n, 1 + 9 * n)] for n in range(3)}
    seen: list[tuple[list[int], list[int], list[int], torch.Tensor]] = []  # text, places, tokens and features

    def watched(passing: Any, self: AnyHead, batch: Batch, features: torch.Tensor, cache: KVCache) -> Any:
        (target,) = harness.engine.scheduler.sequences.values()
        text = list(target.sequence.tokens)
        places = batch.positions.tolist() if self.layers else [len(text) - 1]
        seen.append((text, places, batch.token_ids.tolist(), features.clone()))
        return passing(self, batch, features, cache)

    for name in passes_of(head):
        monkeypatch.setattr(type(head), name, partialmethod_of(watched, getattr(type(head), name)))
    harness = TargetHarness.of(loaded, max_rows=13, head=head, tree=tree)
    for number, prompt in texts.items():
        harness.send(asked(number, prompt, head, max_tokens=24), Credit(number, 1 << 20, 3))
        harness.run()
        for text, places, tokens, features in seen:
            if not isinstance(head, BlockHead) and head.mask is not None:
                masked = [place >= len(text) for place in places]
                assert {token for token, is_mask in zip(tokens, masked, strict=True) if is_mask} <= {head.mask.token_id}
                assert (features[torch.tensor(masked)] == head.mask.features).all()
                places, tokens, features = _unmasked(places, tokens, features, masked)
            assert tokens == [text[place] for place in places]
            with torch.inference_mode():
                states = hf(torch.tensor([text]), output_hidden_states=True).hidden_states
            before = torch.tensor(places) - 1
            expected = torch.stack([states[layer][0, before] for layer in head.taps], dim=1)
            torch.testing.assert_close(features, expected, atol=2e-5, rtol=1e-4)
        computed = {place for _, places, _, _ in seen for place in places}
        found = 32 if number else 1  # places of blocks that the first sequence filled
        assert not head.layers or computed >= set(range(found, len(prompt) + 20))
        assert not head.layers or number == 0 or min(computed) == 32
        seen.clear()


def test_a_parallel_head_drafts_what_its_rows_say(models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of sequences that draft so many tokens each, in one pass."""
    head = random_head("p-eagle", tmp_path, *models)
    first, piece_of = LayerHead.first, HeadLine.piece
    rows: list[int] = []
    drafted: list[int] = []

    def watched_first(*arguments: Any) -> Any:
        logits, state = first(*arguments)
        rows.extend(logits.argmax(-1).tolist())
        return logits, state

    def watched_piece(line: Any) -> DraftTokens:
        drafted.extend(piece_of(line).ids)
        return piece_of(line)

    monkeypatch.setattr(LayerHead, "first", watched_first)
    monkeypatch.setattr(HeadLine, "piece", watched_piece)
    harness = TargetHarness.of(models[1], head=head)
    for number, k in ((1, 2), (2, 5), (3, 1)):
        harness.send(asked(number, prompt_of(number), head, max_tokens=16), Credit(number, 1 << 20, k))
    harness.run()
    assert drafted == rows and len(rows) > 60


def _unmasked(
    places: list[int], tokens: list[int], features: torch.Tensor, masked: list[bool]
) -> tuple[list[int], list[int], torch.Tensor]:
    known = [row for row, is_mask in enumerate(masked) if not is_mask]
    return [places[row] for row in known], [tokens[row] for row in known], features[known]


def test_without_credit_for_a_window_or_another_method_nothing_is_drafted(models: Any, head: AnyHead) -> None:
    harness = TargetHarness.of(models[1], head=head)
    harness.send(asked(1, prompt_of(1), head, max_tokens=9), Credit(1, 1 << 20, 0))
    harness.send(opened(2, prompt_of(2), max_tokens=9), Credit(2, 1 << 20, 4))
    harness.run()
    assert {origin for n in (1, 2) for c in harness.commits(n) for origin in c.origins} == {TokenOrigin.PLAIN}


@pytest.mark.parametrize("sampling", [{}, SAMPLED, {"temperature": 1.0, "acceptance": AcceptanceRule.BLOCK}])
def test_a_chain_ends_before_a_token_of_too_little_confidence(
    models: Any, tmp_path: Path, sampling: dict[str, Any]
) -> None:
    """But for blocks, which are judged whole."""
    head = random_head("dspark", tmp_path, *models)
    request = asked(1, prompt_of(4), head, max_tokens=40, seed=3, **sampling)
    lengths = []
    for least in (0.0, 0.48, 1.0):
        expect_confidence(head, least)
        harness = TargetHarness.of(models[1], head=head)
        harness.send(request, Credit(1, 1 << 20, 5))
        harness.run()
        lengths.append([commit.num_drafted for commit in harness.commits(1)])
        if "acceptance" not in sampling or sampling["acceptance"] == COUPLED:
            assert harness.output(1) == TargetHarness.of(models[1]).decode_plain(1, request)
    whole, some, none = lengths
    if sampling.get("acceptance") == AcceptanceRule.BLOCK:
        assert max(none) == max(whole) == 5
    else:
        assert max(none) == 0 and len(set(some)) > 2 and sum(some) < sum(whole)


def test_confidence_is_asked_of_a_head_that_tells_it(models: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"head_confidence: is 0.5; allowed: 0, since this eagle head tells no conf"):
        expect_confidence(random_head("eagle", tmp_path, *models), 0.5)


def test_a_head_that_fails_costs_its_drafts_alone(models: Any, head: AnyHead, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = prompt_of(4)
    plain = TargetHarness.of(models[1]).decode_plain(1, opened(1, prompt, max_tokens=12))

    def broken(*_: Any) -> Any:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(type(head), passes_of(head)[0], broken)
    harness = TargetHarness.of(models[1], head=head)
    harness.send(asked(1, prompt, head, max_tokens=12), Credit(1, 1 << 20, 3))
    harness.run()
    assert harness.output(1) == plain


WINDOW = 9


@pytest.fixture(scope="module")
def transparent() -> tuple[Any, LoadedModel]:
    """A target of one layer that a head can copy: see `perfect_head`."""
    options = {"num_hidden_layers": 1, "sliding_window": WINDOW}
    hf = tiny_hf_model("mistral", **options)
    with torch.no_grad():
        embeddings = hf.get_input_embeddings().weight
        embeddings /= embeddings.square().mean(-1, keepdim=True).sqrt()
        hf.model.norm.weight.fill_(1.0)
    loaded = build_decoder(tiny_config("mistral", **options), tiny_state(hf), batch_invariant=True)
    return hf, loaded


@pytest.mark.parametrize("num_blocks", [64, 7])
@pytest.mark.parametrize("k", [1, 4, 8])
def test_a_head_that_must_be_right_is(transparent: Any, tmp_path: Path, k: int, num_blocks: int) -> None:
    """Once token 0, whose row a head has not, is out of the window. Its rows are there after chunks of prompts, hits of
    the prefix cache and preemption: few blocks for three sequences, of which two begin alike."""
    head = perfect_head(tmp_path, *transparent)
    loaded = transparent[1]
    shared = prompt_of(9, 37)
    prompts = {1: shared, 2: [*shared[:33], 5, 6], 3: prompt_of(10, 40)}
    harness = TargetHarness.of(loaded, num_blocks=num_blocks, max_rows=24, head=head)
    for number, prompt in prompts.items():
        harness.send(asked(number, prompt, head, max_tokens=30), Credit(number, 1 << 20, k))
    harness.run()
    for number, prompt in prompts.items():
        assert harness.output(number) == TargetHarness.of(loaded).decode_plain(1, opened(1, prompt, max_tokens=30))
        commits = harness.commits(number)
        assert all(commit.num_accepted == commit.num_drafted for commit in commits), number
        assert sum(commit.num_drafted for commit in commits) > 30 * k // (k + 3)


def test_nodes_follow_their_own_paths(transparent: Any, tmp_path: Path) -> None:
    """Of a head that must be right, also what follows wrong tokens is what the target would say there."""
    hf, loaded = transparent
    tree = TokenTree.parse(
        "[(0,), (1,), (2,), (0, 0), (1, 0), (1, 1), (2, 0), (0, 0, 0), (1, 0, 0), (1, 0, 1), (1, 1, 0)]"
    )
    head = perfect_head(tmp_path, hf, loaded)
    harness = TargetHarness.of(loaded, max_rows=24, head=head, tree=tree)
    windows: list[tuple[list[int], tuple[int, ...]]] = []

    def watch(step: ComputedStep) -> None:
        for one in step.scheduled:
            windows.append((one.target.sequence.tokens[: one.committed], one.window.ids))

    harness.engine._on_step = watch
    prompt = prompt_of(9, 37)
    harness.send(asked(1, prompt, head, max_tokens=30), Credit(1, 1 << 20, len(tree)))
    harness.run()
    assert harness.output(1) == TargetHarness.of(loaded).decode_plain(1, opened(1, prompt, max_tokens=30))
    depths = [commit.num_accepted for commit in harness.commits(1)]
    assert depths[1:-1] == [3] * (len(depths) - 2)
    whole = [(before, ids) for before, ids in windows if len(ids) == len(tree)]
    assert len(whole) > 3
    for before, ids in whole:
        for node, (parent, rank) in enumerate(zip(tree.parents, tree.ranks, strict=True)):
            path = [ids[at] for at in path_to(tree.parents, parent - 1)]
            with torch.inference_mode():
                logits = hf(torch.tensor([[*before, *path]])).logits[0, -1]
            assert ids[node] == int(logits.topk(3).indices[rank])
