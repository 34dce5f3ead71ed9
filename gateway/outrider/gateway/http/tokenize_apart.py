"""/tokenize of a text of megabytes, in a process of its own: making its ids into Python's numbers, and freeing what the
library holds, are single calls for which nobody else in the gateway would run. `python -m
outrider.gateway.http.tokenize_apart < WORK`; it writes the answer."""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import DEVNULL, PIPE
from dataclasses import asdict, dataclass
from pathlib import Path

from outrider.gateway.text.chat import ChatText
from outrider.gateway.text.tokenizer import Tokenizer

MEGABYTES = 128 << 10  # characters, each of up to four bytes, which are tokens at most


@dataclass(frozen=True, slots=True)
class Work:
    """What the process beside this one is asked."""

    mark: str  # of the text
    adds_special_tokens: bool
    with_names: bool
    max_model_len: int
    fingerprint: str  # that the folder's tokenizer has to have: another one may lie there by now
    folder: str

    def done(self, text: str, tokenizer: Tokenizer) -> dict[str, object]:
        """The answer in vLLM's shape."""
        ids = ChatText(text, self.mark).encode(tokenizer, self.adds_special_tokens)
        names = list(map(tokenizer.backend.id_to_token, ids)) if self.with_names else None
        return {"count": len(ids), "max_model_len": self.max_model_len, "tokens": ids, "token_strs": names}


async def apart(work: Work, text: str) -> bytes | None:
    """The answer; None where the folder's tokenizer is not the one that is meant, or cannot tokenise the text. The
    process ends with its caller's task."""
    if not (Path(work.folder) / "tokenizer.json").is_file():
        return None
    command = (sys.executable, "-m", __name__)
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL)
    try:
        said, _ = await process.communicate(json.dumps(asdict(work)).encode() + b"\n" + text.encode())
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return None if process.returncode else said


def main() -> int:
    """0 where it has answered."""
    head, _, text = sys.stdin.buffer.read().partition(b"\n")
    work = Work(**json.loads(head))
    tokenizer = Tokenizer.load(work.folder)
    if tokenizer.fingerprint != work.fingerprint:
        return 1
    told = json.dumps(work.done(text.decode(), tokenizer), ensure_ascii=False, separators=(",", ":"))
    sys.stdout.buffer.write(told.encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
