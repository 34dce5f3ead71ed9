"""The identity proof's models and prompts, what plain decoding makes of each, once and in a second process beside
the cells, and when a difference between two outputs is a near-tie: where they part, both tokens have the highest
score, up to rounding.

Scores are what the arg max is taken of: processed logits under greedy decoding, logits / temperature - log(noise)
under coupling. How far may two orders of summation move a score? One sum of n products in float32 (unit roundoff u =
2^-24) is off by about u sqrt(n) times the norm of its terms, roundings being as good as random (Higham and Mary, "A
new approach to probabilistic rounding error analysis", 2019). A logit ends a chain of sums of N terms in all;
independent errors add in quadrature, so to u sqrt(N) of the vectors that meet in the head, and these have norms of
at most W = max |row of the head| and H = sqrt(hidden size) max |weight of the last norm|:

    tau = u sqrt(N) W H

The norm of the head's terms is about W H / sqrt(hidden size): the factor between them is the allowance for what
layers amplify. Each of two evaluations may be off by tau, for each of two tokens: scores whose order differs are no
more than 4 tau apart. Temperature divides that, a repetition penalty may multiply it."""

from __future__ import annotations

import math
import multiprocessing
import random
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from enum import Enum
from functools import cache
from types import TracebackType
from typing import Any, Literal, Self

import torch
from support.engines import TargetHarness
from support.environment import SEED
from support.models import build_decoder, cpu_kernels, tiny_config, tiny_hf_model, tiny_state
from support.quantized import rounded_state
from torch import Tensor

from outrider.engine.batch import BatchEntry
from outrider.engine.kv_cache_manager import BLOCK_SIZE
from outrider.engine.loader import LoadedModel
from outrider.engine.model_runner import ModelRunner
from outrider.engine.sampler import SamplingRows, SequenceSampler, assemble
from outrider.kernels.random.reference import as_int64, exponential_noise
from outrider.kernels.sampling.reference import adjust_logits
from outrider.rpc.messages import Credit, Open
from outrider.rpc.words.sampling_params import AcceptanceRule, SamplingParams

VOCAB = 300
# What the target's products are stored as. In float32 each row of the head may have a twin: the row of every odd token
# is that of the even one before it, but for a rounding of each number, so that there are near-ties at every position.
Weights = Literal["float32", "twins", "int8", "int4"]
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
    guess: tuple[int, ...] = ()  # at the output, for a draft that has no other

    def open(self, method: str = "", priority: int = 0) -> Open:
        """As the gateway opens it; several methods have commas between them."""
        methods = tuple(method.split(","))
        rule = AcceptanceRule.REJECTION if self.sampling.greedy else AcceptanceRule.COUPLED
        return Open(
            0,
            self.ids,
            self.sampling,
            acceptance=rule,
            seed=self.seed,
            priority=priority,
            one_hot=self.sampling.greedy,
            method=methods[0],
            methods=methods if len(methods) > 1 else (),
            prediction=self.guess,
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
    """The target in transformers, in float32."""
    model = tiny_hf_model("llama", SEED + 1, **SHAPE)
    with torch.no_grad():
        head = model.lm_head.weight.mul_(SHARPER)  # [vocab, hidden]
        if twins:
            roundings = torch.randint(-1, 2, head[1::2].shape, generator=torch.Generator().manual_seed(SEED))
            head[1::2] = head[::2] * (1 + torch.finfo(torch.float32).eps * roundings)
    return model


def target_state(weights: Weights) -> Mapping[str, Tensor]:
    """The target's tensors, as a checkpoint stores them."""
    state = tiny_state(hf_model(weights == "twins"))
    return rounded_state(state, weights) if weights in ("int8", "int4") else state


@cache
def target_model(arithmetic: Arithmetic, weights: Weights = "float32") -> LoadedModel:
    """The target. Of few bits, the C kernels keep its products packed, and PyTorch computes with their numbers."""
    invariant = arithmetic != Arithmetic.ORDINARY
    with cpu_kernels("c" if arithmetic == Arithmetic.C else "pytorch"):
        return build_decoder(tiny_config("llama", **SHAPE), target_state(weights), batch_invariant=invariant)


@cache
def rounded_draft(weights: Weights) -> LoadedModel:
    """The target's own weights rounded to 4 bits, as `self:int4` drafts."""
    return build_decoder(tiny_config("llama", **SHAPE), target_state(weights), quantization="int4")


@cache
def draft_model() -> LoadedModel:
    """The target with noise on its weights; in ordinary mode, as every draft service runs."""
    state = tiny_state(hf_model())
    noise = torch.Generator().manual_seed(SEED)
    for tensor in state.values():
        tensor += DRAFT_NOISE * tensor.std() * torch.randn(tensor.shape, generator=noise)
    return build_decoder(tiny_config("llama", **SHAPE), state)


def decode_plainly(prompt: Prompt, arithmetic: Arithmetic, weights: Weights = "float32") -> list[int]:
    """What that target says of a prompt."""
    return decode_alone(prompt, target_model(arithmetic, weights))


def decode_alone(prompt: Prompt, loaded: LoadedModel) -> list[int]:
    """One token a step, alone in the batch, nothing cached before, blocks enough."""
    total = len(prompt.ids) + prompt.sampling.max_tokens
    harness = TargetHarness.of(loaded, num_blocks=-(-total // BLOCK_SIZE) + 1, prefix_cache=False)
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


_Key = tuple[tuple[int, ...], int, Arithmetic, Weights]


class PlainOutputs:
    """Use as a context. One process, started afresh: a forked one would share this one's threads."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._executor = ProcessPoolExecutor(1, context, torch.set_num_threads, (1,))
        self._outputs: dict[_Key, Future[list[int]]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._executor.shutdown(cancel_futures=True)

    def start(self, prompts: Iterable[Prompt], arithmetic: Arithmetic, weights: Weights = "float32") -> None:
        """Decodes those that were not started before, in the background."""
        for prompt in prompts:
            key = _key(prompt, arithmetic, weights)
            if key not in self._outputs:
                self._outputs[key] = self._executor.submit(decode_plainly, prompt, arithmetic, weights)

    def of(self, prompt: Prompt, arithmetic: Arithmetic, weights: Weights = "float32") -> list[int]:
        """The output of one prompt, by now or after a wait."""
        self.start([prompt], arithmetic, weights)
        return self._outputs[_key(prompt, arithmetic, weights)].result()


def _key(prompt: Prompt, arithmetic: Arithmetic, weights: Weights) -> _Key:
    return prompt.ids, prompt.sampling.max_tokens, arithmetic, weights


UNIT_ROUNDOFF = 2.0**-24


@dataclass(frozen=True, slots=True)
class NearTie:
    """Where two outputs part for no other reason than rounding."""

    index: int  # of the output token
    tokens: tuple[int, int]
    gap: float  # between the highest score and the lower one of the two tokens'
    bound: float

    def __str__(self) -> str:
        return f"at token {self.index}: {self.tokens[0]} or {self.tokens[1]}, {self.gap:.1e} apart ({self.bound:.1e})"


def near_tie(plain: Sequence[int], other: Sequence[int], prompt: Prompt, loaded: LoadedModel, hf: Any) -> NearTie:
    """Judges the first difference of two outputs of a prompt. AssertionError if rounding cannot have made it. `hf` has
    the last norm and the head that `loaded` computes with."""
    index = first_difference(plain, other)
    assert index is not None and index < min(len(plain), len(other)), f"lengths {len(plain)} and {len(other)}"
    scores = plain_scores(prompt, plain[:index], loaded)  # [vocab]
    tokens = (plain[index], other[index])
    gap = float(scores.max() - scores[list(tokens)].min())
    bound = score_bound(prompt, len(prompt.ids) + index, hf)
    tie = NearTie(index, tokens, gap, bound)
    assert gap <= bound, f"no near-tie {tie}"
    return tie


def plain_scores(prompt: Prompt, output: Sequence[int], loaded: LoadedModel) -> Tensor:  # [vocab] float64
    """What the token after `output` is the arg max of, computed for this sequence alone. Of parameters that cut tokens
    off it knows nothing."""
    context = [*prompt.ids, *output]
    num_blocks = -(-len(context) // BLOCK_SIZE)
    runner = ModelRunner(loaded.model, num_blocks)
    logits = runner.forward([BatchEntry(context, 0, list(range(num_blocks)), 1)])  # [1, vocab]
    sampler = SequenceSampler(prompt.sampling, prompt.ids, output, loaded.eos_token_ids, loaded.vocab_size)
    scores = adjust_logits(logits, assemble([SamplingRows(sampler)]))[0].double()
    if prompt.sampling.greedy:
        return scores
    seed, place, completion = (torch.tensor([number]) for number in (as_int64(prompt.seed), len(context), 0))
    noise = exponential_noise(seed, place, completion, loaded.vocab_size)[0].double()  # [vocab]
    return scores / prompt.sampling.temperature - noise.log()


def score_bound(prompt: Prompt, context_len: int, hf: Any) -> float:
    """4 tau, as above, in units of the scores."""
    config = hf.config
    hidden, heads_dim = config.hidden_size, config.num_attention_heads * config.head_dim
    # Two norms, the products of query and key, key by query, of values, of the output, gate and up, and down.
    of_layer = 2 * hidden + hidden + config.head_dim + context_len + heads_dim + hidden + config.intermediate_size
    num_terms = config.num_hidden_layers * of_layer + 2 * hidden  # and the last norm and the head
    row_norm = float(hf.lm_head.weight.detach().norm(dim=1).max())
    hidden_norm = math.sqrt(hidden) * float(hf.model.norm.weight.detach().abs().max())
    tau = UNIT_ROUNDOFF * math.sqrt(num_terms) * row_norm * hidden_norm
    sampling = prompt.sampling
    return 4 * tau * max(sampling.repetition_penalty, 1.0) / (1.0 if sampling.greedy else sampling.temperature)
