"""What a rollout does, under load: every service is restarted in its turn, with the same weights or others. No request
fails, and each comes out as the weights say that it began with."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from chaos.asks import Answer, Ask, all_asks, expectations
from chaos.fleet import Fleet
from chaos.rolling import NUM_STREAMS, failed, progress, reading, roll, told
from chaos.streams import Readers, Stream, judge
from safetensors.torch import load_file, save_file
from support.environment import SEED

from outrider.pairs import pair_path

NUM_TOKENS = 100
GRACE_S = "120"  # longer than any stream takes, as a rollout's has to be
SHOWN = 12  # hex digits of a digest, over HTTP

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def some_asks() -> list[Ask]:
    """A third of the fault runner's, and all greedy ones, which its reader over HTTP can ask, too."""
    asks = all_asks(SEED, NUM_TOKENS)
    return [ask for place, ask in enumerate(asks) if place % 3 == 0 or ask.name.startswith("greedy, ")]


def other_weights(source: Path, folder: Path) -> Path:
    """The checkpoint with a tenth of noise on what each layer writes: the same tokens, said otherwise."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns(".outrider-digest"))
    tensors, dice = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(SEED)
    for name, tensor in tensors.items():
        if name.endswith("down_proj.weight"):
            tensor += 0.1 * tensor * torch.randn(tensor.shape, generator=dice).to(tensor.dtype)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


async def test_a_rolling_restart_of_every_service_fails_no_request() -> None:
    async with Fleet(GRACE_S) as fleet:
        pids = [member.pid for member in fleet.members.values()]
        async with reading(fleet, some_asks()) as readers:
            for member in fleet.members.values():
                await roll(fleet, member, readers)
            await progress(readers)
        assert failed(readers) == [], told(fleet)
        assert not set(pids) & {member.pid for member in fleet.members.values()}
        assert len(readers.streams) > 6 * NUM_STREAMS


async def test_a_rolling_change_of_weights_fails_no_request(tmp_path: Path) -> None:
    """Of the drafts, then of the targets. A request stays with the weights that it began with; new ones change over."""
    pair, asks = pair_path(), some_asks()
    async with Fleet(GRACE_S) as fleet:
        async with reading(fleet, asks) as readers:
            for role, source, members in (("draft", pair.draft, fleet.drafts), ("target", pair.target, fleet.targets)):
                changed = str(other_weights(source, tmp_path / role))
                for member in members:
                    member.arguments[member.arguments.index(str(source))] = changed
                    await roll(fleet, member, readers)
            await progress(readers, len(asks))
        anew = await expectations(asks, fleet)
        same = [key for key, answer in readers.expected.items() if anew[key].ids == answer.ids]
        assert len(same) < len(anew) / 2, "the weights say the same"
        judge_by_weights(readers, [readers.expected, anew])
        assert failed(readers) == [], told(fleet)


def judge_by_weights(readers: Readers, sets: Sequence[dict[str, Answer]]) -> None:
    """Anew, since the readers knew the first weights alone: which set belongs to which digest follows from the order in
    which they came, and each has to have been met by many."""
    digests: dict[str, list[tuple[Stream, Answer]]] = {}
    for stream in readers.streams:
        if stream.answer is not None:
            digests.setdefault(stream.digest[:SHOWN], []).append((stream, stream.answer))
    assert len(digests) == len(sets) and all(len(streams) > NUM_STREAMS for streams in digests.values()), digests.keys()
    for expected, streams in zip(sets, digests.values(), strict=True):
        for stream, answer in streams:
            stream.change = ""
            judge(stream, answer, expected, stream.left)
