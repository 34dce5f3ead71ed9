"""Folders of tiny random models that rows are served by: a target that knows tools and reasoning, drafts and heads that
are right now and then, and an adapter."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lossless.composition.table import Method
from safetensors.torch import load_file, save_file
from support.adapters import save_adapter
from support.fakes import EOS
from support.heads import LAYOUTS, random_head_of, save_guess
from support.models import other_weights, save_tiny, tiny_hf_model
from support.tools import save_tool_tokenizer
from torch import Tensor

VOCAB = 400
SHAPE: dict[str, Any] = {  # packed products have inputs by 32, and vLLM's attention no smaller heads
    "vocab_size": VOCAB, "intermediate_size": 128, "head_dim": 32, "eos_token_id": EOS,
}  # fmt: skip
SHAPES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "dense": ("llama", SHAPE), "a mixture": ("qwen3_moe", SHAPE | {"moe_intermediate_size": 64}),
}  # fmt: skip
SHARPER = 4.0  # factor on the head, so that sampled text has likely and unlikely tokens
MOST = 16  # tokens drafted in a round, of the rows that ask for most
TREE = "[(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]"
# At the end of the chat template: opens what is reasoned in the prompt, where a request wants that.
OPENS = "{% if opens %}<think>\n{% endif %}"


class Checkpoints:
    """The folders of each model, made once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[str, Folders] = {}

    def of(self, model: str) -> Folders:
        """Of one."""
        if model not in self._made:
            self._made[model] = Folders(self._folder / model.split()[-1], *SHAPES[model])
        return self._made[model]


class Folders:
    """A target's, and what drafts for it."""

    def __init__(self, folder: Path, family: str, shape: Mapping[str, Any]) -> None:
        self.target = save_tool_tokenizer("hermes", save_tiny(folder / "target", family, **shape))
        said = json.loads((self.target / "tokenizer_config.json").read_text())
        said["chat_template"] += OPENS
        (self.target / "tokenizer_config.json").write_text(json.dumps(said))
        state = _sharpened(self.target)
        self.draft = other_weights(self.target, folder / "draft", noise=0.05)
        self.pard = other_weights(self.target, folder / "pard", noise=0.05)
        config = json.loads((self.pard / "config.json").read_text())
        (self.pard / "config.json").write_text(json.dumps(config | {"pard_token": VOCAB - 1}))
        self.heads = {layout: random_head_of(self.target, layout, folder / layout) for layout in LAYOUTS}
        self.heads["eagle"] = save_guess(folder / "guess", tiny_hf_model(**SHAPE))
        for layout in ("eagle3", "p-eagle", "medusa"):
            _speaks_as_target(self.heads[layout], state)
        changed = {name: tensor for name, tensor in state.items() if "layers" in name and ".experts." not in name}
        self.adapter = save_adapter(folder / "adapter", changed, scale=0.05)

    def speculative_config(self, method: Method) -> dict[str, Any] | None:
        """What `LLM` is told of a method."""
        lookup = {"prompt_lookup_min": 1, "prompt_lookup_max": 4}
        by_method: Mapping[str, Mapping[str, Any]] = {
            "draft_model": {"draft_trial": "off", "model": self.draft},
            "ngram": {"method": "ngram", **lookup},
            "suffix": {"method": "suffix"},
            "prediction": {"method": "prediction"},
            "pard": {"draft_trial": "off", "model": self.pard, "method": "pard"},
            "self:int4": {"draft_trial": "off", "model": "self:int4"},
            "in turn": {"draft_trial": "off", "model": self.draft, "method": "prediction,suffix,draft_model"},
            "draft tree": {
                "draft_trial": "off",
                "model": self.draft,
                "method": "draft_model",
                "speculative_token_tree": TREE,
            },
            "head tree": {"model": self.heads["eagle"], "speculative_token_tree": TREE, "draft_trial": "off"},
        }
        if method == "none":
            return None
        if method in self.heads:
            return {"model": str(self.heads[method]), "num_speculative_tokens": MOST, "draft_trial": "off"}
        given = {name: str(value) if isinstance(value, Path) else value for name, value in by_method[method].items()}
        return given if "speculative_token_tree" in given else given | {"num_speculative_tokens": MOST}


def _sharpened(folder: Path) -> Mapping[str, Tensor]:
    """The tensors of a checkpoint, with its head made sharper, in bfloat16."""
    file = folder / "model.safetensors"
    state = load_file(file)
    state["lm_head.weight"] *= SHARPER
    state = {name: tensor.bfloat16() for name, tensor in state.items()}
    save_file(state, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    return {name: tensor.float() for name, tensor in state.items()}


def _speaks_as_target(folder: Path, state: Mapping[str, Tensor]) -> None:
    """Gives a head the target's own output matrix, so that it says what the target does now and then."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name in tensors:
        if name == "lm_head.weight" or name.startswith("lm_heads."):
            tensors[name] = state["lm_head.weight"].clone()
        elif name.startswith("blocks."):
            tensors[name] *= 0.1
    save_file(tensors, file)
