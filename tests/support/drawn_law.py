"""Whether what a deployment draws under rejection follows the target's law, by what it says of each position."""

from __future__ import annotations

import asyncio
import math
from itertools import chain
from typing import Any

from support.deployment import Deployment


async def excess_of_a_token(served: Deployment, count: int, **speculation: Any) -> tuple[float, int]:
    """By how many standard deviations one of three tokens comes more often than the target says, and how many tokens
    were drafted, of so many requests. Seeds are the gateway's own, so that what drafts is what was put in use."""
    excess, variance, drafted = 0.0, 0.0, 0

    async def one(number: int) -> list[Any]:
        return await served.generate(
            token_ids={"ids": [number % 90 + 4, 9, 8, 7]},
            sampling={
                "temperature": 1, "max_tokens": 8, "ignore_eos": True, "allowed_token_ids": [7, 8, 9], "logprobs": 3,
                "logprobs_mode": 3, "logit_bias": {7: 0.7},
            },
            speculation={"num_draft_tokens": 4, "acceptance": 1, "mode": "sequential", **speculation},
        )  # fmt: skip

    for start in range(0, count, 12):
        for said in await asyncio.gather(*(one(n) for n in range(start, start + 12))):
            drafted += said[-1].speculation.num_draft_tokens
            tokens = [token for part in said for token in part.token_ids]
            rows = chain.from_iterable(part.logprobs for part in said)
            for token, row in zip(tokens, rows, strict=True):
                p = next(math.exp(each.logprob) for each in row.candidates if each.id == 7)
                excess, variance = excess + (token == 7) - p, variance + p * (1 - p)
    return excess / math.sqrt(variance), drafted
