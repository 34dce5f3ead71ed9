"""The command line. Every command's module is imported only when it is run, so that `outrider --help` answers at
once."""

from __future__ import annotations

import difflib
import importlib
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from outrider.rpc.systems import lacking_for_models, require_posix

INTERRUPTED = 130  # what a shell reports for a program ended by Ctrl-C
CLOSED_PIPE = 141  # ... and for one whose reader went away
USAGE = "usage: outrider COMMAND [OPTIONS]\n       outrider COMMAND --help\n       outrider --version\n"
DESCRIPTION = "Lossless speculative decoding: a small model drafts, the target verifies, a gateway streams."
EPILOG = (
    "Settings come from flags, then OUTRIDER_* variables, then the YAML file of --config.\nStart with: outrider demo\n"
)
WITHOUT_MODELS = ("", "gateway")  # extras of commands that run none
HELP = ("-h", "--help", "help")
GROUP = "outrider.commands"  # entry points of commands that other wheels bring


@dataclass(frozen=True, slots=True)
class Command:
    """A command: the module with its `main(argv, prog) -> int` (empty: another wheel has it, under the entry points
    `outrider.commands`), what `outrider --help` says of it, and the extra of the package that brings what it needs
    (none: the package alone will do)."""

    module: str
    summary: str
    extra: str = ""


# By subject. Of a command of two words the first names a group, which shows its commands unless it is a command, too.
SUBJECTS: dict[str, dict[str, Command]] = {
    "serve": {
        "demo": Command("outrider.cli.demo", "start the three services on this machine and watch a completion", "llm"),
        "serve": Command(
            "outrider.cli.serve", "start the three services on this machine with models of your own", "llm"
        ),
        "target": Command(
            "outrider.target_service.__main__", "serve the target: verifies drafted tokens in batches", "target"
        ),
        "draft": Command("outrider.draft_service.__main__", "serve the draft: proposes tokens", "draft"),
        "gateway": Command(
            "outrider.gateway.__main__", "serve clients: runs the loop between draft and target", "gateway"
        ),
        "colocated": Command("outrider.cli.colocated", "serve clients from one process that holds both models", "llm"),
    },
    "ask a gateway": {
        "generate": Command("outrider.cli.generate", "ask for completions"),
        "chat": Command("outrider.cli.chat", "talk to the model"),
    },
    "look after what is served": {
        "doctor": Command("outrider.cli.doctor", "say what is wrong with a running deployment"),
        "trace": Command("outrider.cli.trace", "sum up where the time of requests went"),
        "plan": Command("outrider.cli.plan", "size a deployment: machines, milliseconds a token, best mode"),
        "admin reload": Command("outrider.cli.reload", "put other weights in a draft's place while it serves"),
        "admin adapter": Command("outrider.cli.adapter", "load and unload a target's adapters while it serves"),
    },
    "make and check models": {
        "model check": Command("outrider.cli.check_pair", "say whether a draft fits a target, and how well", "target"),
        "model convert": Command("outrider.cli.convert", "turn a checkpoint's .bin weights into safetensors", "target"),
        "model train": Command("", "make a draft for a target, or a head, by distillation", "train"),
        "learn": Command("", "let a draft learn from what it drafts for, while it serves", "train"),
        "model tap": Command("", "write a target's hidden states on a corpus, for training heads", "train"),
    },
    "measure": {
        "compare": Command("", "measure every method of drafting on the same prompts", "bench"),
        "bench": Command("", "measure a pair of models against plain decoding, peers and the floor", "bench"),
        "bench serve": Command("", "what was drafted and accepted while another tool loads a server", "bench"),
        "bench network": Command("", "measure what the network between the services costs", "bench"),
        "bench gateway": Command("", "measure a gateway: what a round costs, how many streams it has", "bench"),
        "bench host": Command("", "measure what target and gateway cost beside the device", "bench"),
        "bench vllm": Command("", "measure drafting by vLLM's own engine, and by ours", "bench"),
        "bench weights": Command("", "measure a GGUF file here and under llama.cpp", "bench"),
        "bench learning": Command("", "measure what a draft wins back that learns from what it serves", "bench"),
        "bench kernels": Command("", "measure the kernels against PyTorch's", "bench"),
    },
}
COMMANDS = {name: command for commands in SUBJECTS.values() for name, command in commands.items()}
GROUPS = {name.partition(" ")[0] for name in COMMANDS if " " in name}
# What commands were called before there were groups. One line says the new name.
ALIASES = {
    "reload": "admin reload",
    "adapter": "admin adapter",
    "check-pair": "model check",
    "convert": "model convert",
    "train": "model train",
    "tap": "model tap",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in HELP:
        print(help_text(), end="")
        return 0 if arguments else 2
    if arguments[0] in ("-V", "--version"):
        print(f"outrider {version()}")
        return 0
    name, *rest = renamed(arguments)
    if name in GROUPS and rest and not rest[0].startswith("-"):
        name, rest = f"{name} {rest[0]}", rest[1:]
    if name in COMMANDS:
        return run(name, rest)
    if name in GROUPS:
        print(help_text(name), end="")
        return 0 if rest and rest[0] in HELP else 2
    print(f"outrider: error: {unknown_command(name)}\nSee outrider --help.", file=sys.stderr)
    return 2


def renamed(arguments: list[str]) -> list[str]:
    """The command line with the present name of its command."""
    name, *rest = arguments
    if name not in ALIASES:
        return arguments
    print(f"outrider: warning: outrider {name} is called outrider {ALIASES[name]} now", file=sys.stderr)
    return [*ALIASES[name].split(), *rest]


def run(name: str, argv: Sequence[str]) -> int:
    """Runs one command. Ctrl-C, a reader that goes away, an extra that is not installed and a system that lacks
    something are no tracebacks."""
    command = COMMANDS[name]
    try:
        require_posix()
    except ImportError as error:
        print(f"outrider {name}: error: {error}", file=sys.stderr)
        return 2
    if command.extra not in WITHOUT_MODELS and (lacking := lacking_for_models()) is not None:
        print(f"outrider {name}: note: {lacking}", file=sys.stderr)
    try:
        status = main_of(name, command)(argv, prog=f"outrider {name}")
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


def main_of(name: str, command: Command) -> Callable[..., int]:
    """What runs a command. Raises ModuleNotFoundError where its wheel or a library of it is not installed."""
    from importlib import metadata

    if command.module:
        found: Callable[..., int] = importlib.import_module(command.module).main
        return found
    for point in metadata.entry_points(group=GROUP, name=name):
        found = point.load()
        return found
    raise ModuleNotFoundError(f"outrider {name} comes with outrider[{command.extra}]")


def missing_requirements(extra: str) -> list[str]:
    """The distributions that an extra of the installed package asks for and that are not installed."""
    from importlib import metadata

    asked = [line for line in metadata.requires("outrider") or () if line.endswith(f"extra == '{extra}'")]
    names = [re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in asked]
    return [name for name in names if not any(metadata.distributions(name=name))]


def help_text(group: str = "") -> str:
    """What `outrider --help` prints: all commands by subject, or those of a group."""
    if group:
        listed = _listed(name for name in COMMANDS if name.startswith(f"{group} "))
        return f"{USAGE.replace('COMMAND', f'{group} COMMAND', 2)}\ncommands:\n{listed}"
    subjects = "\n".join(f"{subject}:\n{_listed(commands)}" for subject, commands in SUBJECTS.items())
    return f"{USAGE}\n{DESCRIPTION}\n\n{subjects}\n{EPILOG}"


def _listed(names: Iterable[str]) -> str:
    width = max(map(len, COMMANDS))
    return "".join(f"  {name:<{width}}  {COMMANDS[name].summary}\n" for name in names)


def unknown_command(name: str) -> str:
    """What is wrong with a name that is no command."""
    kind = "flag" if name.startswith("-") else "command"
    group = name.partition(" ")[0]
    known = [one for one in COMMANDS if one.startswith(f"{group} ")] if " " in name else [*COMMANDS, *ALIASES]
    close = difflib.get_close_matches(name, known, n=1)
    meant = f"did you mean {ALIASES.get(close[0], close[0])}?" if close else f"there are {', '.join(known)}"
    return f"unknown {kind} {name}: {meant}"


def version() -> str:
    """The installed version."""
    from importlib import metadata

    return metadata.version("outrider")


if __name__ == "__main__":
    sys.exit(main())
