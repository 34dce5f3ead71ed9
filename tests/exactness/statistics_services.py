"""The services that the draws come from: a target, and drafts whose laws are far from the target's in known ways."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tiny import tiny_hf_model

from outrider.cli.local_services import Services
from outrider.target_service.boot import build, load
from outrider.target_service.settings import TargetSettings

START_S = 120.0
MAX_ROWS = 8192  # of a step: no window is cut for want of room, so that a seed fixes the draws
MODEL_SEED, LOGIT_SCALE = 9, 0.8  # enough overlap with its own opposite that top_p leaves some, min_p cuts some
DRAFTS = {
    "opposite": lambda weight: -weight,  # most drafted tokens are refused, and the residual decides
    "tempered": lambda weight: 0.6 * weight,  # the target at another temperature: most windows end in a bonus
    "half": lambda weight: weight * (1 - 2 * (torch.arange(len(weight)) % 2))[:, None],  # opposite at odd ids
}


@dataclass(frozen=True)
class Pair:
    """The target's weights in transformers, its folder, and the addresses of the services. `cutting` is a target that
    verifies fewer drafted tokens than there are where that pays."""

    hf: Any
    folder: Path
    target: str
    cutting: str | None
    drafts: dict[str, str]


@contextmanager
def serving(
    folder: Path, drafts: tuple[str, ...], scale: float = LOGIT_SCALE, cutting: bool = False, **shape: int
) -> Iterator[Pair]:
    """One process each, until the end of the block."""
    hf = tiny_hf_model("llama", MODEL_SEED, **shape)
    with torch.no_grad():
        hf.lm_head.weight *= scale
    hf.save_pretrained(folder / "target")
    for name in drafts:
        draft = tiny_hf_model("llama", MODEL_SEED, **shape)
        with torch.no_grad():
            draft.lm_head.weight.copy_(DRAFTS[name](hf.lm_head.weight))
        draft.save_pretrained(folder / name)
    with Services() as services:
        started = {"target": services.start("target", [*_arguments("target", folder / "target"), "--no-cut-windows"])}
        if cutting:
            started["cutting"] = services.start("cutting", _arguments("target", folder / "target"))
        lookup = ["--prompt-lookup-min", "1", "--prompt-lookup-max", "3"]
        started |= {name: services.start(name, [*_arguments("draft", folder / name), *lookup]) for name in drafts}
        for service in started.values():
            services.wait(service, START_S)
        addresses = {name: service.address for name, service in started.items()}
        yield Pair(hf, folder / "target", addresses.pop("target"), addresses.pop("cutting", None), addresses)


def _arguments(command: str, model: Path) -> list[str]:
    return [command, "--model", str(model), "--listen", "127.0.0.1:0", "--threads", "1", "--max-rows", str(MAX_ROWS)]


@asynccontextmanager
async def target_in_process(model: Path) -> AsyncIterator[str]:
    """The address of a target that can be harmed."""
    settings = TargetSettings(
        model=model, listen="127.0.0.1:0", threads=1, max_rows=MAX_ROWS, cache_mb=16, cut_windows=False
    )
    service = build(settings, load(settings))
    await service.server.start()
    try:
        yield service.server.address
    finally:
        await service.stop()
