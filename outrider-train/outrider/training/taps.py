"""A target's hidden states on a corpus: `outrider model tap`.

The corpus is cut into windows, the target reads them, and what it gives is written as lessons (lessons.py) with the
states of chosen layers: what a head is trained on, here or by any other code. A run that was cut short goes on behind
its last shard, in a folder beside the one that it makes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.engine.hidden_states import check_taps
from outrider.engine.loader import load_model
from outrider.training.budget import ModelSize, Needs, lesson_needs, require_memory
from outrider.training.course import TAP_FILE
from outrider.training.drafts import read_corpus
from outrider.training.heads import eagle3_taps
from outrider.training.lessons import write_lessons
from outrider.training.teacher import OnWord, Teacher, silent


@dataclass(frozen=True)
class TapPlan:
    """What is read, and what is kept of it."""

    target: Path
    corpus: Path
    out: Path
    taps: tuple[int, ...] = ()  # as hidden_states.py numbers layers; none: those of eagle3, and the last
    length: int = 256  # of a window
    num_windows: int = 256  # of a shard
    max_tokens: int | None = None  # of the corpus; None: all


def tap(plan: TapPlan, on_shard: Callable[[int, int], None], on_word: OnWord = silent) -> Mapping[str, Any]:
    """Writes `plan.out`; `on_shard` is told how many shards there are, and of how many, `on_word` what is done between.
    What tap.json says. Raises ValueError for what cannot be used, and where memory lacks."""
    if plan.out.exists():
        raise ValueError(f"{plan.out} exists; nothing is overwritten")
    require_memory(tap_needs(plan), {"--length 64": tap_needs(replace(plan, length=64))} if plan.length > 64 else {})
    loaded = load_model(plan.target)
    num_layers = len(loaded.model.layers)
    taps = check_taps(plan.taps or default_layers(num_layers), num_layers)
    windows = cut(read_corpus(plan.corpus, plan.target)[: plan.max_tokens], plan.length)
    said = {
        **asdict(plan),
        "taps": taps,
        "digest": loaded.digest,
        "hidden_size": loaded.model.hidden_size,
        "num_tokens": len(windows) * plan.length,
    }
    partial = noted(plan, said)
    teacher = Teacher(loaded, plan.length, taps, on_word)
    shards = torch.split(windows, plan.num_windows)
    on_shard(0, len(shards))
    for number, shard in enumerate(shards):
        path = partial / f"{number:05}.safetensors"
        if not path.exists():
            write_lessons(path, len(shard), teacher.lessons(f"shard {number + 1} of {len(shards)}", shard, None))
        on_shard(number + 1, len(shards))
    partial.rename(plan.out)
    return said


def tap_needs(plan: TapPlan) -> Needs:
    """The memory that a tap takes."""
    target = ModelSize.read(plan.target)
    num_taps = len(plan.taps or default_layers(target.num_layers))
    return lesson_needs(target, plan.length, num_taps)


def default_layers(num_layers: int) -> tuple[int, ...]:
    """Those that the heads read that `outrider model train` makes."""
    return tuple(dict.fromkeys((*eagle3_taps(num_layers), num_layers)))


def cut(stream: Tensor, length: int) -> Tensor:  # [tokens] -> [windows, length + 1]
    """One behind the other; the last token of each is the first of the next. Raises ValueError where there is none."""
    if len(stream) <= length:
        raise ValueError(f"the corpus has {len(stream)} tokens; allowed: at least {length + 1}, a window's")
    return stream.unfold(0, length + 1, length)


def noted(plan: TapPlan, said: Mapping[str, Any]) -> Path:
    """The run's own folder, with what the run is. Raises ValueError where another was begun."""
    partial = plan.out.with_name(f"{plan.out.name}.partial")
    path, text = partial / TAP_FILE, json.dumps(said, default=str, indent=2) + "\n"
    if path.exists() and path.read_text(encoding="utf-8") != text:
        raise ValueError(f"{partial} holds a run of other settings; remove it, or give another folder")
    partial.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return partial
