"""Versions of learned weights on disk: a folder each, with the weights in PEFT's layout and a card that says what they
were made of and how they were judged; and the list of those that are in use, by which a learner goes on when it starts
again."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from outrider.rpc.messages import LearningKey

LIVE_NAME = "live.json"
CARD_NAME = "card.json"
KEPT = 5  # versions of a key


@dataclass(frozen=True, slots=True)
class Version:
    """Weights that were judged better than what drafted before."""

    number: int
    digest: str  # of the weights and the draft's model together
    path: str  # of the folder
    num_lessons: int  # that had come
    num_steps: int
    num_judged: int  # lessons that judged them
    gain: float  # of a lesson's worth, 0 to 1, on average
    error: float  # of the judgement, at most
    made_at: float  # seconds since 1970
    left_out: tuple[str, ...] = ()  # callers for whom the model alone drafts all the same

    @property
    def said(self) -> str:
        """In a line."""
        judged = f"{self.num_judged} lessons held out, error at most {self.error:g}"
        return f"version {self.number} ({self.digest[:12]}): {100 * self.gain:+.1f} points of acceptance on {judged}"


def _name_of(digest: str) -> str:
    """In a folder's name. A caller says which target it means, so that what is no digest is none of a path, either."""
    if not digest or (digest.isascii() and digest.isalnum()):
        return digest[:16]
    return hashlib.sha256(digest.encode("utf-8", "surrogatepass")).hexdigest()[:16]


@contextmanager
def owned(folder: Path) -> Iterator[None]:
    """While in it, no other learner has the folder, which is made. Raises ValueError where one has."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise ValueError(f"folder: {folder} is a learner's that runs; allowed: one of its own") from error
    finally:
        os.close(descriptor)


class Shelf:
    """The versions of one draft's model in a folder."""

    def __init__(self, folder: Path, model_digest: str) -> None:
        """Makes the folder. ValueError where it is another model's, or its list cannot be read."""
        self.folder, self._model_digest = folder, model_digest
        folder.mkdir(parents=True, exist_ok=True)
        self.live = self._read()

    def place(self, key: LearningKey) -> tuple[int, Path]:
        """The number and the folder of a key's next version."""
        of_key = self.folder / f"{_name_of(key.target_digest)}-{_name_of(key.group) or 'unsalted'}"
        numbers = [int(path.name) for path in of_key.glob("[0-9]*") if path.name.isdecimal()]
        number = max(numbers, default=0) + 1
        return number, of_key / f"{number:05}"

    def put(self, key: LearningKey, version: Version | None) -> None:
        """Says which version is in use for a key; older ones than the last few are deleted."""
        if version is None:
            self.live.pop(key, None)
        else:
            self.live[key] = version
            path = Path(version.path)
            (path / CARD_NAME).write_text(json.dumps({**key._asdict(), **asdict(version)}, indent=2) + "\n", "utf-8")
            for old in sorted(path.parent.glob("[0-9]*"))[:-KEPT]:
                shutil.rmtree(old, ignore_errors=True)
        rows = [{**key._asdict(), **asdict(one)} for key, one in self.live.items()]
        partial = self.folder / f"{LIVE_NAME}.partial"
        partial.write_text(json.dumps({"model_digest": self._model_digest, "live": rows}, indent=2) + "\n", "utf-8")
        os.replace(partial, self.folder / LIVE_NAME)

    def _read(self) -> dict[LearningKey, Version]:
        path = self.folder / LIVE_NAME
        if not path.exists():
            return {}
        try:
            said = json.loads(path.read_text("utf-8"))
            of, rows = said["model_digest"], said["live"]
            found = {
                LearningKey(row.pop("target_digest"), row.pop("group")): Version(
                    **{**row, "left_out": tuple(row.get("left_out", ()))}
                )
                for row in rows
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"folder: {path} cannot be read ({error}); allowed: what outrider learn wrote") from error
        if of != self._model_digest:
            raise ValueError(
                f"folder: {self.folder} is of another draft's model, {of[:12]}, than {self._model_digest[:12]}; "
                "allowed: an empty folder, or this model's"
            )
        return found
