"""Which adapters lie on the device: in so many slots, of which a new one takes that of the one that was wanted longest
ago."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.engine.adapters.loader import LoadedAdapter
from outrider.engine.batch import PreparedAdapter
from outrider.engine.models.base import TakesAdapters, UnsupportedModel


@dataclass(frozen=True, slots=True)
class AdapterRoom:
    """What a runner has for adapters."""

    num_slots: int
    max_rank: int


class ResidentAdapters:
    """The adapters that one model has on its device. Called from the thread that runs it, but for `prepare`."""

    def __init__(self, model: object, room: AdapterRoom) -> None:
        """Takes the memory. Raises UnsupportedModel for a model without adapters."""
        if not isinstance(model, TakesAdapters):
            raise UnsupportedModel("adapters are for our own decoder and for transformers' models of plain products")
        model.adapters.make_room(room.num_slots, room.max_rank)
        self.room = room
        self.num_swaps = 0  # since the start: adapters that were put into a slot
        self._bank = model.adapters
        self._free = list(reversed(range(room.num_slots)))
        self._slot_of: OrderedDict[PreparedAdapter, int] = OrderedDict()  # the one wanted longest ago first

    def prepare(self, loaded: LoadedAdapter) -> PreparedAdapter:
        """Lays an adapter out as a slot has it, on the host; from any thread. Raises ValueError for a rank that has no
        room."""
        if loaded.rank > self.room.max_rank:
            raise ValueError(f"rank: is {loaded.rank}; allowed here: at most {self.room.max_rank}")
        return PreparedAdapter(loaded.digest, loaded.rank, self._bank.prepare(loaded.modules))

    def slots_for(self, adapters: Sequence[PreparedAdapter | None]) -> list[int]:
        """Where each lies, -1 for none; those that are not there are put there. Raises ValueError for more than there
        are slots."""
        wanted = dict.fromkeys(adapter for adapter in adapters if adapter is not None)
        if len(wanted) > self.room.num_slots:
            raise ValueError(f"a step of {len(wanted)} adapters; allowed: at most {self.room.num_slots}")
        for adapter in wanted:
            if adapter in self._slot_of:
                self._slot_of.move_to_end(adapter)
        for adapter in wanted:
            if adapter not in self._slot_of:
                self._put(self._free.pop() if self._free else self._slot_of.popitem(last=False)[1], adapter)
        return [-1 if adapter is None else self._slot_of[adapter] for adapter in adapters]

    def forget(self, adapter: PreparedAdapter) -> None:
        """No step wants it any more."""
        if (slot := self._slot_of.pop(adapter, None)) is not None:
            self._bank.put(slot, None)
            self._free.append(slot)

    def _put(self, slot: int, adapter: PreparedAdapter) -> None:
        try:
            self._bank.put(slot, adapter.weights)
        except Exception:
            self._free.append(slot)
            raise
        self._slot_of[adapter] = slot
        self.num_swaps += 1

    def __contains__(self, adapter: PreparedAdapter) -> bool:
        """Whether it lies on the device."""
        return adapter in self._slot_of
