"""What the library speculators computes of block drafters, as numbers that the tests compare with.

Run by hand, without arguments, in an environment that holds speculators 0.9.0 beside torch, transformers, pydantic and
openai (`pip install --no-deps speculators==0.9.0`). For each case it makes a tiny model of random weights and leaves in
`reference/CASE`

* `config.json` and `model.safetensors`, as the library saves them,
* `expected.safetensors`: `embeddings` and `output` of the target [vocab, hidden], `features` [positions, taps, hidden]
  and `tokens` [positions] of a text, `anchors` [blocks], the positions of the blocks' first tokens, and what the
  library makes of them: `hidden` [blocks, rows, hidden] behind the last norm; `logits` [blocks, rows, outputs], those
  of DSpark with the bias of the text's own tokens; `confidence` [blocks, rows], probabilities; of DFlash2 `candidates`
  and `scores` [blocks, rows, top_k], by the text's own tokens."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

HIDDEN, VOCAB, TAPS, POSITIONS = 16, 64, 3, 24
ANCHORS = [5, 6, 9, 17]
REDUCED, BLOCK = 40, 4
SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "intermediate_size": 24, "vocab_size": VOCAB, "max_position_embeddings": 128, "rope_theta": 10_000.0,
}  # fmt: skip
SLIDES = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6, "use_sliding_window": True}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # kind, its own fields, those of its layers
    "dflash": ("dflash", {}, {}),
    "dflash_anchor": ("dflash", {"sample_from_anchor": True}, {}),
    "dflash_sliding": ("dflash", {}, SLIDES),
    "dflash_sliding_whole": ("dflash", {"sliding_window_non_causal": True}, SLIDES),
    "dflash_reduced": ("dflash", {"draft_vocab_size": REDUCED}, {}),
    "dflash2": ("dflash2", {"conv_group_size": 8, "selector_rank": 8, "selector_top_k": 6}, SLIDES),
    "dflash2_anchor": ("dflash2", {"conv_group_size": 4, "conv_kernel_size": 3, "selector_rank": 8, "selector_top_k": 4,
                                   "sample_from_anchor": True}, {}),
    "dspark": ("dspark", {"markov_rank": 8}, {}),
    "dspark_gated": ("dspark", {"markov_rank": 8, "markov_head_type": "gated"}, {}),
    "dspark_rnn": ("dspark", {"markov_rank": 8, "markov_head_type": "rnn", "enable_confidence_head": False}, {}),
    "dspark_bonus": ("dspark", {"markov_rank": 8, "sample_from_anchor": False, "confidence_head_with_markov": False,
                                "draft_vocab_size": REDUCED}, SLIDES),
}  # fmt: skip


def library() -> dict[str, tuple[Any, Any]]:
    """Models and configurations by kind. What it imports to train with is not wanted here."""
    for name, wanted in (
        ("datasets", ("load_from_disk",)),
        ("hs_connectors", ("FileTransfer", "HiddenStatesTransfer")),
    ):
        unused = ModuleType(name)
        unused.__dict__.update(dict.fromkeys(wanted, object))
        sys.modules.setdefault(name, unused)
    from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
    from speculators.models.dflash2 import DFlash2DraftModel, DFlash2SpeculatorConfig
    from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig

    return {
        "dflash": (DFlashDraftModel, DFlashSpeculatorConfig),
        "dflash2": (DFlash2DraftModel, DFlash2SpeculatorConfig),
        "dspark": (DSparkDraftModel, DSparkSpeculatorConfig),
    }


def made(kind: str, own: dict[str, Any], layers: dict[str, Any]) -> Any:
    """A model of random weights."""
    model_type, config_type = library()[kind]
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import Qwen3Config

    layer = Qwen3Config(**SIZES, **layers)
    layer._attn_implementation = "eager"
    most_tokens = BLOCK if own.get("sample_from_anchor", kind == "dspark") else BLOCK - 1  # as the library trains
    config = config_type(
        **{"draft_vocab_size": VOCAB, **own}, block_size=BLOCK, aux_hidden_state_layer_ids=[1, 2, 4], mask_token_id=3,
        transformer_layer_config=layer,
        speculators_config=SpeculatorsConfig(
            algorithm=kind, proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=most_tokens)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path="", architectures=["Qwen3ForCausalLM"]),
        ),
    )  # fmt: skip
    model = model_type(config).eval()
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            parameter.uniform_(0.5, 1.5) if name.endswith("norm.weight") else parameter.normal_(0.0, 0.25)
    if model.t2d is not None:
        kept = torch.randperm(VOCAB)[:REDUCED].sort().values  # [outputs]
        model.d2t.copy_(kept - torch.arange(REDUCED))
        model.t2d.zero_()
        model.t2d[kept] = True
    return model


@torch.no_grad()
def expected(model: Any) -> dict[str, Tensor]:
    """What the model makes of a text, with blocks at the anchors."""
    features, tokens = torch.randn(POSITIONS, TAPS, HIDDEN), torch.randint(4, VOCAB, (POSITIONS,))
    loss_mask = torch.zeros(1, POSITIONS)
    loss_mask[0, ANCHORS] = 1.0
    hidden, logits, *_, rows = model._backbone_forward(
        features.flatten(1)[None], tokens[None], loss_mask, torch.randn(1, POSITIONS, HIDDEN),
        torch.zeros(1, POSITIONS, dtype=torch.long), max_anchors=len(ANCHORS),
    )  # fmt: skip
    shape = len(ANCHORS), model.block_size
    if rows.view(shape)[:, 0].tolist() != ANCHORS:
        raise RuntimeError(f"blocks at {rows.view(shape)[:, 0].tolist()}")
    hidden, logits = hidden.view(*shape, -1), logits.view(*shape, -1)
    before = tokens[rows].view(shape)
    if not model.config.sample_from_anchor:
        before = torch.cat([before[:, :1], before[:, :-1]], dim=1)
    found: dict[str, Tensor] = {}
    if getattr(model, "markov_head", None) is not None:
        logits = logits + model.markov_head.block_bias(prev_token_ids=before, hidden_states=hidden)
        if model.confidence_head is not None:
            known = [hidden]
            if model.config.confidence_head_with_markov:
                known.append(model.markov_head.prev_embeddings(before))
            found["confidence"] = torch.sigmoid(model.confidence_head(torch.cat(known, dim=-1)))
    if hasattr(model, "candidate_selector"):
        found["candidates"], found["scores"] = model.candidate_selector.select(logits, hidden, before)
    output = torch.randn(VOCAB, HIDDEN) if model.t2d is not None else model.lm_head.weight
    return found | {
        "embeddings": model.embed_tokens.weight, "output": output, "features": features, "tokens": tokens,
        "anchors": torch.tensor(ANCHORS), "hidden": hidden, "logits": logits,
    }  # fmt: skip


def main() -> None:
    """Writes all cases."""
    for seed, (name, (kind, own, layers)) in enumerate(CASES.items()):
        torch.manual_seed(seed)
        folder, model = Path(__file__).parent / "reference" / name, made(kind, own, layers)
        found = expected(model)
        model.save_pretrained(folder)
        (folder / "config.py").unlink()  # the library's code
        said = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(said, indent=2, sort_keys=True) + "\n")
        save_file(
            {key: value.detach().contiguous().clone() for key, value in found.items()}, folder / "expected.safetensors"
        )


if __name__ == "__main__":
    main()
