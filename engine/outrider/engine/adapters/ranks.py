"""The greatest ranks of low-rank adapters. Settings read them before torch is there."""

MOST_RANK = 64
MOST_RANK_ON_VLLM = 512
