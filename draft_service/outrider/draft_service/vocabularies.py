"""The targets' vocabularies that a draft model drafts for beside its own, and how each is joined with it: by the tokens
that both have, or by the text alone where these say too little of it."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path

from tokenizers import Tokenizer as Backend

from outrider.draft_service.settings import Level
from outrider.proposers.reencoding import Encoding, JoinedVocabulary, PairMap, Reencoding, Writer
from outrider.proposers.vocabulary_map import VocabularyMap
from outrider.rpc.lexicon import Lexicon, lexicon_of
from outrider.rpc.vocabulary import has_tokenizer, load_backend

logger = logging.getLogger(__name__)

# Of the target's tokens; with less a draft is re-encoded. See docs/architecture.md, "Drafts of another vocabulary".
LEAST_OVERLAP_GREEDY, LEAST_OVERLAP_SAMPLED = 0.95, 0.1


@dataclass(frozen=True, slots=True)
class LoadedTokenizer:
    """A tokenizer and what its tokens stand for."""

    backend: Backend
    lexicon: Lexicon

    @classmethod
    def read(cls, folder: Path) -> LoadedTokenizer:
        """Raises ValueError where the folder has no tokenizer.json."""
        if not has_tokenizer(folder):
            raise ValueError(f"{folder} has no tokenizer.json: allowed: the folder of a tokenizer or checkpoint")
        backend, special = load_backend(folder)
        return cls(backend, lexicon_of(backend, special))

    @property
    def start_ids(self) -> tuple[int, ...]:
        """The special tokens that it puts before every text."""
        special = {token_id for token_id, token in enumerate(self.lexicon.tokens) if token and token.kind == "special"}
        encoding = _encode(self.backend, "a", add_special_tokens=True)
        return () if encoding is None else tuple(takewhile(special.__contains__, encoding.ids))

    def writer(self) -> Writer:
        """It as one that writes text alone."""
        self.backend.encode_special_tokens = True
        return Writer(self.lexicon, partial(_encode, self.backend))


def _encode(backend: Backend, text: str, add_special_tokens: bool = False) -> Encoding | None:
    try:
        return backend.encode(text, add_special_tokens=add_special_tokens)
    except Exception:  # the library's own, bare: there is no token for a character, and none for what is unknown
        return None


def join(target: LoadedTokenizer, draft: LoadedTokenizer, level: Level = "auto") -> JoinedVocabulary:
    """How a draft drafts for a target of another vocabulary. Raises ValueError where it cannot."""
    mapping, start_ids = VocabularyMap.between(target.lexicon, draft.lexicon), draft.start_ids
    reencoding = Reencoding(target.writer(), draft.writer(), mapping, start_ids)
    if not (mapping.to_draft if level == "token" else reencoding.drawable):
        raise ValueError("they have no token in common: no draft for that target")

    def way(least_overlap: float) -> PairMap:
        by_tokens = level == "token" or (level == "auto" and mapping.overlap >= least_overlap)
        return mapping if by_tokens else reencoding

    return JoinedVocabulary(way(LEAST_OVERLAP_GREEDY), way(LEAST_OVERLAP_SAMPLED))


def join_all(targets: Iterable[Path], model: Path, level: Level = "auto") -> dict[str, JoinedVocabulary]:
    """By fingerprint the targets' vocabularies that differ from the model's; the arguments are folders. Raises
    ValueError where a tokenizer is missing, or two cannot be joined."""
    joined: dict[str, JoinedVocabulary] = {}
    for folder in targets:
        target, draft = LoadedTokenizer.read(folder), LoadedTokenizer.read(model)
        if target.lexicon.fingerprint == draft.lexicon.fingerprint:
            continue
        try:
            found = joined[target.lexicon.fingerprint] = join(target, draft, level)
        except ValueError as error:
            raise ValueError(f"the tokenizers of {folder} and {model}: {error}") from error
        logger.info("%s: %s", folder, describe(found))
    return joined


def describe(joined: JoinedVocabulary) -> str:
    """Which way, and how much both have in common."""
    ways = [type(way) is VocabularyMap for way in (joined.greedy, joined.sampled)]
    named = [_WAYS[by_tokens] for by_tokens in ways]
    way = named[0] if named[0] == named[1] else f"{named[0]} for greedy requests, {named[1]} for sampled ones"
    return f"{joined.mapping.overlap:.1%} of the target's tokens have a counterpart; drafted {way}"


_WAYS = {True: "token-level", False: "string-level"}
