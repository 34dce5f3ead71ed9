"""Peers without a model: the production engines of both services over models that are functions of a prefix, and
compute nothing. The simulation explores them (tests/simulation/machines.py), and what the planner's virtual services
say of rounds and times is checked against them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from outrider.draft_service.admission import ModelMethod, make_methods
from outrider.draft_service.engine import DraftEngine
from outrider.engine.kv_cache_manager import BlockPool, KVCacheManager
from outrider.engine.token_tree import TokenTree
from outrider.proposers.draft_rows import DraftedToken, DraftRows
from outrider.proposers.tree import GrowingTree
from outrider.target_service.engine import TargetEngine
from outrider.target_service.outputs import LaunchedVerify, VerifiedWindow, _up_to_stop
from outrider.target_service.scheduler import ScheduledSequence
from outrider.target_service.sequence import TargetLimits

NextToken = Callable[[Sequence[int]], int]
Ranked = Callable[[Sequence[int]], tuple[int, ...]]  # what may follow a prefix, the likeliest first


def target_engine(
    limits: TargetLimits,
    verifier: Any,
    *,
    takes_trees: bool = False,
    on_pass: Callable[[int], None] = lambda rows: None,
    clock: Callable[[], float] = lambda: 0.0,
    **options: Any,
) -> TargetEngine:
    """A target whose passes compute nothing; `on_pass` hears of each with its rows."""
    model = SimpleNamespace(
        takes_trees=takes_trees, device=torch.device("cpu"), dtype=torch.float32, vocab_size=limits.vocab_size
    )
    runner: Any = SimpleNamespace(
        forward=lambda entries: on_pass(sum(len(entry.token_ids) for entry in entries)),
        keep_paths=lambda paths: None,
        last_pass=lambda: 0,
        last_woken=lambda: 0,
        captured=None,
        adapters=None,
        model=model,
    )
    engine = TargetEngine(runner, limits, clock=clock, **options)
    engine.steps.verifier = verifier
    return engine


@dataclass(slots=True)
class PrefixVerifier:
    """In the place of the target's verifier: as many drafted tokens as the target says, too."""

    next_token: NextToken

    def prepare(self, target: Any) -> bool:
        """There are no random numbers."""
        return False

    def launch(self, logits: Any, windows: Sequence[ScheduledSequence], masks: Any = None) -> LaunchedVerify:
        """Of every window."""
        verified = [self.verify_one(scheduled) for scheduled in windows]
        return LaunchedVerify(lambda: verified)

    def verify_one(self, scheduled: ScheduledSequence) -> VerifiedWindow:
        """A chain, up to the token that the target would not have said, and its own behind."""
        prefix = scheduled.target.sequence.tokens[: scheduled.committed]
        own: tuple[int, ...] = ()
        for token in scheduled.window.ids:
            if token != self.next_token(prefix):
                break
            prefix.append(token)
        num_accepted = len(prefix) - scheduled.committed
        if num_accepted < len(scheduled.window.ids) or scheduled.takes_next:
            own = (self.next_token(prefix),)
        return _up_to_stop(scheduled, num_accepted, (), own)


def draft_engine(
    proposer: Any, cache: KVCacheManager, stop_ids: tuple[int, ...], *options: Any, tree: TokenTree | None = None,
    **more: Any,
) -> DraftEngine:  # fmt: skip
    """A draft with this model alone."""
    return DraftEngine(make_methods([ModelMethod(proposer, cache, stop_ids, tree=tree)]), *options, **more)


def new_cache(num_blocks: int) -> KVCacheManager:
    """Blocks for so much."""
    return KVCacheManager(BlockPool(num_blocks))


@dataclass(slots=True)
class PrefixProposer:
    """In the place of the draft's model. A token's weights are the tokens behind which it was drafted, so that who
    verifies it in another context can be seen."""

    ranked: Ranked
    vocab_size: int
    max_len: int
    on_pass: Callable[[int], None] = lambda rows: None
    name: ClassVar[str] = "draft_model"
    parallel: ClassVar[bool] = False
    runner: Any = field(init=False)

    def __post_init__(self) -> None:
        model = SimpleNamespace(vocab_size=self.vocab_size, max_model_len=self.max_len, device=torch.device("cpu"))
        self.runner = SimpleNamespace(model=model, copy_blocks=lambda pairs: None)

    def tokens_at_once(self, rows: Sequence[DraftRows], wanted: Sequence[int]) -> list[int]:
        """One."""
        return [1] * len(rows)

    def prepare(self, *where: Any) -> bool:
        """There are no random numbers."""
        return False

    def run(self, rows: Sequence[DraftRows], counts: Sequence[int]) -> list[list[DraftedToken]]:
        """One token behind each."""
        self.on_pass(len(rows))
        return [self._draft(row) for row in rows]

    def grow(self, rows: Sequence[DraftRows], roots: Sequence[DraftedToken], trees: Sequence[GrowingTree]) -> None:
        """Every level of each tree."""
        for row, root, tree in zip(rows, roots, trees, strict=True):
            tree.grow({-1: (root.token_id, *root.top_tokens)})
            while nodes := tree.branching():
                tree.grow({node: self.ranked([*row.text.tokens, *tree.path(node)]) for node in nodes})

    def _draft(self, row: DraftRows) -> list[DraftedToken]:
        sequence, prefix = row.sequence, list(row.text.tokens)
        first, *others = self.ranked(prefix)
        drawn = [DraftedToken(first, bytes(prefix), b"", tuple(others)[: row.num_top_tokens])]
        row.text.append([first])
        sequence.num_computed_tokens = len(sequence) - 1
        return drawn
