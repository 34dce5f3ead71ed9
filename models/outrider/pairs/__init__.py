"""The embedded model pairs: small targets and drafts that come with the package, for demos and tests."""

from dataclasses import dataclass
from pathlib import Path

__all__ = ["PairPaths", "pair_path"]


@dataclass(frozen=True)
class PairPaths:
    """The Hugging Face folders of a target and of the draft that was distilled from it."""

    target: Path
    draft: Path


def pair_path(name: str = "python") -> PairPaths:
    """Where the embedded pair `name` lies; `ValueError` if there is none of that name."""
    root = Path(__file__).parent
    pair = PairPaths(target=root / name / "target", draft=root / name / "draft")
    if not (pair.target / "config.json").is_file():
        known = sorted(path.parent.parent.name for path in root.glob("*/target/config.json"))
        raise ValueError(f"no embedded pair {name!r}; there are: {', '.join(known) or 'none'}")
    return pair
