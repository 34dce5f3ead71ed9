"""A cache of huggingface_hub as a download would have left it."""

from __future__ import annotations

from pathlib import Path

import pytest

COMMIT = "5f3c7a1b" * 5


def cached(monkeypatch: pytest.MonkeyPatch, cache: Path, **models: Path) -> None:
    """The folders as models of the hub's org `tests`, by name; nothing may be downloaded."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    for name, folder in models.items():
        root = cache / f"models--tests--{name}"
        snapshot = root / "snapshots" / COMMIT
        snapshot.mkdir(parents=True)
        (root / "refs").mkdir()
        (root / "refs" / "main").write_text(COMMIT)
        for file in folder.iterdir():
            (snapshot / file.name).symlink_to(file.resolve())
