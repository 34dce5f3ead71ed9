"""The invariants of one request, checked at every event that concerns it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from outrider.rpc.messages import Commit, Credit, DraftTokens, Failure, Open
from outrider.rpc.words.sampling_params import TokenOrigin

if TYPE_CHECKING:
    from simulation.network import SimLink
    from simulation.tables import IsHonest, Table


class Violation(BaseException):
    """An invariant does not hold. No Exception: the code under test may catch those."""


def require(condition: object, message: str) -> None:
    """Raises Violation unless the condition holds."""
    if not condition:
        raise Violation(message)


@dataclass(slots=True, eq=False)
class Watch:
    """What is known of one request, and what has to hold of it."""

    name: str
    request: Open
    ahead: int  # tokens that may be committed past what the client has read
    draft_table: Table
    is_honest: IsHonest | None  # None where that takes more than a table
    reference: Sequence[int] | None  # the plain output, where it is a function of the seed
    gateway: list[int] = field(default_factory=list)  # the core's list of committed tokens, not a copy
    seen: list[int] = field(default_factory=list)  # a copy of it, as of the last event
    num_read: int = 0
    disturbed: bool = False  # a piece was lost, doubled, delayed or overtaken
    num_accepted: int = 0
    target_len: int = 0  # what the target has committed, as far as it was seen there
    notes: Counter[str] = field(default_factory=Counter)  # what happened, so that a fault can be seen to have worked
    _chains: dict[int, dict[int, int]] = field(default_factory=dict)  # tokens by chain and position, as relayed
    _delivered: set[tuple[int, int]] = field(default_factory=set)  # chain and position, at the present target
    _most_until: int = 0

    @property
    def start(self) -> int:
        """Where the tokens begin that the client does not have yet."""
        return len(self.request.prompt_ids) + len(self.request.output_ids)

    def on_credit(self, credit: Credit, before: int) -> None:
        """The core grants credit: it never falls, and a slow client holds it back."""
        require(credit.until >= before, f"{self.name}: credit falls from {before} to {credit.until}")
        bound = self.start + self.num_read + self.ahead
        require(credit.until <= max(bound, self._most_until), f"{self.name}: credit {credit.until} above {bound}")
        self._most_until = max(self._most_until, credit.until)

    def on_delivery(self, link: SimLink, message: Any) -> None:
        """The target takes a message of the gateway."""
        if not link.alive:
            return
        if isinstance(message, Open):
            self._delivered.clear()
            self.notes["forked" if message.fork_of is not None else "target opened"] += 1
            prompt_len = len(self.request.prompt_ids)
            self.target_len = prompt_len + len(message.output_ids)
            resumed = self.seen[prompt_len : self.target_len]
            require(list(message.output_ids) == resumed, f"{self.name}: opened with {message.output_ids}")
        elif isinstance(message, DraftTokens):
            self.notes["piece taken"] += 1
            self._delivered.update((message.chain, message.position + index) for index in range(len(message.ids)))

    def on_departure(self, link: SimLink, event: Any, engine: Any) -> None:
        """A service says something."""
        if not link.alive:
            return
        if isinstance(event, DraftTokens):
            self._check_piece(link, event, engine.sequences[(link.stream.number, link.sequence_id)])
        elif isinstance(event, Commit):
            self._check_commit(link, event, engine.scheduler.sequences[link.stream.number, link.sequence_id])
            self.notes["chain dropped"] += len(event.dropped)

    def on_arrival(self, link: SimLink, event: Any) -> None:
        """The gateway is about to hear of something."""
        if isinstance(event, DraftTokens):
            chain = self._chains.setdefault(event.chain, {})
            for position, token in enumerate(event.ids, event.position):
                require(chain.setdefault(position, token) == token, f"{self.name}: chain {event.chain} used twice")
        elif isinstance(event, Commit):
            require(event.position == len(self.gateway), f"{self.name}: the target is out of step")
            self._check_record(event)
        elif isinstance(event, Failure):
            self.notes["sequence failed"] += 1

    def after_event(self) -> None:
        """The gateway's tokens: append-only, and those of plain decoding where these are known."""
        length = len(self.seen)
        require(self.gateway[:length] == self.seen, f"{self.name}: committed tokens changed at the gateway")
        if len(self.gateway) == length:
            return
        self.seen = list(self.gateway)
        if self.reference is not None:
            output = self.seen[self.start :]
            plain = list(self.reference[: len(output)])
            require(output == plain, f"{self.name}: output {output}, plain decoding gives {plain}")

    def _check_piece(self, link: SimLink, piece: DraftTokens, draft: Any) -> None:
        end = piece.position + len(piece.ids)
        require(end <= max(link.until, piece.position), f"{self.name}: drafted to {end}, credit ends at {link.until}")
        guesses = piece.parent is not None  # a branch's first token is not drawn, and its window follows
        require(len(piece.ids) <= link.max_window + guesses, f"{self.name}: a piece of {len(piece.ids)} tokens")
        self.notes["branch"] += guesses
        known = draft.sequence.tokens[: draft.committed]
        require(known == self.seen[: draft.committed], f"{self.name}: the draft's committed tokens are others")
        if self.is_honest is None:
            return
        lines = {branch.number: branch.sequence for branch in draft.branches}
        tokens = lines.get(piece.chain, draft.sequence).tokens
        state = self.draft_table.state_after(tokens[: piece.position])
        for index, token in enumerate(piece.ids):
            weights = piece.weights[index] if index < len(piece.weights) else None
            position = piece.position + index
            guessed = (guesses and index == 0) or position < draft.committed  # a branch that was chosen sends its guess
            honest = guessed or self.is_honest(position, state, token, weights)
            require(honest, f"{self.name}: {token} at {position} was drafted in another context")
            state = self.draft_table.state_after((token,), state)

    def _check_commit(self, link: SimLink, commit: Commit, target: Any) -> None:
        """As the target makes it."""
        end = commit.position + len(commit.ids)
        require(end <= link.until, f"{self.name}: committed to {end}, credit ends at {link.until}")
        require(commit.position == self.target_len, f"{self.name}: commit at {commit.position}, not {self.target_len}")
        self.target_len = end
        tokens, known = target.sequence.tokens, len(self.seen)
        require(known <= commit.position and tokens[:known] == self.seen, f"{self.name}: target and gateway differ")
        require(tuple(tokens[commit.position :]) == commit.ids, f"{self.name}: a commit is not what the target holds")
        if not commit.ids:
            require(commit.dropped and commit.num_drafted == 0, f"{self.name}: a round without a token")
            return
        accepted = sum(origin == TokenOrigin.ACCEPTED for origin in commit.origins)
        require(len(commit.origins) == len(commit.ids), f"{self.name}: an origin is missing")
        require(accepted == min(commit.num_accepted, len(commit.ids)), f"{self.name}: {accepted} accepted tokens")
        require(commit.num_accepted <= commit.num_drafted <= link.max_window, f"{self.name}: too wide a window")
        require(len(commit.ids) <= commit.num_accepted + 1, f"{self.name}: tokens from nowhere")

    def _check_record(self, commit: Commit) -> None:
        """A window comes from one chain, which agrees with all that is committed."""
        if commit.chain is None or not commit.num_drafted:
            return
        chain = self._chains.get(commit.chain, {})
        for position, token in enumerate(commit.ids[: commit.num_accepted], commit.position):
            require(chain.get(position) == token, f"{self.name}: accepted at {position} what was never drafted there")
        if self.disturbed:  # what was dropped for a gap was never compared
            return
        for position, token in chain.items():
            if position < commit.position and (commit.chain, position) in self._delivered:
                require(self.gateway[position] == token, f"{self.name}: chain {commit.chain} is dead at {position}")
