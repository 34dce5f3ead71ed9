"""A model's sign of life."""

from __future__ import annotations

from outrider.engine.batch import BatchEntry
from outrider.engine.blocks import BlockPool, OutOfBlocks
from outrider.engine.device_thread import require_device
from outrider.engine.runner import ModelRunner


def probe(runner: ModelRunner, pool: BlockPool) -> None:
    """One forward of one row, in a block of its own: sequences may be open. Where they hold every block, their steps
    are the sign. Raises what the model raises, or DeviceLost if the device is unusable after it."""
    try:
        block = pool.allocate(1)
    except OutOfBlocks:
        return
    try:
        runner.forward([BatchEntry([0], 0, block, 1)])
    except Exception:
        require_device(runner.model.device)
        raise
    finally:
        pool.release(block)
