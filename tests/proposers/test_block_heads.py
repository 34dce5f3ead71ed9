"""Block drafters compute what the library that trains them does, over rounds with refusals and beside other sequences;
and what they cannot compute they refuse by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.engine.batch import BatchEntry, build_batch
from outrider.engine.kv_cache import KVCache
from outrider.engine.models.base import UnsupportedModel
from outrider.proposers.heads.block import MASK, BlockChains, BlockGuess, BlockHead
from outrider.proposers.heads.head import TargetWeights
from outrider.proposers.heads.loading import load_head

REFERENCE = Path(__file__).parent / "blocks" / "reference"
CASES = sorted(path.name for path in REFERENCE.iterdir())
BLOCK, LAYERS = 4, 5


@dataclass
class Case:
    """A checkpoint, and what the library makes of it."""

    folder: Path
    found: dict[str, Tensor]

    @classmethod
    def of(cls, name: str) -> Case:
        return cls(REFERENCE / name, load_file(REFERENCE / name / "expected.safetensors"))

    @property
    def target(self) -> TargetWeights:
        return TargetWeights(self.found["embeddings"], self.found["output"], LAYERS, 64)

    def head(self, folder: Path | None = None) -> BlockHead:
        head = load_head(folder or self.folder, self.target, torch.float32, torch.device("cpu"))
        assert isinstance(head, BlockHead)
        return head


@dataclass
class Text:
    """The text of a case in a cache of its own blocks, computed up to a place."""

    case: Case
    head: BlockHead
    table: list[int]
    end: int = 1  # behind the rows of the context

    def entry(self, anchor: int) -> BatchEntry:
        """The rows of the context up to a block's first token."""
        first, self.end = self.end, anchor + 1
        return BatchEntry(self.case.found["tokens"][first : anchor + 1].tolist(), first, self.table, 0)

    def block(self, anchor: int, rows: int) -> BatchEntry:
        last = int(self.case.found["tokens"][anchor])
        return BatchEntry([last, *[MASK] * (rows - 1)], anchor + 1, self.table, rows)


def drafted(case: Case, head: BlockHead, texts: list[Text], anchor: int, cache: KVCache) -> list[BlockGuess]:
    """All rows of a block behind the anchor, of each text, in one pass."""
    features = case.found["features"]
    entries = [text.entry(anchor) for text in texts]
    rows = torch.cat([features[entry.start - 1 : entry.start - 1 + len(entry.token_ids)] for entry in entries])
    with torch.inference_mode():
        head.fill(build_batch(entries, BLOCK, "cpu"), rows, cache)
        guess = head.draft(build_batch([text.block(anchor, head.rows) for text in texts], BLOCK, "cpu"), cache)
    parts = zip(guess.logits.split(head.rows), guess.hidden.split(head.rows), strict=True)
    return [BlockGuess(*part) for part in parts]


def caches(head: BlockHead) -> KVCache:
    return KVCache.allocate(head.layers, 24, torch.float32, "cpu", BLOCK)


@pytest.mark.parametrize("name", CASES)
def test_blocks_are_the_librarys(name: str) -> None:
    """A block follows each anchor in turn: the places of the one before are overwritten by what was committed."""
    case = Case.of(name)
    head = case.head()
    cache, text = caches(head), Text(case, head, [3, 7, 1, 4, 9, 2, 0, 5])
    other = Text(case, head, [10, 11, 12, 13, 14, 15, 16, 17])
    for index, anchor in enumerate(case.found["anchors"].tolist()):
        for guess in drafted(case, head, [text, other], anchor, cache):
            torch.testing.assert_close(guess.hidden, case.found["hidden"][index], atol=1e-5, rtol=1e-5)
            check_chain(case, head, guess, index)


def check_chain(case: Case, head: BlockHead, guess: BlockGuess, index: int) -> None:
    """Place by place, behind the text's own tokens."""
    found, anchor = case.found, int(case.found["anchors"][index])
    memory = None
    for row in range(head.first_row, head.rows):
        before = found["tokens"][anchor + row - head.first_row]
        chains = BlockChains(torch.tensor([row]), before[None], memory, lambda logits: logits)
        with torch.inference_mode():
            logits, memory = head.at(guess, chains)
            sure = head.confidence(guess, chains)
        ids = head._ids if head._ids is not None else slice(None)
        if "scores" in found:
            (wanted,), kept = found["scores"][index, row][None], found["candidates"][index, row]
            torch.testing.assert_close(logits[0, kept], wanted, atol=1e-5, rtol=1e-5)
            assert int(logits[0].isfinite().sum()) == len(kept)
        else:
            torch.testing.assert_close(logits[0, ids], found["logits"][index, row], atol=1e-5, rtol=1e-5)
            assert int(logits[0].isfinite().sum()) == found["logits"].shape[-1]
        assert (sure is None) == ("confidence" not in found)
        if sure is not None:
            torch.testing.assert_close(sure, found["confidence"][index, row][None], atol=1e-5, rtol=1e-5)


def test_masks_come_before_the_candidates() -> None:
    case = Case.of("dflash2")
    head = case.head()
    (guess,) = drafted(case, head, [Text(case, head, list(range(8)))], 9, caches(head))
    allowed = torch.arange(0, 64, 9)  # fewer than any block's candidates would leave

    def only(logits: Tensor) -> Tensor:
        return torch.full_like(logits, -torch.inf).index_copy_(1, allowed, logits[:, allowed])

    with torch.inference_mode():
        logits, _ = head.at(guess, BlockChains(torch.tensor([1]), torch.tensor([5]), None, only))
    kept = logits[0].isfinite().nonzero().flatten().tolist()
    assert len(kept) == 6 and set(kept) <= set(allowed.tolist())


Change = Callable[[dict[str, Any]], object]


def changed(name: str, folder: Path, change: Change, tensors: Mapping[str, Tensor] = MappingProxyType({})) -> Path:
    """A case's folder with another config.json, and further tensors."""
    shutil.copytree(REFERENCE / name, folder, dirs_exist_ok=True)
    said = json.loads((folder / "config.json").read_text())
    change(said)
    (folder / "config.json").write_text(json.dumps(said))
    save_file(load_file(folder / "model.safetensors") | dict(tensors), folder / "model.safetensors")
    return folder


def as_z_lab(said: dict[str, Any]) -> None:
    """The same model in the words of its first layout."""
    own = {"mask_token_id": said.pop("mask_token_id"), "target_layer_ids": [
        layer - 1 for layer in said.pop("aux_hidden_state_layer_ids")
    ]}  # fmt: skip
    for name in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"):
        own |= {name: said.pop(name)} if name in said else {}
    if said.pop("sliding_window_non_causal", False):
        own["causal"] = False
    said |= said.pop("transformer_layer_config")
    for name in ("speculators_model_type", "speculators_config", "speculators_version", "target_hidden_size"):
        said.pop(name)
    said |= {"model_type": "qwen3", "num_target_layers": LAYERS, "dflash_config": own}
    if said["architectures"] == ["DSparkSpeculator"]:
        said["architectures"] = ["Qwen3DSparkModel"]


@pytest.mark.parametrize("name", CASES)
def test_layouts_agree(name: str, tmp_path: Path) -> None:
    case = Case.of(name)
    first, second = case.head(), case.head(changed(name, tmp_path, as_z_lab))
    assert replace(first.config, layer=second.config.layer) == second.config
    guesses = [drafted(case, head, [Text(case, head, list(range(8)))], 17, caches(head))[0] for head in (first, second)]
    assert torch.equal(guesses[0].logits, guesses[1].logits)


def test_parts_may_be_fused_and_the_mask_a_row_of_its_own(tmp_path: Path) -> None:
    case = Case.of("dflash")
    held, fused = load_file(case.folder / "model.safetensors"), {}
    for layer in ("layers.0.", "layers.1."):
        qkv = [held[f"{layer}self_attn.{part}_proj.weight"] for part in "qkv"]
        fused[f"{layer}self_attn.qkv_proj.weight"] = torch.cat(qkv)
        fused[f"{layer}mlp.gate_up_proj.weight"] = torch.cat(
            [held[f"{layer}mlp.{part}_proj.weight"] for part in ("gate", "up")]
        )
    whole = changed("dflash", tmp_path, lambda said: said.update(mask_token_id=64))
    held = {
        name: value
        for name, value in load_file(whole / "model.safetensors").items()
        if not any(f".{part}_proj" in name for part in ("q", "k", "v", "gate", "up"))
    }
    mask = {"mask_embedding": case.found["embeddings"][3].clone()}
    save_file(held | fused | mask, whole / "model.safetensors")
    guesses = [
        drafted(case, head, [Text(case, head, list(range(8)))], 17, caches(head))[0]
        for head in (case.head(), case.head(whole))
    ]
    torch.testing.assert_close(guesses[0].logits, guesses[1].logits, atol=1e-6, rtol=1e-6)


REFUSED: tuple[tuple[str, dict[str, Any], str], ...] = (  # by fields of config.json; None: it is absent
    ("dflash", {"mask_token_id": 64}, "mask_token_id: is 64; allowed: a row of the embeddings, 0 to 63"),
    ("dflash", {"block_size": 64}, "block_size: is 64; allowed: 2 to 63"),
    ("dflash", {"aux_hidden_state_layer_ids": [1, 2, 6]}, r"target_layer_ids: states \[1, 2, 6\]; allowed: states 0"),
    ("dflash", {"aux_hidden_state_layer_ids": None}, "target_layer_ids: names no layers"),
    ("dflash", {"num_target_layers": 6}, "num_target_layers: is 6; allowed: the target's, 5"),
    ("dflash", {"dflash_config": {"wider": 2}}, "dflash_config: has wider"),
    ("dflash", {"dflash_config": {"attention_sink_bias": True}}, "attention_sink_bias: is True; allowed: False"),
    ("dflash", {"draft_vocab_size": 40}, "draft_vocab_size: is 40, and there is no lm_head.weight"),
    ("dflash", {"draft_vocab_size": 65}, "draft_vocab_size: is 65; allowed: the target's 64 or fewer"),
    ("dflash_reduced", {"draft_vocab_size": 39}, r"lm_head.weight has shape \[40, 16\]"),
    ("dspark", {"markov_head_type": "deep"}, "markov_head_type: is 'deep'; allowed: vanilla, gated, rnn"),
    ("dspark", {"markov_rank": 4}, r"markov_w1.weight has shape \[64, 8\]"),
    ("dflash2", {"conv_kernel_size": 5}, "conv_kernel_size: is 5; allowed: 1 to 4"),
    ("dflash2", {"conv_group_size": 7}, "conv_group_size: is 7; allowed: what divides 16"),
)


@pytest.mark.parametrize(("name", "fields", "problem"), REFUSED)
def test_what_is_not_computed_is_refused_by_name(
    name: str, fields: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    def change(said: dict[str, Any]) -> None:
        said |= fields
        for absent in [field for field, value in fields.items() if value is None]:
            said.pop(absent)

    with pytest.raises(UnsupportedModel, match=problem):
        Case.of(name).head(changed(name, tmp_path, change))


def test_a_tensor_that_is_not_known_is_refused(tmp_path: Path) -> None:
    folder = changed("dflash", tmp_path, lambda said: None, {"layers.0.self_attn.g_proj.weight": torch.zeros(4, 16)})
    with pytest.raises(UnsupportedModel, match=r"dflash: tensors layers.0.self_attn.g_proj.weight are not known here"):
        Case.of("dflash").head(folder)
