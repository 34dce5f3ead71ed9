"""`outrider check-pair`: does a draft fit a target? Compares tokenizers and vocabularies and, on a text that both
models read, how much their next-token distributions have in common at every position."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from outrider.cli.terminal import fail, load_tokenizer, one_line, parse, read_text, require_config
from outrider.engine.batch import BatchEntry
from outrider.engine.loader import LoadedModel, load_model
from outrider.engine.model_runner import ModelRunner
from outrider.engine.models.base import UnsupportedModel
from outrider.rpc.hub import locate
from outrider.rpc.settings import ServiceSettings

DESCRIPTION = (
    "Say whether a draft fits a target. Tokenizers and vocabularies are compared; with --text both models read the "
    "file, and their next-token distributions are compared at every position. Status 1: no pair."
)


class CheckPairSettings(ServiceSettings):
    """What is compared."""

    section: ClassVar[str] = "check_pair"

    target: Path = Field(description="folder of the target's checkpoint, or a hub id: ORG/NAME")
    draft: Path = Field(description="folder of the draft's checkpoint, or a hub id: ORG/NAME")
    text: Path | None = Field(None, description="text file to compare the models on; absent: they are not loaded")
    num_draft_tokens: int = Field(4, ge=1, le=128, description="drafted tokens of a round, for the estimates")
    max_tokens: int = Field(2048, ge=2, description="tokens read of the text")
    threads: int | None = Field(None, ge=1, le=256, description="threads for the models' products (default: torch's)")


def main(argv: Sequence[str] | None = None, prog: str = "outrider check-pair") -> int:
    """Prints the comparison; 1 if the two are no pair or cannot be read."""
    settings = parse(CheckPairSettings, sys.argv[1:] if argv is None else argv, prog, DESCRIPTION)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        weights = settings.text is not None
        folders = {name: locate(getattr(settings, name), weights=weights) for name in ("target", "draft")}
        settings = settings.model_copy(update=folders)
        if settings.text is not None:
            for folder, flag in ((settings.target, "--target"), (settings.draft, "--draft")):
                require_config(folder, flag)
        ids = _compare_tokenizers(settings)
        if settings.text is not None:
            _compare_models(settings, ids)
    except (OSError, ValueError) as error:
        return fail(prog, error, one_line(error))
    return 0


def _compare_tokenizers(settings: CheckPairSettings) -> list[int]:
    """Prints the tokenizers' agreement; returns the text's ids."""
    target, draft = load_tokenizer(settings.target, "--target"), load_tokenizer(settings.draft, "--draft")
    share = target.require_agreement(draft)
    same = ", identical" if target.fingerprint == draft.fingerprint else ""
    print(f"tokenizers    {target.num_tokens} and {draft.num_tokens} tokens, {share:.1%} alike{same}")
    if settings.text is None:
        print("acceptance    not measured: give --text FILE")
        return []
    return target.encode(read_text(settings.text, "--text"))[: settings.max_tokens]


def _compare_models(settings: CheckPairSettings, ids: Sequence[int]) -> None:
    if len(ids) < 2:
        raise ValueError(f"{settings.text} has {len(ids)} tokens; at least 2 are needed")
    result = compare_models(settings.target, settings.draft, ids, settings.threads)
    print("\n".join(describe(result, settings.num_draft_tokens)))


def describe(result: Agreement, num_draft_tokens: int) -> list[str]:
    """The comparison of the models, a line each."""
    greedy, sampled = result.matches, result.overlaps
    return [
        f"vocabularies  {result.target_vocab} and {result.draft_vocab} logits",
        f"context       {result.target_len} and {result.draft_len} tokens",
        f"read          {len(greedy)} positions of the text",
        f"loss          {result.target_loss:.3f} and {result.draft_loss:.3f} nats a token",
        f"acceptance    {mean(greedy):.3f} greedy (same argmax), {mean(sampled):.3f} at temperature 1 (overlap)",
        f"tokens/round  {tokens_per_round(greedy, num_draft_tokens):.2f} greedy, "
        f"{tokens_per_round(sampled, num_draft_tokens):.2f} at temperature 1 "
        f"(estimates for {num_draft_tokens} drafted tokens, on this text and not on the target's own)",
    ]


def mean(values: Sequence[float]) -> float:
    """The mean of at least one value."""
    return sum(values) / len(values)


def tokens_per_round(acceptance: Sequence[float], num_draft_tokens: int) -> float:
    """The expected tokens of a round that starts anywhere in the text: the target's own, and each drafted one if it
    and all before it are accepted."""
    width = min(num_draft_tokens, len(acceptance))
    totals = []
    for start in range(len(acceptance) - width + 1):
        survival, total = 1.0, 1.0
        for accepted in acceptance[start : start + width]:
            survival *= accepted
            total += survival
        totals.append(total)
    return mean(totals)


WINDOW = 512  # tokens of context; each window is read from its start
ROWS = 128  # rows of one forward pass: large vocabularies make large logits


@dataclass(slots=True)
class Agreement:
    """A value per predicted position, the models' mean losses, and their limits."""

    target_vocab: int
    draft_vocab: int
    target_len: int
    draft_len: int
    matches: list[float] = field(default_factory=list)  # 1 where both have the same argmax, else 0
    overlaps: list[float] = field(default_factory=list)  # sum of min(target_probs, draft_probs)
    target_loss: float = 0.0
    draft_loss: float = 0.0


def compare_models(target: Path, draft: Path, ids: Sequence[int], threads: int | None = None) -> Agreement:
    """Both models on the same tokens. Raises ValueError where one cannot be loaded or does not know the ids."""
    if threads is not None:
        torch.set_num_threads(threads)
    models = _load(target), _load(draft)
    for folder, loaded in zip((target, draft), models, strict=True):
        if max(ids) >= loaded.vocab_size:
            raise ValueError(f"{folder} has {loaded.vocab_size} logits, but the target's tokenizer gives id {max(ids)}")
    result = Agreement(models[0].vocab_size, models[1].vocab_size, models[0].max_model_len, models[1].max_model_len)
    window = min(WINDOW, result.target_len, result.draft_len)
    for start in range(0, len(ids) - 1, window):
        _read_window(result, models, ids[start : start + window + 1])
    result.target_loss /= len(result.matches)
    result.draft_loss /= len(result.matches)
    return result


def _load(folder: Path) -> LoadedModel:
    try:
        return load_model(folder)
    except UnsupportedModel as error:
        raise ValueError(str(error)) from error


def _read_window(result: Agreement, models: tuple[LoadedModel, LoadedModel], ids: Sequence[int]) -> None:
    """Adds the positions of a window: every token but the first is predicted from those before it."""
    inputs, following = ids[:-1], torch.tensor(ids[1:])
    for target, draft, start in zip(_probs(models[0], inputs), _probs(models[1], inputs), _starts(inputs), strict=True):
        shared = min(target.shape[1], draft.shape[1])  # padded vocabularies may differ
        result.matches += (target.argmax(-1) == draft.argmax(-1)).float().tolist()
        result.overlaps += torch.minimum(target[:, :shared], draft[:, :shared]).sum(-1).tolist()
        chosen = following[start : start + len(target), None]
        result.target_loss -= float(target.gather(1, chosen).log().sum())
        result.draft_loss -= float(draft.gather(1, chosen).log().sum())


def _probs(loaded: LoadedModel, ids: Sequence[int]) -> Iterator[Tensor]:  # each [rows, vocab] float32
    """The next-token distributions after every id, a few rows at a time."""
    runner = ModelRunner(loaded.model, num_blocks=WINDOW // 16)
    table = range(runner.cache.num_blocks)
    for start in _starts(ids):
        rows = ids[start : start + ROWS]
        yield runner.forward([BatchEntry(rows, start, table, len(rows))]).softmax(-1)


def _starts(ids: Sequence[int]) -> range:
    return range(0, len(ids), ROWS)


if __name__ == "__main__":
    sys.exit(main())
