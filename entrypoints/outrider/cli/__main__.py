"""The command line. Every command's module is imported only when it is run, so that `outrider --help` answers at
once."""

from __future__ import annotations

import difflib
import importlib
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass

INTERRUPTED = 130  # what a shell reports for a program ended by Ctrl-C
CLOSED_PIPE = 141  # ... and for one whose reader went away


@dataclass(frozen=True, slots=True)
class Command:
    """A command: the module with its `main(argv, prog) -> int`, what `outrider --help` says of it, and the extra of
    the package that has the libraries for it (none: the package alone will do)."""

    module: str
    summary: str
    extra: str = ""


COMMANDS = {
    "demo": Command("outrider.cli.demo", "start the three services on this machine and watch a completion", "llm"),
    "target": Command(
        "outrider.target_service.__main__", "serve the target: verifies drafted tokens in batches", "target"
    ),
    "draft": Command("outrider.draft_service.__main__", "serve the draft: proposes tokens", "draft"),
    "gateway": Command("outrider.gateway.__main__", "serve clients: runs the loop between draft and target", "gateway"),
    "colocated": Command("outrider.cli.colocated", "serve clients from one process that holds both models", "llm"),
    "serve": Command("outrider.cli.serve", "start the three services on this machine with models of your own", "llm"),
    "generate": Command("outrider.cli.generate", "ask a gateway for completions"),
    "chat": Command("outrider.cli.chat", "talk to a gateway's model"),
    "trace": Command("outrider.cli.trace", "show where a request's rounds spent their time"),
    "plan": Command("outrider.cli.plan", "size a deployment: machines, milliseconds a token, best mode"),
    "doctor": Command("outrider.cli.doctor", "say what is wrong with a running deployment"),
    "reload": Command("outrider.cli.reload", "put other weights in a draft's place while it serves"),
    "adapter": Command("outrider.cli.adapter", "load and unload a target's adapters while it serves"),
    "check-pair": Command("outrider.cli.check_pair", "say whether a draft fits a target, and how well", "target"),
    "compare": Command("outrider.bench.compare", "measure every method of drafting on the same prompts", "bench"),
    "bench": Command(
        "outrider.bench.pair", "measure a pair of models against plain decoding, peers and the floor", "bench"
    ),
    "train": Command("outrider.cli.train", "make a draft for a target, or a head, by distillation", "train"),
    "tap": Command("outrider.cli.tap", "write a target's hidden states on a corpus, for training heads", "train"),
    "convert": Command("outrider.cli.convert", "turn a checkpoint's .bin weights into safetensors", "target"),
}
# Commands of two words. Their first words are commands, too, that take no bare argument.
SUBCOMMANDS = {
    "bench network": Command("outrider.bench.network", "measure what the network between the services costs", "bench"),
    "bench gateway": Command(
        "outrider.bench.gateway",
        "measure what a round costs a gateway, and how many streams it carries",
        "bench",
    ),
    "bench serve": Command("outrider.bench.load", "load a server: latencies, throughput and acceptance", "bench"),
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
        print(f"outrider: error: {unknown_command(name)}\nSee outrider --help.", file=sys.stderr)
        return 2
    if rest and not rest[0].startswith("-") and subcommands(name):
        name, rest = f"{name} {rest[0]}", rest[1:]
        if name not in SUBCOMMANDS:
            print(f"outrider: error: {unknown_command(name)}\nSee outrider --help.", file=sys.stderr)
            return 2
    return run(name, rest)


def subcommands(name: str) -> list[str]:
    """The commands of two words that begin with a command."""
    return [known for known in SUBCOMMANDS if known.startswith(f"{name} ")]


def run(name: str, argv: Sequence[str]) -> int:
    """Runs one command. Ctrl-C, a reader that goes away and an extra that is not installed are no tracebacks."""
    command = COMMANDS.get(name) or SUBCOMMANDS[name]
    try:
        status: int = importlib.import_module(command.module).main(argv, prog=f"outrider {name}")
        sys.stdout.flush()
        return status
    except ModuleNotFoundError:
        missing = missing_requirements(command.extra)
        if not missing:
            raise
        said = f"not installed: {', '.join(missing)}; pip install 'outrider[{command.extra}]'"
        print(f"outrider {name}: error: {said}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the flush at exit has nobody to write to
        return CLOSED_PIPE


def missing_requirements(extra: str) -> list[str]:
    """The distributions that an extra of the installed package asks for and that are not installed."""
    from importlib import metadata

    asked = [line for line in metadata.requires("outrider") or () if line.endswith(f"extra == '{extra}'")]
    names = [re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in asked]
    return [name for name in names if not any(metadata.distributions(name=name))]


def help_text() -> str:
    """What `outrider --help` prints."""
    listed = {known: command for name in COMMANDS for known, command in _family(name)}
    width = max(map(len, listed))
    lines = [f"  {name:<{width}}  {command.summary}" for name, command in listed.items()]
    return f"{USAGE}\n{DESCRIPTION}\n\ncommands:\n" + "\n".join(lines) + f"\n\n{EPILOG}"


def _family(name: str) -> list[tuple[str, Command]]:
    """A command, then those of two words that begin with it."""
    return [(name, COMMANDS[name]), *((known, SUBCOMMANDS[known]) for known in subcommands(name))]


def unknown_command(name: str) -> str:
    """What is wrong with a name that is no command."""
    kind = "flag" if name.startswith("-") else "command"
    known = subcommands(name.partition(" ")[0]) if " " in name else list(COMMANDS)
    close = difflib.get_close_matches(name, known, n=1)
    meant = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
    return f"unknown {kind} {name}: {meant}"


def version() -> str:
    """The installed version."""
    from importlib import metadata

    return metadata.version("outrider")


if __name__ == "__main__":
    sys.exit(main())
