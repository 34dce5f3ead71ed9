"""What constraints cost the thread that runs the model:

    python bench/outrider/bench/grammar_masks.py [--vocab 128000] [--sequences 32] [--draft-tokens 4] [--json FILE]

First masks alone: of so many sequences with windows, over a made-up tokenizer of so many tokens, what the device thread
spends on them in a step (handing them out, and taking them once they are there), and what the threads spend that make
them. Then steps of the embedded pair's target, with and without a constraint, with equal rows: one that the model would
mostly keep by itself (indented lines behind a function's head), and one that forbids nearly all that it would write."""

from __future__ import annotations

import argparse
import json
import random
import time
from itertools import islice, product
from pathlib import Path
from statistics import median
from string import ascii_lowercase
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from outrider.bench.machine import describe
from outrider.bench.results import Json, dump, new_result, spread
from outrider.engine.grammar import GrammarCompiler, GrammarSpec
from outrider.engine.loader import load_model
from outrider.engine.model_runner import ModelRunner
from outrider.pairs import pair_path
from outrider.rpc.messages import Credit, DraftTokens, Open
from outrider.rpc.sampling_params import SamplingParams, StructuredOutput
from outrider.rpc.servicer import Deliver
from outrider.rpc.vocabulary import load_backend
from outrider.target_service.draft_buffer import Window
from outrider.target_service.engine import TargetEngine
from outrider.target_service.grammars import Grammars
from outrider.target_service.outputs import ComputedStep
from outrider.target_service.scheduler import ScheduledSequence
from outrider.target_service.sequence import TargetLimits, admit

SCHEMA = json.dumps({"type": "array", "items": {"type": "object", "properties": {"name": {"type": "string"}}}})
PROMPT = tuple(range(5, 37))
TEXT = 'def parse_args(argv):\n    """Parse the command line."""\n'
KEPT, FOUGHT = r"(    [^\n]*\n|\n){1,400}", r"[a-z ]{1,4000}"
END = 0
PATIENCE_S = 60


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=128_000, help="tokens of the made-up tokenizer (default: 128000)")
    parser.add_argument("--sequences", type=int, default=32, help="with masks in a step (default: 32)")
    parser.add_argument("--streams", type=int, default=8, help="that share steps of the pair's target (default: 8)")
    parser.add_argument("--draft-tokens", type=int, default=4, help="of every window (default: 4)")
    parser.add_argument("--steps", type=int, default=200, help="that are measured (default: 200)")
    parser.add_argument("--json", type=Path, help="where to store the result")
    options = parser.parse_args()
    setup = {name: value for name, value in vars(options).items() if name != "json"}
    result: Json = new_result(describe(), setup)
    result |= measure_masks(options.vocab, options.sequences, options.draft_tokens, options.steps)
    result |= measure_steps(options.streams, options.draft_tokens, options.steps)
    print(dump({name: value for name, value in result.items() if name not in ("machine", "setup", "when")}))
    if options.json is not None:
        options.json.write_text(dump(result), encoding="utf-8")


def measure_masks(vocab_size: int, num_sequences: int, k: int, num_steps: int) -> Json:
    """Milliseconds of a step's masks: of the device thread, and of all threads that make them."""
    backend = made_up_tokenizer(vocab_size)
    grammars = Grammars(GrammarCompiler(backend.to_str().encode(), vocab_size, (END,)))
    windows = [_window(number, backend, grammars, vocab_size, k) for number in range(num_sequences)]
    own, made = [], []
    for _ in range(num_steps):
        before = grammars.mask_seconds
        started = time.perf_counter()
        masks = grammars.start(windows)
        handed_out = time.perf_counter() - started
        if masks is None:
            raise RuntimeError("no window has a constraint")
        masks.wait_for_all()
        started = time.perf_counter()
        masks.wait(0.0)
        masks.close()
        own.append(1000 * (handed_out + time.perf_counter() - started))
        made.append(1000 * (grammars.mask_seconds - before))
    grammars.close()
    return {"device_thread_ms": spread_of(own), "mask_threads_ms": spread_of(made)}


def spread_of(values: list[float]) -> Json | None:
    """Without the single values."""
    found = spread(values)
    return None if found is None else {name: found[name] for name in ("median", "min", "max")}


def made_up_tokenizer(vocab_size: int) -> Tokenizer:
    """An end of sequence, all bytes, then words of letters, half of them behind a space."""
    tokens = ["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words = ("".join(letters) for length in range(2, 6) for letters in product(ascii_lowercase, repeat=length))
    for word in islice(words, (vocab_size - len(tokens) + 1) // 2):
        tokens += [word, "Ġ" + word]
    backend = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens[:vocab_size])}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    return backend


def _window(number: int, backend: Tokenizer, grammars: Grammars, vocab_size: int, k: int) -> ScheduledSequence:
    """Of a sequence inside a string, so that most tokens are allowed."""
    limits = TargetLimits(vocab_size, 4096, (END,), 1024)
    message = Open(number, PROMPT, SamplingParams(structured_output=StructuredOutput(json_schema=SCHEMA)))
    target = admit(message, None, (0, number), lambda event: None, limits, number, 0.0)
    output = backend.encode('[{"name":"some').ids
    compiled = grammars.compiler.compile(GrammarSpec("json_schema", SCHEMA))
    target.sampler.append(output)
    target.sampler.constrain(compiled.matcher(output))
    drafted = tuple(backend.encode("wordsmany").ids[:k])
    committed = target.committed
    rows = len(drafted) + 1
    return ScheduledSequence(
        target, committed, committed - 1, rows, Window(1, drafted, (), False), takes_next=True, num_logits=rows
    )


def measure_steps(num_streams: int, k: int, num_steps: int) -> Json:
    """Milliseconds of steps with equal rows, with and without a constraint in turn, so that both meet the same machine:
    every window is refused, so that each has one token and k drafted ones."""
    text = tuple(load_backend(pair_path().target)[0].encode(TEXT).ids)
    result: Json = {}
    for name, prompt, regex in (("kept", text, KEPT), ("fought", PROMPT, FOUGHT)):
        both = [Streams(num_streams, k, prompt, one) for one in (None, regex)]
        plain, constrained = zip(*([one.step() for one in both] for _ in range(min(num_steps, 300))), strict=True)
        result[name] = {
            "plain_step_ms": spread_of(list(plain)),
            "constrained_step_ms": spread_of(list(constrained)),
            "ratio": round(median(constrained) / median(plain), 4),
        }
        for one in both:
            one.close()
    return result


class Streams:
    """Greedy sequences of the embedded target that share every step."""

    def __init__(self, num_streams: int, k: int, prompt: tuple[int, ...], regex: str | None) -> None:
        folder = pair_path().target
        loaded = load_model(folder, dtype="float32", device="cpu")
        layout = load_backend(folder)[0].to_str().encode()
        self._grammars = Grammars(GrammarCompiler(layout, loaded.vocab_size, loaded.eos_token_ids))
        limits = TargetLimits(loaded.vocab_size, loaded.max_model_len, loaded.eos_token_ids, 2048)
        self._milliseconds = 0.0
        runner = ModelRunner(loaded.model, 2048)
        self._engine = TargetEngine(runner, limits, grammars=self._grammars, on_step=self._note)
        self._k, self._vocab_size, self._chain, self._rng = k, loaded.vocab_size, 0, random.Random(0)
        self._lengths = dict.fromkeys(range(num_streams), len(prompt))
        self._failed: list[Any] = []
        constraint = None if regex is None else StructuredOutput(regex=regex)
        sampling = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True, structured_output=constraint)
        for number in self._lengths:
            messages: list[Any] = [Open(number, prompt, sampling), Credit(number, len(prompt) + 1, 0)]
            self._engine.handle(Deliver(0, messages, self._sink))
        self._rest()

    def step(self) -> float:
        """Milliseconds of one in which every sequence has a window that no model would draft."""
        self._chain += 1
        for number, length in self._lengths.items():
            drafted = tuple(self._rng.randrange(self._vocab_size) for _ in range(self._k))
            piece = DraftTokens(number, self._chain, length, drafted)
            credit = Credit(number, length + self._k + 1, self._k, 1000 * PATIENCE_S)
            self._engine.handle(Deliver(0, [piece, credit], self._sink))
        self._rest()
        if self._failed:
            raise RuntimeError(f"a sequence failed: {self._failed[0]}")
        return self._milliseconds

    def close(self) -> None:
        """Ends its threads."""
        self._grammars.close()

    def _note(self, step: ComputedStep) -> None:
        self._milliseconds = 1000 * step.seconds

    def _sink(self, event: Any) -> None:
        if not hasattr(event, "ids"):
            self._failed.append(event)
        elif event.finish_reason is None:
            self._lengths[event.sequence_id] = event.position + len(event.ids)

    def _rest(self) -> None:
        """Steps until every sequence waits for its next window, or for credit."""
        while (wait := self._engine.step(time.monotonic())) is not None and wait < PATIENCE_S / 2:
            time.sleep(wait)


if __name__ == "__main__":
    main()
