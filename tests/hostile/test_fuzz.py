"""Every entry point takes altered seeds, or refuses them in words; `make fuzz` looks further."""

from __future__ import annotations

import random

import pytest
from hostile.entries import Entry, altered, entries
from hostile.fuzz import most_bytes
from support.environment import SEED

NAMES = (
    "DraftService frames to the service", "DraftService frames to the gateway", "TargetService frames to the service",
    "TargetService frames to the gateway", "completions", "chat", "responses", "tokenize", "detokenize", "weights",
    "configuration", "tokenizer", "template", "constraint", "vocabulary", "gguf",
)  # fmt: skip
SLOW = ("tokenizer", "vocabulary")  # to be read
pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("name", NAMES)
def test_altered_seeds_are_taken_or_refused(name: str, prove: bool) -> None:
    entry, dice = entries()[name], random.Random(f"{name} {SEED}")
    assert all(entry.tried(seed) for seed in entry.seeds), "a seed is refused"
    num_refused = 0
    for _ in range(20_000 if prove and name not in SLOW else 200):
        raw = altered(dice.choice(entry.seeds), dice)
        try:
            num_refused += not entry.tried(raw)
        except BaseException as error:  # a library's panic is none of Exception
            raise AssertionError(f"{raw!r}: {error!r}") from error
    assert num_refused > 5


def test_these_are_all() -> None:
    assert set(NAMES) == set(entries())


def test_the_fuzzer_cuts_no_seed() -> None:
    """There is room to add to each, too."""
    lengths = {name: (max(map(len, entry.seeds)), most_bytes(entry)) for name, entry in entries().items()}
    assert not {name: (longest, most) for name, (longest, most) in lengths.items() if most < 2 * longest}


def test_another_error_is_no_refusal() -> None:
    entry = Entry(dict[bytes, int]().__getitem__, (b"",), (ValueError,))
    with pytest.raises(KeyError):
        entry.tried(b"x")
    silent = Entry(lambda raw: int(raw) or list[int]().index(1), (b"",), (ValueError,))
    assert not silent.tried(b"x")
