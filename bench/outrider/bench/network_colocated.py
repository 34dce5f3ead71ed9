"""Co-located speculation as a worker: `python -m outrider.bench.network_colocated TARGET DRAFT THREADS
[expand]`. Draft and verification alternate on one thread of one process, under the same stretched draft passes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from outrider.bench.colocated import Colocated
from outrider.bench.network_draft import PassPacer
from outrider.bench.network_fleet import summarise_rounds
from outrider.bench.worker import serve_requests
from outrider.planner.policy import Policy
from outrider.rpc.messages import Open
from outrider.rpc.sampling_params import SamplingParams


def make_handler(target: Path, draft: Path, threads: int, expand: bool) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Answers {"prompts", "seeds", "sampling", "k", "pass_ms"} with the digest of the rounds. Above temperature 0
    acceptance is by rejection, which accepts the most."""
    pace = PassPacer()
    pace.stretch_passes()
    engines = Colocated.of(target, draft, threads=threads, expand=expand)

    def handle(question: dict[str, Any]) -> dict[str, Any]:
        pace.pass_s = question["pass_ms"] / 1e3
        sampling = SamplingParams(**question["sampling"])
        opens = [
            Open(0, tuple(ids), sampling, seed=seed, one_hot=sampling.greedy)
            for ids, seed in zip(question["prompts"], question["seeds"], strict=True)
        ]
        return asdict(summarise_rounds(engines.decode(opens, Policy(question["k"]))))

    return handle


if __name__ == "__main__":
    folders = (Path(sys.argv[1]), Path(sys.argv[2]))
    sys.exit(serve_requests(lambda: make_handler(*folders, int(sys.argv[3]), "expand" in sys.argv[4:])))
