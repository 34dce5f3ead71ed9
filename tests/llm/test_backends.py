"""LLM(gateway=...): the same API over gRPC. The gateway is the real one, over toys; the call runs beside its loop.

An LLM starts threads and ends them: by close, by the end of the object, of the process, and after Ctrl-C; two of
them work side by side, and one that lost a thread says so."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.fakes import ToyDraft, ToyTarget, expected, target_info
from support.gateways import over_grpc
from support.models import train_byte_level
from support.pairs import CHAT, TinyPair, greedy_ids
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel

from outrider.gateway.engine import EngineConfig, GenerationEngine
from outrider.gateway.servicer import GenerationServicer
from outrider.gateway.text.tokenizer import Tokenizer
from outrider.llm import LLM, SamplingParams, Unsupported
from outrider.llm.backends import speculation_options
from outrider.llm.local import LocalBackend
from outrider.rpc.errors import Internal, Unavailable
from outrider.rpc.messages import DraftMethod
from outrider.rpc.words.sampling_params import AcceptanceRule

DRAFTED = "vllm:spec_decode_num_draft_tokens"
NINE_GREEDY = SamplingParams(temperature=0, max_tokens=9)


@asynccontextmanager
async def gateway(folder: Path, target: ToyTarget, **config: Any) -> AsyncIterator[str]:
    train_byte_level().save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHAT)
    engine = GenerationEngine(Tokenizer.load(folder), target, ToyDraft(wrong_every=3), EngineConfig(**config))
    async with over_grpc(GenerationServicer(engine)) as address:
        yield address


async def test_generates_over_a_gateway(tmp_path: Path) -> None:
    target = ToyTarget(num_cached=1)

    def use(address: str) -> None:
        with LLM(gateway=address, tokenizer=tmp_path) as made:
            params = SamplingParams(temperature=0, max_tokens=9, logprobs=0, prompt_logprobs=0)
            ids = made.generate([[11, 12, 13], [14, 15]], [params, NINE_GREEDY], use_tqdm=False)
            assert [o.outputs[0].token_ids for o in ids] == [expected([11, 12, 13], 9), expected([14, 15], 9)]
            first = ids[0].outputs[0]
            assert first.logprobs is not None and len(first.logprobs) == 9 and first.finish_reason == "length"
            assert first.logprobs[0][first.token_ids[0]].decoded_token is not None
            assert ids[0].prompt_logprobs is not None and len(ids[0].prompt_logprobs) == 3
            assert ids[0].num_cached_tokens == 1
            (text,) = made.generate("the quick", SamplingParams(n=2, max_tokens=4, seed=9), use_tqdm=False)
            assert text.prompt == "the quick" and text.prompt_token_ids == made.get_tokenizer().encode("the quick")
            assert len(text.outputs) == 2 and all(c.text for c in text.outputs)
            (talk,) = made.chat([{"role": "user", "content": "hello"}], NINE_GREEDY, use_tqdm=False)
            assert talk.prompt == "<|user|>hello<|assistant|>"
            (long,) = made.generate([[7] * 250], SamplingParams(temperature=0, max_tokens=None), use_tqdm=False)
            assert len(long.outputs[0].token_ids) == 6  # what the context of 256 leaves
            values: dict[str, Any] = {metric.name: metric for metric in made.get_metrics()}
            accepted = values["vllm:spec_decode_num_accepted_tokens"].value
            assert 0 < accepted == sum(values["vllm:spec_decode_num_accepted_tokens_per_pos"].values)
            assert values["vllm:spec_decode_num_draft_tokens"].value > accepted
            with pytest.raises(ValueError, match=r"^prompt\[0\]: is 999"):
                made.generate([[999]], NINE_GREEDY, use_tqdm=False)

    async with gateway(tmp_path, target) as address:
        await asyncio.to_thread(use, address)
    assert target.opens[2].acceptance is AcceptanceRule.COUPLED and target.opens[2].seed == 9
    assert {request.acceptance for request in target.opens[:2]} == {AcceptanceRule.BLOCK}


async def test_of_several_gateways_one_that_is_there_is_asked(tmp_path: Path) -> None:
    def ask(addresses: str) -> list[int]:
        with LLM(gateway=addresses) as made:
            (output,) = made.generate([[11, 12, 13]], NINE_GREEDY, use_tqdm=False)
            return list(output.outputs[0].token_ids)

    async with gateway(tmp_path, ToyTarget()) as address:
        assert await asyncio.to_thread(ask, f"127.0.0.1:1, {address}") == expected([11, 12, 13], 9)


async def test_what_a_request_can_say(tmp_path: Path) -> None:
    target = ToyTarget()

    def use(address: str) -> None:
        options: dict[str, Any] = {"per_request_spec_decode_metrics": "summary"}
        with LLM(gateway=address, speculative_config={"num_speculative_tokens": 2}, **options) as made:
            (output,) = made.generate([[11, 12, 13]], NINE_GREEDY, use_tqdm=False, priority=[7])
            assert output.outputs[0].token_ids == expected([11, 12, 13], 9)
            times = output.metrics
            assert times is not None and (times.num_generation_tokens, times.scheduled_ts) == (9, 0.0)
            assert 0 < times.queued_ts <= times.first_token_ts <= times.last_token_ts
            own = output.outputs[0].spec_decode_metrics
            assert own is not None and own.num_spec_tokens == 2 and len(own.acceptance_histogram) == 3
            assert own.num_spec_steps == sum(own.acceptance_histogram) > 0 and own.per_step_accepted is None
            values: dict[str, Any] = {metric.name: metric for metric in made.get_metrics()}
            assert len(values["vllm:spec_decode_num_accepted_tokens_per_pos"].values) == 2
            with pytest.raises(ValueError, match=r"^thinking_token_budget: is given, and no reasoning"):
                made.generate([[11, 12]], SamplingParams(thinking_token_budget=5), use_tqdm=False)
            with pytest.raises(ValueError, match="max_tokens=None"):
                made.generate("text", SamplingParams(max_tokens=None), use_tqdm=False)
            with pytest.raises(ValueError, match="tokenizer"):
                made.get_tokenizer()
        with pytest.raises(Unsupported, match="'summary' over a gateway"):
            LLM(gateway=address, per_request_spec_decode_metrics="detailed")
        with pytest.raises(TypeError, match="did you mean 'num_speculative_tokens'"):
            LLM(gateway=address, speculative_config={"num_speculative_token": 3})
        with pytest.raises(ValueError, match="128"):
            LLM(gateway=address, speculative_config={"num_speculative_tokens": 129})
        with (
            LLM(gateway=address, speculative_config={"method": "eagle"}) as made,
            pytest.raises(ValueError, match=r"^speculative_config\['method'\].*eagle.*draft"),
        ):
            made.generate([[11, 12, 13]], NINE_GREEDY, use_tqdm=False)
        for option in ({"dtype": "float32"}, {"max_model_len": 9}, {"speculative_config": {"model": "x"}}):
            with pytest.raises(Unsupported, match=r"gateway=.*decide"):
                LLM(gateway=address, **option)

    async with gateway(tmp_path, target) as address:
        await asyncio.to_thread(use, address)
    assert target.opens[0].priority == 7
    with pytest.raises(Unavailable):
        await asyncio.to_thread(LLM, gateway="127.0.0.1:1")


async def test_a_targets_head_is_asked_for_by_name(tmp_path: Path) -> None:
    """Beside a draft, which is the default; a head that no target has is refused by name."""
    head = (DraftMethod("eagle3", needs_features=True, can_run_ahead=False),)
    target = ToyTarget(info=replace(target_info(), methods=head))

    def use(address: str) -> None:
        config = {"method": "eagle3", "num_speculative_tokens": 3}
        with LLM(gateway=address, speculative_config=config) as made:
            (output,) = made.generate([[11, 12, 13]], NINE_GREEDY, use_tqdm=False)
            assert output.outputs[0].token_ids == expected([11, 12, 13], 9)
            assert {metric.name: getattr(metric, "value", 0) for metric in made.get_metrics()}[DRAFTED] > 0
        with (
            LLM(gateway=address, speculative_config=config | {"method": "medusa"}) as made,
            pytest.raises(ValueError, match=r"'medusa', a head that the target does not have; allowed: .*eagle3"),
        ):
            made.generate([[11, 12, 13]], NINE_GREEDY, use_tqdm=False)

    async with gateway(tmp_path, target) as address:
        await asyncio.to_thread(use, address)
    assert [opened.method for opened in target.opens] == ["eagle3"]


async def test_more_prompts_than_the_gateway_queues(tmp_path: Path) -> None:
    def use(address: str) -> list[list[int]]:
        with LLM(gateway=address) as made:
            prompts = [[5 + i, 6] for i in range(150)]
            return [o.outputs[0].token_ids for o in made.generate(prompts, NINE_GREEDY, use_tqdm=False)]

    async with gateway(tmp_path, ToyTarget(step_s=0.01), max_active=60, max_waiting=4) as address:
        found = await asyncio.to_thread(use, address)
    assert found == [expected([5 + i, 6], 9) for i in range(150)]


def test_who_asks_a_gateway_loads_no_torch() -> None:
    code = "import sys, outrider.llm; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_the_ngram_names_of_the_old_keywords() -> None:
    assert speculation_options({"model": "[ngram]", "num_speculative_tokens": 3}).method == "ngram"
    assert speculation_options({"method": "[ngram]"}, "chains").mode == "chains"
    with pytest.raises(ValueError, match="num_speculative_tokens must be 0 to 128, got '3'"):
        speculation_options({"num_speculative_tokens": "3"})
    with pytest.raises(Unsupported, match="draft service decides prompt_lookup_max"):
        speculation_options({"model": "ngram", "prompt_lookup_max": 4})


QUIET: dict[str, Any] = {"use_tqdm": False}
GREEDY = SamplingParams(temperature=0, max_tokens=8)


def started(tiny_pair: TinyPair) -> LLM:
    config = {"draft_trial": "off", "model": str(tiny_pair.draft), "num_speculative_tokens": 3}
    return LLM(tiny_pair.target, batch_invariant=True, threads=1, speculative_config=config)


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("llm-")]


def peers_of(made: LLM) -> Any:
    assert isinstance(made._backend, LocalBackend)
    return made._backend.target, getattr(made._backend.draft, "service", None)


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
    from support.models import save_tiny

    before = set(threads())
    other = save_tiny(tmp_path, vocab_size=400)
    Backend(WordLevel({"¿": 0}, unk_token="¿")).save(str(other / "tokenizer.json"))
    with pytest.raises(ValueError, match="no token in common"):
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
        deadline = time.monotonic() + 60
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
        deadline = time.monotonic() + 60
        while not peers_of(made)[0].engine.scheduler.sequences and time.monotonic() < deadline:
            time.sleep(0.001)
        made.close()
        with pytest.raises(RuntimeError, match="closed"):
            call.result(timeout=60)


def test_one_bad_prompt_ends_the_call_alone(llm: LLM) -> None:
    with pytest.raises(ValueError, match=r"^prompt\[0\]: is 1000000"):
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
        with pytest.raises(Internal, match="the target's engine has ended"):
            made.generate([[5, 6, 7]], GREEDY, **QUIET)
