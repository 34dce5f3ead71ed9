"""Adapters by request, as vLLM's offline class has them: `lora_request` names one and says where its files are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from pydantic.dataclasses import dataclass

from outrider.llm.validation import CONFIG, Integer, Only, fixed_fields, integer, plain_errors, require_fixed
from outrider.rpc.messages import MAX_NAME_CHARS


@plain_errors("LoRARequest")
@dataclass(frozen=True, slots=True, config=CONFIG, eq=False)
class LoRARequest:
    """An adapter: its name, a number of the caller's, and its folder (or hub id) in PEFT's layout. As in vLLM two of
    one name are the same."""

    lora_name: Annotated[
        str, Field(min_length=1, max_length=MAX_NAME_CHARS, description="a text of 1 to 128 characters")
    ]
    lora_int_id: Annotated[Integer, integer(1)]  # vLLM's own; names tell adapters apart
    lora_path: Annotated[str | Path, Field(description="a folder's path or a hub id, a str or a Path")] = ""
    lora_local_path: Annotated[str | Path | None, Field(description="a folder's path, or None")] = None  # its old name
    long_lora_max_len: Annotated[Any, Only(None, why="adapters do not lengthen contexts")] = None
    base_model_name: str | None = None  # says nothing here: the model is the LLM's
    tensorizer_config_dict: Annotated[Any, Only(None, why="weights are safetensors")] = None
    load_inplace: Annotated[Any, Only(False, None, why="a name stands for one folder")] = False

    def __post_init__(self) -> None:
        require_fixed(fixed_fields(LoRARequest), {name: getattr(self, name) for name in _FIXED}, "LoRARequest({}={!r})")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LoRARequest) and self.lora_name == other.lora_name

    def __hash__(self) -> int:
        return hash(self.lora_name)

    @property
    def name(self) -> str:
        """vLLM's other word."""
        return self.lora_name

    @property
    def adapter_id(self) -> int:
        """vLLM's other word."""
        return self.lora_int_id

    @property
    def path(self) -> str:
        """Where its files are; empty where that was not said."""
        return str(self.lora_path or self.lora_local_path or "")

    @property
    def local_path(self) -> str | None:
        """The old name, where it was used."""
        return None if self.lora_local_path is None else str(self.lora_local_path)


_FIXED = ("long_lora_max_len", "tensorizer_config_dict", "load_inplace")


def lora_per_prompt(given: Any, num_prompts: int) -> list[LoRARequest | None]:
    """One for all prompts, or a list with one for each, of which some may be None. Raises ValueError, TypeError."""
    if given is None or isinstance(given, LoRARequest):
        return [given] * num_prompts
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise TypeError(f"lora_request must be a LoRARequest, a list of them, or None; got {given!r:.100}")
    if len(given) != num_prompts:
        raise ValueError(f"{num_prompts} prompts and {len(given)} lora_requests: their numbers must be the same.")
    for place, one in enumerate(given):
        if one is not None and not isinstance(one, LoRARequest):
            raise TypeError(f"lora_request[{place}] must be a LoRARequest or None; got {one!r:.100}")
    return list(given)
