"""`outrider chat`: a conversation with a gateway's model, and what speculation did for each answer. On a terminal the
answer's last line and its numbers are drawn anew as tokens come; elsewhere there is the text alone."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import nullcontext, suppress
from typing import Any, ClassVar

from pydantic import Field
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from outrider.cli.arguments import fail, load_tokenizer, of_gateway, one_line, parse
from outrider.cli.generate import CollectedCompletion, RequestSettings
from outrider.cli.terminal import VISIBLE, Painter, TokenWriter
from outrider.client import GatewayInfo, Part, SyncClient
from outrider.gateway.text.tokenizer import Tokenizer
from outrider.pairs import pair_path, trained_on
from outrider.rpc.errors import InvalidArgument, OutriderError

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
PROMPT = "> "
FRAMES_PER_S = 15
ROOM = re.compile(r"allowed: at most (\d+)")  # what a refusal of the request's length says of max_tokens
Show = Callable[[Iterator[Part], CollectedCompletion], None]


class ChatSettings(RequestSettings):
    """Whom to talk to, how answers are chosen, and how they are shown."""

    section: ClassVar[str] = "chat"

    system: str = Field("", description="the system message that every conversation begins with")
    max_tokens: int = Field(512, ge=1, lt=2**32, description="most tokens of an answer; fewer where the context ends")
    speculation: bool = Field(True, description="draft at all; /speculation switches it during the chat")
    plain: bool = Field(False, description="no colours and no line that is drawn anew, also on a terminal")
    stats: bool = Field(True, description="a line on each answer; on standard error where the output is no terminal")


class View:
    """Where a chat is shown: the text of the answers, and a line of numbers on standard error. On a terminal the text
    has colours by origin, and under an answer stands what speculation has done for it so far."""

    def __init__(self, stats: bool, tokenizer: Tokenizer | None = None, terminal: Console | None = None) -> None:
        self._stats = stats
        self._tokenizer = tokenizer if terminal else None
        self._terminal = terminal

    def show(self, parts: Iterator[Part], answer: CollectedCompletion) -> None:
        """Takes all parts into the answer and shows its text as it comes, and an end of line. On a terminal whole lines
        are printed once; the last one and the numbers are drawn again and again below them."""
        live = None if self._terminal is None else _LastLine(self._terminal)
        writer = TokenWriter(live or Painter(sys.stdout, colours=False), self._tokenizer)
        num_rounds = 0
        try:
            with live.drawn() if live else nullcontext():
                for part in parts:
                    answer.add(part)
                    num_rounds += bool(part.token_ids)
                    if live and self._stats:
                        live.status = progress(answer, num_rounds)
                    writer.write(part)
        finally:
            if live and (answer.text or answer.reasoning):
                live.end()
            elif answer.text:
                print(flush=True)
        if self._stats:
            self.note(summary(answer))

    def question(self, text: str) -> None:
        """A question that was not typed here, as if it had been: an output that is no terminal is the answers alone."""
        if self._terminal is not None:
            self._terminal.print(Text(PROMPT + text.translate(VISIBLE), style="bold"))

    def note(self, text: str) -> None:
        """A line of ours: in grey, or on standard error."""
        if self._terminal is not None:
            self._terminal.print(Text(text, style="dim"))
        else:
            print(text, file=sys.stderr, flush=True)


class _LastLine(Painter):
    """Takes tokens, prints the lines that are full, and keeps the one that may still grow."""

    def __init__(self, console: Console) -> None:
        super().__init__(sys.stdout, colours=True)
        self._console = console
        self.text = Text()
        self.status = "..."

    def drawn(self) -> Live:
        """A context in which the line and its numbers are drawn again and again."""
        return Live(self, console=self._console, refresh_per_second=FRAMES_PER_S, transient=True)

    def end(self) -> None:
        """Prints the line that was not full."""
        self._console.print(self.text)

    def __rich__(self) -> Group:
        """What is drawn anew: the line that grows, and the numbers below it."""
        return Group(self.text, Text(self.status, style="dim"))

    def write(self, text: str, style: str = "") -> None:
        """A line is full at its end or where the terminal's is: a region that is drawn anew must fit on it."""
        self.text.append(text, style=style)
        *full, self.text = self.text.split("\n", allow_blank=True)
        *wrapped, self.text = self.text.wrap(self._console, self._console.width) or [Text()]
        for line in (*full, *wrapped):
            self._console.print(line)


def make_view(plain: bool, stats: bool, tokenizer: Tokenizer | None) -> View:
    """Live on a terminal that can do it. NO_COLOR leaves the colours out."""
    console = Console(highlight=False)
    is_live = not plain and sys.stdout.isatty() and not console.is_dumb_terminal
    return View(stats, tokenizer, console if is_live else None)


def make_editable() -> None:
    """Line editing and history at the prompt, where Python has them."""
    with suppress(ImportError):
        import readline  # noqa: F401  # input() uses it once it is imported


def progress(answer: CollectedCompletion, num_rounds: int) -> str:
    """The numbers while an answer grows: how many tokens were drafted is known at its end."""
    count, accepted = len(answer.token_ids), answer.origins.count("accepted")
    return (
        f"{count} tokens, {accepted / count if count else 0:.0%} of them drafted and accepted, "
        f"{count / max(1, num_rounds):.2f} a round, {answer.tokens_per_s:.0f} tokens/s"
    )


def summary(answer: CollectedCompletion) -> str:
    """The numbers of an answer that has ended."""
    stats, usage = answer.speculation, answer.usage
    words = [f"{len(answer.token_ids)} tokens"]
    if usage is not None and usage.reasoning_tokens:
        words[0] += f" ({usage.reasoning_tokens} of reasoning)"
    if stats is not None and stats.num_rounds:
        words[0] += f" in {stats.num_rounds} rounds ({len(answer.token_ids) / stats.num_rounds:.2f} a round)"
        drafted = stats.num_draft_tokens
        share = f"{stats.acceptance_rate:.0%} ({stats.num_accepted_tokens}/{drafted})" if drafted else "none drafted"
        words.append(f"acceptance {share}")
        if stats.num_forced_tokens:
            words.append(f"forced {stats.num_accepted_forced_tokens}/{stats.num_forced_tokens}")
    words.append(f"{answer.tokens_per_s:.1f} tokens/s")
    if usage is not None:
        words.append(f"prompt {usage.prompt_tokens} tokens ({usage.cached_tokens} cached)")
    return f"[{', '.join(words)}, then {answer.finish_reason}]"


class Conversation:
    """The messages so far. Every question is sent with all of them; the target's prefix cache knows the old ones."""

    def __init__(self, client: SyncClient, system: str, options: dict[str, Any]) -> None:
        self._client = client
        self._opening = [{"role": "system", "content": system}] if system else []
        self._options = options
        self.messages: list[dict[str, str]] = []
        self.speculate = True
        self.restart()

    def restart(self) -> None:
        """Forgets everything but the system message."""
        self.messages = list(self._opening)

    def ask(self, text: str, show: Show) -> CollectedCompletion:
        """Puts a question and hands the parts of the answer to `show` as they come. What came of an answer that was
        interrupted stays in the conversation; a question without any answer does not."""
        self.messages.append({"role": "user", "content": text})
        answer, parts = CollectedCompletion(0), self._parts()
        try:
            show(parts, answer)
        finally:
            parts.close()
            if answer.text:
                self.messages.append({"role": "assistant", "content": answer.text})
            else:
                self.messages.pop()
        return answer

    def _parts(self) -> Generator[Part, None, None]:
        """The gateway is the one that counts tokens: where it says that the context has less room, that is asked
        for."""
        try:
            yield from self._request()
        except InvalidArgument as error:
            room = _room(error)
            if room is None:
                raise
            yield from self._request(max_tokens=room)

    def _request(self, **more: int) -> Iterator[Part]:
        speculate = None if self.speculate else False
        return self._client.generate(messages=self.messages, speculate=speculate, **self._options | more)


def _room(error: InvalidArgument) -> int | None:
    """The tokens that are left for an answer, if that is what the gateway complained of."""
    for violation in error.violations:
        found = ROOM.search(violation.problem)
        if violation.field == "sampling.max_tokens" and found and int(found[1]) > 0:
            return int(found[1])
    return None


def main(argv: Sequence[str] | None = None, prog: str = "outrider chat") -> int:
    """Talks until the input ends; 1 if the gateway cannot be reached, or refuses a question that came from a pipe."""
    settings = parse(ChatSettings, argv, prog, DESCRIPTION)
    try:
        tokenizer = None if settings.tokenizer is None else load_tokenizer(settings.tokenizer, "--tokenizer")
        with SyncClient(settings.gateway, **settings.access()) as client:
            info = client.info(ASK_S, settings.model)
            conversation = Conversation(client, settings.system, settings.options() | settings.given())
            conversation.speculate = settings.speculation
            view = make_view(settings.plain, settings.stats, tokenizer)
            _talk(conversation, view, info)
    except FAILURES as error:
        return fail(prog, error, of_gateway(error, settings.gateway))
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
    """The lines that come from a pipe. ValueError for one that is not UTF-8."""
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
    """What a chat begins with: who answers, by which draft, and how much it can hold."""
    draft = "without a draft" if info.draft is None else f"drafted by {info.draft.name}, k={info.num_draft_tokens}"
    who = f"{info.target.name}, {draft}, {info.target.max_model_len} tokens of context; /help, Ctrl-D ends"
    return "\n".join([who, *_schooling(info)])


def _schooling(info: GatewayInfo) -> Iterator[str]:
    """What to expect of an embedded pair, which its tokenizer tells whatever it is served as."""
    for name, texts in trained_on().items():
        if Tokenizer.load(pair_path(name).target).fingerprint == info.target.tokenizer_fingerprint:
            yield f"this is the embedded pair {name}, trained on {texts} alone: it writes on, and knows no answers"
