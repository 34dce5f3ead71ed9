"""The bench of GGUF files: what it writes for llama.cpp, which way gets which prompts, and what its tables say. Nothing
here judges a speed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import logits_of

from outrider.bench import peers_llama, weights
from outrider.bench.pair import Cell, Run
from outrider.bench.weights import WeightsSettings, main, render
from outrider.engine.loader import load_model
from outrider.gateway.text.tokenizer import Tokenizer
from outrider.pairs import pair_path
from outrider.rpc.hub import locate


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded target as GGUF."""
    return peers_llama.write_gguf(pair_path().target, tmp_path_factory.mktemp("gguf") / "target.gguf")


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))


def test_what_is_written_is_the_checkpoint(file: Path) -> None:
    """Numbers, shapes, settings and every token. A matrix unit adds up the checkpoint's 16 bits in another order than
    the file's float32."""
    folder, ids = pair_path().target, list(range(5, 45))
    of_file, of_folder = logits_of(load_model(locate(file)), ids), logits_of(load_model(folder), ids)
    torch.testing.assert_close(of_file, of_folder, atol=1e-4, rtol=1e-4)
    assert Tokenizer.load(locate(file)).fingerprint == Tokenizer.load(folder).fingerprint


def test_only_a_plain_llama_is_written(tmp_path: Path) -> None:
    for changed in ({"model_type": "qwen2"}, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}):
        config = json.loads((pair_path().target / "config.json").read_text()) | changed
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match="only"):
            peers_llama.write_gguf(tmp_path, tmp_path / "single.gguf")


@dataclass
class FakeBackend:
    """Keeps what it is asked."""

    name: str
    asked: list[tuple[int, tuple[tuple[int, ...], ...]]] = field(default_factory=list)

    def fits(self, cell: Cell) -> bool:
        return self.name != "llama.cpp draft" or cell.batch == 1

    def decode(self, cell: Cell, prompts: Sequence[Sequence[int]], max_tokens: int, seed: int) -> Run:
        self.asked.append((cell.batch, tuple(map(tuple, prompts))))
        return Run(1.0 if self.name.startswith("outrider") else 2.0, max_tokens * cell.batch)


def test_no_prompt_comes_twice_to_a_way(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a cell; and ours over theirs is formed repeat by repeat."""
    backends = [
        FakeBackend(name) for name in ("llama.cpp plain", "llama.cpp draft", "outrider plain", "outrider suffix")
    ]

    def start(stack: ExitStack, settings: WeightsSettings, path: Path, draft: Path) -> Iterator[FakeBackend]:
        assert path == file and settings.ways == ("plain", "self:int4", "suffix")
        yield from backends

    monkeypatch.setattr(weights, "start_ways", start)
    (tmp_path / "prompts.txt").write_text("".join(f"def number_{index}(argv):\n" for index in range(8)))
    flags = {
        "gguf": file, "llama-python": "python", "prompts": tmp_path / "prompts.txt", "batches": "1,2",
        "temperatures": "0", "repeats": "3", "max-tokens": "8", "output": tmp_path / "out.json",
    }  # fmt: skip
    assert main([*(f"--{name}={value}" for name, value in flags.items()), "--no-store"]) == 0
    for backend in backends:
        for batch in (1, 2):
            asked = [prompt for size, prompts in backend.asked if size == batch for prompt in prompts]
            assert len(set(asked)) == len(asked) == (4 * batch if batch == 1 or "draft" not in backend.name else 0)
    result: Any = json.loads((tmp_path / "out.json").read_text())
    assert [block["weights"] for block in result["blocks"]] == ["as it is"] * 2
    for block in result["blocks"]:
        assert block["ratios"]["outrider plain / llama.cpp plain"]["median"] == 2.0
        assert "llama.cpp plain / outrider plain" not in block["ratios"]
    assert capsys.readouterr().out.splitlines() == [*render(result)]


def test_what_lacks_is_said(file: Path) -> None:
    with pytest.raises(ValueError, match="prompts: 16 texts, with ways that remember answers; allowed: 48 or more"):
        WeightsSettings(gguf=file, llama_python=file, ways=("suffix",))
    with pytest.raises(ValueError, match=r"ways names draft, .* allowed: --draft DIR with it"):
        WeightsSettings(gguf=file, llama_python=file, ways=("draft",))
    assert WeightsSettings(gguf=file, llama_python=file).effective().ways == ("plain", "self:int4")
