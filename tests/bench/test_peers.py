"""What the bench writes for llama.cpp."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

CONFIG = {
    "model_type": "llama", "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1, "hidden_size": 8,
    "intermediate_size": 8, "max_position_embeddings": 16, "rope_theta": 1e4, "rms_norm_eps": 1e-5, "vocab_size": 4,
}  # fmt: skip


class Writer:
    """Keeps the tensors that it is given, by name, with the type that they are said to have."""

    tensors: dict[str, tuple[Any, str | None]]

    def __init__(self, *_: object) -> None:
        type(self).tensors = {}

    def add_tensor(self, name: str, tensor: Any, raw_dtype: str | None = None) -> None:
        self.tensors[name] = tensor, raw_dtype

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


@pytest.fixture
def gguf(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the place of the library, which only the peer's environment has."""
    module: Any = ModuleType("gguf")
    module.GGUFWriter, module.GGMLQuantizationType = Writer, SimpleNamespace(BF16="bfloat16")
    monkeypatch.setitem(sys.modules, "gguf", module)
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "bench/outrider/bench"))
    monkeypatch.delitem(sys.modules, "peers_gguf", raising=False)


@pytest.mark.usefixtures("gguf")
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
def test_bfloat16_rounds_no_number(tmp_path: Path, stored: torch.dtype) -> None:
    """Matrices of bfloat16 numbers become bfloat16, in whatever type they are stored; others and norms do not."""
    from outrider.bench.peers_gguf import write_gguf

    grid = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    state = {
        "model.embed_tokens.weight": grid.to(stored), "lm_head.weight": grid.float() + 1e-5,
        "model.norm.weight": torch.ones(8),
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file(state, tmp_path / "model.safetensors")

    write_gguf(tmp_path, tmp_path / "half.gguf", bfloat16=True)
    half, head, norm = (Writer.tensors[f"{name}.weight"] for name in ("token_embd", "output", "output_norm"))
    assert half[1] == "bfloat16" and bytes(half[0]) == grid.view(torch.int16).numpy().tobytes()
    assert half[0].shape == (4, 16)  # bytes
    for kept, name in ((head, "lm_head.weight"), (norm, "model.norm.weight")):
        assert kept[1] is None and torch.equal(torch.tensor(kept[0]), state[name])

    write_gguf(tmp_path, tmp_path / "single.gguf")
    assert {dtype for _, dtype in Writer.tensors.values()} == {None}
    assert torch.equal(torch.tensor(Writer.tensors["token_embd.weight"][0]), grid.float())
