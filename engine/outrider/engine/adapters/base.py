"""Which products of a checkpoint's model adapters may change, told by its configuration: for an engine that is not
ours, whose adapters shall have the names, and so the digests, that they have on ours."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from outrider.engine import checkpoint
from outrider.engine.adapters.config import UnsupportedAdapter
from outrider.engine.loader import parsed_config
from outrider.engine.models.base import UnsupportedModel
from outrider.engine.models.low_rank import decoder_linears


def linears_of(folder: Path, *, trust_remote_code: bool = False) -> Mapping[str, tuple[int, int]]:
    """The outputs and inputs of each product, by the modules' names as our engine has them. Of quantised weights as
    well, and without any being read. Raises UnsupportedAdapter for a model whose products nobody here knows."""
    try:
        if (parsed := parsed_config(checkpoint.read_config(folder), None)) is not None:
            return decoder_linears(parsed)
        from outrider.engine.models.transformers import registry_linears  # which imports transformers' models

        return registry_linears(folder, trust_remote_code)
    except UnsupportedModel as error:
        raise UnsupportedAdapter(f"which products of {folder} an adapter may change is not known: {error}") from error
