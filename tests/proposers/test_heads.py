"""Heads load their public layouts, and compute what the modules that those were saved from do."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from support.heads import load_in_turn
from torch import Tensor, nn

from outrider.engine.batch import Batch, BatchEntry, build_batch
from outrider.engine.kv_cache import KVCache
from outrider.engine.models.base import UnsupportedModel, WrongCheckpoint
from outrider.proposers.heads.head import Head, TargetWeights
from outrider.proposers.heads.loading import load_head

HIDDEN, VOCAB, INNER, HEADS = 24, 50, 20, 3
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def target() -> TargetWeights:
    return TargetWeights(torch.randn(VOCAB, HIDDEN), torch.randn(VOCAB, HIDDEN), num_layers=2, max_model_len=64)


def saved(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()}, folder / "model.safetensors"
    )
    return folder


def drafted(head: Head, features: Tensor, tokens: Tensor) -> list[Tensor]:
    """The logits of a greedy draft, depth by depth, by a head that looks at no row before; features: [rows, taps,
    hidden] of rows of their own."""
    cache = KVCache((), ())

    def batch(ids: Tensor) -> Batch:
        return build_batch([BatchEntry([token], 1, [0], 1) for token in ids.tolist()], 16)

    logits, state = head.first(batch(tokens), features, cache)
    found = [logits]
    for depth in range(1, head.most_tokens):
        logits, state = head.next(depth, batch(found[-1].argmax(-1)), state, cache)
        found.append(logits)
    return found


class PlainMedusa(nn.Module):
    """As in the paper's code: x + silu(Wx + b), then a linear layer without a bias."""

    def __init__(self, num_layers: int, bias: bool) -> None:
        super().__init__()
        self.heads = nn.ModuleList(
            nn.ModuleList(
                [*(nn.Linear(HIDDEN, HIDDEN, bias) for _ in range(num_layers)), nn.Linear(HIDDEN, VOCAB, False)]
            )
            for _ in range(HEADS)
        )

    def forward(self, x: Tensor) -> list[Tensor]:
        found = []
        for head in self.heads:
            *blocks, output = cast(nn.ModuleList, head)
            hidden = x
            for block in blocks:
                hidden = hidden + F.silu(block(hidden))
            found.append(output(hidden))
        return found


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("layout", ["original", "vllm"])
def test_medusa(tmp_path: Path, layout: str, num_layers: int) -> None:
    plain = PlainMedusa(num_layers, bias=layout == "original")
    config: dict[str, Any]
    if layout == "original":
        config = {"medusa_num_heads": HEADS, "medusa_num_layers": num_layers, "base_model_name_or_path": "some/model"}
        rename = {
            f"heads.{h}.{i}.{kind}": f"{h}.{i}.linear.{kind}"
            for h in range(HEADS)
            for i in range(num_layers)
            for kind in ("weight", "bias")
        }
        rename |= {f"heads.{h}.{num_layers}.weight": f"{h}.{num_layers}.weight" for h in range(HEADS)}
    else:
        config = {
            "model_type": "medusa",
            "num_heads": HEADS,
            "num_hidden_layers": num_layers,
            "hidden_size": HIDDEN,
            "vocab_size": VOCAB,
        }
        rename = {
            f"heads.{h}.{i}.weight": f"blocks.{h}.layers.{i}.weight" for h in range(HEADS) for i in range(num_layers)
        }
        rename |= {f"heads.{h}.{num_layers}.weight": f"lm_heads.{h}.weight" for h in range(HEADS)}
    tensors = {rename[name]: tensor for name, tensor in plain.state_dict().items()}
    head = load_in_turn(saved(tmp_path, config, tensors), target(), torch.float32, CPU)
    assert (head.name, head.taps, head.most_tokens) == ("medusa", (2,), HEADS)
    features, tokens = torch.randn(5, 1, HIDDEN), torch.randint(0, VOCAB, (5,))
    for found, expected in zip(drafted(head, features, tokens), plain(features[:, 0]), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("stored", [False, True])
def test_medusa_with_the_targets_own_output(tmp_path: Path, stored: bool) -> None:
    own = target()
    config = {"model_type": "medusa", "num_heads": 2, "num_hidden_layers": 1, "original_lm_head": True}
    blocks = {f"blocks.{h}.layers.0.weight": torch.randn(HIDDEN, HIDDEN) for h in range(2)}
    tensors = blocks | ({"lm_heads.0.weight": own.output} if stored else {})
    head = load_in_turn(saved(tmp_path, config, tensors), own, torch.float32, CPU)
    features = torch.randn(4, 1, HIDDEN)
    for depth, found in enumerate(drafted(head, features, torch.zeros(4, dtype=torch.int64))):
        hidden = features[:, 0] + F.silu(features[:, 0] @ blocks[f"blocks.{depth}.layers.0.weight"].T)
        torch.testing.assert_close(found, hidden @ own.output.T, atol=1e-4, rtol=1e-4)


def test_medusa_with_a_token_map(tmp_path: Path) -> None:
    config = {"model_type": "medusa", "num_heads": 1, "num_hidden_layers": 1, "truncated_vocab_size": 7}
    output, ids = torch.randn(7, HIDDEN), torch.randperm(VOCAB)[:7]
    tensors = {"blocks.0.layers.0.weight": torch.zeros(HIDDEN, HIDDEN), "lm_heads.0.weight": output, "token_map": ids}
    head = load_in_turn(saved(tmp_path, config, tensors), target(), torch.float32, CPU)
    features = torch.randn(2, 1, HIDDEN)
    (logits,) = drafted(head, features, torch.zeros(2, dtype=torch.int64))
    assert (logits > -math.inf).sum(1).tolist() == [7, 7]
    torch.testing.assert_close(logits[:, ids], features[:, 0] @ output.T, atol=1e-4, rtol=1e-4)


class PlainSpeculator(nn.Module):
    """As the paper has it, stage by stage."""

    def __init__(self, tied: bool, scaled: bool) -> None:
        super().__init__()
        self.tied, self.scaled = tied, scaled
        count = 1 if tied else HEADS
        self.emb = nn.ModuleList(nn.Embedding(VOCAB, INNER) for _ in range(count))
        self.proj = nn.ModuleList(
            nn.Linear(HIDDEN if i == 0 else INNER, INNER, bias=False) for i in range(2 if tied else HEADS)
        )
        norms = [nn.LayerNorm(INNER) for _ in range(count)]
        self.ln = nn.ModuleList(norms)  # for its weight and bias
        self.head = nn.ModuleList(nn.Linear(INNER, VOCAB, bias=False) for _ in range(count))
        for norm in norms:
            nn.init.uniform_(norm.weight, 0.5, 1.5)
            nn.init.normal_(norm.bias)

    def forward(self, state: Tensor, tokens: Tensor) -> list[Tensor]:
        def norm(x: Tensor) -> Tensor:
            return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()

        weight = 0.5 ** (0.5 / HEADS)
        token_weight = ((1 - weight**2) * INNER / 2) ** 0.5
        state = norm(state) / 2**0.5 if self.scaled else state
        found = []
        for stage in range(HEADS):
            at = 0 if self.tied else stage
            mixed = weight * self.proj[min(stage, 1) if self.tied else stage](state) + token_weight * self.emb[at](
                tokens
            )
            mixed = mixed / weight  # so that the norm's epsilon weighs the same
            ln = cast(nn.LayerNorm, self.ln[at])
            state = F.gelu(norm(mixed) * ln.weight + ln.bias)
            found.append(self.head[at](state))
            tokens = found[-1].argmax(-1)
        return found


@pytest.mark.parametrize("prefix", ["", "speculator."])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_mlp_speculator(tmp_path: Path, tied: bool, scaled: bool, prefix: str) -> None:
    plain = PlainSpeculator(tied, scaled)
    config = {
        "model_type": "mlp_speculator", "architectures": ["MLPSpeculatorPreTrainedModel"], "n_predict": HEADS,
        "emb_dim": HIDDEN, "inner_dim": INNER, "vocab_size": VOCAB, "tie_weights": tied, "scale_input": scaled,
        "top_k_tokens_per_head": [4, 3, 2],
    }  # fmt: skip
    tensors = {prefix + name: tensor for name, tensor in plain.state_dict().items()}
    head = load_in_turn(saved(tmp_path, config, tensors), target(), torch.float32, CPU)
    assert (head.name, head.taps, head.most_tokens) == ("mlp_speculator", (2,), HEADS)
    features, tokens = torch.randn(6, 1, HIDDEN), torch.randint(0, VOCAB, (6,))
    for found, expected in zip(drafted(head, features, tokens), plain(features[:, 0], tokens), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_what_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    def refused(config: dict[str, Any], tensors: dict[str, Tensor], kind: type[Exception], message: str) -> None:
        with pytest.raises(kind, match=message):
            load_head(saved(tmp_path, config, tensors), target(), torch.float32, CPU)

    some = {"blocks.0.layers.0.weight": torch.zeros(HIDDEN, HIDDEN)}
    refused({"model_type": "llama"}, some, UnsupportedModel, "model_type is 'llama'; allowed: eagle, eagle3, medusa")
    medusa = {"model_type": "medusa", "num_heads": 1, "num_hidden_layers": 1}
    refused({**medusa, "hidden_size": 8}, some, WrongCheckpoint, "hidden_size 8 .*allowed: .*the target's 24 and 50")
    refused(medusa, some, WrongCheckpoint, "no tensor lm_heads.0.weight or 0.1.weight")
    wrong = {"blocks.0.layers.0.weight": torch.zeros(HIDDEN, 3)}
    refused(medusa, wrong, WrongCheckpoint, r"has shape \[24, 3\], its config.json asks for \[24, 24\]")
    refused({"model_type": "mlp_speculator"}, some, WrongCheckpoint, "n_predict 0, emb_dim 0 and vocab_size 0; allowed")
