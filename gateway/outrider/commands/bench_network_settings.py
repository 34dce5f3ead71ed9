"""The settings of `outrider bench network`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from outrider.commands.arguments import split_ids
from outrider.commands.bench_network_link import Network
from outrider.commands.bench_network_run import COLOCATED, COLOCATED_ALL, SERVICES
from outrider.wire.config import ServiceSettings

Mode = Literal["plain", "sequential", "chains", "branches", "auto", "colocated", "colocated-all"]
FULL: dict[str, Any] = {
    "networks": ("0", "0v", "0.2v", "1", "5", "20", "5~2", "5!200"),
    "temperatures": (0.0, 0.7, 1.0),
    "streams": (1, 4, 16),
    "costs": (0.05, 0.1, 0.2, 0.4),
    "modes": (*SERVICES, COLOCATED, COLOCATED_ALL),
    "load_streams": 32,
}


class NetworkSettings(ServiceSettings):
    """What is measured, and where the results go."""

    section: ClassVar[str] = "bench_network"

    target: Path | None = Field(None, description="folder of the target's checkpoint (default: the embedded pair's)")
    draft: Path | None = Field(None, description="folder of the draft's checkpoint (default: the embedded pair's)")
    pair: str = Field("python", description="the embedded pair, where target and draft are not given")
    expand: bool = Field(True, description="make the target large: the same function, about 300M parameters (Llama)")
    networks: Annotated[tuple[str, ...], BeforeValidator(split_ids)] = Field(
        ("0", "0v", "0.2v", "20"),
        min_length=1,
        description="each way on each link: 5 (ms), 0.2v (of a verification; 0v: none), 5~2 (jitter), 5!200 (stalls)",
    )
    modes: Annotated[tuple[Mode, ...], BeforeValidator(split_ids)] = Field(
        ("plain", "sequential", "chains", "branches", "colocated", "colocated-all"),
        min_length=1,
        description="plain, sequential, chains, branches, auto, colocated (on the target's cores), colocated-all",
    )
    temperatures: Annotated[tuple[Annotated[float, Field(ge=0)], ...], BeforeValidator(split_ids)] = Field(
        (0.0,), min_length=1, description="temperatures, as in 0,1"
    )
    streams: Annotated[tuple[Annotated[int, Field(ge=1, le=64)], ...], BeforeValidator(split_ids)] = Field(
        (1,), min_length=1, description="numbers of streams at once, as in 1,4"
    )
    costs: Annotated[tuple[Annotated[float, Field(ge=0, le=4)], ...], BeforeValidator(split_ids)] = Field(
        (0.05, 0.2), min_length=1, description="a draft pass over a verification; 0: as it is"
    )
    load_streams: int = Field(0, ge=0, le=64, description="one more block under load, with this many streams; 0: none")
    kills: int = Field(5, ge=0, le=100, description="drafts killed at a random moment of a completion")
    num_draft_tokens: int = Field(4, ge=1, le=32, description="tokens drafted a round")
    max_tokens: int = Field(96, ge=8, le=900, description="tokens of every completion")
    repeats: int = Field(10, ge=1, le=100, description="runs of each cell, in random order")
    seed: int = Field(0, ge=0, description="of the order, the sampling and the networks")
    results: Path = Field(Path("bench/results/network"), description="folder of the stored results")
    store: bool = Field(True, description="store the result and its plot")
    full: bool = Field(False, description="every network, temperature, cost and number of streams: hours")
    output: Path | None = Field(None, description="file to write the result to as well, as JSON")
    keep_awake: bool = Field(False, description="keep the cores out of their idle state (Linux), to wake at once")
    start_timeout: float = Field(180.0, gt=0, description="seconds that a process may take to start")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.target is None) != (self.draft is None):
            raise ValueError("give both --target and --draft, or neither")
        for name in self.networks:
            Network.parse(name)
        return self

    def effective(self) -> NetworkSettings:
        """With what --full stands for, where nothing else was said."""
        missing = {name: value for name, value in FULL.items() if name not in self.model_fields_set}
        return self.model_copy(update=missing) if self.full else self
