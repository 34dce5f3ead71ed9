"""The identity proof's models and prompts, and what plain decoding makes of a prompt."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any

import torch
from conftest import SEED
from target_harness import Harness
from tiny import cpu_kernels, tiny_config, tiny_hf_model, tiny_state

from outrider.engine.kv_cache_manager import BLOCK_SIZE
from outrider.engine.loader import LoadedModel, build_decoder
from outrider.rpc.messages import Credit, Open
from outrider.rpc.sampling_params import AcceptanceRule, SamplingParams

VOCAB = 300
# Two layers at least: with one, cached keys and values would not depend on what stands before their token.
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
}
SHARPER = 5.0  # factor on the head, so that sampled text has likely and unlikely tokens
DRAFT_NOISE = 0.05  # of the draft's weights, in their standard deviations: some drafts are right and some are wrong
SHORTEST_PROMPT, LONGEST_PROMPT = 64, 100  # tokens
GREEDY_MENU: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"repetition_penalty": 1.2},
    {"presence_penalty": 0.7, "frequency_penalty": 0.2},
    {"logit_bias": {7: 1.5, 11: -2.0}, "bad_words_ids": ((23,), (31, 32))},
)
PENALTIES_MENU: tuple[dict[str, Any], ...] = (*GREEDY_MENU[1:], {"repetition_penalty": 1.1, "frequency_penalty": 0.3})
COUPLED_MENU: tuple[dict[str, Any], ...] = (
    *PENALTIES_MENU,
    {"top_p": 0.9},
    {"top_k": 20},
    {"min_p": 0.02},
    {"top_p": 0.95, "top_k": 50, "repetition_penalty": 1.2},
)


class Arithmetic(Enum):
    """What computes the target's logits. Only in ordinary mode do a row's bits depend on the others of its step."""

    C = "C kernels"
    INVARIANT = "PyTorch, batch-invariant"
    ORDINARY = "PyTorch, ordinary"


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt with all that its output is a function of."""

    ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int

    def open(self, method: str = "", priority: int = 0) -> Open:
        """As the gateway opens it."""
        rule = AcceptanceRule.REJECTION if self.sampling.greedy else AcceptanceRule.COUPLED
        return Open(
            0,
            self.ids,
            self.sampling,
            acceptance=rule,
            seed=self.seed,
            priority=priority,
            one_hot=self.sampling.greedy,
            method=method,
        )


def make_prompt(number: int, coupled: bool, num_tokens: int, truncated: bool = True, length: int = 0) -> Prompt:
    """Prompt `number`. Its first block is its own, so that no prompt warms another; its second block is everybody's and
    must yet not be another prompt's; later it repeats itself, so that n-grams are found. Without `truncated`, no
    parameter cuts tokens off."""
    rng = random.Random(f"{SEED} {number} {coupled}")
    length = length or rng.randrange(SHORTEST_PROMPT, LONGEST_PROMPT + 1)
    ids = [3 + number % (VOCAB - 3), 3 + number // (VOCAB - 3), *rng.choices(range(3, VOCAB), k=BLOCK_SIZE - 2)]
    ids += random.Random(SEED).choices(range(3, VOCAB), k=BLOCK_SIZE)
    while len(ids) < length:
        start = rng.randrange(2, len(ids) - 6)
        ids += [*ids[start : start + rng.randrange(3, 7)], rng.randrange(3, VOCAB)]
    menu = GREEDY_MENU if not coupled else COUPLED_MENU if truncated else PENALTIES_MENU
    temperature = round(rng.uniform(0.8, 1.2), 3) if coupled else 0.0
    sampling = SamplingParams(
        temperature=temperature, max_tokens=num_tokens, ignore_eos=True, **menu[rng.randrange(len(menu))]
    )
    return Prompt(tuple(ids[:length]), sampling, rng.randrange(1 << 63) if coupled else 0)


@cache
def hf_model(twins: bool = False) -> Any:
    """The target in transformers. With `twins`, the row of the head of every odd token is that of the even one before
    it, but for a rounding of each weight: near-ties at every position."""
    model = tiny_hf_model("llama", SEED + 1, **SHAPE)
    with torch.no_grad():
        head = model.lm_head.weight.mul_(SHARPER)  # [vocab, hidden]
        if twins:
            roundings = torch.randint(-1, 2, head[1::2].shape, generator=torch.Generator().manual_seed(SEED))
            head[1::2] = head[::2] * (1 + torch.finfo(torch.float32).eps * roundings)
    return model


@cache
def target_model(arithmetic: Arithmetic, twins: bool = False) -> LoadedModel:
    """The target."""
    invariant = arithmetic != Arithmetic.ORDINARY
    with cpu_kernels("c" if arithmetic == Arithmetic.C else "pytorch"):
        return build_decoder(tiny_config("llama", **SHAPE), tiny_state(hf_model(twins)), batch_invariant=invariant)


@cache
def draft_model() -> LoadedModel:
    """The target with noise on its weights; in ordinary mode, as every draft service runs."""
    state = tiny_state(hf_model())
    noise = torch.Generator().manual_seed(SEED)
    for tensor in state.values():
        tensor += DRAFT_NOISE * tensor.std() * torch.randn(tensor.shape, generator=noise)
    return build_decoder(tiny_config("llama", **SHAPE), state)


def decode_plainly(prompt: Prompt, arithmetic: Arithmetic, twins: bool = False) -> list[int]:
    """One token a step, alone in the batch, nothing cached before, blocks enough."""
    loaded = target_model(arithmetic, twins)
    total = len(prompt.ids) + prompt.sampling.max_tokens
    harness = Harness.of(loaded, num_blocks=-(-total // BLOCK_SIZE) + 1, prefix_cache=False)
    harness.send(prompt.open(), Credit(0, total, 0))
    while harness.engine.step(0.0) == 0.0:
        pass
    return harness.output(0)


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The first index at which two outputs part; None if they are equal."""
    for index, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return index
    return None if len(one) == len(other) else min(len(one), len(other))
