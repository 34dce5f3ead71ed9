"""`outrider model check`: does a draft fit a target? Compares tokenizers, maps those that differ, and, on a text that
both models read, how much their next-token distributions have in common at every position."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from outrider.cli.arguments import fail, load_tokenizer, one_line, parse, read_text, require_config
from outrider.draft_service.settings import VocabularyLevel
from outrider.draft_service.vocabularies import LoadedTokenizer, join
from outrider.draft_service.vocabularies import describe as describe_vocabulary
from outrider.gateway.text.tokenizer import Tokenizer
from outrider.proposers.reencoding import JoinedVocabulary
from outrider.rpc.hub import locate
from outrider.rpc.settings import ServiceSettings

DESCRIPTION = (
    "Say whether a draft fits a target. Tokenizers are compared, and mapped where they differ; with --text both models "
    "read the file, and their next-token distributions are compared at every position. A --head is loaded beside the "
    "target; with --text the two go on from places of the file. Status 1: no pair."
)


class CheckPairSettings(ServiceSettings):
    """Which models are compared, on which text."""

    section: ClassVar[str] = "check_pair"

    target: Path = Field(description="folder of the target's checkpoint, or a hub id: ORG/NAME")
    draft: Path | None = Field(None, description="folder of the draft's checkpoint, or a hub id: ORG/NAME")
    head: Path | None = Field(None, description="folder of a head's, instead, that drafts beside the target")
    text: Path | None = Field(None, description="text file to compare the models on; absent: they are not loaded")
    draft_quantization: Literal["int8", "int4"] | None = Field(
        None, description="round the draft's weights to 8 or 4 bits, as outrider draft --quantization does"
    )
    num_draft_tokens: int = Field(4, ge=1, le=128, description="drafted tokens of a round, for the estimates")
    max_tokens: int = Field(2048, ge=2, description="tokens read of the text")
    threads: int | None = Field(None, ge=1, le=256, description="threads for the models' products (default: torch's)")
    vocabulary_level: VocabularyLevel = "auto"

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        if (self.draft is None) == (self.head is None):
            raise ValueError("give --draft DIR, or --head DIR")
        return self


def main(argv: Sequence[str] | None = None, prog: str = "outrider model check") -> int:
    """Prints the comparison; 1 if the two are no pair or cannot be read."""
    settings = parse(CheckPairSettings, argv, prog, DESCRIPTION)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch
    try:
        if settings.text is not None:
            read_text(settings.text, "--text")  # said before anything is printed, or loaded
        weights = settings.text is not None or settings.head is not None
        target = locate(settings.target, weights=weights)
        if settings.head is not None:
            _compare_head(settings, target, locate(settings.head))
        elif settings.draft is not None:
            _compare_draft(settings, target, locate(settings.draft, weights=weights, drafts_by="draft_model"))
    except (OSError, ValueError) as error:
        return fail(prog, error, one_line(error))
    return 0


def _compare_draft(settings: CheckPairSettings, target: Path, draft: Path) -> None:
    """Prints how a draft's tokenizer, and with a text how the draft, agree with the target's."""
    from outrider.cli.agreement import compare_models, describe  # torch comes with it: not for --help

    if settings.text is not None:
        require_config(target, "--target")
        require_config(draft, "--draft")
    ids, joined = _compare_tokenizers(settings, target, draft)
    if settings.text is not None:
        agreement = compare_models(target, draft, ids, settings.threads, joined, settings.draft_quantization)
        print("\n".join(describe(agreement, settings.num_draft_tokens)))


def _compare_head(settings: CheckPairSettings, target: Path, head: Path) -> None:
    """Prints what a head is, and with a text what the target keeps of its drafts."""
    from outrider.cli.head_agreement import describe_head, judge_head  # the same

    require_config(target, "--target")
    require_config(head, "--head")
    ids: list[int] = []
    if settings.text is not None:
        ids = _read_ids(settings, load_tokenizer(target, "--target"))
    found = judge_head(target, head, ids, settings.num_draft_tokens, settings.threads)
    print("\n".join(describe_head(found)))
    if settings.text is None:
        print("acceptance    not measured: give --text FILE")


def _read_ids(settings: CheckPairSettings, tokenizer: Tokenizer) -> list[int]:
    """The text's. ValueError where they are too few."""
    ids = [] if settings.text is None else tokenizer.encode(read_text(settings.text, "--text"))[: settings.max_tokens]
    if len(ids) < 2:
        raise ValueError(f"{settings.text} has {len(ids)} tokens; at least 2 are needed")
    return ids


def _compare_tokenizers(
    settings: CheckPairSettings, target_folder: Path, draft_folder: Path
) -> tuple[list[int], JoinedVocabulary | None]:
    """Prints how the draft's vocabulary serves the target; returns the text's ids, and how one that is another is
    joined with the target's."""
    target, draft = load_tokenizer(target_folder, "--target"), load_tokenizer(draft_folder, "--draft")
    joined = None
    if target.fingerprint == draft.fingerprint:
        print(f"tokenizers    {target.num_tokens} tokens each, identical")
    else:
        one, other = LoadedTokenizer.read(target_folder), LoadedTokenizer.read(draft_folder)
        try:
            joined = join(one, other, settings.vocabulary_level)
        except ValueError as error:
            raise ValueError(f"not a pair: {target_folder} and {draft_folder}: {error}") from error
        print(f"tokenizers    {target.num_tokens} and {draft.num_tokens} tokens: {describe_vocabulary(joined)}")
    if settings.text is None:
        print("acceptance    not measured: give --text FILE")
        return [], joined
    ids = _read_ids(settings, target)
    if joined is not None:
        mapping = joined.mapping
        length = len(mapping.spell_all(ids)) / len(ids)
        print(f"of the text   {mapping.overlap_in(ids):.1%} have a counterpart; the draft reads {length:.2f} for each")
    return ids, joined
