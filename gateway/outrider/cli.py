"""The command line. Every command's module is imported only when it is run, so that `outrider --help` answers at
once."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

INTERRUPTED = 130  # what a shell reports for a program ended by Ctrl-C
CLOSED_PIPE = 141  # ... and for one whose reader went away


@dataclass(frozen=True, slots=True)
class Command:
    """A command: the module with its `main(argv, prog) -> int`, and what `outrider --help` says of it."""

    module: str
    summary: str


COMMANDS = {
    "demo": Command("outrider.commands.demo", "start the three services on this machine and watch a completion"),
    "target": Command("outrider.target.__main__", "serve the target: verifies drafted tokens in batches"),
    "draft": Command("outrider.draft.__main__", "serve the draft: proposes tokens"),
    "gateway": Command("outrider.gateway.__main__", "serve clients: runs the loop between draft and target"),
    "generate": Command("outrider.commands.generate", "ask a gateway for completions"),
    "check-pair": Command("outrider.commands.check_pair", "say whether a draft fits a target, and how well"),
    "bench": Command("outrider.commands.bench", "measure a pair of models against plain decoding, peers and the floor"),
    "convert": Command("outrider.commands.convert", "turn a checkpoint's .bin weights into safetensors"),
}

USAGE = "usage: outrider COMMAND [OPTIONS]\n       outrider COMMAND --help\n       outrider --version\n"
DESCRIPTION = "Lossless speculative decoding: a small model drafts, the target verifies, a gateway streams."
EPILOG = (
    "Settings come from flags, then OUTRIDER_* variables, then the YAML file of --config.\nStart with: outrider demo\n"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(help_text(), end="")
        return 0 if arguments else 2
    if arguments[0] in ("-V", "--version"):
        print(f"outrider {version()}")
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        print(f"outrider: error: {complaint(name)}\nSee outrider --help.", file=sys.stderr)
        return 2
    return run(name, rest)


def run(name: str, argv: Sequence[str]) -> int:
    """Runs one command. Ctrl-C and a reader that goes away are no tracebacks."""
    try:
        status: int = importlib.import_module(COMMANDS[name].module).main(argv, prog=f"outrider {name}")
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the flush at exit has nobody to write to
        return CLOSED_PIPE


def help_text() -> str:
    """What `outrider --help` prints."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()]
    return f"{USAGE}\n{DESCRIPTION}\n\ncommands:\n" + "\n".join(lines) + f"\n\n{EPILOG}"


def complaint(name: str) -> str:
    """What is wrong with a name that is no command."""
    kind = "flag" if name.startswith("-") else "command"
    close = difflib.get_close_matches(name, COMMANDS, n=1)
    meant = f"did you mean {close[0]}?" if close else f"there are {', '.join(COMMANDS)}"
    return f"unknown {kind} {name}: {meant}"


def version() -> str:
    """The installed version."""
    from importlib import metadata

    return metadata.version("outrider")


if __name__ == "__main__":
    sys.exit(main())
