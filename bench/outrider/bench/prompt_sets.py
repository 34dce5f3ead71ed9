"""The prompt sets of `outrider compare`, of which nothing was trained on:

    python -m outrider.bench.prompt_sets FOLDER [--target DIR] [--tokens 128]

`code` are the beginnings of Python functions; `changed` eight of them, which are asked but not measured, then each
again with small changes, as agents do; `predictions` bring the target's own answer with one token in 20 replaced,
joined by another one or left out; `random` are random tokens, answered at temperature 1."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from outrider.bench.prompts import PROMPTS
from outrider.gateway.text.tokenizer import Tokenizer
from outrider.llm import LLM, SamplingParams
from outrider.pairs import pair_path

NUM_CHANGED = 8
CHANGES: Mapping[str, Callable[[str], str]] = {
    "a line before": lambda prompt: f"# Changed in 2026.\n{prompt}",
    "a wrapped docstring": lambda prompt: prompt.replace('"""', '"""\n    ', 1),
    "another first name": lambda prompt: prompt.replace("(", "_again(", 1) if "(" in prompt else prompt + " ",
    "a space at the end": lambda prompt: prompt + " ",
}
NUM_RANDOM, RANDOM_TOKENS = 8, 48
EDITS = 20  # one in so many tokens
SEED = 17
Line = dict[str, Any]


def code() -> Iterator[Line]:
    """Plain code."""
    yield from ({"prompt": prompt} for prompt in PROMPTS)


def changed() -> Iterator[Line]:
    """The same requests again, with small changes."""
    yield from ({"prompt": prompt, "counts": False} for prompt in PROMPTS[:NUM_CHANGED])
    yield from ({"prompt": apply(prompt)} for apply in CHANGES.values() for prompt in PROMPTS[:NUM_CHANGED])


def predictions(answers: Sequence[Sequence[int]], vocab_size: int) -> Iterator[Line]:
    """Guesses at the answers to PROMPTS."""
    for number, (prompt, ids) in enumerate(zip(PROMPTS, answers, strict=True)):
        guess, _ = edited(ids, vocab_size, random.Random(f"{SEED} {number}"))
        yield {"prompt": prompt, "prediction": guess, "max_tokens": len(ids)}


def edited(ids: Sequence[int], vocab_size: int, rng: random.Random) -> tuple[list[int], set[int]]:
    """A guess at a text, and which places of the text it lacks: those replaced or left out."""
    guess: list[int] = []
    lacking = set()
    for place, token_id in enumerate(ids):
        edit = rng.choice(("replaced", "joined", "left out")) if rng.randrange(EDITS) == 0 else ""
        if edit in ("replaced", "joined"):
            guess.append(rng.randrange(vocab_size))
        if edit in ("replaced", "left out"):
            lacking.add(place)
        else:
            guess.append(token_id)
    return guess, lacking


def random_tokens(vocab_size: int) -> Iterator[Line]:
    """Prompts that mean nothing."""
    rng = random.Random(SEED)
    for _ in range(NUM_RANDOM):
        yield {"prompt": [rng.randrange(vocab_size) for _ in range(RANDOM_TOKENS)], "temperature": 1.0}


def plain_answers(target: Path, num_tokens: int) -> list[Sequence[int]]:
    """Greedy ones to PROMPTS."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    with LLM(model=target) as llm:
        return [output.outputs[0].token_ids for output in llm.generate(list(PROMPTS), params, use_tqdm=False)]


def main() -> None:
    """Writes the four files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the files go")
    parser.add_argument("--target", type=Path, default=None, help="folder of the target; the embedded pair's")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of a predicted answer (default: 128)")
    options = parser.parse_args()
    target = options.target or pair_path().target
    vocab_size = Tokenizer.load(target).num_tokens
    guesses = predictions(plain_answers(target, options.tokens), vocab_size)
    sets = {"code": code(), "changed": changed(), "predictions": guesses, "random": random_tokens(vocab_size)}
    options.folder.mkdir(parents=True, exist_ok=True)
    for name, lines in sets.items():
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (options.folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
