"""docs/vllm.md: its table says of every capability what the two engines say of themselves."""

from __future__ import annotations

import re

from test_layout import REPOSITORY

from outrider.rpc.words.sampling_params import CAPABILITIES
from outrider.vllm.target.requests import GRAMMARS, MISSING, VLLM_CAPABILITIES

PAGE = (REPOSITORY / "docs/vllm.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)


def test_the_table_says_what_the_engines_say() -> None:
    said: dict[str, tuple[bool, bool]] = {}
    for what, ours, vllms in ROW.findall(PAGE):
        for name in re.findall(r"`((?:sampling|acceptance)\.\w+)`", what):
            assert name not in said, name
            said[name] = ours.startswith("yes"), vllms.startswith("yes")
    known = {name: (name in CAPABILITIES, name in VLLM_CAPABILITIES) for name in {*CAPABILITIES, *MISSING}}
    assert said == known | {GRAMMARS: (True, True)}, "docs/vllm.md"  # of both, where there is a tokenizer
