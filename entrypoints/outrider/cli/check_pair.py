"""`outrider check-pair`: does a draft fit a target? Compares tokenizers, maps those that differ, and, on a text that
both models read, how much their next-token distributions have in common at every position."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from outrider.cli.terminal import fail, load_tokenizer, one_line, parse, read_text, require_config
from outrider.draft_service.settings import VocabularyLevel
from outrider.draft_service.vocabularies import LoadedTokenizer, join
from outrider.draft_service.vocabularies import describe as describe_vocabulary
from outrider.proposers.reencoding import JoinedVocabulary
from outrider.rpc.hub import locate
from outrider.rpc.settings import ServiceSettings

DESCRIPTION = (
    "Say whether a draft fits a target. Tokenizers are compared, and mapped where they differ; with --text both models "
    "read the file, and their next-token distributions are compared at every position. Status 1: no pair."
)


class CheckPairSettings(ServiceSettings):
    """What is compared."""

    section: ClassVar[str] = "check_pair"

    target: Path = Field(description="folder of the target's checkpoint, or a hub id: ORG/NAME")
    draft: Path = Field(description="folder of the draft's checkpoint, or a hub id: ORG/NAME")
    text: Path | None = Field(None, description="text file to compare the models on; absent: they are not loaded")
    draft_quantization: Literal["int8"] | None = Field(
        None, description="round the draft's weights to 8 bits, as outrider draft --quantization does"
    )
    num_draft_tokens: int = Field(4, ge=1, le=128, description="drafted tokens of a round, for the estimates")
    max_tokens: int = Field(2048, ge=2, description="tokens read of the text")
    threads: int | None = Field(None, ge=1, le=256, description="threads for the models' products (default: torch's)")
    vocabulary_level: VocabularyLevel = "auto"


def main(argv: Sequence[str] | None = None, prog: str = "outrider check-pair") -> int:
    """Prints the comparison; 1 if the two are no pair or cannot be read."""
    settings = parse(CheckPairSettings, sys.argv[1:] if argv is None else argv, prog, DESCRIPTION)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch
    from outrider.cli.agreement import compare_models, describe  # torch comes with it: not for --help

    try:
        weights = settings.text is not None
        folders = {name: locate(getattr(settings, name), weights=weights) for name in ("target", "draft")}
        settings = settings.model_copy(update=folders)
        if settings.text is not None:
            for folder, flag in ((settings.target, "--target"), (settings.draft, "--draft")):
                require_config(folder, flag)
        ids, joined = _compare_tokenizers(settings)
        if settings.text is not None:
            agreement = compare_models(
                settings.target, settings.draft, ids, settings.threads, joined, settings.draft_quantization
            )
            print("\n".join(describe(agreement, settings.num_draft_tokens)))
    except (OSError, ValueError) as error:
        return fail(prog, error, one_line(error))
    return 0


def _compare_tokenizers(settings: CheckPairSettings) -> tuple[list[int], JoinedVocabulary | None]:
    """Prints how the draft's vocabulary serves the target; returns the text's ids, and how one that is another is
    joined with the target's."""
    target, draft = load_tokenizer(settings.target, "--target"), load_tokenizer(settings.draft, "--draft")
    joined = None
    if target.fingerprint == draft.fingerprint:
        print(f"tokenizers    {target.num_tokens} tokens each, identical")
    else:
        one, other = LoadedTokenizer.read(settings.target), LoadedTokenizer.read(settings.draft)
        try:
            joined = join(one, other, settings.vocabulary_level)
        except ValueError as error:
            raise ValueError(f"not a pair: {settings.target} and {settings.draft}: {error}") from error
        print(f"tokenizers    {target.num_tokens} and {draft.num_tokens} tokens: {describe_vocabulary(joined)}")
    if settings.text is None:
        print("acceptance    not measured: give --text FILE")
        return [], joined
    ids = target.encode(read_text(settings.text, "--text"))[: settings.max_tokens]
    if len(ids) < 2:
        raise ValueError(f"{settings.text} has {len(ids)} tokens; at least 2 are needed")
    if joined is not None:
        mapping = joined.mapping
        length = len(mapping.spell_all(ids)) / len(ids)
        print(f"of the text   {mapping.overlap_in(ids):.1%} have a counterpart; the draft reads {length:.2f} for each")
    return ids, joined


if __name__ == "__main__":
    sys.exit(main())
