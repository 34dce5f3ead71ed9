"""Runs a cell of the design on fresh services: what came out, and what happened inside."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from exactness.identity_design import Cell
from exactness.identity_prompts import Prompt, draft_model, make_prompt
from exactness.identity_services import Services, serving

from outrider.engine.kv_cache_manager import BLOCK_SIZE
from outrider.engine.loader import LoadedModel
from outrider.gateway.speculation.loop import speculate
from outrider.planner.policy import Policy, Round
from outrider.rpc.sampling_params import TokenOrigin

WARM_BLOCKS = 2  # of each prompt; what follows them is long enough to be cut in chunks
WHOLE_ROWS = 1 << 16  # a step's room: every prompt at once
AHEAD = {"sequential": (0, 0), "chains": (1, 0), "branches": (2, 6)}  # windows, branches; of branches, too
MAX_UNREAD = 40  # tokens that a sequence may be ahead of its reader
RIVAL_TOKENS = 40
RIVAL_NUMBERS = 50_000  # from here on
CELL_S = 240.0  # a cell that takes longer hangs


@dataclass(frozen=True, slots=True)
class Work:
    """A cell and its prompts. The last one may be the rival of a lone sequence that is to be preempted: a request of
    higher priority that leaves no block over."""

    cell: Cell
    prompts: tuple[Prompt, ...]


@dataclass(slots=True)
class Outcome:
    """Outputs in the order of the prompts, and what happened."""

    outputs: list[list[int]]
    num_tokens: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    longest_window: int = 0
    drafts_lost: int = 0  # sequences that lost it in mid-stream
    num_after_draft: int = 0  # plain tokens of these after that
    draft_killed: bool = False
    cached_ids: int = 0
    preemptions: int = 0
    draft_preemptions: int = 0
    drafted_ahead: int = 0
    branches: int = 0
    branches_taken: int = 0
    chunks: int = 0
    most_open: int = 0
    most_in_step: int = 0


@dataclass(slots=True)
class _Run:
    """A cell under way."""

    work: Work
    services: Services
    outcome: Outcome
    killing: asyncio.Task[None] | None = None

    async def decode_all(self) -> None:
        """All at once; the draft's end comes in the middle."""
        await asyncio.gather(*(self.decode(index) for index in range(len(self.work.prompts))))

    async def decode(self, index: int) -> None:
        """One request through the gateway's loop."""
        cell, outcome = self.work.cell, self.outcome
        priority = -1 if index == cell.batch else 0
        request = self.work.prompts[index].open("ngram" if cell.ngram else "draft_model", priority)
        lost: list[str] = []
        drafts, targets = self.services.drafts, self.services.targets
        policy = policy_of(cell)
        async for item in speculate(drafts, targets, request, policy, on_draft_stop=lost.append):
            if isinstance(item, Round):
                outcome.outputs[index] += item.commit.ids
                self.count(item, bool(lost))
                await self.kill_when_due()
        outcome.drafts_lost += bool(lost)

    def count(self, closed: Round, draft_is_lost: bool) -> None:
        """Adds up a round."""
        commit, outcome = closed.commit, self.outcome
        outcome.num_tokens += len(commit.ids)
        outcome.num_drafted += commit.num_drafted
        outcome.num_accepted += commit.num_accepted
        outcome.longest_window = max(outcome.longest_window, commit.num_drafted)
        outcome.num_after_draft += draft_is_lost * commit.origins.count(TokenOrigin.PLAIN)

    async def kill_when_due(self) -> None:
        """Ends the draft once a third of the tokens is there and something was drafted. Meanwhile nobody reads, so no
        sequence gets to its end."""
        cell, num_wanted = self.work.cell, sum(prompt.sampling.max_tokens for prompt in self.work.prompts)
        due = 3 * self.outcome.num_tokens >= num_wanted and (self.outcome.num_drafted or cell.k == 0)
        if cell.killed and due and self.killing is None:
            self.killing = asyncio.create_task(self.services.draft.kill())
        if self.killing is not None:
            await self.killing


def policy_of(cell: Cell) -> Policy:
    """The gateway's for every sequence of a cell."""
    windows_ahead, max_branches = AHEAD[cell.ahead]
    return Policy(cell.k, windows_ahead=windows_ahead, max_branches=max_branches, max_unread=MAX_UNREAD)


def assign(design: Sequence[Cell], num_prompts: int, num_tokens: int, truncated: bool = True) -> list[Work]:
    """Deals `num_prompts` different prompts to the places in the cells, half of them greedy and half coupled where
    there are as many places; again from the first one when all are dealt. No prompt is twice in a cell."""
    num_coupled = sum(cell.batch for cell in design if cell.coupled)
    num_greedy = sum(cell.batch for cell in design) - num_coupled
    different = {False: min(num_greedy, max(num_prompts // 2, num_prompts - num_coupled))}
    different[True] = num_prompts - different[False]
    dealt = {False: 0, True: 0}
    works = []
    for cell in design:
        first = dealt[cell.coupled]
        dealt[cell.coupled] += cell.batch
        numbers = [number % different[cell.coupled] for number in range(first, first + cell.batch)]
        prompts = [make_prompt(number, cell.coupled, num_tokens, truncated) for number in numbers]
        if cell.preempted and cell.batch == 1:
            room = blocks_for(prompts[0]) - blocks_of(len(prompts[0].ids)) - 1
            length = room * BLOCK_SIZE - 4
            prompts.append(make_prompt(RIVAL_NUMBERS + first, cell.coupled, RIVAL_TOKENS, truncated, length))
        works.append(Work(cell, tuple(prompts)))
    return works


async def run(work: Work, target: LoadedModel) -> Outcome:
    """Decodes the prompts at once. Blocks are checked when all is over."""
    cell = work.cell
    max_rows = 24 + 2 * cell.batch if cell.chunked else WHOLE_ROWS
    at_once = min(cell.batch, max_rows // (cell.k + 1))  # sequences that decode in a step with room for `max_rows`
    pools = {"num_blocks": num_blocks(work, at_once), "draft_blocks": num_blocks(work, cell.batch)}
    async with (
        asyncio.timeout(CELL_S),
        serving(target, draft_model(), max_rows=max_rows, cut_windows=cell.cut, **pools) as services,
    ):
        if work.cell.warm:
            await _warm(work, services)
        services.forget()
        outcome = Outcome([[] for _ in work.prompts])
        await _Run(work, services, outcome).decode_all()
        await services.check_blocks()
    steps, cache = services.steps, services.cache
    outcome.chunks, outcome.most_open, outcome.most_in_step = steps.chunks, steps.most_open, steps.most_in_step
    outcome.cached_ids, outcome.preemptions = cache.cached_ids, cache.preemptions
    outcome.draft_killed, outcome.draft_preemptions = services.draft.killed, services.draft.watch.preemptions
    pieces = services.draft.pieces
    outcome.drafted_ahead, outcome.branches, outcome.branches_taken = pieces.ahead, pieces.branches, pieces.taken
    return outcome


async def _warm(work: Work, services: Services) -> None:
    """Decodes two tokens after the first blocks of each prompt; the first prompt last, so that its blocks stay."""
    cell = replace(work.cell, killed=False)
    for prompt in reversed(work.prompts[: work.cell.batch]):
        length = WARM_BLOCKS * BLOCK_SIZE + 1
        start = replace(prompt, ids=prompt.ids[:length], sampling=replace(prompt.sampling, max_tokens=2))
        await _Run(Work(cell, (start,)), services, Outcome([[]])).decode_all()


def blocks_of(num_tokens: int) -> int:
    """Blocks that hold so many tokens."""
    return -(-num_tokens // BLOCK_SIZE)


def blocks_for(prompt: Prompt) -> int:
    """Blocks that a prompt and its output take, and one more."""
    return blocks_of(len(prompt.ids) + prompt.sampling.max_tokens) + 1


def num_blocks(work: Work, at_once: int) -> int:
    """Of a service: enough for all; or, to force preemption, for the longest sequence alone, or for the prompts of as
    many as decode at once and little more."""
    if not work.cell.preempted:
        return 2 * sum(map(blocks_for, work.prompts))
    if work.cell.batch == 1:
        return blocks_for(work.prompts[0])
    of_prompts = sum(blocks_of(len(prompt.ids)) for prompt in work.prompts)
    return max(max(map(blocks_for, work.prompts)) + 1, round(1.1 * of_prompts * at_once / work.cell.batch))


def check_happened(work: Work, outcome: Outcome) -> None:
    """Every circumstance of the cell occurred, and none that is not the cell's: else the cell proves nothing. (Except
    that a machine which stalls for seconds may cost a sequence its draft in any cell.)"""
    cell = work.cell
    assert outcome.longest_window == cell.k or (cell.cut and cell.batch > 1 and outcome.longest_window < cell.k)
    assert (outcome.drafted_ahead > 0) == (cell.ahead != "sequential" and cell.k > 0)
    may_branch = cell.ahead == "branches" and cell.k > 0 and not cell.ngram
    assert (outcome.branches > 0) == may_branch or (may_branch and cell.preempted)  # branches yield their blocks
    assert outcome.most_open == len(work.prompts)
    if cell.batch > 1:
        assert outcome.most_in_step > 1
    if not cell.chunked and not cell.preempted:
        assert 2 * outcome.most_in_step >= cell.batch
    assert (outcome.chunks > 0) == cell.chunked
    assert (outcome.cached_ids > 0) == cell.warm
    if cell.warm and not cell.preempted:
        assert outcome.cached_ids == cell.batch * WARM_BLOCKS * BLOCK_SIZE
    assert (outcome.preemptions > 0) == cell.preempted
    assert outcome.draft_killed == cell.killed
    if cell.killed and cell.k:
        assert outcome.drafts_lost > 0 and outcome.num_after_draft > 0
