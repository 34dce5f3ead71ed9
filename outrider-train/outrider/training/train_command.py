"""`outrider model train`: a draft for any target, or a head that drafts beside it, by distillation on what the target
writes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, cast

from pydantic import Field

from outrider.cli.arguments import fail, one_line, parse, require_config
from outrider.cli.terminal import Painter, make_painter, progress
from outrider.rpc.hub import locate
from outrider.rpc.settings import ServiceSettings

if TYPE_CHECKING:
    from outrider.training.course import CoursePlan
    from outrider.training.drafts import DraftAcceptance, DraftPlan
    from outrider.training.heads import HeadMethod, HeadPlan

DESCRIPTION = (
    "Train a draft for the target (second bare argument) on a corpus (third): METHOD draft drafts a token a pass, pard "
    "all tokens of a window in one; eagle3, medusa, mlp, mtp, dflash and dspark are heads that draft beside the target "
    "from its hidden states. The target writes on from places of the corpus, and the draft learns its distributions "
    "there. A run that was cut short goes on when it is started again with the same settings."
)
DRAFTS = ("draft", "pard")  # models of their own
BLOCKS = ("dflash", "dspark")  # heads that draft a window in one pass
HEADS = ("eagle3", "medusa", "mlp", "mtp", *BLOCKS)


class TrainSettings(ServiceSettings):
    """What is trained, and on what."""

    section: ClassVar[str] = "train"

    method: Literal["draft", "pard", "eagle3", "medusa", "mlp", "mtp", "dflash", "dspark"] = Field(
        description="what it will draft by; also the first bare argument"
    )
    target: Path = Field(description="folder or hub id of the target's checkpoint; also the second bare argument")
    corpus: Path = Field(
        description='text file, or .jsonl with an object a line whose "text" is read, or for a head what outrider '
        "model tap made; also the third bare argument"
    )
    out: Path = Field(description="folder to make; OUT.work beside it holds the run until it is done")
    draft: Path | None = Field(
        None,
        description="folder or hub id of a draft that draft and pard start from (default: a Llama half as wide as the "
        "target)",
    )
    layers: int | None = Field(
        None, ge=1, le=256, description="layers of draft and pard (default: the start's, or 2; twice as many for pard)"
    )
    tokens: int | None = Field(
        None,
        ge=1,
        le=16,
        description="tokens in a row that a head learns to draft (default: 5 for eagle3, 7 for dflash and dspark, "
        "4 for the others); all but eagle3 and mtp draft no more",
    )
    draft_vocab: int | None = Field(
        None, ge=1, description="outputs of eagle3: the corpus's likeliest tokens (default: the whole vocabulary)"
    )
    inner: int | None = Field(
        None, ge=1, description="channels of the feed-forward of dflash and dspark (default: the target's)"
    )
    rank: int | None = Field(
        None, ge=1, description="of what dspark's token before adds (default: 256, and no more than hidden channels)"
    )
    steps: int = Field(1200, ge=1, description="steps of the optimizer")
    batch: int | None = Field(None, ge=1, le=256, description="windows of a step, of 256 tokens each (default: 8)")
    threads: int | None = Field(None, ge=1, le=256, description="threads (default: all cores)")
    plain: bool = Field(False, description="no colours, and no progress bar")


def main(argv: Sequence[str] | None = None, prog: str = "outrider model train") -> int:
    """Trains, and prints what the draft accepts where the corpus was held out; 1 if it cannot."""
    arguments = sys.argv[1:] if argv is None else argv
    settings = parse(TrainSettings, arguments, prog, DESCRIPTION, bare=("method", "target", "corpus"))
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch
    try:
        target = locate(settings.target)
        require_config(target, "--target")
        drafts_by = "pard" if settings.method == "pard" else "draft_model"
        start = None if settings.draft is None else locate(settings.draft, drafts_by=drafts_by)
        if start is not None:
            require_config(start, "--draft")
        painter = make_painter(settings.plain)
        check_method(settings)
        painter.lines(describe(_run(settings, target, start, painter)))
    except (OSError, ValueError) as error:
        return fail(prog, error, one_line(error))
    return 0


def check_method(settings: TrainSettings) -> None:
    """Raises ValueError for a setting that is given and is not the method's."""
    own = {
        "draft": DRAFTS, "layers": DRAFTS, "tokens": HEADS, "draft_vocab": ("eagle3",), "inner": BLOCKS,
        "rank": ("dspark",),
    }  # fmt: skip
    for name, methods in own.items():
        if getattr(settings, name) is not None and settings.method not in methods:
            flag = name.replace("_", "-")
            raise ValueError(f"{flag}: is for {' and '.join(methods)}; the method is {settings.method}")


def draft_plan(settings: TrainSettings, target: Path, start: Path | None) -> DraftPlan:
    """Of a draft."""
    from outrider.training import drafts

    return drafts.DraftPlan(
        parallel=settings.method == "pard",
        target=target,
        corpus=settings.corpus,
        out=settings.out,
        start=start,
        layers=settings.layers,
        steps=settings.steps,
        **_course(settings),
    )


def head_plan(settings: TrainSettings, target: Path) -> HeadPlan:
    """Of a head."""
    from outrider.training import heads

    return heads.HeadPlan(
        method=cast("HeadMethod", settings.method),
        target=target,
        corpus=settings.corpus,
        out=settings.out,
        num_tokens=settings.tokens,
        draft_vocab=settings.draft_vocab,
        inner=settings.inner,
        rank=settings.rank,
        steps=settings.steps,
        **_course(settings),
    )


def describe(measured: Sequence[DraftAcceptance]) -> Iterator[str]:
    """A draft's acceptance, and that of the one it started from."""
    yield "accepted where the corpus was held out, by position, of those reached; tokens a round at k=4 and 8"
    width = max(len(each.name) for each in measured)
    for each in measured:
        for name, shares in (("greedy", each.greedy), ("temperature 1", each.sampled)):
            listed = "  ".join(f"{share:.0%}".rjust(4) for share in shares)
            yield f"  {each.name:<{width}}  {name:<13}  {listed}   {rounds(shares, 4):.2f}  {rounds(shares, 8):.2f}"


def rounds(shares: Sequence[float], k: int) -> float:
    """Tokens that a round of `k` drafted ones commits: those accepted, and one of the target's own."""
    total, survival = 1.0, 1.0
    for share in shares[:k]:
        survival *= share
        total += survival
    return total


def _course(settings: TrainSettings) -> dict[str, CoursePlan]:
    """What is not the default's."""
    from outrider.training.course import CoursePlan

    return {} if settings.batch is None else {"course": CoursePlan(batch_size=settings.batch)}


def _run(settings: TrainSettings, target: Path, start: Path | None, painter: Painter) -> list[DraftAcceptance]:
    import torch

    from outrider.training import drafts, heads

    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    if settings.method in DRAFTS:
        draft = draft_plan(settings, target, start)
        needs, make = drafts.draft_needs(draft), partial(drafts.make_draft, draft)
    else:
        head = head_plan(settings, target)
        needs, make = heads.head_needs(head), partial(heads.make_head, head)
    painter.note(needs.describe())
    with progress(painter, "step", every=10) as shown:
        done = 0

        def on_step(step: int, loss: float) -> None:
            nonlocal done
            done = step
            shown(step, settings.steps, f"loss {loss:.3f}")

        measured = make(on_step, lambda word: shown(done, settings.steps, word))
    painter.note(f"{settings.out}: {settings.method}, trained for {settings.steps} steps")
    return measured


if __name__ == "__main__":
    sys.exit(main())
