"""Services that start at once: they are forked from a process that has imported what they import, which is most of what
a start costs. For who starts them they are its children, as any others.

    python -m support.nursery MODULE..."""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import IO
from unittest.mock import patch

from outrider.cli import attached, local_services

# What services import by and by, whatever they are asked for.
ENGINE = (
    "outrider.target_service.boot",
    "outrider.target_service.grammars",
    "outrider.draft_service.boot",
    "outrider.draft_service.grammar",
    "outrider.rpc.metrics",
)
GATEWAY = ("outrider.gateway.__main__", "outrider.gateway.http.server", "outrider.rpc.metrics")  # no torch
IMPORTED = {"target": ENGINE, "draft": ENGINE, "gateway": GATEWAY}
MATTERS = ("PYTHON", "LD_", "OMP_", "KMP_", "MKL_", "GRPC_", "HF_", "TRITON_INTERPRET")  # how names begin
OF_SERVICES = {"OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}  # what each is started with
PR_SET_CHILD_SUBREAPER = 36
MOST_BYTES = 1 << 20


class Forked:
    """A process that was forked elsewhere and adopted: what `Service` asks of one."""

    def __init__(self, pid: int, stdin: IO[bytes]) -> None:
        self.pid, self.stdin = pid, stdin
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its status if it has ended, negative for a signal."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout_s: float | None = None) -> int:
        """Its status once it has ended. Raises TimeoutExpired."""
        if self.poll() is None:
            process = os.pidfd_open(self.pid)
            try:
                select.select([process], [], [], timeout_s)
            finally:
                os.close(process)
        if (status := self.poll()) is None:
            raise subprocess.TimeoutExpired("a service", timeout_s or 0)
        return status


class Nursery:
    """A process that imports modules under an environment, on which imports may hang, and forks services."""

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "support.nursery", *modules],
                stdin=theirs.fileno(),
                env={**environment, "PYTHONPATH": os.pathsep.join(sys.path)},
                start_new_session=True,
            )

    def fork(self, arguments: Sequence[str], environment: Mapping[str, str], stdout: int, stderr: int) -> Forked:
        """Starts `outrider ARGUMENTS` with these files, in a session of its own."""
        stdin, ours = os.pipe()
        try:
            with _adopting():
                asked = json.dumps([os.getcwd(), sorted(os.sched_getaffinity(0)), {**environment}, *arguments]).encode()
                socket.send_fds(self._socket, [asked], [stdin, stdout, stderr])
                return Forked(int(self._socket.recv(MOST_BYTES)), os.fdopen(ours, "wb"))
        finally:
            os.close(stdin)

    def close(self) -> None:
        """It ends; what it has forked goes on."""
        self._socket.close()
        self._process.wait()


def significant(environment: Mapping[str, str]) -> dict[str, str]:
    """What of it may change what is imported; libraries of this process set others."""
    return {name: value for name, value in environment.items() if name.startswith(MATTERS)}


@contextmanager
def nurseries() -> Iterator[None]:
    """Within it `Services` forks drafts, targets and gateways that shall run with this process's environment; all else,
    and all of it where processes cannot be adopted, starts as ever."""
    if not sys.platform.startswith("linux"):
        yield
        return
    kept: dict[tuple[str, ...], Nursery] = {}
    usual = significant(os.environ | OF_SERVICES)

    def start(
        command: list[str],
        *,
        stdin: int,
        stdout: IO[bytes],
        stderr: int | None,
        env: dict[str, str],
        start_new_session: bool,
    ) -> Forked | subprocess.Popen[bytes]:
        modules = IMPORTED.get(command[3])
        if modules is not None and significant(env) == usual:
            nursery = kept.get(modules) or kept.setdefault(modules, Nursery(modules, env))
            errors = stdout.fileno() if stderr == subprocess.STDOUT else 2
            return nursery.fork(command[3:], env, stdout.fileno(), errors)
        return subprocess.Popen(
            command, stdin=stdin, stdout=stdout, stderr=stderr, env=env, start_new_session=start_new_session
        )

    try:
        with patch.object(local_services, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": start})):
            yield
    finally:
        for nursery in kept.values():
            nursery.close()


@contextmanager
def _adopting() -> Iterator[None]:
    """Meanwhile this process becomes the parent of what its children leave behind."""
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def main(modules: Sequence[str]) -> int:
    """Forks a service for every message, until nobody can send one. In the service itself: runs it."""
    for module in modules:
        importlib.import_module(module)
    if "torch" in sys.modules:
        from outrider.engine.models.decoder_config import parse_config

        parse_config({"model_type": "llama"})  # loads what transformers needs for one
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=0) as tests:
        while True:
            message, files, _, _ = socket.recv_fds(tests, MOST_BYTES, 3)
            if not message:
                tests.detach()
                return 0
            receiver, sender = os.pipe()
            if not (between := os.fork()):
                if os.fork():
                    os._exit(0)
                os.setsid()
                os.write(sender, str(os.getpid()).encode())
                tests.detach()
                for number, file in enumerate(files):
                    os.dup2(file, number)
                os.closerange(3, max(*files, receiver, sender) + 1)
                break
            os.waitpid(between, 0)  # then its child is ours who asked for it
            tests.send(os.read(receiver, 100))
            for file in (*files, receiver, sender):
                os.close(file)
    folder, cores, environment, *arguments = json.loads(message)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    os.sched_setaffinity(0, cores)
    return attached.main(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
