"""From a folder to a head: its config.json says which one it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from outrider.engine import checkpoint
from outrider.engine.models.base import UnsupportedModel
from outrider.proposers.heads.block import BlockHead
from outrider.proposers.heads.dflash2 import DFlash2Head
from outrider.proposers.heads.dspark import DSparkHead
from outrider.proposers.heads.eagle import Eagle3Head, EagleHead
from outrider.proposers.heads.head import Head, HeadReader, TargetWeights
from outrider.proposers.heads.medusa import MedusaConfig, MedusaHead
from outrider.proposers.heads.mlp_speculator import MlpConfig, MlpSpeculatorHead
from outrider.proposers.heads.mtp import MtpHead
from outrider.proposers.registry import head_of, is_dflash2

Config = Mapping[str, Any]


def _medusa(config: Config, reader: HeadReader, target: TargetWeights) -> Head:
    return MedusaHead(MedusaConfig.parse(config, target), reader, target)


def _mlp_speculator(config: Config, reader: HeadReader, target: TargetWeights) -> Head:
    return MlpSpeculatorHead(MlpConfig.parse(config, target), reader, target)


def _dflash(config: Config, reader: HeadReader, target: TargetWeights) -> BlockHead:
    return _whole(reader, (DFlash2Head if is_dflash2(config) else BlockHead)(config, reader, target))


def _dspark(config: Config, reader: HeadReader, target: TargetWeights) -> BlockHead:
    return _whole(reader, DSparkHead(config, reader, target))


def _whole(reader: HeadReader, head: BlockHead) -> BlockHead:
    """The head, if it reads all of its file: a tensor that it does not know would be part of what it computes."""
    unread = [name for name in reader.unread() if name not in UNREAD]
    if unread:
        raise UnsupportedModel(f"{head.name}: tensors {', '.join(unread):.200} are not known here")
    return head


UNREAD = ("d2t", "t2d")  # the first where no output is missing, the second is for training
AnyHead = Head | BlockHead


def drafts_in_one_pass(head: AnyHead) -> bool:
    """Whether all tokens of a window are."""
    return isinstance(head, BlockHead) or head.mask is not None


HEADS: Mapping[str, Callable[[Config, HeadReader, TargetWeights], AnyHead]] = {
    "eagle": EagleHead,
    "eagle3": Eagle3Head,
    "medusa": _medusa,
    "mlp_speculator": _mlp_speculator,
    "mtp": MtpHead,
    "dflash": _dflash,
    "dspark": _dspark,
}


def load_head(
    folder: Path,
    target: TargetWeights,
    dtype: torch.dtype,
    device: torch.device,
    changes: Config | None = None,  # of its config.json, as a convention has them
) -> AnyHead:
    """Loads a head for a target. Raises UnsupportedModel (WrongCheckpoint) with the reason."""
    config = {**checkpoint.read_config(folder), **(changes or {})}
    checkpoint.tell_left_aside(folder, lone=True)
    state = checkpoint.read_tensors(checkpoint.weight_files(folder, lone=True))
    method = head_of(config, state.keys())
    if method is None:
        raise UnsupportedModel(
            f"{folder} holds no head: model_type is {config.get('model_type')!r}; allowed: {', '.join(HEADS)}"
        )
    with torch.inference_mode():
        return HEADS[method](config, HeadReader(state, dtype, device), target)


def head_digest(folder: Path) -> str:
    """SHA-256, in hex, of a head's configuration and weights. Raises WrongCheckpoint."""
    with checkpoint.checkpoint_digest(folder, checkpoint.weight_files(folder, lone=True)) as weights:
        return checkpoint.model_digest(checkpoint.read_config(folder), weights())
