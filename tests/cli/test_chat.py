"""`outrider chat` against the three services: on a pipe, and on a terminal with its keys."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from support.services import Done, Trio, outrider

from outrider.cli.chat import progress, summary
from outrider.cli.generate import CollectedCompletion
from outrider.client import generate

GREEDY = ("--temperature", "0", "--mode", "sequential")
QUESTION = "def add(a, b):"
WAIT_S = 60
# A session of its own whose terminal is standard input's: by it Ctrl-C becomes a signal.
IN_A_SESSION = """
import os, sys
os.setsid()
os.close(os.open(os.ttyname(0), os.O_RDWR))
os.execv(sys.argv[1], sys.argv[1:])
"""


def chat(trio: Trio, questions: str | bytes, *arguments: str) -> Done:
    stdin = questions.encode() if isinstance(questions, str) else questions
    return outrider("chat", *GREEDY, "--gateway", trio.gateway, *arguments, stdin=stdin)


def answer_to(trio: Trio, *texts: str, system: str = "", max_tokens: int = 12) -> str:
    """What the gateway answers to the last of the texts, of user and assistant in turns."""
    opening = [{"role": "system", "content": system}] if system else []
    turns = [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(texts)]
    parts = generate(trio.gateway, messages=[*opening, *turns], max_tokens=max_tokens, temperature=0.0)
    return "".join(part.text for part in parts)


def test_a_pipe_gets_the_answers_alone_and_every_turn_knows_the_last(trio: Trio) -> None:
    done = chat(trio, f"{QUESTION}\n\nhello\n", "--max-tokens", "12", "--system", "Be brief.")
    assert done.returncode == 0, done.stderr
    first = answer_to(trio, QUESTION, system="Be brief.")
    second = answer_to(trio, QUESTION, first, "hello", system="Be brief.")
    assert second != answer_to(trio, "hello", system="Be brief.")
    assert done.stdout == f"{first}\n{second}\n"
    lines = done.stderr.splitlines()
    assert len(lines) == 2
    for line in lines:
        assert re.fullmatch(
            r"\[12 tokens in \d+ rounds \(\d\.\d\d a round\), acceptance \d+% \(\d+/\d+\), \d+\.\d tokens/s, "
            r"prompt \d+ tokens \(\d+ cached\), then length\]",
            line,
        )


def test_the_commands_of_the_chat(trio: Trio) -> None:
    questions = f"{QUESTION}\n/new\n/speculation\nhello\n/nwe\n/exit\nnobody answers this\n"
    done = chat(trio, questions, "--max-tokens", "12")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{answer_to(trio, QUESTION)}\n{answer_to(trio, 'hello')}\n"
    notes = done.stderr.splitlines()
    assert notes[1:3] == ["(a new conversation)", "(speculation is off)"]
    assert "acceptance none drafted" in notes[3] and notes[4] == "(unknown command /nwe: did you mean /new?)"
    assert len(notes) == 5


def test_an_answer_ends_where_the_context_does(trio: Trio) -> None:
    """The embedded pair's context is 1024 tokens: asked for more, the gateway says what is left, and that is taken."""
    question = "x = 1 + 2" * 140
    done = chat(trio, f"{question}\n", "--max-tokens", "1000")
    assert done.returncode == 0, done.stderr
    found = re.search(r"\[(\d+) tokens .* prompt (\d+) tokens .* then (length|stop)\]", done.stderr)
    assert found and int(found[1]) >= 1 and (int(found[1]) + int(found[2]) == 1024 or found[3] == "stop")


def test_what_is_refused_ends_a_pipe_with_one_line(trio: Trio) -> None:
    done = chat(trio, f"{QUESTION}\nhello\n", "--temperature", "-1")
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("outrider chat: error: ") and "temperature" in done.stderr
    assert done.stderr.count("\n") == 1
    absent = outrider("chat", "--gateway", "127.0.0.1:1")
    assert absent.returncode == 1
    assert absent.stderr == "outrider chat: error: no gateway answers at 127.0.0.1:1 (connection refused)\n"
    wrong = outrider("chat", "--gatway", "x")
    assert wrong.returncode == 2 and "unknown flag --gatway: did you mean --gateway?" in wrong.stderr


def test_a_line_that_is_no_text_is_named(trio: Trio) -> None:
    done = chat(trio, b"hello\na\xff\n", "--max-tokens", "2")
    assert done.returncode == 1 and done.stdout.count("\n") >= 1  # the first is answered
    assert done.stderr.endswith("\noutrider chat: error: line 2 of the input is not UTF-8\n")


def test_variables_of_other_commands_are_no_near_misses(trio: Trio) -> None:
    """CHAT and DRAFT, TRACE and TARGET, BENCH and BENCH_SERVE resemble each other."""
    env = {f"OUTRIDER_{name}__MODEL": "x" for name in ("DRAFT", "TARGET", "BENCH")}
    for command in (("chat",), ("trace",), ("serve",), ("bench", "serve")):
        assert outrider(*command, "--help", env=env).returncode == 0
    done = outrider("chat", "--gateway", "127.0.0.1:1", env=env)
    assert done.returncode == 1 and "unknown variable" not in done.stderr
    done = outrider("trace", "nowhere.jsonl", env=env)
    assert done.returncode == 1 and "unknown variable" not in done.stderr


@dataclass
class Terminal:
    """A chat with a terminal of its own, whose keys make signals."""

    process: subprocess.Popen[bytes]
    leader: int
    shown: bytes = b""

    def press(self, keys: bytes) -> None:
        os.write(self.leader, keys)

    def interrupt(self, text: str) -> None:
        """Ctrl-C until it shows something that matches: a key between two prompts may meet none."""
        self.wait_for(text, again=b"\x03")

    def wait_for(self, text: str, again: bytes = b"") -> None:
        """Until something new that matches is shown; presses `again` at once, and every few seconds."""
        start, end, due = len(self.shown), time.monotonic() + WAIT_S, time.monotonic()
        while not re.search(text.encode(), self.shown[start:]):
            assert time.monotonic() < end, f"{text} is not in {self.shown[start:]!r}"
            if again and time.monotonic() >= due:
                self.press(again)
                due += 3.0
            if select.select([self.leader], [], [], 0.1)[0]:
                self.shown += os.read(self.leader, 65536)


@contextlib.contextmanager
def terminal(*arguments: str) -> Iterator[Terminal]:
    leader, follower = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "100", "LINES": "30"}
    environment.pop("NO_COLOR", None)
    chat = [sys.executable, "-m", "outrider.cli", "chat", *GREEDY]
    command = [sys.executable, "-c", IN_A_SESSION, *chat, *arguments]
    with subprocess.Popen(command, stdin=follower, stdout=follower, stderr=follower, env=environment) as process:
        os.close(follower)
        try:
            yield Terminal(process, leader)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            os.close(leader)


def test_on_a_terminal(trio: Trio) -> None:
    """Colours and live numbers; Ctrl-C ends an answer and no chat; Ctrl-D ends the chat."""
    with terminal("--gateway", trio.gateway, "--max-tokens", "900") as chat:
        chat.wait_for("> ")
        chat.press(f"{QUESTION}\n".encode())
        chat.wait_for(r"\d\d tokens, \d+% of them drafted and accepted, \d\.\d\d a round, \d+ tokens/s")
        chat.press(b"\x03")
        chat.wait_for(r"cancelled(.|\n)*> ")
        chat.press(b"/new\n")
        chat.wait_for(r"a new conversation(.|\n)*> ")
        chat.interrupt(r"Ctrl-D ends(.|\n)*> ")
        chat.press(b"\x04")
        assert chat.process.wait(WAIT_S) == 0
    assert b"\x1b[32m" in chat.shown and b"python, drafted by python/draft, k=4, 1024 tokens of context" in chat.shown
    assert b"trained on the sources of Python's standard library alone" in b" ".join(chat.shown.split())
    assert b"Traceback" not in chat.shown


def test_a_terminal_is_told_what_was_refused_and_goes_on(trio: Trio) -> None:
    with terminal("--gateway", trio.gateway, "--top-p", "7") as chat:
        chat.wait_for("> ")
        chat.press(b"hello\n")
        chat.wait_for(r"error: .*top_p(.|\n)*> ")
        chat.press(b"/exit\n")
        assert chat.process.wait(WAIT_S) == 0


def test_numbers_of_nothing() -> None:
    assert progress(CollectedCompletion(0), 0).startswith("0 tokens, 0% of them")
    assert summary(CollectedCompletion(0)) == "[0 tokens, 0.0 tokens/s, then None]"


@pytest.mark.parametrize("text", ["/etc/hosts", "/New", "// a comment"])
def test_a_text_with_a_slash_is_a_question(trio: Trio, text: str) -> None:
    done = chat(trio, f"{text}\n", "--max-tokens", "2")
    assert done.returncode == 0 and done.stdout == answer_to(trio, text, max_tokens=2) + "\n"
