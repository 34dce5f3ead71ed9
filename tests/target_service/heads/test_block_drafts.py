"""Blocks beside the target: of a target whose next token follows from the last one alone, a head can say its law at
every place, and everything that it drafts has to be taken; where a chain ends hangs on nothing that was not drawn."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from support.engines import COUPLED, VOCAB, TargetHarness, opened, tiny_model
from support.heads import BLOCK_ROWS, forgetful_model, knowing_head, random_head
from support.models import build_decoder, tiny_config, tiny_state

from outrider.engine.batch import BatchEntry
from outrider.engine.loader import LoadedModel
from outrider.engine.token_tree import TokenTree
from outrider.proposers.draft_rows import DraftedToken
from outrider.proposers.drawing import Drawer
from outrider.proposers.heads.block import BlockHead
from outrider.rpc.messages import Credit, DraftTokens, Open
from outrider.rpc.words.sampling_params import AcceptanceRule
from outrider.target_service.boot import expect_confidence
from outrider.target_service.heads import block_drafts, drafter
from outrider.target_service.heads.drafter import HeadDrafter
from outrider.target_service.heads.lines import HeadLine

RULES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "coupled": {"temperature": 1.0, "acceptance": COUPLED},
    "rejection": {"temperature": 1.0, "acceptance": AcceptanceRule.REJECTION},
    "block": {"temperature": 1.0, "acceptance": AcceptanceRule.BLOCK},
}


@pytest.fixture(scope="module")
def forgetful() -> tuple[Any, LoadedModel]:
    hf = forgetful_model()
    return hf, build_decoder(tiny_config("llama"), tiny_state(hf), batch_invariant=True)


def prompt_of(seed: int, length: int = 20) -> list[int]:
    return random.Random(seed).choices(range(3, VOCAB), k=length)


def asked(number: int, head: BlockHead, length: int = 20, **sampling: Any) -> Open:
    return opened(number, prompt_of(number, length), method=head.name, **{"seed": number, "max_tokens": 40, **sampling})


@pytest.mark.parametrize("num_blocks", [64, 13])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("layout", "k"), [("dspark", 1), ("dspark", 4), ("dspark", BLOCK_ROWS), ("dflash", 1)])
def test_a_head_that_must_be_right_is(
    forgetful: Any, tmp_path: Path, layout: str, k: int, rule: str, num_blocks: int
) -> None:
    """Of three sequences at once, of which two begin alike, in chunks, with few blocks, too."""
    head = knowing_head(layout, tmp_path, *forgetful)
    harness = TargetHarness.of(forgetful[1], head=head, num_blocks=num_blocks, max_rows=24)
    requests = [asked(number, head, 20 + 7 * number, **RULES[rule]) for number in (1, 2, 3)]
    for request in requests:
        harness.send(request, Credit(request.sequence_id, 1 << 20, k))
    harness.run()
    for request in requests:
        commits = harness.commits(request.sequence_id)
        drafted = sum(commit.num_drafted for commit in commits)
        refused = drafted - sum(commit.num_accepted for commit in commits)
        assert drafted > 30 * k // (k + 3)
        assert refused <= (0 if rule in ("greedy", "coupled") else k)  # weights are whole numbers: not quite the law
        if rule in ("greedy", "coupled"):
            plain = TargetHarness.of(forgetful[1]).decode_plain(request.sequence_id, request)
            assert harness.output(request.sequence_id) == plain


@pytest.mark.parametrize("layout", ["dflash", "dflash2", "dspark"])
def test_a_text_ends_where_the_context_does(layout: str, tmp_path: Path) -> None:
    """There is no room for a whole block then, nor for any in the end."""
    hf, loaded = tiny_model(max_position_embeddings=64)
    head = random_head(layout, tmp_path, hf, loaded)
    assert isinstance(head, BlockHead)
    request = asked(1, head, 30, max_tokens=64 - 30)
    harness = TargetHarness.of(loaded, head=head)
    harness.send(request, Credit(1, 1 << 20, 5))
    harness.run()
    assert harness.output(1) == TargetHarness.of(loaded).decode_plain(1, request)
    drafted = [commit.num_drafted for commit in harness.commits(1)]
    assert max(drafted) == 5 and len(harness.output(1)) == 34


@pytest.mark.parametrize("rule", ["greedy", "coupled", "rejection"])
def test_where_a_chain_ends_follows_from_what_stands_before(
    rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And never from the token that is not drawn: of equal texts before it either all chains end, or none."""
    hf, loaded = tiny_model()
    head = random_head("dspark", tmp_path, hf, loaded)
    expect_confidence(head, 0.497)
    ended: dict[tuple[tuple[int, ...], ...], set[bool]] = {}  # by what is committed, and what is drawn
    take = HeadLine.take

    def noted(line: HeadLine, token: DraftedToken | None) -> bool:
        text = tuple(line.target.sequence.tokens), tuple(drawn.token_id for drawn in line.drawn)
        ended.setdefault(text, set()).add(token is None)
        return take(line, token)

    monkeypatch.setattr(HeadLine, "take", noted)
    assert isinstance(head, BlockHead)
    for seed in range(60):
        harness = TargetHarness.of(loaded, head=head)
        sampling = RULES[rule] | {"allowed_token_ids": (5, 6, 7), "max_tokens": 5}
        harness.send(asked(1, head, **sampling | {"seed": seed}), Credit(1, 1 << 20, 4))
        harness.run()
    assert all(len(how) == 1 for how in ended.values())
    assert rule == "greedy" or ({True, False} == set.union(*ended.values()) and len(ended) > 40)


TREE = TokenTree.parse("[(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0)]")


@pytest.mark.parametrize("num_blocks", [64, 13])
@pytest.mark.parametrize("rule", ["greedy", "coupled", "rejection"])
@pytest.mark.parametrize("layout", ["dflash", "dflash2", "dspark", "dspark-rnn"])
def test_a_tree_over_a_block_changes_no_token(layout: str, rule: str, num_blocks: int, tmp_path: Path) -> None:
    """Beside a sequence with penalties, with few blocks, too; under rejection what is drafted are chains."""
    hf, loaded = tiny_model()
    head = random_head(layout, tmp_path, hf, loaded)
    harness = TargetHarness.of(loaded, head=head, tree=TREE, num_blocks=num_blocks, max_rows=24)
    requests = [
        opened(1, prompt_of(1), method=head.name, max_tokens=24, seed=1, **RULES[rule]),
        opened(2, prompt_of(2), method=head.name, max_tokens=24, seed=2, **RULES[rule], presence_penalty=0.7),
    ]
    harness.send(*(part for request in requests for part in (request, Credit(request.sequence_id, 1 << 20, 8))))
    harness.run()
    for request in requests:
        commits = harness.commits(request.sequence_id)
        assert max(commit.num_drafted for commit in commits) == (head.most_tokens if rule == "rejection" else 8)
        if rule != "rejection":
            plain = TargetHarness.of(loaded).decode_plain(request.sequence_id, request)
            assert harness.output(request.sequence_id) == plain


def test_a_tree_over_a_block_holds_what_is_right(forgetful: Any, tmp_path: Path) -> None:
    """Its likeliest path is the chain that must be accepted; and behind each node stands what follows that node."""
    head = knowing_head("dspark", tmp_path, *forgetful)
    harness = TargetHarness.of(forgetful[1], head=head, tree=TREE)
    harness.send(asked(1, head), Credit(1, 1 << 20, 8))
    held: list[DraftTokens] = []
    with pytest.MonkeyPatch.context() as patch:
        hold = HeadDrafter._hold

        def noted(drafter: HeadDrafter, line: HeadLine, draft_us: int) -> None:
            held.append(line.piece())
            hold(drafter, line, draft_us)

        patch.setattr(HeadDrafter, "_hold", noted)
        harness.run()
    assert {commit.num_accepted for commit in harness.commits(1) if commit.num_drafted == 8} == {3}
    follows: dict[int, set[int]] = {}
    for piece in held:
        for node, parent in enumerate(piece.parents):
            if parent and all(piece.parents[other] != parent for other in range(node)):  # the likeliest behind it
                follows.setdefault(piece.ids[parent - 1], set()).add(piece.ids[node])
    assert len(follows) > 3 and all(len(ids) == 1 for ids in follows.values())


@pytest.mark.parametrize("layout", ["dflash", "p-eagle"])
@pytest.mark.parametrize("rule", RULES)
def test_what_hangs_on_nothing_drawn_is_drawn_at_once(
    layout: str, rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by itself, token for token and weight for weight, also beside a sequence whose penalties count its tokens."""
    hf, loaded = tiny_model()
    head = random_head(layout, tmp_path, hf, loaded)
    penalised = RULES[rule] | {"presence_penalty": 0.7}

    def drawn(at_once: bool, *samplings: dict[str, Any]) -> tuple[list[DraftTokens], int]:
        held: list[DraftTokens] = []
        calls: list[int] = []
        draw, hold = Drawer.draw, HeadDrafter._hold

        def counted(drawer: Drawer, logits: Any, rows: Any) -> Any:
            calls.append(len(rows))
            return draw(drawer, logits, rows)

        def noted(drafter: HeadDrafter, line: HeadLine, draft_us: int) -> None:
            held.append(line.piece())
            hold(drafter, line, draft_us)

        with monkeypatch.context() as patch:
            patch.setattr(Drawer, "draw", counted)
            patch.setattr(HeadDrafter, "_hold", noted)
            if not at_once:
                for module in (block_drafts, drafter):
                    patch.setattr(module, "apart", lambda lines: ([], list(lines)))
            harness = TargetHarness.of(loaded, head=head)
            for number, sampling in enumerate(samplings, 1):
                opened_one = opened(
                    number, prompt_of(number), **{"method": head.name, "seed": number, "max_tokens": 24, **sampling}
                )
                harness.send(opened_one, Credit(number, 1 << 20, 4))
            harness.run()
        return held, len(calls)

    (both, _), (one_by_one, _) = (drawn(at_once, RULES[rule], penalised) for at_once in (True, False))
    assert both == one_by_one and any(len(piece.ids) == 4 for piece in both)
    alone, num_calls = drawn(True, RULES[rule])
    assert num_calls == len([piece for piece in alone if piece.ids])


def test_a_block_has_its_rows_whatever_is_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a place's law is the same of long and short windows."""
    hf, loaded = tiny_model()
    head = random_head("dflash", tmp_path, hf, loaded)
    rows: list[int] = []
    entry = block_drafts._entry

    def counted(line: HeadLine, count: int) -> BatchEntry:
        rows.append(count)
        return entry(line, count)

    monkeypatch.setattr(block_drafts, "_entry", counted)
    firsts: dict[int, list[int]] = {}
    for k in (1, 3, 5):
        harness = TargetHarness.of(loaded, head=head)
        assert isinstance(head, BlockHead)
        harness.send(asked(1, head), Credit(1, 1 << 20, k))
        take, firsts[k] = HeadLine.take, []

        def noted(line: HeadLine, token: DraftedToken | None, k: int = k, take: Any = take) -> bool:
            if token is not None and not line.drawn:
                firsts[k].append(token.token_id)
            return bool(take(line, token))

        with monkeypatch.context() as patch:
            patch.setattr(HeadLine, "take", noted)
            harness.run()
    assert set(rows) == {BLOCK_ROWS}
    assert firsts[1][0] == firsts[3][0] == firsts[5][0]
