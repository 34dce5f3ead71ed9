"""A tokenizer that a peer sent, tried in a process of its own before the service reads it: what is broken, too large or
made to take for ever ends that process alone. `python -m outrider.draft_service.trial < FILE`; what is wrong with it is
the last line of what it says."""

from __future__ import annotations

import json
import re
import resource
import sys
from collections.abc import Iterator
from typing import Any

from outrider.draft_service.vocabularies import LoadedTokenizer
from outrider.rpc.vocabulary import TokenizerFile

MAX_TOKENS = 1 << 21
MAX_TOKEN_CHARS = 1024
MAX_TEXT_CHARS = 4096  # of a pattern, or what takes its place
CPU_S, MEMORY_BYTES = 60, 8 << 30
COMPONENTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
# A repeated group in which something is repeated, or a reference back: what may take exponential time.
_REPEAT = r"(?:[*+]|\{\d*,?\d*\})"
_NESTED = re.compile(rf"{_REPEAT}.*\){_REPEAT}|\\[1-9k]", re.DOTALL)
_ESCAPED = re.compile(r"\\[^pPk1-9]|\[(?:\\.|[^\]\\])*\]")  # letters and sets, which may look like groups


def main() -> int:
    """0 where the tokenizer of standard input may be used."""
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    try:
        check(TokenizerFile.unpack(sys.stdin.buffer.read()))
    except Exception as error:  # the library's are bare
        sys.stderr.write(f"{' '.join(str(error).split()) or type(error).__name__}\n")
        return 1
    return 0


def check(file: TokenizerFile) -> None:
    """Raises ValueError where it is not what it is said to be, or would do harm."""
    layout = json.loads(file.layout)
    for path, text in _texts({name: layout.get(name) for name in COMPONENTS}):
        if len(text) > MAX_TEXT_CHARS and not path.endswith("precompiled_charsmap"):
            raise ValueError(f"{path} has {len(text)} characters; allowed: {MAX_TEXT_CHARS}")
        if path.endswith("Regex") and _NESTED.search(_ESCAPED.sub("", text)):
            raise ValueError(
                f"{path} is {text!r:.200}; allowed: no repetition within a repeated group, no references back"
            )
    vocabulary = layout.get("model", {}).get("vocab", {})
    tokens = vocabulary if isinstance(vocabulary, dict) else {entry[0]: index for index, entry in enumerate(vocabulary)}
    added = {token["content"]: token["id"] for token in layout.get("added_tokens", ())}
    for text, token_id in (*tokens.items(), *added.items()):
        if not 0 <= token_id < MAX_TOKENS or len(text) > MAX_TOKEN_CHARS:
            raise ValueError(
                f"a token has id {token_id} and {len(text)} characters; allowed: {MAX_TOKENS - 1}, {MAX_TOKEN_CHARS}"
            )
    found = LoadedTokenizer.of(file)
    if found.lexicon.fingerprint != file.fingerprint:
        raise ValueError("its tokens are not those of its fingerprint")
    found.writer().say(b"a", b" b\n")


def _texts(node: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Every text of a JSON value, with where it stands."""
    if isinstance(node, str):
        yield path, node
    elif isinstance(node, dict | list):
        for name, entry in node.items() if isinstance(node, dict) else enumerate(node):
            yield from _texts(entry, f"{path}.{name}" if path else str(name))


if __name__ == "__main__":
    sys.exit(main())
