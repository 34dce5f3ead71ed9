"""The prompts of the bench: the beginnings of Python functions, cut to one length in tokens, because transformers'
batches are rectangles."""

from __future__ import annotations

import json
from pathlib import Path

from outrider.gateway.tokenizer import Tokenizer

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


def read_prompts(tokenizer: Tokenizer, path: Path | None, num: int) -> list[list[int]]:
    """Token ids of `num` prompts, all of the same length. Raises ValueError where the file has too few."""
    texts = list(PROMPTS) if path is None else json.loads(path.read_text(encoding="utf-8"))
    if len(texts) < num or not all(isinstance(text, str) and text for text in texts):
        raise ValueError(f"the prompts must be a JSON list of at least {num} texts")
    prompts = [list(tokenizer.encode(text)) for text in texts[:num]]
    length = min(MAX_PROMPT_TOKENS, *map(len, prompts)) if num > 1 else min(MAX_PROMPT_TOKENS, len(prompts[0]))
    return [ids[:length] for ids in prompts]
