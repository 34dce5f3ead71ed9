"""`outrider generate`: asks a gateway for completions and shows them as they come, or as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence

from outrider.client import Part, generate
from outrider.commands.answers import Answer
from outrider.commands.arguments import parse
from outrider.commands.colours import make_painter
from outrider.commands.complaints import load_tokenizer, of_gateway
from outrider.commands.generate_settings import GenerateSettings
from outrider.commands.token_writer import TokenWriter
from outrider.gateway.tokenizer import Tokenizer
from outrider.wire.errors import OutriderError
from outrider.wire.sampling import AcceptanceRule

DESCRIPTION = (
    'Ask a gateway for completions of a prompt, given as a bare argument ("Once upon a time") or by --token-ids. On a '
    "terminal the colour of the text says how its tokens came about: green for drafted tokens that the target kept, "
    "yellow where it refused one, cyan for the token after a whole window. Without --tokenizer a round's text has one "
    "colour, that of its first token."
)
SHORT = {"--json": "--output=json", "--no-json": "--output=text"}


def main(argv: Sequence[str] | None = None, prog: str = "outrider generate") -> int:
    """Streams the completions; 1 if the gateway refuses the request or cannot be reached."""
    arguments = sys.argv[1:] if argv is None else argv
    settings = parse(GenerateSettings, arguments, prog, DESCRIPTION, bare=("prompt",), short=SHORT)
    try:
        tokenizer = None if settings.tokenizer is None else load_tokenizer(settings.tokenizer, "--tokenizer")
        if settings.output == "json":
            _print_json(_request(settings))
        else:
            _print_text(settings, tokenizer, _request(settings))
    except (OutriderError, OSError, ValueError) as error:
        if isinstance(error, BrokenPipeError):
            raise
        print(f"{prog}: error: {of_gateway(error, settings.gateway)}", file=sys.stderr)
        return 1
    return 0


def _request(settings: GenerateSettings) -> Iterator[Part]:
    return generate(
        settings.gateway,
        settings.prompt,
        token_ids=settings.token_ids,
        timeout=settings.timeout,
        n=settings.n,
        speculate=None if settings.speculation else False,
        num_draft_tokens=settings.num_draft_tokens,
        method=settings.method,
        mode=settings.mode or "",
        acceptance=AcceptanceRule[settings.acceptance.upper()],
        request_id=settings.request_id,
        priority=settings.priority,
        salt=settings.salt,
        **settings.given(),
    )


def _print_json(parts: Iterator[Part]) -> None:
    """A line for each completion when it has ended."""
    answers: dict[int, Answer] = {}
    for part in parts:
        answer = answers.setdefault(part.index, Answer(part.index))
        answer.add(part)
        if part.finish_reason is not None:
            print(json.dumps(answer.as_json(), ensure_ascii=False), flush=True)


def _print_text(settings: GenerateSettings, tokenizer: Tokenizer | None, parts: Iterator[Part]) -> None:
    """One completion as it comes; of several each where those before it have ended."""
    painter = make_painter(settings.plain)
    tokenizer = tokenizer if painter.colours else None
    shown = 0
    writer = TokenWriter(painter, tokenizer)
    for part in _one_after_another(parts):
        if part.index != shown:
            shown, writer = part.index, TokenWriter(painter, tokenizer)
            painter.note(f"\n-- completion {shown + 1} of {settings.n}")
        writer.write(part)
        if part.finish_reason is not None:
            print(flush=True)


def _one_after_another(parts: Iterator[Part]) -> Iterator[Part]:
    """The parts by completion: those of a later one wait for the end of those before it."""
    waiting: dict[int, list[Part]] = {}
    current = 0
    for part in parts:
        waiting.setdefault(part.index, []).append(part)
        while ready := waiting.pop(current, None):
            yield from ready
            if ready[-1].finish_reason is None:
                break
            current += 1


if __name__ == "__main__":
    sys.exit(main())
