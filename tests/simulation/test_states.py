"""Every order of events of a few small scenarios: no invariant breaks, and everything ends. Without any one of the
safeguards a counterexample is found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, cast
from unittest.mock import patch

import pytest
from simulation import machines
from simulation.machines import Event, Scenario
from simulation.mutants import MUTANTS, wrapped
from simulation.states import FAULTS, PIECE_FAULTS, Counterexample, Explorer

from outrider.draft_service import sequence as draft_sequence
from outrider.draft_service.engine import DraftEngine
from outrider.engine.token_tree import TokenTree
from outrider.gateway.speculation import core as core_module
from outrider.gateway.speculation.core import PARENT_GONE, Effect, OpenTarget, SpeculationCore
from outrider.planner.estimates import OpenWork
from outrider.planner.policy import Policy
from outrider.rpc.messages import Close, Credit, DraftTokens, Failure, Open
from outrider.target_service.draft_buffer import ChainBuffer
from outrider.target_service.sequence import TargetSequence

PLAIN, ONE, TWO = Policy(0, plain_ahead=2), Policy(1), Policy(2)  # tokens drafted a round
CHAINS_OF_ONE, CHAINS = Policy(1, windows_ahead=1), Policy(2, windows_ahead=1)
BRANCHES = Policy(2, windows_ahead=1, max_branches=2)
SLOWLY = replace(PLAIN, max_unread=1)
SMALL_TREE, TREE = TokenTree.of([(0,), (1,), (0, 0)]), TokenTree.of([(0,), (1,), (0, 0), (1, 0)])
OF_THREE, OF_FOUR = Policy(3), Policy(4)  # nodes
Y, N = True, False  # whether the draft says what the target says

SHORT = [
    Scenario("plain, two faults", PLAIN, (Y,), num_faults=2),
    Scenario("plain, a slow client", SLOWLY, (Y, Y), reads_late=True),
    Scenario("sequential", TWO, (Y, N)),
    Scenario("sequential, stop strings", ONE, (Y, N), num_faults=0, reads_late=True, examines_text=True),
    Scenario("sequential, an end of text", TWO, (Y, N, Y, Y), num_faults=0, ends_at=1),
    Scenario("sequential, the client leaves", ONE, (Y, N), num_faults=0, may_leave=True),
    Scenario("chains", CHAINS, (Y, N, Y, Y), num_faults=0),
    Scenario("chains, by rejection", CHAINS, (Y, Y, Y), num_faults=0, rejects=True),
    Scenario("chains, pieces disturbed", ONE, (N, Y), piece_faults=True),
    Scenario("branches", BRANCHES, (Y, N), num_faults=0),
    Scenario("off and on", PLAIN, (Y, N), (TWO, CHAINS)),
    Scenario("off and on, a draft that learns", PLAIN, (Y, N, Y), (CHAINS,), num_faults=0, learns=True),
    Scenario("two requests, a draft for one", ONE, (Y,), num_faults=0, num_requests=2, draft_room=1),
    Scenario("plain, the gateway dies", PLAIN, (Y, Y), gateway_dies=True),
    Scenario("sequential, the gateway dies", ONE, (Y,), gateway_dies=True),
    Scenario("two completions", PLAIN, (Y,), num_requests=2, forks=True),
    Scenario("two completions, drafted", ONE, (Y,), num_faults=0, num_requests=2, forks=True),
    Scenario("trees", OF_FOUR, (Y, N, Y), num_faults=0, tree=TREE),
    Scenario("trees, and a fault", OF_THREE, (N, Y), tree=SMALL_TREE),
    Scenario("trees, a target that takes none", OF_THREE, (Y, N), num_faults=0, tree=SMALL_TREE, takes_trees=False),
]
LONG = [
    Scenario("plain, two faults", PLAIN, (Y, Y, Y), num_faults=2),
    Scenario("sequential", TWO, (Y, N, Y, Y)),
    Scenario("sequential, two faults", ONE, (Y, N), num_faults=2),
    Scenario("sequential of two, two faults", TWO, (Y, N), num_faults=2),
    Scenario("sequential, the client leaves", TWO, (Y, N, Y), may_leave=True),
    Scenario("chains", CHAINS, (Y, N, Y, Y)),
    Scenario("chains, by rejection", CHAINS, (Y, Y, Y), rejects=True),
    Scenario("chains, pieces disturbed", CHAINS_OF_ONE, (Y, N, Y), piece_faults=True),
    Scenario("branches", BRANCHES, (Y, N)),
    Scenario("off and on", TWO, (Y, N, Y), (PLAIN, CHAINS)),
    Scenario("off and on, a draft that learns", PLAIN, (Y, N, Y), (CHAINS,), learns=True),
    Scenario("two requests, a draft for one", ONE, (Y, N), num_faults=0, num_requests=2, draft_room=1),
    Scenario("two requests", ONE, (Y,), num_requests=2),
    Scenario("chains, two faults", CHAINS_OF_ONE, (Y, N), num_faults=2),
    Scenario("branches, two faults", BRANCHES, (Y,), num_faults=2),
    Scenario("chains, the gateway dies", CHAINS_OF_ONE, (Y, N), gateway_dies=True),
    Scenario("a slow client, the gateway dies", SLOWLY, (Y, Y), num_faults=2, reads_late=True, gateway_dies=True),
    Scenario("two completions", PLAIN, (Y, Y), num_requests=2, forks=True),
    Scenario("two completions, drafted", ONE, (Y,), num_requests=2, forks=True),
    Scenario("two completions, two faults", PLAIN, (Y,), num_faults=2, num_requests=2, forks=True, gateway_dies=True),
    Scenario("trees", OF_THREE, (N, Y, Y), tree=SMALL_TREE),
    Scenario("trees, pieces disturbed", OF_THREE, (N, Y), tree=SMALL_TREE, piece_faults=True),
    Scenario("trees, a target that takes none", OF_THREE, (Y, N), tree=SMALL_TREE, takes_trees=False),
]
# Windows of two tokens, two faults, and more states than are worth their memory: of these the nearest so many.
MOST = 1_000_000
BOUNDED = [
    Scenario("sequential of two, three tokens, two faults", TWO, (Y, N, Y), num_faults=2),
    Scenario("chains of two, three tokens, two faults", CHAINS, (Y, N, Y), num_faults=2),
    Scenario("branches of two, two faults", BRANCHES, (Y, N), num_faults=2),
]
MERGED_NAMES = "plain, a slow client", "branches", "off and on, a draft that learns", "trees", "plain, the gateway dies"
MERGED = [one for one in SHORT if one.name in MERGED_NAMES]


FORMS = [
    *(pytest.param(one, id=one.name) for one in SHORT),
    *(pytest.param(one, marks=pytest.mark.slow, id=f"{one.name}, long") for one in LONG),  # for the long proof alone
]


@pytest.mark.parametrize("scenario", FORMS)
def test_every_order_ends_as_the_target_alone_would(scenario: Scenario) -> None:
    explored = Explorer(scenario).run()
    print(explored)
    assert explored.is_whole and explored.num_done
    none = (set() if scenario.piece_faults else PIECE_FAULTS) | (set() if scenario.gateway_dies else {"die"})
    assert explored.kinds & FAULTS == (FAULTS - none if scenario.num_faults else set())


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("scenario", BOUNDED, ids=lambda scenario: scenario.name)
def test_no_invariant_breaks_in_the_nearest_states(scenario: Scenario) -> None:
    """That everything ends cannot be told of a part."""
    explored = Explorer(scenario).run(MOST)
    print(f"the nearest {explored.num_states} states, all up to {explored.depth - 1} events away: {explored}")
    assert (explored.is_whole or explored.num_states >= MOST) and explored.num_done
    assert explored.kinds & FAULTS == FAULTS - PIECE_FAULTS - {"die"}


def goes_on(scenario: Scenario) -> list[tuple[int, Event, bool]]:
    """Of states that were reached in several ways, whether each event does the same after all of them."""
    explorer = Explorer(scenario)
    explorer.run()
    world = explorer.world
    return [found for states in (*world.gateways, world.target, world.draft) for found in states.merged()]


@pytest.mark.parametrize("scenario", MERGED, ids=lambda scenario: scenario.name)
def test_states_that_are_taken_for_one_go_on_as_one(scenario: Scenario) -> None:
    found = goes_on(scenario)
    assert len(found) > 40
    assert [(state, event) for state, event, is_same in found if not is_same] == []


def test_states_that_differ_are_seen_to_go_on_otherwise() -> None:
    blind = machines.IGNORED | {"_chains"}
    with patch.object(machines, "IGNORED", blind), patch.object(machines, "_fields", {}):
        assert not all(is_same for _, _, is_same in goes_on(MERGED[1]))


def shorter(new: Sequence[int], drafted: Sequence[int]) -> int:
    """The draft takes what was committed for what it drafted."""
    return min(len(new), len(drafted))


def always(*piece: Any) -> bool:
    """Every chain agrees."""
    return True


def drops(refuse: Any, chains: ChainBuffer, number: int) -> None:
    """A chain of which a piece was dropped is told of, and goes on."""
    chains._drop(number)


def orphaned(start: Any, chains: ChainBuffer, piece: DraftTokens) -> None:
    """A branch stands for itself."""
    start(chains, replace(piece, parent=None))


def not_replaced(failed: Any, core: SpeculationCore, failure: Failure) -> list[Effect]:
    """A lost target leaves the request alone."""
    return []


def without_credit(open_target: Any, core: SpeculationCore) -> OpenTarget:
    """A target that is opened again has the credit of the one before."""
    had, effect = core._target_credit, open_target(core)
    messages = [message for message in effect.messages if had is None or not isinstance(message, Credit)]
    return cast(OpenTarget, replace(effect, messages=tuple(messages)))


def with_credit_twice(open_target: Any, core: SpeculationCore) -> OpenTarget:
    """Credit is counted on top of what the target before had."""
    had, effect = core._target_until, open_target(core)
    messages = [replace(one, until=one.until + had) if isinstance(one, Credit) else one for one in effect.messages]
    return cast(OpenTarget, replace(effect, messages=tuple(messages)))


def from_the_prompt(open_request: Any, core: SpeculationCore) -> Open:
    """What the client had is forgotten."""
    request: Open = open_request(core)
    return replace(request, output_ids=()) if core.request.output_ids else request


def as_long_as_a_whole_one(tokens_left: Any, target: TargetSequence, committed: int) -> int:
    """What the client had does not count."""
    left: int = tokens_left(target, committed)
    return left + len(target.open.output_ids)


def without_parent(failed: Any, core: SpeculationCore, failure: Failure) -> list[Effect]:
    """A fork whose parent has ended is an error."""
    effects: list[Effect] = failed(core, replace(failure, code=13) if failure.reason == PARENT_GONE else failure)
    return effects


def lost_without_parent(failed: Any, core: SpeculationCore, failure: Failure) -> list[Effect]:
    """It counts as a target that was lost."""
    core._parent_gone = True
    effects: list[Effect] = failed(core, failure)
    return effects


def without_close(apply: Any, engine: DraftEngine, key: Any, message: Any, sink: Any, model: str) -> None:
    """A draft keeps what the gateway has closed."""
    if not isinstance(message, Close):
        apply(engine, key, message, sink, model)


@dataclass(frozen=True, slots=True)
class Removed:
    """A safeguard that is gone, the scenario that needs it, and what the counterexample says."""

    name: str
    scenario: Scenario
    apply: Callable[[], AbstractContextManager[Any]]
    what: str


def known(name: str, scenario: Scenario, what: str) -> Removed:
    """One of the simulation's."""
    return Removed(name, scenario, next(mutant.apply for mutant in MUTANTS if mutant.name == name), what)


def without(name: str, scenario: Scenario, what: str, owner: Any, method: str, change: Callable[..., Any]) -> Removed:
    """A method is another one, which gets the original first."""
    return Removed(name, scenario, wrapped(owner, method, change), what)


AHEAD = Scenario("chains", CHAINS, (Y, N, Y, Y), num_faults=0)
BRANCHING = Scenario("branches", BRANCHES, (Y, N, Y, Y), num_faults=0)
DISTURBED = Scenario("chains, pieces disturbed", CHAINS_OF_ONE, (Y, Y), piece_faults=True)
ENDED = Scenario("sequential", ONE, (Y, N), num_faults=0)
LOST_DRAFT = Scenario("sequential", ONE, (Y, Y))
LOST_TARGET = Scenario("chains", CHAINS_OF_ONE, (N, Y))
LOSS = Scenario("plain", PLAIN, (Y, Y, Y))
SLOW = Scenario("a slow client", SLOWLY, (Y, Y), num_faults=0, reads_late=True)
RESUMED = Scenario("plain, the gateway dies", PLAIN, (Y, Y, Y), gateway_dies=True)
FORKS = Scenario("two completions", PLAIN, (Y,), num_faults=0, num_requests=2, forks=True)
TREES = Scenario("trees", OF_FOUR, (Y, N, Y), num_faults=0, tree=TREE)
CONTEXT, STUCK = "is verified behind", "nothing can happen any more, and it is not done"

REMOVED = [
    known("the target forgets to kill a chain", AHEAD, CONTEXT),
    without("the target compares no tokens", AHEAD, CONTEXT, ChainBuffer, "_difference", lambda *_: None),
    Removed(
        "the draft compares no tokens", AHEAD, lambda: patch.object(draft_sequence, "_common_prefix", shorter), CONTEXT
    ),
    known("a piece after a gap is held", DISTURBED, CONTEXT),
    without("a dropped chain goes on", DISTURBED, "which has a gap", ChainBuffer, "_refuse", drops),
    without("a branch outlives its parent", BRANCHING, CONTEXT, ChainBuffer, "_start", orphaned),
    known("patience has no end", DISTURBED, STUCK),
    known("the target goes past its credit", LOSS, "credit ends at"),
    known("a slow reader is forgotten", SLOW, "the client has read"),
    without("a lost target is not replaced", LOSS, STUCK, SpeculationCore, "_on_target_failure", not_replaced),
    without("no credit after a reopening", LOSS, STUCK, SpeculationCore, "_open_target", without_credit),
    without("credit twice after a reopening", LOSS, "credit", SpeculationCore, "_open_target", with_credit_twice),
    known("a commit is repeated after a reopening", LOSS, "the journal ends at"),
    known("chain numbers are used again", LOST_DRAFT, "used by a draft before"),
    Removed("the journal holds dead chains", LOST_TARGET, lambda: patch.object(core_module, "agrees", always), CONTEXT),
    known("a broken stream's sequences stay", LOSS, STUCK),
    known("a removed sequence keeps its blocks", LOSS, STUCK),
    without("room is not given back", ENDED, STUCK, OpenWork, "remove", lambda *_: None),
    without("a closed sequence stays", ENDED, STUCK, DraftEngine, "_apply", without_close),
    without(
        "what a client has is generated again", RESUMED, "the journal ends at", SpeculationCore, "_open_request",
        from_the_prompt,
    ),
    without(
        "what a client has does not count", RESUMED, "in the end|alone says", TargetSequence, "tokens_left_at",
        as_long_as_a_whole_one,
    ),
    without(
        "an orphaned fork is an error", FORKS, "the request fails", SpeculationCore, "_on_target_failure",
        without_parent,
    ),
    without(
        "an orphaned fork has lost a target", replace(FORKS, num_faults=2), "target lost", SpeculationCore,
        "_on_target_failure", lost_without_parent,
    ),
    without("a tree is not climbed", TREES, "is verified in", ChainBuffer, "_climb", lambda *_: None),
]  # fmt: skip


LATER = ("an orphaned fork has lost a target",)  # for the long proof alone


@pytest.mark.parametrize(
    "removed", [pytest.param(one, id=one.name, marks=[pytest.mark.slow] * (one.name in LATER)) for one in REMOVED]
)
def test_without_a_safeguard_there_is_a_counterexample(removed: Removed) -> None:
    with removed.apply(), pytest.raises(Counterexample, match=removed.what) as caught:
        Explorer(removed.scenario).run()
    print(caught.value)
