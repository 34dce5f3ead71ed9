"""Heads that are a layer load their public layouts, and draft what a forward written out gives: over rounds with
refusals, in chunks, beside other sequences."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from support.heads import load_in_turn
from torch import Tensor

from outrider.engine.batch import BatchEntry, build_batch
from outrider.engine.kv_cache import KVCache
from outrider.engine.models.base import UnsupportedModel, WrongCheckpoint
from outrider.proposers.heads.head import Head, TargetWeights
from outrider.proposers.heads.loading import load_head

HIDDEN, VOCAB, WIDTH, HEADS, KV_HEADS, DIM, LAYERS = 32, 60, 48, 4, 2, 8, 6
EPS = 1e-5
BLOCK = 4
CONFIG: dict[str, Any] = {
    "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": WIDTH, "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS, "num_hidden_layers": 1, "vocab_size": VOCAB, "rms_norm_eps": EPS,
    "max_position_embeddings": 64, "hidden_act": "silu", "rope_theta": 1000.0,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


@dataclass
class Layout:
    """A public layout: its config.json, its tensors, and what its head computes, written out."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    target: TargetWeights
    layer: str  # what its layer's tensors begin with
    taps: tuple[int, ...]

    def save(self, folder: Path) -> Path:
        (folder / "config.json").write_text(json.dumps(self.config))
        save_file(
            {name: tensor.contiguous().clone() for name, tensor in self.tensors.items()}, folder / "model.safetensors"
        )
        return folder

    def state_of(self, features: Tensor) -> Tensor:  # [rows, taps, hidden] -> [rows, width]
        return features[:, 0]

    def enter(self, embedded: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def leave(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    @property
    def embeddings(self) -> Tensor:
        return self.target.embeddings

    def rows(self, tokens: list[int], states: Tensor) -> tuple[Tensor, Tensor]:
        """Every row of a whole sequence: token t + 1 with the state of t; its logits and states."""
        ids = torch.tensor(tokens)
        embedded = self.embeddings[ids]
        normed, residual = self.enter(embedded, states)
        hidden = self.through(normed, residual, self.layer)
        said = self.config.get("transformer_layer_config", self.config)["num_hidden_layers"]
        for index in range(1, said if "layers.1.mlp.up_proj.weight" in self.tensors else 1):
            normed = norm(hidden, self.tensors[f"layers.{index}.input_layernorm.weight"])
            hidden = self.through(normed, hidden, f"layers.{index}.")
        return self.leave(hidden)

    def through(self, normed: Tensor, residual: Tensor, layer: str) -> Tensor:  # [rows, ...] -> [rows, hidden]
        """A layer."""
        weights = {name.removeprefix(layer): tensor for name, tensor in self.tensors.items()}

        def product(x: Tensor, name: str) -> Tensor:
            return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

        count = len(normed)
        angles = torch.arange(count)[:, None] / 1000.0 ** (torch.arange(0, DIM, 2) / DIM)  # [rows, dim / 2]
        turn = torch.polar(torch.ones_like(angles), angles)[:, None]  # [rows, 1, dim / 2]

        def turned(x: Tensor) -> Tensor:  # [rows, heads, dim]: element i with i + dim / 2
            first, second = x.chunk(2, dim=-1)
            pairs = torch.complex(first, second) * turn
            return torch.cat([pairs.real, pairs.imag], dim=-1)

        query = turned(product(normed, "self_attn.q_proj").view(count, HEADS, DIM))
        key = turned(product(normed, "self_attn.k_proj").view(count, KV_HEADS, DIM))
        value = product(normed, "self_attn.v_proj").view(count, KV_HEADS, DIM)
        attended = torch.empty(count, HEADS, DIM)
        for row in range(count):
            for head in range(HEADS):
                group = head * KV_HEADS // HEADS
                weight = (key[: row + 1, group] @ query[row, head] / DIM**0.5).softmax(0)
                attended[row, head] = weight @ value[: row + 1, group]
        residual = residual + product(attended.flatten(1), "self_attn.o_proj")
        wide = norm(residual, weights["post_attention_layernorm.weight"])
        wide = F.silu(product(wide, "mlp.gate_proj")) * product(wide, "mlp.up_proj")
        return residual + product(wide, "mlp.down_proj")


def layer_tensors(prefix: str, inputs: int, bias: bool = False) -> dict[str, Tensor]:
    shapes = {
        "self_attn.q_proj": (HEADS * DIM, inputs), "self_attn.k_proj": (KV_HEADS * DIM, inputs),
        "self_attn.v_proj": (KV_HEADS * DIM, inputs), "self_attn.o_proj": (HIDDEN, HEADS * DIM),
        "mlp.gate_proj": (WIDTH, HIDDEN), "mlp.up_proj": (WIDTH, HIDDEN), "mlp.down_proj": (HIDDEN, WIDTH),
    }  # fmt: skip
    found = {f"{prefix}{name}.weight": 0.15 * torch.randn(shape) for name, shape in shapes.items()}
    if bias:
        found |= {
            f"{prefix}self_attn.{part}_proj.bias": torch.randn(found[f"{prefix}self_attn.{part}_proj.weight"].shape[0])
            for part in "qkv"
        }
    return found | {f"{prefix}post_attention_layernorm.weight": factors(HIDDEN)}


def factors(size: int) -> Tensor:
    return torch.rand(size) + 0.5


def target() -> TargetWeights:
    return TargetWeights(torch.randn(VOCAB, HIDDEN), torch.randn(VOCAB, HIDDEN), LAYERS, 64)


class Eagle(Layout):
    fc = "fc"

    def enter(self, embedded: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        weights = self.tensors[f"{self.fc}.weight"], self.tensors.get(f"{self.fc}.bias")
        joined = F.linear(torch.cat([embedded, state], -1), *weights)
        return joined, joined

    def leave(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return hidden @ self.target.output.T, hidden


def eagle(bias: bool) -> Layout:
    """As its authors save it, with a copy of the target's embeddings, which is not looked at."""
    own = target()
    tensors = {"fc.weight": 0.1 * torch.randn(HIDDEN, 2 * HIDDEN), "embed_tokens.weight": own.embeddings}
    tensors |= {"fc.bias": torch.randn(HIDDEN)} if bias else {}
    tensors |= layer_tensors("layers.0.", HIDDEN)
    return Eagle(CONFIG | {"architectures": ["EagleLlamaForCausalLM"]}, tensors, own, "layers.0.", (LAYERS,))


class SpeculatorsEagle(Eagle):
    fc = "fusion_fc"


class Eagle3(Layout):
    norms_residual = False  # where its config.json does not say

    @property
    def embeddings(self) -> Tensor:
        return self.tensors.get("embed_tokens.weight", self.target.embeddings)

    def state_of(self, features: Tensor) -> Tensor:
        parts = [features[:, index] for index in range(3)]
        if self.config.get("fc_norm"):
            parts = [norm(part, self.tensors[f"fc_norm.{index}.weight"]) for index, part in enumerate(parts)]
        joined = torch.cat(parts, -1)
        if self.config.get("norm_before_fc"):
            joined = norm(joined, self.tensors["input_norm.weight"])
        return joined @ self.tensors["fc.weight"].T

    def enter(self, embedded: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        normed = norm(state, self.tensors[f"{self.layer}hidden_norm.weight"])
        token = norm(embedded, self.tensors[f"{self.layer}input_layernorm.weight"])
        norms_residual = self.config.get("norm_before_residual", self.norms_residual)
        return torch.cat([token, normed], -1), normed if norms_residual else state

    def leave(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        normed = norm(hidden, self.tensors["norm.weight"])
        found = normed @ self.tensors["lm_head.weight"].T
        state = normed if self.config.get("norm_output") else hidden
        if "d2t" not in self.tensors:
            return found, state
        logits = torch.full((len(found), VOCAB), float("-inf"))
        for index, shift in enumerate(self.tensors["d2t"].tolist()):
            logits[:, index + shift] = found[:, index]
        return logits, state


def eagle3(layer: str = "midlayer.", outputs: int = 40, own_embeddings: bool = False, **options: Any) -> Layout:
    """As its authors save it; `options` are fields of its config.json."""
    chosen = torch.randperm(VOCAB)[:outputs].sort().values
    tensors = {
        "fc.weight": 0.2 * torch.randn(HIDDEN, 3 * HIDDEN),
        "norm.weight": factors(HIDDEN),
        "lm_head.weight": torch.randn(outputs, HIDDEN),
        f"{layer}input_layernorm.weight": factors(HIDDEN),
        f"{layer}hidden_norm.weight": factors(HIDDEN),
    } | layer_tensors(layer, 2 * HIDDEN)
    if outputs < VOCAB:
        tensors["d2t"] = chosen - torch.arange(outputs)
        tensors["t2d"] = torch.isin(torch.arange(VOCAB), chosen)
    if own_embeddings:
        tensors["embed_tokens.weight"] = torch.randn(VOCAB, HIDDEN)
    if options.get("fc_norm"):
        tensors |= {f"fc_norm.{index}.weight": factors(HIDDEN) for index in range(3)}
    if options.get("norm_before_fc"):
        tensors["input_norm.weight"] = factors(3 * HIDDEN)
    config = CONFIG | {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": outputs} | options
    taps = options.get("eagle_aux_hidden_state_layer_ids", (2, 3, 3))
    return Eagle3(config, tensors, target(), layer, tuple(taps))


def p_eagle() -> Layout:
    """Of several layers, and with what stands for rows that are not known."""
    found = eagle3("layers.0.", num_hidden_layers=3, parallel_drafting=True, pard_token=7)
    for layer in ("layers.1.", "layers.2."):
        found.tensors |= layer_tensors(layer, HIDDEN) | {f"{layer}input_layernorm.weight": factors(HIDDEN)}
    found.tensors["mask_hidden"] = torch.randn(1, 1, 3 * HIDDEN)
    return found


def in_speculators(layout: Layout, kind: str, **own: Any) -> Layout:
    """As the library of that name saves it: the layer's configuration apart."""
    names = CONFIG.keys() & layout.config.keys()
    layer = {name: layout.config.pop(name) for name in sorted(names)}
    proposal = {"proposal_type": "greedy", "speculative_tokens": 5, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    layout.config |= own | {
        "speculators_model_type": kind, "speculators_version": "0.5.0", "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": kind, "default_proposal_method": "greedy", "proposal_methods": [proposal],
            "verifier": {"name_or_path": "org/target", "architectures": ["LlamaForCausalLM"]},
        },
    }  # fmt: skip
    return layout


def speculators_eagle(fusion_bias: bool) -> Layout:
    """EAGLE's there, without the target's embeddings."""
    plain = eagle(fusion_bias)
    renamed = {"fc.": "fusion_fc.", "layers.0.": "transformer."}
    tensors = {
        prefix + name.removeprefix(old): tensor
        for old, prefix in renamed.items()
        for name, tensor in plain.tensors.items()
        if name.startswith(old)
    }
    found = SpeculatorsEagle(plain.config, tensors, plain.target, "transformer.", plain.taps)
    said = {"architectures": ["EagleSpeculator", "LlamaDecoderLayer"], "layernorms": False, "fusion_bias": fusion_bias}
    return in_speculators(found, "eagle", **said, transformer_layer_architecture="LlamaDecoderLayer")


def speculators_eagle3(**options: Any) -> Layout:
    found = eagle3("layers.0.", own_embeddings=True, **options)
    found = in_speculators(found, "eagle3", architectures=["Eagle3Speculator"], target_hidden_size=None)
    found.norms_residual = True  # type: ignore[attr-defined]
    return found


def speculators_p_eagle() -> Layout:
    found = p_eagle()
    del found.config["parallel_drafting"], found.config["pard_token"]
    found.tensors["embed_tokens.weight"] = torch.randn(VOCAB, HIDDEN)  # trained on
    return in_speculators(found, "peagle", architectures=["PEagleSpeculator"], mask_token_id=7)


class Mtp(Layout):
    def enter(self, embedded: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        embedded = torch.cat([torch.zeros(1, HIDDEN), embedded[1:]])  # of the token after the first
        named = {
            name: self.tensors[f"{self.layer}{name}.weight"]
            for name in ("token_layernorm", "hidden_layernorm", "input_layernorm", "input_proj")
        }
        joined = torch.cat([norm(state, named["hidden_layernorm"]), norm(embedded, named["token_layernorm"])], -1)
        residual = joined @ named["input_proj"].T
        return norm(residual, named["input_layernorm"]), residual

    def leave(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        normed = norm(hidden, self.tensors[f"{self.layer}final_layernorm.weight"])
        return normed @ self.target.output.T, normed


def mtp() -> Layout:
    """MiMo's: among the target's own tensors."""
    layer = "model.mtp_layers.0."
    tensors = {
        f"{layer}{name}.weight": factors(HIDDEN)
        for name in ("token_layernorm", "hidden_layernorm", "input_layernorm", "final_layernorm")
    }
    tensors[f"{layer}input_proj.weight"] = 0.2 * torch.randn(HIDDEN, 2 * HIDDEN)
    tensors |= layer_tensors(layer, HIDDEN, bias=True) | {"model.layers.0.mlp.up_proj.weight": torch.zeros(2, 2)}
    config = CONFIG | {"model_type": "mimo", "num_hidden_layers": LAYERS, "num_nextn_predict_layers": 1}
    return Mtp(config, tensors, target(), layer, (LAYERS,))


LAYOUTS = {
    "eagle": lambda: eagle(bias=False),
    "eagle with a bias": lambda: eagle(bias=True),
    "eagle3": eagle3,
    "eagle3 whole vocabulary": lambda: eagle3(outputs=VOCAB, own_embeddings=True),
    "eagle3 norm_before_residual": lambda: eagle3(norm_before_residual=True),
    "eagle3.1": lambda: eagle3(fc_norm=True, norm_output=True, eagle_aux_hidden_state_layer_ids=[1, 3, 4]),
    "eagle3 norm_before_fc": lambda: eagle3(eagle_config={"use_aux_hidden_state": True}, norm_before_fc=True),
    "eagle3 of layers": p_eagle,
    "eagle of speculators": lambda: speculators_eagle(fusion_bias=False),
    "eagle of speculators with a bias": lambda: speculators_eagle(fusion_bias=True),
    "eagle3 of speculators": lambda: speculators_eagle3(norm_before_residual=False, norm_before_fc=True),
    "eagle3 of speculators by default": speculators_eagle3,
    "eagle3.1 of speculators": lambda: speculators_eagle3(fc_norm=True, norm_output=True, norm_before_residual=True),
    "eagle3 of speculators of layers": speculators_p_eagle,
    "mtp": mtp,
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_drafts_over_rounds_are_those_written_out(name: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]()
    head = load_in_turn(layout.save(tmp_path), layout.target, torch.float32, torch.device("cpu"))
    assert head.name == name.split(".")[0].split()[0] and head.taps == layout.taps
    cache = KVCache.allocate(head.layers, 9, torch.float32, "cpu", BLOCK)
    text = torch.randint(0, VOCAB, (30,)).tolist()
    features = torch.randn(30, len(head.taps), HIDDEN)  # of every position, as the target gives them
    drafter = Drafter(head, cache, [6, 2, 7, 4, 1, 8, 3, 5])
    other = Drafter(head, cache, [0])
    other.first(text[:2], features[7:9], 1)
    known = 1  # tokens whose rows are computed; the first has none
    for committed in (5, 9, 10, 14, 21):  # what is committed after each round, whatever was drafted
        rows = text[known:committed]
        for start in range(0, len(rows), 3):  # in chunks
            logits, state = drafter.first(rows[start : start + 3], features[known + start - 1 :], known + start)
        tokens, states = text[1:committed], layout.state_of(features[: committed - 1])
        for depth in range(1, 4):
            plain, plain_states = layout.rows(tokens, states)
            torch.testing.assert_close(logits[0], plain[-1], atol=1e-4, rtol=1e-4)
            tokens, states = [*tokens, int(plain[-1].argmax())], torch.cat([states, plain_states[-1:]])
            logits, state = drafter.next(depth, tokens[-1], state, committed + depth - 1)
        known = committed


@pytest.mark.parametrize("name", ["eagle3 of layers", "eagle3 of speculators of layers"])
def test_a_parallel_head_drafts_all_in_one_pass(name: str, tmp_path: Path) -> None:
    """Beside a sequence that drafts nothing; later rows take the places of the masks."""
    layout = LAYOUTS[name]()
    head = load_in_turn(layout.save(tmp_path), layout.target, torch.float32, torch.device("cpu"))
    assert head.mask is not None and head.mask.token_id == 7
    cache = KVCache.allocate(head.layers, 9, torch.float32, "cpu", BLOCK)
    text, features = torch.randint(0, VOCAB, (20,)).tolist(), torch.randn(20, 3, HIDDEN)
    table, other = [6, 2, 7, 4, 1], BatchEntry(text[:2], 1, [0], 0)
    mask, known = head.mask.features[None], 1
    for committed, k in ((5, 4), (6, 1), (12, 3)):
        rows = [*text[known:committed], *[7] * (k - 1)]
        states = torch.cat([features[:2], features[known - 1 : committed - 1], mask.expand(k - 1, -1, -1)])
        batch = build_batch([other, BatchEntry(rows, known, table, k)], BLOCK)
        logits, _ = head.first(batch, states, cache)
        whole = torch.cat([features[: committed - 1], mask.expand(k - 1, -1, -1)])
        plain, _ = layout.rows([*text[1:committed], *[7] * (k - 1)], layout.state_of(whole))
        torch.testing.assert_close(logits, plain[-k:], atol=1e-4, rtol=1e-4)
        known = committed


@dataclass
class Drafter:
    """One sequence's rows, computed alone."""

    head: Head
    cache: KVCache
    table: list[int]

    def first(self, tokens: list[int], features: Tensor, start: int) -> tuple[Tensor, Tensor]:
        batch = build_batch([BatchEntry(tokens, start, self.table, 1)], BLOCK)
        return self.head.first(batch, features[: len(tokens)], self.cache)

    def next(self, depth: int, token: int, state: Tensor, position: int) -> tuple[Tensor, Tensor]:
        batch = build_batch([BatchEntry([token], position, self.table, 1)], BLOCK)
        return self.head.next(depth, batch, state, self.cache)


@pytest.mark.parametrize("name", ["eagle", "eagle3", "mtp"])
def test_sequences_are_drafted_side_by_side(name: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]()
    head = load_in_turn(layout.save(tmp_path), layout.target, torch.float32, torch.device("cpu"))
    lengths, tables = (5, 9, 2), ([0, 1, 2], [3, 4, 5], [6, 7, 8])
    texts = [torch.randint(0, VOCAB, (length,)).tolist() for length in lengths]
    features = [torch.randn(length - 1, len(head.taps), HIDDEN) for length in lengths]
    cache = KVCache.allocate(head.layers, 9, torch.float32, "cpu", BLOCK)
    entries = [BatchEntry(text[1:], 1, table, 1) for text, table in zip(texts, tables, strict=True)]
    logits, state = head.first(build_batch(entries, BLOCK), torch.cat(features), cache)
    drawn = logits.argmax(-1).tolist()
    entries = [
        BatchEntry([token], length, table, 1) for token, length, table in zip(drawn, lengths, tables, strict=True)
    ]
    second, _ = head.next(1, build_batch(entries, BLOCK), state, cache)
    for index, text in enumerate(texts):
        states = layout.state_of(features[index])
        plain, plain_states = layout.rows(text[1:], states)
        torch.testing.assert_close(logits[index], plain[-1], atol=1e-4, rtol=1e-4)
        after, _ = layout.rows([*text[1:], drawn[index]], torch.cat([states, plain_states[-1:]]))
        torch.testing.assert_close(second[index], after[-1], atol=1e-4, rtol=1e-4)


def test_what_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    def refused(layout: Layout, kind: type[Exception], message: str) -> None:
        with pytest.raises(kind, match=message):
            load_head(layout.save(tmp_path), layout.target, torch.float32, torch.device("cpu"))

    refused(
        replace(eagle(False), target=replace(target(), output=torch.zeros(VOCAB, 8))),
        WrongCheckpoint,
        "hidden_size: is 32; allowed: the target's, 8",
    )
    refused(eagle3(num_hidden_layers=17), UnsupportedModel, "17 layers .*allowed: 1 to 16")
    refused(eagle3(num_hidden_layers=2), WrongCheckpoint, "no tensor layers.1.input_layernorm.weight or")
    no_mask = "pard_token, ptd_token_id, mask_token_id: none is there; allowed: the id of the mask token in one of them"
    refused(eagle3(parallel_drafting=True), WrongCheckpoint, no_mask)
    refused(eagle3(parallel_drafting=True, pard_token=3), WrongCheckpoint, "no tensor mask_hidden")
    refused(eagle3(parallel_drafting=True, mask_token_id=VOCAB), WrongCheckpoint, "mask_token_id: is 60; allowed: 0 to")
    broken = speculators_eagle(False)
    broken.config["layernorms"] = True
    refused(broken, UnsupportedModel, "layernorms: is True; allowed: false")
    broken = speculators_eagle(False)
    broken.config["fusion_bias"] = True
    refused(broken, WrongCheckpoint, "no tensor fc.bias or model.fc.bias or fusion_fc.bias")
    broken = speculators_p_eagle()
    broken.config["mask_token_id"] = None
    refused(broken, WrongCheckpoint, no_mask)
    broken = speculators_p_eagle()
    del broken.tensors["mask_hidden"]
    refused(broken, WrongCheckpoint, "no tensor mask_hidden")
    broken = eagle3()
    del broken.tensors["midlayer.hidden_norm.weight"]
    refused(broken, WrongCheckpoint, "no tensor layers.0.hidden_norm.weight or")
    broken = eagle3()
    broken.tensors["fc.weight"] = torch.zeros(HIDDEN, HIDDEN)
    refused(broken, WrongCheckpoint, r"fc.weight has shape \[32, 32\], its config.json asks for \[32, 96\]")
