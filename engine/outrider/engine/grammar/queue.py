"""Constraints on their way to sequences, on threads of their own.

One that is known is opened by a thread that no compilation holds up. One that is not waits for the compiler, each text
once however many ask for it, and boundedly: what takes long, or is sent in masses, costs those that are new, too, and
nobody else."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from outrider.engine.grammar.compiler import CompiledGrammar, GrammarCompiler
from outrider.engine.grammar.source import GrammarSpec

MAX_WAITING = 64  # constraints that are compiled, or wait for it
MEMORY = 8  # compilations that the time to come back is foreseen by
FIRST_S = 0.1  # for one, until one was seen
LEAST_WAIT_MS = 100

T = TypeVar("T")


class GrammarQueueFull(Exception):
    """So many constraints wait that one more is not taken; `wait_ms` says when to come back."""

    def __init__(self, wait_ms: int) -> None:
        super().__init__(f"{MAX_WAITING} constraints that are new wait to be compiled; allowed: no more")
        self.wait_ms = wait_ms


@dataclass(frozen=True, slots=True)
class _Waiter:
    """Who asks for a constraint."""

    spec: GrammarSpec
    finish: Callable[[CompiledGrammar, float], Any]
    future: Future[Any] = field(default_factory=Future)


class GrammarQueue:
    """Compiles the constraints over one tokenizer; thread-safe."""

    def __init__(self, make: Callable[[], GrammarCompiler], num_threads: int = 2, pool: Executor | None = None) -> None:
        """`make` is called with the first constraint, by the thread that compiles it. A pool does the work of all
        threads."""
        self._make = make
        self._num_threads = num_threads
        self._compile_pool = pool or ThreadPoolExecutor(num_threads, "grammar-compile")
        self._open_pool = pool or ThreadPoolExecutor(num_threads, "grammar-open")
        self._lock = threading.Lock()
        self._making = threading.Lock()
        self._compiler: GrammarCompiler | None = None
        self._waiting: dict[GrammarSpec, list[_Waiter]] = {}  # by constraint, what comes before it left out
        self._mean_s = FIRST_S  # that a compilation takes

    def submit(self, spec: GrammarSpec, finish: Callable[[CompiledGrammar, float], T]) -> Future[T]:
        """What `finish` makes of the constraint, and of the seconds that it took to compile; GrammarError where it does
        not compile. Once nobody waits for a constraint any more, who cancelled, it is not compiled. Raises
        GrammarQueueFull."""
        waiter = _Waiter(spec, finish)
        content = replace(spec, reasoning=None)
        with self._lock:
            is_known = self._compiler is not None and self._compiler.knows(content)
            is_new = not is_known and content not in self._waiting
            if is_new and len(self._waiting) >= MAX_WAITING:
                self._drop_cancelled()
            if is_new and (count := len(self._waiting)) >= MAX_WAITING:
                raise GrammarQueueFull(max(LEAST_WAIT_MS, round(1000 * self._mean_s * count / self._num_threads)))
            if not is_known:
                self._waiting.setdefault(content, []).append(waiter)
        if is_known:
            self._open_pool.submit(self._open, waiter, 0.0)
        elif is_new:
            self._compile_pool.submit(self._compile, content)
        return waiter.future

    def close(self, wait: bool = False) -> None:
        """Ends threads and processes; what waits is told nothing more."""
        with self._lock:
            self._waiting.clear()
        self._compile_pool.shutdown(wait=wait, cancel_futures=True)
        self._open_pool.shutdown(wait=wait, cancel_futures=True)
        if self._compiler is not None:
            self._compiler.close()

    def _drop_cancelled(self) -> None:
        waiting = self._waiting.items()
        self._waiting = {key: many for key, many in waiting if not all(one.future.cancelled() for one in many)}

    def _compile(self, content: GrammarSpec) -> None:
        with self._lock:
            if all(waiter.future.cancelled() for waiter in self._waiting.get(content, ())):
                self._waiting.pop(content, None)
                return
        started = time.perf_counter()
        error: Exception | None = None
        try:
            with self._making:
                self._compiler = self._compiler or self._make()
            self._compiler.compile(content)
        except Exception as problem:  # told to those that wait
            error = problem
        seconds = time.perf_counter() - started
        with self._lock:
            self._mean_s += (seconds - self._mean_s) / MEMORY
            waiters = self._waiting.pop(content, [])
        for waiter in waiters:
            self._open_pool.submit(self._open, waiter, seconds, error)

    def _open(self, waiter: _Waiter, seconds: float, error: Exception | None = None) -> None:
        future, compiler = waiter.future, self._compiler
        if not future.set_running_or_notify_cancel():
            return
        try:
            if error is not None or compiler is None:
                raise error or RuntimeError("nothing was compiled")
            future.set_result(waiter.finish(compiler.compile(waiter.spec), seconds))
        except Exception as problem:
            future.set_exception(problem)
