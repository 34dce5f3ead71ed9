"""An LLM starts threads and ends them: by close, by the end of the object, of the process, and after Ctrl-C; two of
them work side by side, and one that lost a thread says so."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from llm.conftest import TinyPair, greedy_ids

from outrider.llm import LLM, SamplingParams
from outrider.llm.backends import LocalBackend
from outrider.rpc.errors import Unavailable

QUIET: dict[str, Any] = {"use_tqdm": False}
GREEDY = SamplingParams(temperature=0, max_tokens=8)


def started(tiny_pair: TinyPair) -> LLM:
    config = {"model": str(tiny_pair.draft), "num_speculative_tokens": 3}
    return LLM(tiny_pair.target, batch_invariant=True, threads=1, speculative_config=config)


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("llm-")]


def peers_of(made: LLM) -> Any:
    assert isinstance(made._backend, LocalBackend)
    return made._backend.peers


def test_close_ends_the_threads(tiny_pair: TinyPair) -> None:
    before = set(threads())
    made = started(tiny_pair)
    assert sorted(t.name for t in set(threads()) - before) == ["llm-draft", "llm-loop", "llm-target"]
    made.generate([[5, 6]], GREEDY, **QUIET)
    made.close()
    made.close()
    assert set(threads()) == before
    with pytest.raises(RuntimeError, match="closed"):
        made.generate([[5, 6]], GREEDY, **QUIET)


def test_the_end_of_the_object_ends_them_too(tiny_pair: TinyPair) -> None:
    before = set(threads())
    made = started(tiny_pair)
    made.generate([[5, 6]], GREEDY, **QUIET)
    del made
    gc.collect()
    assert set(threads()) == before


def test_a_start_that_fails_leaves_nothing(tiny_pair: TinyPair) -> None:
    before = set(threads())
    with pytest.raises(ValueError, match="no folder"):
        LLM(tiny_pair.target, speculative_config={"model": "/no/such", "num_speculative_tokens": 2})
    (tiny_pair.draft / "broken").mkdir(exist_ok=True)
    with pytest.raises(Exception, match="broken"):
        LLM(tiny_pair.draft / "broken", tokenizer=tiny_pair.draft)
    assert set(threads()) == before


def test_models_that_are_no_pair(tiny_pair: TinyPair, tmp_path: Any) -> None:
    from tiny import save_tiny
    from tokenizer_factory import train_byte_level

    before = set(threads())
    other = save_tiny(tmp_path, vocab_size=400)
    train_byte_level(400).save(str(other / "tokenizer.json"))
    with pytest.raises(ValueError, match="not a pair"):
        LLM(tiny_pair.target, speculative_config={"model": str(other), "num_speculative_tokens": 2})
    with pytest.raises(ValueError, match="is not that of target"):
        LLM(tiny_pair.target, tokenizer=other)
    assert set(threads()) == before


@pytest.mark.timeout(120)
def test_a_process_that_is_interrupted_ends_cleanly_without_close(tiny_pair: TinyPair) -> None:
    """test_examples.py has one that just ends."""
    script = f"""
import os, signal, sys
from outrider.llm import LLM, SamplingParams
config = {{"model": {str(tiny_pair.draft)!r}, "num_speculative_tokens": 3}}
llm = LLM({str(tiny_pair.target)!r}, threads=1, speculative_config=config)
print(llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)[0].outputs[0].token_ids)
sys.stdout.flush()
os.kill(os.getpid(), signal.SIGINT)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False)
    assert str(greedy_ids(tiny_pair, [5, 6, 7], 8)) in done.stdout
    assert done.returncode != 0 and done.stderr.split("KeyboardInterrupt")[1].strip() == ""


def test_two_at_once(tiny_pair: TinyPair) -> None:
    with started(tiny_pair) as one, started(tiny_pair) as two, ThreadPoolExecutor(4) as pool:
        prompts = [[5 + i, 6, 7] for i in range(4)]
        calls = [
            pool.submit(made.generate, [prompt], SamplingParams(temperature=0, max_tokens=24), **QUIET)
            for made, prompt in zip([one, two, one, two], prompts, strict=True)
        ]
        ids = [call.result()[0].outputs[0].token_ids for call in calls]
    assert ids == [greedy_ids(tiny_pair, prompt, 24) for prompt in prompts]


def test_an_interrupt_releases_what_ran(tiny_pair: TinyPair) -> None:
    class Interrupted:
        def __init__(self, **options: Any) -> None: ...

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *error: object) -> None: ...

        def set_postfix_str(self, text: str, refresh: bool) -> None: ...

        def update(self, count: int) -> None:
            raise KeyboardInterrupt

    with started(tiny_pair) as made:
        params = [SamplingParams(temperature=0, max_tokens=count) for count in (1, 400, 400)]
        with pytest.raises(KeyboardInterrupt) as kept:  # with all its frames, as a notebook keeps it
            made.generate([[5, 6]] * 3, params, use_tqdm=Interrupted)
        running = [metric for metric in made.get_metrics() if metric.name.endswith("running")]
        assert [metric.value for metric in running] == [0] and kept.tb is not None  # type: ignore[attr-defined]
        sequences = peers_of(made)[0].engine.scheduler.sequences
        deadline = time.monotonic() + 10
        while sequences and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not sequences
        ended = [metric.value for metric in made.get_metrics() if metric.name == "vllm:generation_tokens"]  # type: ignore[attr-defined]
        assert ended == [1]  # the long ones did not go on to their end
        assert len(made.generate([[5, 6]], GREEDY, **QUIET)[0].outputs[0].token_ids) == 8


def test_a_call_that_runs_when_the_llm_is_closed_says_so(tiny_pair: TinyPair) -> None:
    made = started(tiny_pair)
    with ThreadPoolExecutor(1) as pool:
        long = SamplingParams(temperature=0, max_tokens=400)
        call = pool.submit(made.generate, [[5, 6]] * 4, long, **QUIET)
        deadline = time.monotonic() + 10
        while not peers_of(made)[0].engine.scheduler.sequences and time.monotonic() < deadline:
            time.sleep(0.001)
        made.close()
        with pytest.raises(RuntimeError, match="closed"):
            call.result(timeout=10)


def test_one_bad_prompt_ends_the_call_alone(llm: LLM) -> None:
    with pytest.raises(ValueError, match=r"token_ids\.ids"):
        llm.generate([[5, 6], [10**6]], SamplingParams(temperature=0, max_tokens=300), **QUIET)
    assert len(llm.generate([[5, 6]], GREEDY, **QUIET)[0].outputs[0].token_ids) == 8


def test_threads_that_are_gone(tiny_pair: TinyPair) -> None:
    """Without its draft an LLM decodes plainly; without its target it says so."""
    with started(tiny_pair) as made:
        target, draft = peers_of(made)
        draft.thread.stop()
        outputs = made.generate([[5, 6, 7]], GREEDY, **QUIET)
        assert outputs[0].outputs[0].token_ids == greedy_ids(tiny_pair, [5, 6, 7], 8)
        target.thread.stop()
        with pytest.raises(Unavailable, match="no target"):
            made.generate([[5, 6, 7]], GREEDY, **QUIET)
