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
from outrider.proposers.vocabulary_map import VocabularyMap
from outrider.rpc.hub import locate
from outrider.rpc.lexicon import read_lexicon
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
        ids, mapping = _compare_tokenizers(settings)
        if settings.text is not None:
            agreement = compare_models(
                settings.target, settings.draft, ids, settings.threads, mapping, settings.draft_quantization
            )
            print("\n".join(describe(agreement, settings.num_draft_tokens)))
    except (OSError, ValueError) as error:
        return fail(prog, error, one_line(error))
    return 0


def _compare_tokenizers(settings: CheckPairSettings) -> tuple[list[int], VocabularyMap | None]:
    """Prints how the draft's vocabulary serves the target; returns the text's ids, and the map of a vocabulary that is
    another one."""
    target, draft = load_tokenizer(settings.target, "--target"), load_tokenizer(settings.draft, "--draft")
    mapping = None
    if target.fingerprint == draft.fingerprint:
        print(f"tokenizers    {target.num_tokens} tokens each, identical")
    else:
        mapping = VocabularyMap.between(read_lexicon(settings.target), read_lexicon(settings.draft))
        if not mapping.to_draft:
            raise ValueError(f"not a pair: {settings.target} and {settings.draft} have no token in common")
        share = f"{mapping.overlap:.1%} of the target's have a counterpart"
        print(f"tokenizers    {target.num_tokens} and {draft.num_tokens} tokens, mapped: {share}")
    if settings.text is None:
        print("acceptance    not measured: give --text FILE")
        return [], mapping
    ids = target.encode(read_text(settings.text, "--text"))[: settings.max_tokens]
    if len(ids) < 2:
        raise ValueError(f"{settings.text} has {len(ids)} tokens; at least 2 are needed")
    if mapping is not None:
        length = len(mapping.spell_all(ids)) / len(ids)
        print(f"of the text   {mapping.overlap_in(ids):.1%} have a counterpart; the draft reads {length:.2f} for each")
    return ids, mapping


if __name__ == "__main__":
    sys.exit(main())
