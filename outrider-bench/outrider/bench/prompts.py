"""The prompts of the bench: the beginnings of Python functions, or those of a file. The sets that `outrider compare` is
measured on, of which nothing was trained on:

    python -m outrider.bench.prompts FOLDER [--target DIR] [--tokens 128]

`code` are the beginnings of Python functions; `changed` eight of them, which are asked but not measured, then each
again with small changes, as agents do; `predictions` bring the target's own answer with one token in 20 replaced,
joined by another one or left out; `random` are random tokens, answered at temperature 1."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from outrider.gateway.text.tokenizer import Tokenizer
from outrider.pairs import pair_path

PROMPTS = (
    'def parse_args(argv):\n    """Parse the command line and return the options and the arguments."""\n    parser =',
    'class Stack:\n    """A last-in, first-out container of items."""\n\n    def __init__(self):\n        self.items =',
    'def read_config(path):\n    """Read the configuration file and return it as a dictionary."""\n    with open(path)',
    'import os\nimport sys\n\n\ndef find_files(root, suffix):\n    """Yield the files below root that end in',
    'def binary_search(values, key):\n    """Return the index of key in the sorted list values, or -1."""\n    low = 0',
    'class Node:\n    """A node of a binary tree, with a value and two children."""\n\n    def __init__(self, value):',
    'def fibonacci(n):\n    """Return the first n numbers of the Fibonacci sequence, in a list."""\n    result = []\n',
    'import json\n\n\ndef save(data, filename):\n    """Write the data to the file as JSON with indentation."""\n',
    'def is_prime(number):\n    """Return True if the number is a prime number and False otherwise."""\n    if number',
    'class Timer:\n    """Measure the time that a block of code takes to run."""\n\n    def __enter__(self):\n',
    'def merge(left, right):\n    """Merge two sorted lists into a new sorted list and return it."""\n    result =',
    'import unittest\n\n\nclass TestParser(unittest.TestCase):\n    """Tests of the parser on small inputs."""\n\n',
    'def send_request(url, data=None, timeout=10):\n    """Send a request to the url and return the response."""\n   ',
    'class Cache:\n    """A dictionary that forgets the entries that were not used lately."""\n\n    def get(self,',
    'def count_words(text):\n    """Return a dictionary from each word of the text to its number."""\n    counts =',
    'import threading\n\n\nclass Worker(threading.Thread):\n    """Take tasks from a queue and run them, until',
)
MAX_PROMPT_TOKENS = 64
LINES = (".jsonl", ".ndjson")
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


def read_prompts(tokenizer: Tokenizer, path: Path | None, num: int) -> list[list[int]]:
    """Token ids of `num` prompts, cut to one length, because transformers' batches are rectangles. Raises ValueError
    where the file has too few."""
    texts = read_texts(path)
    if len(texts) < num:
        raise ValueError(f"{path} has {len(texts)} prompts; at least {num} are needed")
    prompts = [list(tokenizer.encode(text)) for text in texts[:num]]
    length = min(MAX_PROMPT_TOKENS, *map(len, prompts))
    return [ids[:length] for ids in prompts]


def read_texts(path: Path | None) -> list[str]:
    """All prompts of a file; without one, those above. ValueError names what is wrong."""
    if path is None:
        return list(PROMPTS)
    return [_text(path, number, value) for number, value in enumerate(read_values(path), 1)]


def read_values(path: Path) -> list[Any]:
    """What a file lists: a JSON list, JSON lines or plain lines. ValueError names the line that is wrong."""
    content = path.read_text(encoding="utf-8")
    if content.lstrip().startswith("[") and path.suffix not in (".txt", *LINES):
        values = _json(path, content)
    elif path.suffix in LINES or content.lstrip().startswith(("{", '"')):
        lines = enumerate(content.splitlines(), 1)
        values = [_json(path, line, number) for number, line in lines if line.strip()]
    else:
        values = [line for line in content.splitlines() if line.strip()]
    if not values:
        raise ValueError(f"{path} has no prompts")
    return list(values)


def _json(path: Path, text: str, line: int | None = None) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        where = f"{path}, line {line or error.lineno}"
        raise ValueError(f"{where}: no JSON ({error.msg})") from error


def _text(path: Path, number: int, value: Any) -> str:
    if isinstance(value, dict):
        value = value.get("prompt")
    if not isinstance(value, str) or not value:
        raise ValueError(f"{path}, prompt {number}: expected a text, or an object with a text as prompt")
    return value


def prompt_sets(vocab_size: int, answers: Sequence[Sequence[int]]) -> dict[str, list[Line]]:
    """The sets by name; `answers` are the target's to PROMPTS."""
    rng, few = random.Random(SEED), PROMPTS[:NUM_CHANGED]
    before: list[Line] = [{"prompt": prompt, "counts": False} for prompt in few]
    changed: list[Line] = [{"prompt": apply(prompt)} for apply in CHANGES.values() for prompt in few]
    guesses = list[Line]()
    for number, (prompt, ids) in enumerate(zip(PROMPTS, answers, strict=True)):
        guess, _ = edited(ids, vocab_size, random.Random(f"{SEED} {number}"))
        guesses.append({"prompt": prompt, "prediction": guess, "max_tokens": len(ids)})
    return {
        "code": [{"prompt": prompt} for prompt in PROMPTS],
        "changed": before + changed,
        "predictions": guesses,
        "random": [
            {"prompt": [rng.randrange(vocab_size) for _ in range(RANDOM_TOKENS)], "temperature": 1.0}
            for _ in range(NUM_RANDOM)
        ],
    }


def edited(ids: Sequence[int], vocab_size: int, rng: random.Random) -> tuple[list[int], set[int]]:
    """A guess at a text, and which places of the text it lacks: those replaced or left out."""
    guess, lacking = list[int](), set[int]()
    for place, token_id in enumerate(ids):
        edit = rng.choice(("replaced", "joined", "left out")) if rng.randrange(EDITS) == 0 else ""
        if edit in ("replaced", "joined"):
            guess.append(rng.randrange(vocab_size))
        if edit in ("replaced", "left out"):
            lacking.add(place)
        else:
            guess.append(token_id)
    return guess, lacking


def plain_answers(target: Path, num_tokens: int) -> list[Sequence[int]]:
    """Greedy ones to PROMPTS."""
    from outrider.llm import LLM, SamplingParams

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
    sets = prompt_sets(Tokenizer.load(target).num_tokens, plain_answers(target, options.tokens))
    options.folder.mkdir(parents=True, exist_ok=True)
    for name, lines in sets.items():
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (options.folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
