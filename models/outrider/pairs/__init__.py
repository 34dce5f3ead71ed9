"""The embedded model pairs: small targets and drafts that come with the package, for demos and tests."""

from dataclasses import dataclass
from pathlib import Path

__all__ = ["PairPaths", "pair_path"]


@dataclass(frozen=True)
class PairPaths:
    """The Hugging Face folders of a target and of the drafts that were distilled from it."""

    target: Path
    draft: Path
    pard: Path  # drafts in parallel

    def draft_by(self, method: str) -> Path:
        """The draft that is for a method."""
        return self.pard if method == "pard" else self.draft


def pair_path(name: str = "python") -> PairPaths:
    """Where the embedded pair `name` lies; `ValueError` if there is none of that name."""
    root = Path(__file__).parent
    pair = PairPaths(*(root / name / folder for folder in ("target", "draft", "pard")))
    if not (pair.target / "config.json").is_file():
        known = sorted(path.parent.parent.name for path in root.glob("*/target/config.json"))
        raise ValueError(f"no embedded pair {name!r}; there are: {', '.join(known) or 'none'}")
    return pair
