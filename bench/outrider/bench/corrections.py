"""How often the token that the target puts in the place of a refused one is among the draft's next guesses:

    python bench/outrider/bench/corrections.py [--pair DIR] [--tokens 256]

The target writes text of its own at each temperature; both models then read it, and every position is one draw of each
rule. The draft's guesses are ranked as it ranks them for branches: under coupling by noise
over probability, which it knows, else by probability. Prints a table in Markdown."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from outrider.bench.prompts import read_prompts
from outrider.gateway.text.tokenizer import Tokenizer
from outrider.pairs import pair_path

SEED = 20
RANKS = 3


@dataclass
class Count:
    """Of one rule at one temperature."""

    positions: int = 0
    refused: int = 0
    among: list[int] = field(default_factory=lambda: [0] * RANKS)  # of the refusals, by rank at most

    def add(self, drafted: Tensor, correction: Tensor, ranking: Tensor, refused: Tensor) -> None:
        """drafted, correction, refused: [rows]; ranking: [rows, vocab], highest first."""
        self.positions += len(refused)
        self.refused += int(refused.sum())
        order = ranking.masked_fill(torch.nn.functional.one_hot(drafted, ranking.shape[1]).bool(), -torch.inf)
        best = order.topk(RANKS).indices == correction[:, None]  # [rows, RANKS]
        for rank in range(RANKS):
            self.among[rank] += int((best[:, : rank + 1].any(1) & refused).sum())

    def row(self) -> str:
        """Acceptance, and the share of refusals whose correction is among the first 1, 2, 3."""
        shares = " | ".join(f"{count / max(1, self.refused):.0%}" for count in self.among)
        return f"{1 - self.refused / self.positions:.3f} | {shares}"


def written(model: torch.nn.Module, prompts: list[list[int]], temperature: float, num_tokens: int) -> Tensor:
    """Texts of the target's own, with their prompts: [prompts, length]."""
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    ids = torch.tensor(prompts)
    return model.generate(  # type: ignore[operator, no-any-return]
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, min_new_tokens=num_tokens, **sampling
    )


def distributions(models: list[torch.nn.Module], ids: Tensor, start: int, temperature: float) -> Iterator[list[Tensor]]:
    """Target and draft at every position after `start`, a text at a time: each [rows, vocab] float64."""
    for text in ids:
        logits = [model(text[None, :-1]).logits[0, start - 1 :].double() for model in models]
        yield [(row / (temperature or 1.0)).softmax(-1) for row in logits]


def count(target: Tensor, draft: Tensor, temperature: float, counts: dict[str, Count]) -> None:
    """target, draft: [rows, vocab] probabilities of one text."""
    if not temperature:
        drafted, own = draft.argmax(-1), target.argmax(-1)
        counts["greedy"].add(drafted, own, draft, drafted != own)
        return
    noise = -torch.log1p(-torch.rand_like(target))  # exponential, shared under coupling
    ranking = draft / noise
    drafted, own = ranking.argmax(-1), (target / noise).argmax(-1)
    counts["coupled"].add(drafted, own, ranking, drafted != own)
    drafted = torch.multinomial(draft, 1).squeeze(-1)
    ratio = (target / draft).gather(1, drafted[:, None]).squeeze(1)
    residual = (target - draft).clamp_min(0) + 1e-300  # a row without any difference has no refusals
    counts["rejection"].add(drafted, torch.multinomial(residual, 1).squeeze(-1), draft, torch.rand(len(ratio)) >= ratio)


def main() -> None:
    """The table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pair", type=Path, default=None, help="folder with target/ and draft/; the embedded pair")
    parser.add_argument("--tokens", type=int, default=256, help="tokens that the target writes after each prompt")
    options = parser.parse_args()
    folders = pair_path() if options.pair is None else None
    target, draft = (folders.target, folders.draft) if folders else (options.pair / "target", options.pair / "draft")
    models = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval() for folder in (target, draft)]
    prompts = read_prompts(Tokenizer.load(target), None, 16)
    print("| temperature | rule | acceptance | correction is first | in 2 | in 3 |\n|---|---|---|---|---|---|")
    for temperature in (0.0, 0.7, 1.0):
        torch.manual_seed(SEED)
        counts = {name: Count() for name in (["greedy"] if not temperature else ["coupled", "rejection"])}
        with torch.inference_mode():
            ids = written(models[0], prompts, temperature, options.tokens)
            for both in distributions(models, ids, len(prompts[0]), temperature):
                count(both[0], both[1], temperature, counts)
        for name, found in counts.items():
            print(f"| {temperature:g} | {name} | {found.row()} |", flush=True)


if __name__ == "__main__":
    main()
