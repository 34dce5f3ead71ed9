"""`outrider model tap`: a target's hidden states on a corpus, for training heads."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import BeforeValidator, Field

from outrider.cli.arguments import fail, one_line, parse, require_config, split_ids
from outrider.cli.terminal import make_painter, progress
from outrider.rpc.hub import locate
from outrider.rpc.settings import ServiceSettings

DESCRIPTION = (
    "Run the target (first bare argument) over a corpus (second), and write its tokens and the hidden states of chosen "
    "layers as safetensors shards, from which outrider model train makes heads. A run that was cut short goes on when "
    "it is started again with the same settings."
)


class TapSettings(ServiceSettings):
    """What is read, and what is kept of it."""

    section: ClassVar[str] = "tap"

    target: Path = Field(description="folder or hub id of the target's checkpoint; also the first bare argument")
    corpus: Path = Field(
        description='text file, or .jsonl with an object a line whose "text" is read; also the second bare argument'
    )
    out: Path = Field(description="folder to make; OUT.partial beside it holds the shards until it is done")
    taps: Annotated[tuple[int, ...], BeforeValidator(split_ids)] = Field(
        (),
        description="layers whose states are kept: i is what enters block i, the number of blocks what the last norm "
        "hands on (default: the three of eagle3, and the last)",
    )
    length: int = Field(256, ge=2, description="tokens of a window; nothing before it is seen")
    max_tokens: int | None = Field(None, ge=1, description="tokens of the corpus to read (default: all)")
    threads: int | None = Field(None, ge=1, le=256, description="threads (default: all cores)")
    plain: bool = Field(False, description="no colours, and no progress bar")


def main(argv: Sequence[str] | None = None, prog: str = "outrider model tap") -> int:
    """Writes the shards; 1 if it cannot."""
    arguments = sys.argv[1:] if argv is None else argv
    settings = parse(TapSettings, arguments, prog, DESCRIPTION, bare=("target", "corpus"))
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch
    try:
        target = locate(settings.target)
        require_config(target, "--target")
        import torch

        from outrider.training import taps

        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        plan = taps.TapPlan(
            target=target,
            corpus=settings.corpus,
            out=settings.out,
            taps=settings.taps,
            length=settings.length,
            max_tokens=settings.max_tokens,
        )
        painter = make_painter(settings.plain)
        painter.note(taps.tap_needs(plan).describe())
        with progress(painter, "shard") as shown:
            done = total = 0

            def on_shard(shard: int, shards: int) -> None:
                nonlocal done, total
                done, total = shard, shards
                shown(done, total, f"{plan.num_windows} windows each")

            said = taps.tap(plan, on_shard, lambda word: shown(done, total, word))
    except (OSError, ValueError) as error:
        return fail(prog, error, one_line(error))
    layers = ", ".join(map(str, said["taps"]))
    painter.note(f"{settings.out}: {said['num_tokens']:,} tokens with the states of layers {layers}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
