"""Row tiles: one shape for every product, so that a row's bits depend neither on how many rows there are nor on their
order.

A matrix product of a given shape reduces every row in the same order, wherever the row lies in the tile; a product of
another number of rows may not. So rows are padded with zeros to tiles of `TILE_ROWS`. Sums over the last dimension,
`exp` and `tanh` of torch do not depend on the place of a row; `silu`, `sigmoid` and `rsqrt` do (their vector loop and
their scalar tail differ) and are therefore written with `exp` and `sqrt`.

On a GPU the products are `layers.triton`'s, which has one tile shape of its own for every number of rows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

TILE_ROWS = 8


def padded_tiles(rows: Tensor) -> list[Tensor]:  # [rows, ...] -> [TILE_ROWS, ...] each
    """Splits into tiles of freshly allocated (so equally aligned) memory, the last one padded with zeros."""
    tiles = []
    for start in range(0, rows.shape[0], TILE_ROWS):
        chunk = rows[start : start + TILE_ROWS]
        tile = rows.new_zeros(TILE_ROWS, *rows.shape[1:])
        tile[: chunk.shape[0]] = chunk
        tiles.append(tile)
    return tiles


def by_row_tiles(function: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:  # [rows, ...] -> [rows, ...]
    """Applies `function` to every tile and puts the rows together again."""
    results = [function(tile) for tile in padded_tiles(rows)]
    return (results[0] if len(results) == 1 else torch.cat(results))[: rows.shape[0]]
