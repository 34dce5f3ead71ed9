"""Whether vLLM would load of a folder what our own engine does, and what the model's digest is of. It has a rule of its
own for the files, and for a tied model's head; a folder of which the two differ is refused before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from outrider.engine import checkpoint
from outrider.engine.models.base import UnsupportedModel
from outrider.engine.models.weights import EMBEDDINGS, HEAD, are_equal, text_model_state
from outrider.engine.quantized.choice import GGUF, kept_as
from outrider.rpc.hub import model_name
from outrider.target_service.settings import TargetSettings

MISTRAL = "consolidated*.safetensors"  # which vLLM takes before any other, by default


def require_same_weights(settings: TargetSettings) -> None:
    """Raises UnsupportedModel with the remedy."""
    folder, load_format = Path(settings.model), settings.engine_args.get("load_format", "auto")
    if kept_as(folder, checkpoint.read_config(folder)) == GGUF:
        raise UnsupportedModel(
            f"model: {model_name(folder)} is a GGUF file, which vLLM does not read since 0.32; allowed: engine "
            "outrider, or with vLLM the checkpoint of which the file was made"
        )
    files = checkpoint.weight_files(folder)
    ours, theirs = {path.name for path in files}, _files_of_vllm(folder, load_format)
    if theirs != ours:
        raise UnsupportedModel(
            f"{folder}: vLLM would read {_few(theirs)}, and transformers and our own engine {_few(ours)}: move "
            f"{_few({*checkpoint.left_aside(folder)})} elsewhere"
        )
    checkpoint.tell_left_aside(folder)
    if _is_tied(folder, settings.trust_remote_code) and _has_another_head(files):
        raise UnsupportedModel(
            f"{folder}: config.json has tie_word_embeddings, and {HEAD} differs from the embeddings: vLLM would drop "
            "it, and transformers uses it; set tie_word_embeddings to false in config.json, or remove that tensor"
        )


def _files_of_vllm(folder: Path, load_format: str) -> set[str]:
    """The files that vLLM 0.32 and 0.33 choose: all that the index names, where there is one."""
    if load_format in ("auto", "mistral") and any(folder.rglob(MISTRAL)):
        return {path.name for path in folder.glob(MISTRAL)}
    names = {path.name for path in folder.glob("*.safetensors")}
    weight_map = checkpoint.read_json(folder / checkpoint.INDEX_NAME).get("weight_map")
    return names & {*map(str, weight_map.values())} if isinstance(weight_map, Mapping) else names


def _is_tied(folder: Path, trust_remote_code: bool) -> bool:
    """Whether the head is the embeddings, by transformers' own object, whose classes have defaults; false where vLLM
    alone knows the model."""
    try:
        config: Any = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
    except (AttributeError, KeyError, OSError, TypeError, ValueError):
        return False
    return bool(getattr(config, "tie_word_embeddings", False))


def _has_another_head(files: tuple[Path, ...]) -> bool:
    """Reads no other tensors: quantised ones may have types that PyTorch does not know."""
    state = text_model_state(checkpoint.read_tensors(files, ("embed_tokens.weight", HEAD)))
    return EMBEDDINGS in state and HEAD in state and not are_equal(state[EMBEDDINGS], state[HEAD])


def _few(names: set[str]) -> str:
    return checkpoint.few(sorted(names)) or "nothing"
