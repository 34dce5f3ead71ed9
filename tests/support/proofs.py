"""Which cases of a table belong to every run, and which to the long proof (`--prove`) alone."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from itertools import product
from typing import Any

import pytest


def mostly_long(every: Iterable[Any], short: Container[Any]) -> list[Any]:
    """Parameters of which `short` alone are tried in every run."""
    return [one if one in short else pytest.param(one, marks=pytest.mark.slow) for one in every]


def on_a_diagonal(*factors: Sequence[Any]) -> list[Any]:
    """All combinations as parameters. Those of every run have each level of the first factor once, and share out the
    combinations of the other factors in their turn: a fault that needs one level alone is met by each run."""
    others = list(product(*factors[1:]))
    short = [(level, *others[place % len(others)]) for place, level in enumerate(factors[0])]
    return [
        pytest.param(*row, marks=() if row in short else pytest.mark.slow, id="-".join(map(str, row)))
        for row in product(*factors)
    ]
