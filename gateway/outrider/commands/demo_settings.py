"""The settings of `outrider demo`."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pydantic import Field

from outrider.wire.config import ServiceSettings

PROMPT = 'def parse_args(argv):\n    """'


class DemoSettings(ServiceSettings):
    """What the demo generates, measures and shows."""

    section: ClassVar[str] = "demo"

    prompt: str = Field(PROMPT, min_length=1, description="the text to continue; also the bare argument")
    max_tokens: int = Field(128, ge=1, le=900, description="tokens of the completion")
    temperature: float = Field(0.0, ge=0, le=100, description="0 is greedy")
    seed: int = Field(0, ge=0, description="of the sampling, above temperature 0")
    num_draft_tokens: int = Field(4, ge=1, le=32, description="tokens drafted a round")
    pair: str = Field("python", description="the embedded pair")
    expand: bool = Field(True, description="compare with plain decoding, on a target that is made large")
    compare_tokens: int = Field(64, ge=2, le=900, description="tokens of each completion of the comparison")
    repeats: int = Field(
        3, ge=1, le=100, description="completions of the comparison, with and without speculation each"
    )
    plain: bool = Field(False, description="no colours, and no progress bars")
    trace_file: Path = Field(Path("trace.jsonl"), description="where the trace goes, as OTLP JSON lines")
    threads: int | None = Field(None, ge=1, le=256, description="threads of the target (default: all cores)")
    start_timeout: float = Field(120.0, gt=0, description="seconds that a service may take to start")
