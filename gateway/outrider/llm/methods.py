"""Which ways of drafting a speculative configuration names, given or by the model's name, and what the ones that are
not there are."""

from __future__ import annotations

from pathlib import Path

from outrider.llm.errors import Unsupported

SUPPORTED = ("ngram", "draft_model")
NGRAM_NAMES = ("ngram", "[ngram]")
_EAGLE = "an EAGLE head, a decoder layer that reads the target's hidden states"
_MTP = "multi-token prediction, by layers that the target's own checkpoint brings"
NOT_THERE = {
    "eagle": _EAGLE,
    "eagle3": _EAGLE,
    "medusa": "Medusa heads, which read the target's last hidden state",
    "mlp_speculator": "an MLP speculator (an 'accelerator'), which reads the target's last hidden state",
    "suffix": "suffix decoding, which looks n-grams up in the answers to earlier requests, too",
    "mtp": _MTP,
    "ngram_gpu": "n-gram lookup on a GPU; 'ngram' proposes the same way",
    "custom_class": "a class of vLLM's own interface",
    "extract_hidden_states": "an export of hidden states, which drafts nothing",
    "dflash": "a block diffusion head, which reads the target's hidden states",
    "dspark": "a head that reads the target's hidden states",
}
INSTEAD = (
    "allowed: ngram, draft_model ('ngram' needs no model; 'draft_model' is any small model that shares the target's "
    "tokenizer)"
)
# A head's own model_type in config.json, and a word in a checkpoint's name, to the method that it is for.
_TYPES = {"medusa": "medusa", "mlp_speculator": "mlp_speculator", "eagle": "eagle", "eagle3": "eagle3"}
_WORDS = {"eagle3": "eagle3", "eagle-": "eagle", "dflash": "dflash"}
_WORDS_ALONE = {"-accelerator": "mlp_speculator"}  # where no config.json says what it is


def named_method(method: object) -> str | None:
    """The method that is meant by a value of `method`, None where it is absent. A list of one method is that method.
    ValueError for anything else."""
    if isinstance(method, list | tuple):
        if len(method) != 1:
            raise ValueError(
                f"speculative_config['method'] is a list of {len(method)} methods; allowed: one method. "
                "Several that are tried in turn are not there yet"
            )
        (method,) = method
    if method is None or isinstance(method, str):
        return method
    raise ValueError(
        f"speculative_config['method'] is {method!r:.100}; allowed: the name of a method, one of {', '.join(SUPPORTED)}"
    )


def method_of_model(model: str | Path, model_type: str) -> str:
    """The method that a model is for, as in vLLM: by its name, by the `model_type` of its config.json ("": unknown),
    else a draft model. `ngram` is no model."""
    if str(model) in NGRAM_NAMES:
        return "ngram"
    if isinstance(model, str) and _is_dotted(model):
        return "custom_class"
    if model_type in _TYPES or model_type.endswith("_mtp"):
        return _TYPES.get(model_type, "mtp")
    words = _WORDS if model_type else _WORDS | _WORDS_ALONE
    name = Path(model).name.lower()
    return next((method for word, method in words.items() if word in name), "draft_model")


def require_method(method: str, model: object = None) -> None:
    """Raises Unsupported for a method that is not there. `model` is named where the method follows from it."""
    if method not in NOT_THERE and not method.endswith("_mtp"):
        return
    what = NOT_THERE.get(method, _MTP)
    said = f"speculative method {method!r}" if model is None else f"speculative_config['model'] {str(model)!r:.200}"
    raise Unsupported(f"{said} is {what}: it is not there yet; {INSTEAD}")


def _is_dotted(name: str) -> bool:
    """Whether it names a class: `package.module.Class`, and no folder."""
    parts = name.split(".")
    return len(parts) > 1 and all(part.isidentifier() for part in parts) and not Path(name).exists()
