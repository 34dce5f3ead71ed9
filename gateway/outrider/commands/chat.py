"""`outrider chat`: a conversation with a gateway's model, and what speculation did for each answer."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterator, Sequence

from outrider.client import GatewayInfo, SyncClient
from outrider.commands.arguments import parse
from outrider.commands.chat_settings import ChatSettings
from outrider.commands.chat_turns import Conversation
from outrider.commands.chat_view import PROMPT, View, make_editable, make_view
from outrider.commands.complaints import load_tokenizer, of_gateway, one_line
from outrider.wire.errors import InvalidArgument, OutriderError

DESCRIPTION = (
    "Talk to the model behind a gateway; its tokenizer must have a chat template. On a terminal the colour of the text "
    "says how its tokens came about (green: drafted, and kept by the target; yellow: the target's own where it refused "
    "one; cyan: the target's own after a whole window), and a line below counts. Ctrl-C cancels an answer, Ctrl-D ends "
    "the chat, /help shows its commands. From a pipe every line is a question, and the answers are plain text."
)
ASK_S = 10.0
COMMANDS = {
    "/new": "begin another conversation",
    "/speculation": "switch drafting off, or on again",
    "/help": "show this",
    "/exit": "end the chat, as Ctrl-D does",
}
FAILURES = (OutriderError, OSError, ValueError)


def main(argv: Sequence[str] | None = None, prog: str = "outrider chat") -> int:
    """Talks until the input ends; 1 if the gateway cannot be reached, or refuses a question that came from a pipe."""
    settings = parse(ChatSettings, sys.argv[1:] if argv is None else argv, prog, DESCRIPTION)
    try:
        tokenizer = None if settings.tokenizer is None else load_tokenizer(settings.tokenizer, "--tokenizer")
        with SyncClient(settings.gateway) as client:
            info = client.info(timeout=ASK_S)
            conversation = Conversation(client, settings.system, settings.max_tokens, settings.options())
            conversation.speculate = settings.speculation
            view = make_view(settings.plain, settings.stats, tokenizer)
            _talk(conversation, view, info)
    except FAILURES as error:
        if isinstance(error, BrokenPipeError):
            raise
        print(f"{prog}: error: {of_gateway(error, settings.gateway)}", file=sys.stderr)
        return 1
    return 0


def _talk(conversation: Conversation, view: View, info: GatewayInfo) -> None:
    """Question by question. A person can mend what was refused; a pipe cannot."""
    if not sys.stdin.isatty():
        for line in _piped():
            if text := line.strip():
                view.question(text)
                if not _answer(conversation, view, text):
                    return
        return
    make_editable()
    view.note(greeting(info))
    while True:
        try:
            text = _read()
            if text and not _answer(conversation, view, text):
                return
        except EOFError:
            print(file=sys.stderr)
            return
        except KeyboardInterrupt:
            view.note("\n(cancelled; Ctrl-D ends the chat)")
        except FAILURES as error:
            if isinstance(error, BrokenPipeError):
                raise
            hint = " (/new begins another conversation)" if isinstance(error, InvalidArgument) else ""
            view.note(f"error: {one_line(error)}{hint}")


def _piped() -> Iterator[str]:
    """The lines of a pipe."""
    for number, line in enumerate(sys.stdin.buffer, 1):
        try:
            yield line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"line {number} of the input is not UTF-8") from error


def _read() -> str:
    """One line. The prompt is no part of an output that goes elsewhere."""
    if sys.stdout.isatty():
        return input(PROMPT).strip()
    print(PROMPT, end="", file=sys.stderr, flush=True)
    return input().strip()


def _answer(conversation: Conversation, view: View, text: str) -> bool:
    """Answers a question or follows a command; false if the chat is to end."""
    if not re.fullmatch(r"/[a-z]*", text):  # other texts may begin with a slash: paths, for one
        conversation.ask(text, view.show)
        return True
    if text == "/exit":
        return False
    if text == "/new":
        conversation.restart()
        view.note("(a new conversation)")
    elif text == "/speculation":
        conversation.speculate = not conversation.speculate
        view.note(f"(speculation is {'on' if conversation.speculate else 'off'})")
    elif text == "/help":
        view.note("\n".join(f"  {name:<13} {meaning}" for name, meaning in COMMANDS.items()))
    else:
        close = difflib.get_close_matches(text, COMMANDS, n=1)
        view.note(f"(unknown command {text}: {f'did you mean {close[0]}?' if close else 'see /help'})")
    return True


def greeting(info: GatewayInfo) -> str:
    """Who answers."""
    draft = "without a draft" if info.draft is None else f"drafted by {info.draft.name}, k={info.num_draft_tokens}"
    return f"{info.target.name}, {draft}, {info.target.max_model_len} tokens of context; /help, Ctrl-D ends"


if __name__ == "__main__":
    sys.exit(main())
