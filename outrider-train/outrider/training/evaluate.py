"""What a pair is worth, measured on held-out files with the exported folders through transformers.

Acceptance is that of plain speculative decoding with chains of `k` drafted tokens: greedy (the draft's best token is
the target's) or by rejection sampling at temperature 1. Both models are decoded side by side, token by token, so the
committed text follows the target's law and every drafted token is tested in the context that it would have had.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from outrider.training.model import NextToken

PROMPTS = 32
PROMPT_TOKENS = 64
NEW_TOKENS = 128
NUM_DRAFT_TOKENS = 4
LOSS_WINDOW = 512
SEED = 5
SPECIAL_IDS = (0, 1, 2)  # <|endoftext|>, <|user|>, <|assistant|>


@dataclass(frozen=True)
class AcceptanceCounts:
    """Drafted, tested and accepted tokens of a run, and the rounds that they took."""

    rounds: int
    drafted: int
    tested: int
    accepted: int

    @property
    def per_tested(self) -> float:
        """Accepted per token that the target came to judge: those after a refusal do not count."""
        return self.accepted / self.tested

    @property
    def per_drafted(self) -> float:
        """Accepted per token that the draft made."""
        return self.accepted / self.drafted


@dataclass(frozen=True)
class Report:
    """Every figure of the model card."""

    target_loss: float
    draft_loss: float
    held_out_tokens: int
    distinct_share: float
    greedy: AcceptanceCounts
    sampled: AcceptanceCounts
    target_special_probs: tuple[float, ...]  # the mean probability of each special token
    draft_special_probs: tuple[float, ...]


def evaluate(target_folder: Path, draft_folder: Path, held_out: Sequence[Tensor]) -> Report:
    """Measure the pair on the held-out files' token ids."""
    target, draft = load(target_folder), load(draft_folder)
    prompts = choose_prompts(held_out)
    greedy_ids, greedy = speculate(target, draft, prompts, temperature=0.0)
    _, sampled = speculate(target, draft, prompts, temperature=1.0)
    target_loss, target_special_probs = measure_text(target, held_out)
    draft_loss, draft_special_probs = measure_text(draft, held_out)
    return Report(
        target_loss=target_loss,
        draft_loss=draft_loss,
        held_out_tokens=sum(ids.numel() - 1 for ids in held_out),
        distinct_share=distinct_share(greedy_ids),
        greedy=greedy,
        sampled=sampled,
        target_special_probs=target_special_probs,
        draft_special_probs=draft_special_probs,
    )


def load(folder: Path, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """The exported model."""
    model: LlamaForCausalLM = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return model.eval()


@torch.no_grad()
def measure_text(model: LlamaForCausalLM, files: Sequence[Tensor]) -> tuple[float, tuple[float, ...]]:
    """(nats per token, the mean probability of each special token) over all files.

    Each file is cut into windows of its own; a window's first tokens have little context.
    """
    total, count = 0.0, 0
    special = torch.zeros(len(SPECIAL_IDS), dtype=torch.float64)
    for ids in files:
        for window in torch.split(ids.long(), LOSS_WINDOW):
            if window.numel() < 2:
                continue
            logits = model(window[None, :-1], use_cache=False).logits[0]  # [tokens, vocabulary]
            total += F.cross_entropy(logits, window[1:], reduction="sum").item()
            special += F.softmax(logits, dim=-1)[:, SPECIAL_IDS].double().sum(0)
            count += window.numel() - 1
    return total / count, tuple((special / count).tolist())


def choose_prompts(files: Sequence[Tensor]) -> Tensor:
    """[PROMPTS, PROMPT_TOKENS] ids from places chosen by a fixed seed, the files by turns."""
    generator = torch.Generator().manual_seed(SEED)
    long_files = [ids for ids in files if ids.numel() > PROMPT_TOKENS + NEW_TOKENS]
    prompts = []
    for index in range(PROMPTS):
        ids = long_files[index % len(long_files)]
        start = int(torch.randint(ids.numel() - PROMPT_TOKENS - NEW_TOKENS, (1,), generator=generator))
        prompts.append(ids[start : start + PROMPT_TOKENS].long())
    return torch.stack(prompts)


@torch.no_grad()
def speculate(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, prompts: Tensor, temperature: float
) -> tuple[Tensor, AcceptanceCounts]:
    """What the target commits after `prompts` [sequences, NEW_TOKENS], and how the draft's tokens fared."""
    generator = torch.Generator().manual_seed(SEED)
    target_next, draft_next = NextToken(target), NextToken(draft)
    place = torch.zeros(len(prompts), dtype=torch.int64)  # drafted tokens accepted so far in each one's round
    rounds = tested = accepted = 0
    committed: list[Tensor] = []
    feed = prompts
    for _ in range(NEW_TOKENS):
        target_probs, draft_probs = target_next(feed, temperature), draft_next(feed, temperature)
        drafting = place < NUM_DRAFT_TOKENS
        kept, tokens = _verify_drafted(target_probs, draft_probs, generator)
        bonus = torch.multinomial(target_probs, 1, generator=generator)[:, 0]
        tokens = torch.where(drafting, tokens, bonus)
        rounds += int((place == 0).sum())
        tested += int(drafting.sum())
        accepted += int((drafting & kept).sum())
        place = torch.where(drafting & kept, place + 1, 0)
        committed.append(tokens)
        feed = tokens[:, None]
    return torch.stack(committed, dim=1), AcceptanceCounts(rounds, rounds * NUM_DRAFT_TOKENS, tested, accepted)


def distinct_share(continuations: Tensor) -> float:
    """The mean share of different tokens in a continuation."""
    shares = [len(set(row)) / len(row) for row in continuations.tolist()]
    return sum(shares) / len(shares)


def _verify_drafted(target_probs: Tensor, draft_probs: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw from the draft and test: (which were accepted, what is committed: the drafted token, or the recovered)."""
    drafted = torch.multinomial(draft_probs, 1, generator=generator)  # [sequences, 1]
    ratio = target_probs.gather(1, drafted) / draft_probs.gather(1, drafted)
    kept = (torch.rand(drafted.shape, generator=generator) < ratio)[:, 0]
    residual = (target_probs - draft_probs).clamp_min(0.0)
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, target_probs)
    recovered = torch.multinomial(residual, 1, generator=generator)[:, 0]
    return kept, torch.where(kept, drafted[:, 0], recovered)
