"""Bit masks of the tokens that may follow."""

from __future__ import annotations

import numpy as np
from torch import Tensor

ALL_BITS = -1  # an int32 of which every bit is set


def num_words(vocab_size: int) -> int:
    """How many int32 a row of a mask has."""
    return -(-vocab_size // 32)


def set_bit(row: Tensor, token: int) -> None:  # [words] int32
    """Allows a token."""
    row.numpy().view("uint32")[token // 32] |= 1 << token % 32


def clear_bit(row: Tensor, token: int) -> None:  # [words] int32
    """Forbids a token."""
    row.numpy().view("uint32")[token // 32] &= 0xFFFFFFFF ^ (1 << token % 32)


def has_bit(row: Tensor, token: int) -> bool:  # [words] int32
    """Whether a token is allowed."""
    return bool(row.numpy().view("uint32")[token // 32] >> np.uint32(token % 32) & 1)


def allowed_ids(row: Tensor, vocab_size: int) -> set[int]:  # [words] int32
    """The ids whose bits are set."""
    bits = np.unpackbits(row.numpy().view("uint8"), bitorder="little")[:vocab_size]
    return set(np.flatnonzero(bits).tolist())
