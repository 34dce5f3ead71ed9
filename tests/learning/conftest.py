"""A tiny draft, and targets: its own weights, and those with an adapter merged in."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from support.adapters import merged, save_adapter
from support.lessons import VOCAB, Target
from support.models import save_tiny, train_byte_level


@pytest.fixture(scope="session")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = save_tiny(tmp_path_factory.mktemp("draft"), vocab_size=VOCAB, eos_token_id=None)
    train_byte_level(VOCAB).save(str(made / "tokenizer.json"))
    return made


@pytest.fixture(scope="session")
def targets(draft: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Target]:
    """`own` is the draft's model itself; the others write otherwise."""
    root, state, found = tmp_path_factory.mktemp("targets"), load_file(draft / "model.safetensors"), {}
    found["own"] = Target(draft, "0" * 64)
    for seed, name in enumerate(("one", "other"), start=1):
        folder = root / name
        adapter = save_adapter(root / f"adapter-{name}", state, seed=seed, scale=0.35)
        folder.mkdir()
        (folder / "config.json").write_bytes((draft / "config.json").read_bytes())
        save_file(merged(state, adapter), folder / "model.safetensors", {"format": "pt"})
        (folder / "tokenizer.json").write_bytes((draft / "tokenizer.json").read_bytes())
        found[name] = Target(folder, str(seed) * 64)
    return found
