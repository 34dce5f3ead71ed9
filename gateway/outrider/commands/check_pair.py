"""`outrider check-pair`: does a draft fit a target? Tokenizers, vocabularies and, on a text, how often they agree."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from outrider.commands.arguments import parse
from outrider.commands.complaints import load_tokenizer, one_line, read_text, require_config
from outrider.wire.config import ServiceSettings
from outrider.wire.hub import locate

if TYPE_CHECKING:
    from outrider.commands.agreement import Agreement

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
        print(f"{prog}: error: {one_line(error)}", file=sys.stderr)
        return 1
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
    from outrider.commands.agreement import compare_models

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


if __name__ == "__main__":
    sys.exit(main())
