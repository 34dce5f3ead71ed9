"""The adapters that a target's sequences may have: by name, with how many sequences have each, and which of them are in
a step where more are wanted than the device holds."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from outrider.engine.batch import PreparedAdapter
from outrider.rpc.errors import InvalidArgument, NotFound, Violation
from outrider.rpc.messages import Adapter, Open

NO_ADAPTER = "NO_ADAPTER"  # reason: a name that is no adapter's
TURN = 16  # steps for which adapters stay in the steps, where others wait
Wanted = TypeVar("Wanted", bound=Hashable)  # what an engine knows an adapter by


@dataclass(slots=True, eq=False)
class ServedAdapter:
    """An adapter that was loaded."""

    info: Adapter
    prepared: PreparedAdapter
    num_sequences: int = 0
    is_served: bool = True  # new sequences may have it


class AdapterTable:
    """The adapters of one engine. Belongs to its thread; `forget` frees the place of one that no sequence has any
    more."""

    def __init__(self, forget: Callable[[PreparedAdapter], None]) -> None:
        self._forget = forget
        self._by_name: dict[str, ServedAdapter] = {}

    def __len__(self) -> int:
        return len(self._by_name)

    def num_sequences(self) -> dict[str, int]:
        """The open sequences of each that has any; from any thread."""
        served = list(self._by_name.items())  # at once: commands change it
        return {name: adapter.num_sequences for name, adapter in served if adapter.num_sequences}

    def add(self, info: Adapter, prepared: PreparedAdapter) -> None:
        """New sequences may name it. Raises ValueError for a name that is taken."""
        if info.name in self._by_name:
            raise ValueError(f"adapter: {info.name!r} is there")
        self._by_name[info.name] = ServedAdapter(info, prepared)

    def remove(self, name: str) -> int:
        """No new sequence gets it; its weights go with the last that has it. Returns how many these are. Raises
        NotFound."""
        if (found := self._by_name.pop(name, None)) is None:
            raise self.not_found(name)
        found.is_served = False
        self._free(found)
        return found.num_sequences

    def find(self, message: Open, parent: ServedAdapter | None) -> ServedAdapter | None:
        """The adapter of a new sequence; a fork has its parent's. Raises NotFound, or InvalidArgument for a fork that
        names another."""
        if message.fork_of is not None:
            inherited = "" if parent is None else parent.info.name
            if message.adapter not in ("", inherited):
                problem = f"is {message.adapter!r:.130}; allowed: that of the sequence to fork, {inherited!r}"
                raise InvalidArgument.of([Violation("open.adapter", problem)])
            return parent
        if not message.adapter:
            return None
        if (found := self._by_name.get(message.adapter)) is None:
            raise self.not_found(message.adapter)
        return found

    def close(self, adapter: ServedAdapter) -> None:
        """One sequence fewer has it."""
        adapter.num_sequences -= 1
        self._free(adapter)

    def not_found(self, name: str) -> NotFound:
        """What is said of a name that is none."""
        there = f"allowed: {', '.join(sorted(self._by_name))}" if self._by_name else "this target has none"
        return NotFound(f"adapter: is {name!r:.130}; {there}", reason=NO_ADAPTER)

    def _free(self, adapter: ServedAdapter) -> None:
        if not (adapter.is_served or adapter.num_sequences):
            self._forget(adapter.prepared)


class AdapterTurns(Generic[Wanted]):
    """Which adapters a step may have, of at most `most`. Where more are wanted, they take turns of TURN steps, so that
    weights are seldom moved, and none waits for the end of another's sequences."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._turn: list[Wanted] = []  # those whose turn it is
        self._left = 0  # steps
        self._waited: dict[Wanted, int] = {}  # number of the turn that each was in last
        self._number = 0

    def choose(self, wanted: Iterable[Wanted], first: Wanted | None = None) -> frozenset[Wanted]:
        """The adapters of a step whose sequences want these, in their order; `first` is always in it, unless it would
        be alone."""
        order = list(dict.fromkeys(wanted))
        if len(order) <= self.most:
            self._turn, self._left = order, 0
            return frozenset(order)
        self._left -= 1
        kept = [adapter for adapter in self._turn if adapter in order] if self._left >= 0 else []
        if not kept:
            self._left, self._number = TURN - 1, self._number + 1
            self._waited = {adapter: self._waited.get(adapter, 0) for adapter in order}
        waiting = sorted((one for one in order if one not in kept), key=lambda one: self._waited.get(one, 0))
        always = [] if first is None or self.most == 1 else [first]
        chosen = list(dict.fromkeys([*always, *kept, *waiting]))[: self.most]
        self._turn = chosen
        for adapter in chosen:
            self._waited[adapter] = self._number
        return frozenset(chosen)

    def forget(self, adapter: Wanted) -> None:
        """No sequence has it any more."""
        self._turn = [one for one in self._turn if one is not adapter]
        self._waited.pop(adapter, None)
