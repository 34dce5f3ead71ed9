"""The prompts of the bench: the beginnings of Python functions, or those of a file."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from outrider.gateway.text.tokenizer import Tokenizer

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


def choose(texts: list[str], num: int, seed: int) -> list[str]:
    """`num` prompts: all of them once in an order that the seed decides, then again."""
    order = random.Random(seed).sample(texts, len(texts))
    return [order[place % len(order)] for place in range(num)]


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
