"""Plain decoding of the same requests by the same engine: no draft, no network, no faults."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from simulation.tables import MAX_LEN, Table, TableRunner

from outrider.rpc.messages import Commit, Credit, Open, TargetEvent
from outrider.target_service.engine import StreamCommand, TargetEngine
from outrider.target_service.sequence import TargetLimits


def plain_outputs(table: Table, requests: Sequence[Open]) -> list[list[int]]:
    """What the target alone gives to each request."""
    outputs: list[list[int]] = [[] for _ in requests]
    num_blocks = 8 * len(requests)
    limits = TargetLimits(table.vocab_size, MAX_LEN, (0,), num_blocks, max_sequences=len(requests))
    engine = TargetEngine(TableRunner(table, num_blocks), limits, clock=lambda: 0.0)  # type: ignore[arg-type]

    def sink(event: TargetEvent) -> None:
        assert isinstance(event, Commit), event
        outputs[event.sequence_id].extend(event.ids)

    for index, request in enumerate(requests):
        opened = replace(request, sequence_id=index, fork_of=None)
        for message in (opened, Credit(index, MAX_LEN, 0)):
            engine.handle(StreamCommand(0, message, sink))
    while engine.step(0.0) is not None:
        pass
    return outputs
