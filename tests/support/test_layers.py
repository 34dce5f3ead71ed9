"""The layers of the tests name what is there."""

from __future__ import annotations

import pytest
from support.changes import ABOUT, COMMON, REPOSITORY, changed_files, touches
from support.layers import HEAVY


def test_what_a_layer_names_is_there() -> None:
    assert all(path.exists() for path in HEAVY)
    named = {name for names in ABOUT.values() for name in (*COMMON, *names)}
    assert all((REPOSITORY / name).exists() for name in named), named


@pytest.mark.parametrize(
    ("files", "about_vllm", "about_compilers"),
    [
        (None, True, True),
        ([], False, False),
        (["docs/tour.md", "gateway/outrider/gateway/http/app.py"], False, False),
        (["rpc/outrider/rpc/frames.py"], True, False),
        (["kernels/outrider/kernels/types.py"], True, True),
        (["pyproject.toml"], True, True),
    ],
)
def test_a_change_touches_what_it_may_break(files: list[str] | None, about_vllm: bool, about_compilers: bool) -> None:
    assert (touches("vllm", files), touches("compilers", files)) == (about_vllm, about_compilers)


def test_the_change_of_this_tree_is_known_or_not() -> None:
    assert all(changed_files() or ["an empty change"])
