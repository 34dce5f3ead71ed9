"""Deliberate breakages of the production code. The simulation is worth what it finds of these."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

from simulation.campaign import Mode

from outrider.draft_service.sequence import DraftSequence
from outrider.engine.kv_cache_manager import KVCacheManager
from outrider.gateway.speculation.core import SpeculationCore
from outrider.proposers.drawing import Drawer
from outrider.rpc.servicer import Detach
from outrider.target_service import verifier
from outrider.target_service.draft_buffer import ChainBuffer
from outrider.target_service.engine import TargetEngine
from outrider.target_service.scheduler import TargetScheduler
from outrider.target_service.sequence import TargetSequence


@dataclass(frozen=True, slots=True)
class Mutant:
    """A breakage, and where it shows: in the worlds of a mode, or in the law of their outputs."""

    name: str
    mode: Mode
    apply: Callable[[], AbstractContextManager[Any]]


def wrapped(owner: Any, name: str, change: Callable[..., Any]) -> Callable[[], AbstractContextManager[Any]]:
    """Replaces a method; the change gets the original first."""
    original = getattr(owner, name)

    def method(*args: Any, **options: Any) -> Any:
        return change(original, *args, **options)

    return lambda: patch.object(owner, name, method)


def _cuts(draw: Any, proposer: Any, probs: Any, invalid: Any, rows: Any) -> Any:
    """A chain ends before a token that the draft itself finds unlikely."""
    likely = [probs[row].tolist() for row in range(len(rows))]
    drawn = draw(proposer, probs, invalid, rows)
    return [
        None if token is not None and likely[row][token.token_id] < 0.25 else token for row, token in enumerate(drawn)
    ]


def _grants_more(grant: Any, target: TargetSequence, credit: Any) -> None:
    grant(target, replace(credit, until=credit.until + 2))


def _forgets_blocks(remove: Any, scheduler: TargetScheduler, target: TargetSequence) -> None:
    del scheduler.sequences[target.key]


def _keeps_tail(restart: Any, draft: DraftSequence, length: int, ids: Any, cache: Any) -> None:
    tail = draft.sequence.tokens[length + len(ids) :]
    restart(draft, length, ids, cache)
    for token in tail[: max(0, draft.limit - len(draft.sequence))]:
        draft.sequence.tokens.append(token)
        draft.chain.weights.append(None)


def _takes_gaps(add: Any, chains: ChainBuffer, piece: Any) -> None:
    chain = chains._chains.get(piece.chain)
    end = max(chain.end, chains._committed) if chain is not None else chains._committed
    add(chains, replace(piece, position=min(piece.position, end)))


def _publishes_all(publish: Any, cache: KVCacheManager, sequence: Any, num_committed: int) -> None:
    computed, sequence.num_computed_tokens = sequence.num_computed_tokens, num_committed
    publish(cache, sequence, min(num_committed, len(sequence.block_table) * cache.block_size))
    sequence.num_computed_tokens = computed


def _waits(due: Any, target: TargetSequence, now: float) -> float | None:
    when = due(target, now)
    return when if when is None or when <= now else None


def _target_as_residual(accept: Any, target_probs: Any, windows: Any, *rest: Any) -> Any:
    num_accepted, _ = accept(target_probs, windows, *rest)
    rows = target_probs[windows.next_rows(num_accepted)].double()
    return num_accepted, rows * windows.has_next(num_accepted)[:, None]


@contextmanager
def _commit_twice() -> Iterator[None]:
    """The last token before a reopening is committed again."""
    opened, on_commit = SpeculationCore._open_request, SpeculationCore._on_commit

    def short(core: SpeculationCore) -> Any:
        request = opened(core)
        return replace(request, output_ids=request.output_ids[:-1]) if core._target_opens > 1 else request

    def anywhere(core: SpeculationCore, commit: Any) -> Any:
        return on_commit(core, replace(commit, position=len(core.committed)))

    with patch.object(SpeculationCore, "_open_request", short), patch.object(SpeculationCore, "_on_commit", anywhere):
        yield


def _fresh_seed(opened: Any, core: SpeculationCore) -> Any:
    request = opened(core)
    return replace(request, seed=request.seed ^ max(0, core._target_opens - 1))


def _reads_all(within: Any, core: SpeculationCore, until: int, ahead: int) -> int:
    return until


def _first_chain_again(open_draft: Any, core: SpeculationCore) -> Any:
    core._last_chain = -1
    return open_draft(core)


def _ignore_stream_end(handle: Any, engine: TargetEngine, command: Any) -> None:
    if not isinstance(command, Detach):
        handle(engine, command)


MUTANTS = (
    Mutant("the target forgets to kill a chain", Mode.GREEDY, wrapped(ChainBuffer, "_mark_dead", lambda *_: None)),
    Mutant("a commit is repeated after a reopening", Mode.COUPLED, _commit_twice),
    Mutant("fresh randomness after a reopening", Mode.COUPLED, wrapped(SpeculationCore, "_open_request", _fresh_seed)),
    Mutant("the target goes past its credit", Mode.GREEDY, wrapped(TargetSequence, "grant", _grants_more)),
    Mutant("a slow reader is forgotten", Mode.GREEDY, wrapped(SpeculationCore, "_within_reader", _reads_all)),
    Mutant("the draft relabels a refused chain", Mode.GREEDY, wrapped(DraftSequence, "_restart", _keeps_tail)),
    Mutant("a piece after a gap is held", Mode.GREEDY, wrapped(ChainBuffer, "add", _takes_gaps)),
    Mutant("a block is cached before it is computed", Mode.GREEDY, wrapped(KVCacheManager, "publish", _publishes_all)),
    Mutant("chain numbers are used again", Mode.GREEDY, wrapped(SpeculationCore, "_open_draft", _first_chain_again)),
    Mutant("a removed sequence keeps its blocks", Mode.GREEDY, wrapped(TargetScheduler, "remove", _forgets_blocks)),
    Mutant("a broken stream's sequences stay", Mode.GREEDY, wrapped(TargetEngine, "handle", _ignore_stream_end)),
    Mutant("patience has no end", Mode.GREEDY, wrapped(TargetSequence, "due", _waits)),
    Mutant("k is cut after the token was seen", Mode.LAW, wrapped(Drawer, "_draw_weighted", _cuts)),
    Mutant("the residual is the target's law", Mode.LAW, wrapped(verifier, "accept", _target_as_residual)),
    Mutant("coin and residual share a word", Mode.LAW, lambda: patch.object(verifier, "RECOVERED", verifier.ACCEPT)),
)
