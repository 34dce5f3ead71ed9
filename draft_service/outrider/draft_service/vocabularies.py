"""The targets' vocabularies that a draft model drafts for beside its own, and how each is joined with it: by the tokens
that both have, or by the text alone where these say too little of it."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from outrider.draft_service.settings import Level
from outrider.proposers.reencoding import Encoding, JoinedVocabulary, PairMap, Reencoding, Writer
from outrider.proposers.vocabulary_map import VocabularyMap
from outrider.rpc.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    ResourceExhausted,
    Violation,
    Violations,
)
from outrider.rpc.lexicon import lexicon_of
from outrider.rpc.messages import MAX_NAME_CHARS, DraftVocabulary
from outrider.rpc.vocabulary import TokenizerFile, complete_backend, has_tokenizer, is_panic, load_backend, panics_told
from outrider.rpc.words.lexicon import Lexicon

logger = logging.getLogger(__name__)

# Of the target's tokens; with less a draft is re-encoded. See docs/architecture.md, "Drafts of another vocabulary".
LEAST_OVERLAP_GREEDY, LEAST_OVERLAP_SAMPLED = 0.95, 0.05
_WAYS = {True: "token-level", False: "string-level"}
MAX_VOCABULARIES = 16
MAX_BYTES = 64 << 20  # of a tokenizer.json
MAX_SPECIAL_TOKENS, MAX_SPECIAL_CHARS = 16, 256
TRANSFER_S, TRIAL_S = 60.0, 90.0


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

    @classmethod
    def of(cls, file: TokenizerFile) -> LoadedTokenizer:
        """One that travelled. What the library says of a broken one is a bare Exception."""
        backend = Backend.from_str(file.layout.decode())
        complete_backend(backend, file.special.values())
        return cls(backend, lexicon_of(backend, file.special))

    @property
    def start_ids(self) -> tuple[int, ...]:
        """The special tokens that it puts before every text."""
        special = {token_id for token_id, token in enumerate(self.lexicon.tokens) if token and token.kind == "special"}
        encoding = _encode(self.backend, "a", add_special_tokens=True)
        return () if encoding is None else tuple(takewhile(special.__contains__, encoding.ids))

    def writer(self) -> Writer:
        """This tokenizer as one that writes text alone."""
        self.backend.encode_special_tokens = True
        return Writer(self.lexicon, partial(_encode, self.backend))


def _encode(backend: Backend, text: str, add_special_tokens: bool = False) -> Encoding | None:
    try:
        return backend.encode(text, add_special_tokens=add_special_tokens)
    except BaseException as error:  # the library's own, bare: no token for a character, and none for what is unknown
        if isinstance(error, Exception) or is_panic(error):
            return None
        raise


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
    """The targets' vocabularies, by fingerprint, that differ from the model's; the arguments are folders. Raises
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


class Vocabularies:
    """The targets' vocabularies that a draft model knows, and those that gateways bring. Belongs to the event loop;
    `joined` is read by the device thread. What came stays, so that no gateway can take another's away."""

    def __init__(self, folder: Path, level: Level, joined: dict[str, JoinedVocabulary]) -> None:
        self._folder, self._level, self.joined = folder, level, joined
        self._lock = asyncio.Lock()  # one at a time: each may be large

    @property
    def rows(self) -> tuple[DraftVocabulary, ...]:
        """What is said of them."""
        return tuple(
            DraftVocabulary(name, one.mapping.overlap, _level(one.greedy), _level(one.sampled))
            for name, one in self.joined.items()
        )

    async def take(self, slices: AsyncIterator[Any]) -> None:
        """One that comes in slices of a PutVocabularyRequest. Raises InvalidArgument, FailedPrecondition where it
        cannot be joined, ResourceExhausted where there are too many, DeadlineExceeded where it comes too slowly."""
        async with self._lock:
            try:
                async with asyncio.timeout(TRANSFER_S):
                    file = await self._receive(slices)
            except TimeoutError:
                raise DeadlineExceeded(f"the vocabulary did not come within {TRANSFER_S:g} s") from None
            if file is not None:
                await _try_out(file)
                self.joined[file.fingerprint] = await asyncio.to_thread(self._join, file)
                logger.info("%s: %s", file.fingerprint[:12], describe(self.joined[file.fingerprint]))

    async def _receive(self, slices: AsyncIterator[Any]) -> TokenizerFile | None:
        """None where it is known already."""
        head, data = None, bytearray()
        async for part in slices:
            if head is None:
                head = part
                self._check(head)
                if head.tokenizer_fingerprint in self.joined:
                    return None
                if len(self.joined) >= MAX_VOCABULARIES:
                    raise ResourceExhausted(f"{MAX_VOCABULARIES} vocabularies are held", reason="TOO_MANY_VOCABULARIES")
            data += part.data
            if len(data) > head.num_bytes:
                break
        found = Violations()
        if head is None or len(data) != head.num_bytes:
            found.add("data", f"has {len(data)} bytes", "as many as num_bytes says")
        found.raise_if_any()
        return (
            None if head is None else TokenizerFile(head.tokenizer_fingerprint, dict(head.special_tokens), bytes(data))
        )

    @staticmethod
    def _check(head: Any) -> None:
        found = Violations()
        found.text("tokenizer_fingerprint", head.tokenizer_fingerprint, MAX_NAME_CHARS)
        found.integer("num_bytes", head.num_bytes, 1, MAX_BYTES)
        longest = max((len(text) for entry in head.special_tokens.items() for text in entry), default=0)
        if len(head.special_tokens) > MAX_SPECIAL_TOKENS or longest > MAX_SPECIAL_CHARS:
            allowed = f"{MAX_SPECIAL_TOKENS} of {MAX_SPECIAL_CHARS} characters"
            found.add(
                "special_tokens", f"has {len(head.special_tokens)} entries of up to {longest} characters", allowed
            )
        found.raise_if_any()

    def _join(self, file: TokenizerFile) -> JoinedVocabulary:
        try:
            with panics_told():
                return join(LoadedTokenizer.of(file), LoadedTokenizer.read(self._folder), self._level)
        except ValueError as error:
            raise FailedPrecondition(f"the draft's tokenizer and the target's: {error}", reason="NOT_A_PAIR") from error


async def _try_out(file: TokenizerFile) -> None:
    """Reads it in another process first. Raises InvalidArgument."""
    command = (sys.executable, "-m", "outrider.draft_service.trial")
    trial = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(TRIAL_S):
            _, said = await trial.communicate(file.pack())
        problem = said.decode(errors="replace").strip().rpartition("\n")[2][:300]
    except TimeoutError:
        problem = f"is not read within {TRIAL_S:g} s"
    finally:
        if trial.returncode is None:
            trial.kill()
            await trial.wait()
    if trial.returncode:
        raise InvalidArgument.of([Violation("data", f"is no tokenizer.json that is taken: {problem}")])


def _level(way: PairMap) -> str:
    return "token" if isinstance(way, VocabularyMap) else "string"
