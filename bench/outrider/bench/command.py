"""What the commands of the bench share: the settings of a pair, notes on the way, and failures as one line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator

from outrider.bench.results import Json, dump
from outrider.bench.worker import BenchWorkerFailed
from outrider.cli.local_services import Folders, ServiceFailed
from outrider.pairs import pair_path
from outrider.rpc.errors import OutriderError
from outrider.rpc.hub import locate
from outrider.rpc.settings import ServiceSettings

Note = Callable[[str], None]
FAILURES = (ServiceFailed, BenchWorkerFailed, OutriderError, OSError, ValueError)


class PairSettings(ServiceSettings):
    """Which pair is measured, and where the result goes."""

    target: Path | None = Field(None, description="folder of the target's checkpoint (default: the embedded pair's)")
    draft: Path | None = Field(None, description="folder of the draft's checkpoint (default: the embedded pair's)")
    pair: str = Field("python", description="the embedded pair, where target and draft are not given")
    num_draft_tokens: int = Field(4, ge=1, le=32, description="tokens drafted a round")
    seed: int = Field(0, ge=0, description="of the order, the sampling and the networks")
    store: bool = Field(True, description="store the result and its plot")
    output: Path | None = Field(None, description="file to write the result to as well, as JSON")
    keep_awake: bool = Field(False, description="keep the cores out of their idle state (Linux), to wake at once")
    start_timeout: float = Field(180.0, gt=0, description="seconds that a process may take to start")

    @model_validator(mode="after")
    def _check_pair(self) -> Self:
        if (self.target is None) != (self.draft is None):
            raise ValueError("give both --target and --draft, or neither")
        return self

    def checkpoints(self) -> tuple[Folders, str]:
        """The checkpoints' folders, and what to call the pair."""
        if self.target is not None and self.draft is not None:
            folders = Folders(locate(self.target), locate(self.draft, drafts_by="draft_model"))
            return folders, f"{self.target.name} with {self.draft.name}"
        pair = pair_path(self.pair)
        return Folders(pair.target, pair.draft), f"the embedded pair {self.pair}"

    def filled(self, values: Mapping[str, Any]) -> Self:
        """With these values where nothing else was said."""
        return self.model_copy(
            update={name: value for name, value in values.items() if name not in self.model_fields_set}
        )

    def write(self, result: Json) -> None:
        """To the file that was asked for."""
        if self.output is not None:
            self.output.write_text(dump(result), encoding="utf-8")


def note(text: str) -> None:
    """Says how far it is, on standard error."""
    print(text, file=sys.stderr, flush=True)


def report_failures(prog: str, work: Callable[[], int], explain: Callable[[Exception], object] = str) -> int:
    """The status of a command: 1, and a line, where something does not start, or dies."""
    try:
        return work()
    except FAILURES as error:
        if isinstance(error, BrokenPipeError):
            raise
        print(f"{prog}: error: {explain(error)}", file=sys.stderr)
        return 1
