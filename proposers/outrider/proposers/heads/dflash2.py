"""DFlash2 (github.com/z-lab/dflash): DFlash with short convolutions along the block around attention and
feed-forward, and a selector, which scores a place's likeliest tokens again by the token before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from outrider.engine.batch import Batch, StaticBatch
from outrider.engine.models.base import UnsupportedModel, WrongCheckpoint
from outrider.engine.models.decoder import DecoderLayer
from outrider.kernels.layers.reference import add_rms_norm
from outrider.proposers.heads.block import BlockChains, BlockGuess, BlockHead, starts_of
from outrider.proposers.heads.head import HeadReader, TargetWeights
from outrider.proposers.heads.layer_weights import layer_prefixes

MOST_CANDIDATES = 1024


class DFlash2Head(BlockHead):
    """Its places follow one another: a place's law has the candidates alone, and hangs on the token before."""

    is_independent = False

    def __init__(self, config: Mapping[str, Any], reader: HeadReader, target: TargetWeights) -> None:
        super().__init__(config, reader, target)
        if self.config.num_outputs != self._vocab_size:
            raise WrongCheckpoint(f"draft_vocab_size: is {self.config.num_outputs}; allowed: {self._vocab_size}")
        own, hidden = dict(config) | dict(config.get("dflash_config") or {}), self.config.layer.hidden_size

        def number(name: str, most: int) -> int:
            value = own.get(name)
            if type(value) is not int or not 1 <= value <= most:
                raise UnsupportedModel(f"{name}: is {value!r:.100}; allowed: 1 to {most}")
            return value

        taps, group = number("conv_kernel_size", self.rows), number("conv_group_size", hidden)
        if hidden % group:
            raise UnsupportedModel(f"conv_group_size: is {group}; allowed: what divides {hidden}")
        self._convolutions = [
            tuple(BlockConvolution(reader, index, name, taps, group, hidden) for name in ("attention_conv", "mlp_conv"))
            for index in range(self.config.layer.num_layers)
        ]
        self._post_norms = [
            reader.tensor((hidden,), *(f"{prefix}post_attention_layernorm.weight" for prefix in layer_prefixes(index)))
            for index in range(self.config.layer.num_layers)
        ]
        self._candidates = number("selector_top_k", min(MOST_CANDIDATES, self._vocab_size))
        rank = number("selector_rank", 1 << 16)
        self._projection = reader.product(reader.tensor((rank, hidden), f"{SELECTOR}hidden_projection.weight"))
        self._before, self._after = (
            reader.tensor((self._vocab_size, rank), f"{SELECTOR}{name}_codebook", f"{SELECTOR}{name}_codebook.weight")
            for name in ("predecessor", "successor")
        )

    def through(
        self,
        index: int,
        layer: DecoderLayer,
        normed: Tensor,
        residual: Tensor,
        step: tuple[Any, ...],
        batch: Batch | StaticBatch,
    ) -> tuple[Tensor, Tensor]:
        """Convolved on its way in and out. Shapes: `BlockHead.through`."""
        places = batch.positions - batch.positions[_first_rows(batch)]  # [rows]: in the block
        around_attention, around_feed = self._convolutions[index]
        taken, kernel = around_attention.enter(normed, places)
        output = around_attention.leave(layer.attend(taken, *step), kernel, places)
        normed, residual = add_rms_norm(output, residual, self._post_norms[index], self._eps)
        taken, kernel = around_feed.enter(normed, places)
        return around_feed.leave(layer.feed(taken, None), kernel, places), residual

    def at(self, guess: BlockGuess, chains: BlockChains) -> tuple[Tensor, Tensor | None]:
        """Masks and bans come before the candidates: of those that are allowed there are as many as without. Shapes:
        `BlockHead.at`."""
        logits = self.of_target(guess.logits[chains.places])  # [chains, vocab]
        ids = chains.adjust(logits).topk(self._candidates, dim=-1).indices  # [chains, candidates]
        known = self._before[chains.before] * self._projection(guess.hidden[chains.places])  # [chains, rank]
        scores = (known[:, None] * self._after[ids]).sum(-1).float() + logits.gather(1, ids)  # [chains, candidates]
        return torch.full_like(logits, float("-inf")).scatter_(1, ids, scores), None


SELECTOR = "candidate_selector."


class BlockConvolution:
    """Two causal convolutions along a block, before and behind a part of a layer. Each row has kernels of its own: what
    all share, and what a projection of the row adds for each group of channels."""

    def __init__(self, reader: HeadReader, index: int, name: str, taps: int, group: int, hidden: int) -> None:
        prefixes, self._taps, self._group = layer_prefixes(index), taps, group
        self._base = reader.tensor((2, taps, hidden), *(f"{prefix}{name}.base_kernel" for prefix in prefixes))
        names = (f"{prefix}{name}.kernel_projection.weight" for prefix in prefixes)
        self._projection = reader.product(reader.tensor((2 * taps * (hidden // group), hidden), *names))

    def enter(self, x: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:  # [rows, hidden], [rows]
        """The rows convolved, and the kernels that `leave` takes, [rows, taps, groups]."""
        kernels = self._projection(x).view(len(x), 2, self._taps, -1)  # [rows, 2, taps, groups]
        return self._convolved(x, kernels[:, 0], self._base[0], places), kernels[:, 1]

    def leave(self, x: Tensor, kernels: Tensor, places: Tensor) -> Tensor:  # [rows, hidden]
        """The rows, [rows, hidden], convolved with their kernels, [rows, taps, groups]; places: [rows]."""
        return self._convolved(x, kernels, self._base[1], places)

    def _convolved(self, x: Tensor, kernels: Tensor, base: Tensor, places: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for tap in range(self._taps):
            row = torch.arange(len(x), device=x.device) - tap
            before = x[row.clamp(min=0)].masked_fill((places < tap)[:, None], 0.0)  # [rows, hidden]
            of_channels = kernels[:, tap, :, None].expand(-1, -1, self._group).flatten(1)  # [rows, hidden]
            total = total + before * (base[tap] + of_channels)
        return total


def _first_rows(batch: Batch | StaticBatch) -> Tensor:  # [rows] int64
    """Of each row the first of its block; of padding that of the last one."""
    starts = starts_of(batch).long()
    rows = torch.arange(len(batch.token_ids), device=starts.device)
    return starts[torch.searchsorted(starts, rows, right=True).clamp(max=len(starts) - 1) - 1]
