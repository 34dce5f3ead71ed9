"""What a target gains by guessing at tokens that a grammar forces:

    python -m outrider.bench.forced_tokens [--most 0,2,4,8,16] [--k 4] [--samples 2]

The embedded pair writes JSON of four schemas, without a draft and with one, and the target may guess at so many forced
tokens a step. Tokens a round and tokens a second, as a table in Markdown."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from outrider.bench.prompts import PROMPTS
from outrider.cli.local_services import LOOPBACK, Services, wait_for_draft
from outrider.client import SyncClient
from outrider.pairs import pair_path
from outrider.rpc.sampling_params import StructuredOutput

START_S = 120.0
TOKENS = 160
WORD = {"type": "string", "pattern": "^[a-z_]{1,12}$"}
NUMBER = {"type": "integer", "minimum": 0, "maximum": 999}


def an_object(**properties: Any) -> dict[str, Any]:
    """A schema of all these, and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


SCHEMAS = (
    an_object(function_name=WORD, num_arguments=NUMBER, returns_value={"type": "boolean"}, description=WORD),
    an_object(first_name=WORD, last_name=WORD, birth_year=NUMBER, is_member={"type": "boolean"}),
    an_object(
        file_name=WORD,
        size_in_bytes=NUMBER,
        kind={"enum": ["directory", "regular file", "symbolic link"]},
        owner=an_object(user_name=WORD, group_name=WORD),
    ),
    an_object(
        temperatures={"type": "array", "items": NUMBER, "minItems": 3, "maxItems": 6},
        unit={"enum": ["celsius", "fahrenheit"]},
        measured_by=WORD,
    ),
)


@dataclass
class Tally:
    """Sums over requests."""

    tokens: int = 0
    rounds: int = 0
    seconds: float = 0.0
    texts: list[str] = field(default_factory=list)


@contextmanager
def served(most: int, has_draft: bool) -> Iterator[str]:
    """The address of a gateway before the pair."""
    pair = pair_path()
    with Services() as services:
        flags = ["--threads", "1", "--listen", LOOPBACK]
        bound = ["--max-forced-tokens", str(most)]
        target = services.start("target", ["target", "--model", str(pair.target), *bound, *flags])
        peers = ["--target", services.wait(target, START_S), "--tokenizer", str(pair.target)]
        if has_draft:
            draft = services.start("draft", ["draft", "--model", str(pair.draft), *flags])
            peers += ["--draft", services.wait(draft, START_S)]
        gateway = services.start("gateway", ["gateway", *peers, "--listen", LOOPBACK])
        address = services.wait(gateway, START_S)
        if has_draft:
            wait_for_draft(address, START_S, services.check)
        yield address


def measure(address: str, k: int, samples: int, temperature: float) -> Tally:
    """Every schema behind as many prompts, one request after the other; the first warms up."""
    tally = Tally()
    options: dict[str, Any] = {"num_draft_tokens": k, "mode": "sequential"} if k else {}
    with SyncClient(address) as client:
        for number, (schema, prompt) in enumerate(product((SCHEMAS[0], *SCHEMAS), PROMPTS[:samples])):
            started = time.perf_counter()
            parts = list(
                client.generate(
                    f"{prompt}\n\n# as JSON:\n",
                    max_tokens=TOKENS,
                    temperature=temperature,
                    seed=number,
                    structured_output=StructuredOutput(json_schema=json.dumps(schema)),
                    **options,
                )
            )
            if number >= samples:
                (stats,) = [part.speculation for part in parts if part.speculation is not None]
                tally.seconds += time.perf_counter() - started
                tally.tokens += sum(len(part.token_ids) for part in parts)
                tally.rounds += stats.num_rounds
                tally.texts.append("".join(part.text for part in parts))
    return tally


def main() -> None:
    """The table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", default="0,2,4,8,16", help="forced tokens a step, with commas between")
    parser.add_argument("--k", type=int, default=4, help="drafted tokens a round, where there is a draft")
    parser.add_argument("--samples", type=int, default=2, help="prompts of each schema")
    parser.add_argument("--temperature", type=float, default=0.0)
    options = parser.parse_args()
    print("| draft | forced tokens, at most | tokens a round | times as many | tokens a second | valid |")
    print("|---|---|---|---|---|---|", flush=True)
    for has_draft in (False, True):
        first: Tally | None = None
        for most in map(int, options.most.split(",")):
            with served(most, has_draft) as address:
                found = measure(address, options.k if has_draft else 0, options.samples, options.temperature)
            first = first or found
            gain = found.tokens / found.rounds / (first.tokens / first.rounds)
            valid = sum(is_json(text) for text in found.texts)
            name, speed = f"k={options.k}" if has_draft else "none", found.tokens / found.seconds
            cells = [name, most, f"{found.tokens / found.rounds:.2f}", f"{gain:.2f}", f"{speed:.0f}"]
            print(f"| {' | '.join(map(str, cells))} | {valid} of {len(found.texts)} |", flush=True)


def is_json(text: str) -> bool:
    """Whether it is whole."""
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


if __name__ == "__main__":
    main()
