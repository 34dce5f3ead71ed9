"""What a bad draft costs: tokens a second beside one, over those of plain decoding.

    python -m outrider.bench.bad_drafts [--target DIR] [--tokens 256] [--repeats 5] [--only NAME] [--quick]

The target writes its answers without a draft and, right after each, once more with one that is bad: it drafts the same
id always, ids that no vocabulary has, or what it repeats from the text but ten times later than a round takes; its
weights are no numbers, or all nought; its pieces come out of order; it has no memory, fails, or says nothing. The
gateway chooses for itself (mode auto). The first 64 tokens, in which it learns what the draft is worth, are left out.
Greedy, one stream. Prints a table in Markdown: the medians over prompts and repeats."""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from outrider.bench.prompts import PROMPTS
from outrider.bench.scripted_draft import SCRIPTS
from outrider.cli.local_services import LISTENING, LOOPBACK, ServiceFailed, Services
from outrider.cli.serve import ServeSettings, start
from outrider.client import SyncClient
from outrider.pairs import pair_path
from outrider.proposers.base import MAX_ID, ProposerState, SequenceContext

LEARNING = 64  # tokens that do not count
NUM_PROMPTS = 4
LATE_S = 0.05  # some ten rounds of the embedded target


class _State:
    """A text, and what follows it by a method's lights."""

    def __init__(self, tokens: Iterable[int], drafted: int | None, late_s: float) -> None:
        self._tokens, self._drafted, self._late_s = list(tokens), drafted, late_s

    @property
    def num_tokens(self) -> int:
        """Tokens held."""
        return len(self._tokens)

    def append(self, ids: Iterable[int]) -> None:
        """Adds tokens at the end."""
        self._tokens += ids

    def truncate(self, length: int) -> None:
        """Keeps the first ones."""
        del self._tokens[length:]

    def propose(self, max_tokens: int) -> list[int]:
        """The same id over and over; without one, that of the last token."""
        time.sleep(self._late_s)
        return [self._tokens[-1] if self._drafted is None else self._drafted] * max_tokens


class Constant:
    """Drafts one id, which is a token."""

    name = "constant"
    _drafted: int | None = 5
    _late_s = 0.0

    def open(self, tokens: Iterable[int], context: SequenceContext) -> ProposerState:
        """Starts a sequence."""
        return _State(tokens, self._drafted, self._late_s)


class Foreign(Constant):
    """Drafts an id that no vocabulary has."""

    name = "foreign"
    _drafted = MAX_ID


class Late(Constant):
    """Repeats the last token, and takes its time."""

    name = "late"
    _drafted = None
    _late_s = LATE_S


METHODS = (Constant, Foreign, Late)
Start = Callable[[Services, Path], str]  # starts a target, a bad draft and a gateway; returns where clients come in


def by_method(bad: type[Constant], services: Services, target: Path) -> str:
    """A draft service with a method that is bad."""
    name = f"outrider.bench.bad_drafts.{bad.__name__}"  # not __main__'s: the draft service imports it
    return _served(services, target, {"method": name, "allow_code": True})


def not_numbers(tensor: torch.Tensor) -> None:
    """Every weight."""
    tensor.fill_(float("nan"))


def noughts(tensor: torch.Tensor) -> None:
    """Every weight."""
    tensor.zero_()


HARMS = (not_numbers, noughts)


def harmed(draft: Path, folder: Path, harm: Callable[[torch.Tensor], None]) -> Path:
    """The draft's checkpoint with other weights."""
    shutil.copytree(draft, folder, ignore=shutil.ignore_patterns(".outrider-digest"))
    for file in folder.glob("*.safetensors"):
        weights = load_file(file)
        for tensor in weights.values():
            harm(tensor)
        save_file(weights, file, metadata={"format": "pt"})
    return folder


def by_weights(draft: Path, harm: Callable[[torch.Tensor], None], services: Services, target: Path) -> str:
    """A draft whose weights are what is bad; once it is loaded, nothing reads them again."""
    with tempfile.TemporaryDirectory() as folder:
        return _served(services, target, {"model": harmed(draft, Path(folder) / "draft", harm)})


@contextmanager
def scripted(script: str, target: str) -> Iterator[str]:
    """A draft in another process that follows a script, for a target that listens."""
    command = [sys.executable, "-m", "outrider.bench.scripted_draft", script, target]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            said = process.stdout.readline() if process.stdout is not None else ""
            if (found := LISTENING.search(said)) is None:
                raise ServiceFailed(f"the scripted draft does not listen: {said!r}")
            yield found[1]
        finally:
            process.terminate()


def _served(services: Services, target: Path, draft: dict[str, Any]) -> str:
    return start(services, _settings(target, draft), lambda _: None).gateway.address


def _settings(target: Path, draft: dict[str, Any]) -> ServeSettings:
    own = {"target": {"model": target}, "draft": draft, "gateway": {"listen": LOOPBACK}}
    return ServeSettings.model_validate(own)


@contextmanager
def served(bad: str | Start, target: Path) -> Iterator[str]:
    """Where clients come in, beside a draft that is started, or follows the script of that name."""
    with Services() as services:
        if not isinstance(bad, str):
            yield bad(services, target)
            return
        settings = _settings(target, {"method": "ngram"})
        at = services.wait(services.start("target", settings.target_arguments()), settings.start_timeout)
        with scripted(bad, at) as draft:
            gateway = services.start("gateway", settings.gateway_arguments(at, draft))
            services.wait(gateway, settings.start_timeout)
            services.wait_ready(gateway, settings.start_timeout)
            yield gateway.address


def all_bad(draft: Path | None) -> dict[str, str | Start]:
    """How each is started, by its name; those of bad weights from the draft's, where there is one."""
    found: dict[str, str | Start] = {bad.name: partial(by_method, bad) for bad in METHODS}
    if draft is not None:
        found |= {harm.__name__.replace("_", " "): partial(by_weights, draft, harm) for harm in HARMS}
    return found | {name.replace("_", " "): name for name in SCRIPTS}


def tokens_a_second(client: SyncClient, prompt: str, num_tokens: int, **options: Any) -> float:
    """Of one answer, behind its first tokens."""
    times: list[float] = []
    for part in client.generate(prompt, max_tokens=num_tokens, temperature=0.0, ignore_eos=True, **options):
        times += [time.perf_counter()] * len(part.token_ids)
    return (len(times) - LEARNING) / (times[-1] - times[LEARNING - 1])


def measure(client: SyncClient, num_tokens: int, repeats: int) -> tuple[float, float, float]:
    """Medians of plain tokens a second, of those beside the draft, and of the second over the first."""
    pairs = [
        tuple(tokens_a_second(client, prompt, num_tokens, speculate=speculate) for speculate in (False, None))
        for _ in range(repeats)
        for prompt in PROMPTS[:NUM_PROMPTS]
    ]
    shares = [beside / plain for plain, beside in pairs]
    return (
        statistics.median(plain for plain, _ in pairs),
        statistics.median(beside for _, beside in pairs),
        statistics.median(shares),
    )


def main() -> None:
    """The table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--target", type=Path, default=None, help="folder of the target; the embedded pair's")
    parser.add_argument("--draft", type=Path, default=None, help="folder of the draft whose weights are harmed")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of each answer")
    parser.add_argument("--repeats", type=int, default=5, help="of each prompt")
    parser.add_argument("--only", action="append", help="the draft of that name alone; may come more than once")
    parser.add_argument("--quick", action="store_true", help="96 tokens, each prompt once: does it work?")
    options = parser.parse_args()
    pair = pair_path()
    bad = all_bad(options.draft or (pair.draft if options.target is None else None))
    if unknown := set(options.only or ()) - bad.keys():
        parser.error(f"--only {', '.join(sorted(unknown))}: no such draft; allowed: {', '.join(bad)}")
    num_tokens, repeats = (LEARNING + 32, 1) if options.quick else (options.tokens, options.repeats)
    print("| draft | tokens a second, plain | beside it | median share |\n|---|---|---|---|")
    for name in options.only or bad:
        with served(bad[name], options.target or pair.target) as address, SyncClient(address) as client:
            plain, beside, share = measure(client, num_tokens, repeats)
        print(f"| {name} | {plain:.0f} | {beside:.0f} | {share:.3f} |", flush=True)


if __name__ == "__main__":
    main()
