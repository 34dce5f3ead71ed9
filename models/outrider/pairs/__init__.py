"""The embedded model pairs: small targets and drafts for demos and tests. Each comes with a wheel of its own, which
names its folder under the entry points `outrider.pairs`."""

from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

__all__ = ["PairPaths", "name_of", "pair_path", "part_path", "trained_on"]

GROUP = "outrider.pairs"


@dataclass(frozen=True)
class PairPaths:
    """The Hugging Face folders of a target and of the drafts that were distilled from it, and of a mixture of experts
    with their vocabulary."""

    target: Path
    draft: Path
    pard: Path  # drafts in parallel
    mixture: Path

    def draft_by(self, method: str) -> Path:
        """The draft that is for a method."""
        return self.pard if method == "pard" else self.draft

    @property
    def heads(self) -> dict[str, Path]:
        """What drafts beside the target, by the method that it is of."""
        others = {self.target, self.draft, self.pard, self.mixture}
        folders = (file.parent for file in sorted(self.target.parent.glob("*/config.json")))
        return {folder.name: folder for folder in folders if folder not in others}

    def head_by(self, method: str) -> Path:
        """The head of a method; `ValueError` if none comes with the pair."""
        if method not in self.heads:
            there = ", ".join(self.heads) or "none"
            raise ValueError(f"the embedded pair {name_of(self.target)!r} has no head {method!r}; there are: {there}")
        return self.heads[method]


@cache
def _modules() -> dict[str, Any]:
    """The modules of the pairs that are installed, by the pairs' names; one that is only named, as what is left of a
    wheel that was removed does, is not."""
    return {point.name: point.load() for point in entry_points(group=GROUP) if find_spec(point.module) is not None}


def _folders() -> dict[str, Path]:
    return {name: Path(module.__file__).parent for name, module in _modules().items()}


def trained_on() -> dict[str, str]:
    """What the installed pairs have learnt from, and from nothing else, by their names."""
    return {name: module.TRAINED_ON for name, module in _modules().items()}


def pair_path(name: str = "python") -> PairPaths:
    """Where the embedded pair `name` lies; `ValueError` if none of that name is installed."""
    folder = _folders().get(name)
    if folder is None:
        known = ", ".join(sorted(_folders())) or "none"
        raise ValueError(f"no embedded pair {name!r}; installed: {known}; outrider-pair-python brings python")
    return PairPaths(*(folder / part for part in ("target", "draft", "pard", "mixture")))


def part_path(name: str, drafts_by: str = "") -> Path | None:
    """The folder that a name stands for where a checkpoint's may: PAIR for the pair's target, or, of what drafts by a
    method, for that draft or head; PAIR/PART for any of its folders. None for all else."""
    pair, _, part = name.partition("/")
    part = part or {"": "target", "draft_model": "draft"}.get(drafts_by, drafts_by)
    root = _folders().get(pair)
    if root is None or not part.isidentifier() or not (root / part / "config.json").is_file():
        return None
    return root / part


def name_of(folder: Path) -> str:
    """By which `part_path` finds a folder of a pair; empty for any other."""
    for name, root in _folders().items():
        if folder.parent == root:
            return name if folder.name == "target" else f"{name}/{folder.name}"
    return ""
