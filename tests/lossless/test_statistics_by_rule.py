"""The law of what clients get under the coupled rule and the rule of blocks: more settings of test_statistics.py, which
the long proof alone draws, and in another worker."""

from __future__ import annotations

import pytest
from lossless.chi_square import check
from lossless.statistics import LONG_BY_RULE, Pair, Setting


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("setting", LONG_BY_RULE, ids=lambda setting: setting.name)
async def test_tokens_follow_the_targets_law(pair: Pair, setting: Setting) -> None:
    await check(pair, setting, setting.long)
