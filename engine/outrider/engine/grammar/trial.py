"""Trying a constraint out in a process of its own, which is ended when it takes too long: some regular expressions cost
minutes or gigabytes whatever limits are set, and a thread inside the library cannot be ended.

`python -m outrider.engine.grammar.trial` reads lines of JSON: the tokenizer first, then one source after another, and
answers each with a line: null, or what is wrong with it."""

from __future__ import annotations

import json
import os
import queue
import resource
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from select import select
from typing import IO, Any

from llguidance import LLTokenizer

from outrider.engine.grammar.lark import GrammarError
from outrider.engine.grammar.source import new_matcher, new_tokenizer

TRIAL_S = 0.7  # of a processor's time
WALL_TIMES = 10  # as long by the wall's clock at the most
POLL_S = 0.02
CPUCLOCK_SCHED = 2  # Linux: of a process, beside its number
START_S = 60.0
NUM_STEPS = 8  # masks that are tried
MAX_MEMORY = 1 << 30  # bytes beside the tokenizer's
BY_OTHERS = {-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP}  # exit statuses: no constraint's doing
TOO_SLOW = f"takes longer than {TRIAL_S:g} s to compile; allowed: a simpler one"
TOO_LARGE = "takes too much memory to compile; allowed: a simpler one"


class TrialFailed(OSError):
    """Nothing is known of the constraint: there was no process to try it, or no time or memory for one."""


class _Idle(queue.LifoQueue["_Process | None"]):
    """Processes without work: those that run come before those that are still to be started."""

    def _put(self, item: _Process | None) -> None:
        self.queue.insert(0 if item is None else len(self.queue), item)


class Trials:
    """Up to `count` processes, started when needed; each tries one constraint at a time."""

    def __init__(self, layout: str, vocab_size: int, eos_ids: Sequence[int], count: int = 2) -> None:
        self._tokenizer = {"layout": layout, "vocab_size": vocab_size, "eos_ids": list(eos_ids)}
        self._idle = _Idle()
        for _ in range(count):
            self._idle.put(None)
        weakref.finalize(self, _end_all, self._idle)

    def check(self, source: str) -> None:
        """Tries a constraint out; from any thread. Raises GrammarError for what does not compile, or not in time;
        TrialFailed for what the machine keeps from being tried."""
        process = self._idle.get()
        try:
            process = process or _started(self._tokenizer)
            problem = process.ask(source, TRIAL_S)
        except BaseException as error:
            if process is not None:
                process.end()
            process = self._next() if isinstance(error, GrammarError) else None
            raise
        finally:
            self._idle.put(process)
        if problem is not None:
            raise GrammarError(problem)

    def _next(self) -> _Process | None:
        """One in the place of one that a constraint has cost: whoever asks next does not wait until it has started."""
        try:
            return _started(self._tokenizer)
        except TrialFailed:
            return None

    def close(self) -> None:
        """Ends the processes; to be called once none is at work."""
        _end_all(self._idle)


def _end_all(idle: _Idle) -> None:
    while not idle.empty():
        if (process := idle.get()) is not None:
            process.end()


def _started(tokenizer: dict[str, Any]) -> _Process:
    """Raises TrialFailed: whatever keeps a process from starting is no constraint's doing."""
    try:
        return _Process(tokenizer)
    except (OSError, MemoryError, GrammarError) as error:
        raise TrialFailed(f"no process to try the constraint: {error}") from error


class _Process:
    def __init__(self, tokenizer: dict[str, Any]) -> None:
        paths = os.pathsep.join(path for path in sys.path if path)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "outrider.engine.grammar.trial"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": paths},
            bufsize=0,
        )
        try:
            self.ask(tokenizer, START_S)
        except BaseException:
            self.end()
            raise

    def ask(self, question: object, seconds: float) -> str | None:
        """Raises GrammarError where it takes too much time or memory, TrialFailed where that says nothing of it."""
        questions, answers = self._process.stdin, self._process.stdout
        if questions is None or answers is None:
            raise TrialFailed("no pipes")
        try:
            write_whole(questions, json.dumps(question).encode() + b"\n")
        except OSError as error:
            raise TrialFailed("the process that tries constraints has ended") from error
        began, spent = time.monotonic(), self._spent()
        while not select([answers], [], [], POLL_S)[0]:
            if self._spent() - spent > seconds:
                raise GrammarError(TOO_SLOW)
            if time.monotonic() - began > WALL_TIMES * seconds:
                raise TrialFailed("the machine is too busy to try the constraint")
        line = answers.readline()
        if not line:
            if self._process.wait() in BY_OTHERS:  # who lack the machine's memory, or end a whole group of processes
                raise TrialFailed("the process that tries constraints was killed")
            raise GrammarError(TOO_LARGE)  # its own bound ends it otherwise
        answer: str | None = json.loads(line)
        return answer

    def _spent(self) -> float:
        """Seconds of a processor's time: what else the machine does is not held against a constraint."""
        if sys.platform == "linux":
            return time.clock_gettime(~self._process.pid << 3 | CPUCLOCK_SCHED)
        return time.monotonic()

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


def write_whole(pipe: IO[bytes], data: bytes) -> None:
    """Writes all of it, without a buffer: a write ends in the midst of it where the process was stopped meanwhile and
    goes on, and who reads would wait for the rest for ever."""
    rest = memoryview(data)
    while rest:
        rest = rest[pipe.write(rest) :]


def problem_of(tokenizer: LLTokenizer, source: str) -> str | None:
    """What is wrong with a constraint; some masks along a text that it allows are tried, too."""
    try:
        matcher = new_matcher(tokenizer, source)
    except GrammarError as error:
        return str(error)
    for _ in range(NUM_STEPS):
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        if matcher.is_error():
            return matcher.get_error()[:300]
        if matcher.is_stopped() or not mask:
            break
        matcher.consume_token((mask & -mask).bit_length() - 1)
    return None


def main() -> None:
    """Answers until its input ends: what asks its service to end comes to the whole group, and the service may still
    have streams to finish."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    first = json.loads(sys.stdin.readline())
    tokenizer = new_tokenizer(first["layout"], first["vocab_size"], first["eos_ids"])
    if sys.platform == "linux":
        bound = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + MAX_MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (bound, bound))
    print("null", flush=True)
    for line in sys.stdin:
        print(json.dumps(problem_of(tokenizer, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
