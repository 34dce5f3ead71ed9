"""The embedded model pairs: small targets and drafts that come with the package, for demos and tests."""

from dataclasses import dataclass
from pathlib import Path

__all__ = ["TRAINED_ON", "PairPaths", "name_of", "pair_path", "part_path"]

TRAINED_ON = {"python": "the sources of Python's standard library"}  # and nothing else
_ROOT = Path(__file__).parent


@dataclass(frozen=True)
class PairPaths:
    """The Hugging Face folders of a target and of the drafts that were distilled from it."""

    target: Path
    draft: Path
    pard: Path  # drafts in parallel

    def draft_by(self, method: str) -> Path:
        """The draft that is for a method."""
        return self.pard if method == "pard" else self.draft

    @property
    def heads(self) -> dict[str, Path]:
        """What drafts beside the target, by the method that it is of."""
        others = {self.target, self.draft, self.pard}
        folders = (file.parent for file in sorted(self.target.parent.glob("*/config.json")))
        return {folder.name: folder for folder in folders if folder not in others}

    def head_by(self, method: str) -> Path:
        """The head of a method; `ValueError` if none comes with the pair."""
        if method not in self.heads:
            there = ", ".join(self.heads) or "none"
            raise ValueError(
                f"the embedded pair {self.target.parent.name!r} has no head {method!r}; there are: {there}"
            )
        return self.heads[method]


def pair_path(name: str = "python") -> PairPaths:
    """Where the embedded pair `name` lies; `ValueError` if there is none of that name."""
    pair = PairPaths(*(_ROOT / name / folder for folder in ("target", "draft", "pard")))
    if not (pair.target / "config.json").is_file():
        known = sorted(path.parent.parent.name for path in _ROOT.glob("*/target/config.json"))
        raise ValueError(f"no embedded pair {name!r}; there are: {', '.join(known) or 'none'}")
    return pair


def part_path(name: str, drafts_by: str = "") -> Path | None:
    """The folder that a name stands for where a checkpoint's may: PAIR for the pair's target, or, of what drafts by a
    method, for that draft or head; PAIR/PART for any of its folders. None for all else."""
    pair, _, part = name.partition("/")
    part = part or {"": "target", "draft_model": "draft"}.get(drafts_by, drafts_by)
    folder = _ROOT / pair / part
    is_part = pair in TRAINED_ON and part.isidentifier() and (folder / "config.json").is_file()
    return folder if is_part else None


def name_of(folder: Path) -> str:
    """By which `part_path` finds a folder of a pair; empty for any other."""
    if folder.parent.parent != _ROOT:
        return ""
    return folder.parent.name if folder.name == "target" else f"{folder.parent.name}/{folder.name}"
