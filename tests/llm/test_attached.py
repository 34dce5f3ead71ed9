"""LLM(gateway=...): the same API over gRPC. The gateway is the real one, over toys; the call runs beside its loop."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from gateway.toys import ToyDraft, ToyTarget, expected
from llm.conftest import CHAT
from tokenizer_factory import train_byte_level

from outrider.gateway.engine import EngineConfig, GenerationEngine
from outrider.gateway.servicer import SERVICE_NAME, GenerationServicer
from outrider.gateway.text.tokenizer import Tokenizer
from outrider.llm import LLM, SamplingParams, Unsupported
from outrider.llm.backends import spoken
from outrider.rpc.errors import Unavailable
from outrider.rpc.sampling_params import AcceptanceRule
from outrider.rpc.server import build_server

GREEDY = SamplingParams(temperature=0, max_tokens=9)


@asynccontextmanager
async def gateway(folder: Path, target: ToyTarget, **config: Any) -> AsyncIterator[str]:
    train_byte_level().save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHAT)
    engine = GenerationEngine(Tokenizer.load(folder), target, ToyDraft(wrong_every=3), EngineConfig(**config))
    server = build_server("127.0.0.1:0", [SERVICE_NAME], GenerationServicer(engine).register)
    await server.start()
    try:
        yield server.address
    finally:
        await server.stop(0)


async def test_generates_over_a_gateway(tmp_path: Path) -> None:
    target = ToyTarget(num_cached=1)

    def use(address: str) -> None:
        with LLM(gateway=address, tokenizer=tmp_path) as made:
            params = SamplingParams(temperature=0, max_tokens=9, logprobs=0, prompt_logprobs=0)
            ids = made.generate([[11, 12, 13], [14, 15]], [params, GREEDY], use_tqdm=False)
            assert [o.outputs[0].token_ids for o in ids] == [expected([11, 12, 13], 9), expected([14, 15], 9)]
            first = ids[0].outputs[0]
            assert first.logprobs is not None and len(first.logprobs) == 9 and first.finish_reason == "length"
            assert first.logprobs[0][first.token_ids[0]].decoded_token is not None
            assert ids[0].prompt_logprobs is not None and len(ids[0].prompt_logprobs) == 3
            assert ids[0].num_cached_tokens == 1
            (text,) = made.generate("the quick", SamplingParams(n=2, max_tokens=4, seed=9), use_tqdm=False)
            assert text.prompt == "the quick" and text.prompt_token_ids == made.get_tokenizer().encode("the quick")
            assert len(text.outputs) == 2 and all(c.text for c in text.outputs)
            (talk,) = made.chat([{"role": "user", "content": "hello"}], GREEDY, use_tqdm=False)
            assert talk.prompt == "<|user|>hello<|assistant|>"
            (long,) = made.generate([[7] * 250], SamplingParams(temperature=0, max_tokens=None), use_tqdm=False)
            assert len(long.outputs[0].token_ids) == 6  # what the context of 256 leaves
            values: dict[str, Any] = {metric.name: metric for metric in made.get_metrics()}
            accepted = values["vllm:spec_decode_num_accepted_tokens"].value
            assert 0 < accepted == sum(values["vllm:spec_decode_num_accepted_tokens_per_pos"].values)
            assert values["vllm:spec_decode_num_draft_tokens"].value > accepted
            with pytest.raises(ValueError, match="token_ids"):
                made.generate([[999]], GREEDY, use_tqdm=False)

    async with gateway(tmp_path, target) as address:
        await asyncio.to_thread(use, address)
    assert target.opens[2].acceptance is AcceptanceRule.COUPLED and target.opens[2].seed == 9
    assert {request.acceptance for request in target.opens[:2]} == {AcceptanceRule.REJECTION}


async def test_what_a_request_can_say(tmp_path: Path) -> None:
    target = ToyTarget()

    def use(address: str) -> None:
        options: dict[str, Any] = {"per_request_spec_decode_metrics": "summary"}
        with LLM(gateway=address, speculative_config={"num_speculative_tokens": 2}, **options) as made:
            (output,) = made.generate([[11, 12, 13]], GREEDY, use_tqdm=False, priority=[7])
            assert output.outputs[0].token_ids == expected([11, 12, 13], 9)
            own = output.outputs[0].spec_decode_metrics
            assert own is not None and own.num_spec_tokens == 2 and len(own.acceptance_histogram) == 3
            assert own.num_spec_steps == sum(own.acceptance_histogram) > 0 and own.per_step_accepted is None
            values: dict[str, Any] = {metric.name: metric for metric in made.get_metrics()}
            assert len(values["vllm:spec_decode_num_accepted_tokens_per_pos"].values) == 2
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
            pytest.raises(ValueError, match=r"speculation\.method.*eagle.*draft"),
        ):
            made.generate([[11, 12, 13]], GREEDY, use_tqdm=False)
        for option in ({"dtype": "float32"}, {"max_model_len": 9}, {"speculative_config": {"model": "x"}}):
            with pytest.raises(Unsupported, match=r"gateway=.*decide"):
                LLM(gateway=address, **option)

    async with gateway(tmp_path, target) as address:
        await asyncio.to_thread(use, address)
    assert target.opens[0].priority == 7
    with pytest.raises(Unavailable):
        await asyncio.to_thread(LLM, gateway="127.0.0.1:1")


async def test_more_prompts_than_the_gateway_queues(tmp_path: Path) -> None:
    def use(address: str) -> list[list[int]]:
        with LLM(gateway=address) as made:
            prompts = [[5 + i, 6] for i in range(150)]
            return [o.outputs[0].token_ids for o in made.generate(prompts, GREEDY, use_tqdm=False)]

    async with gateway(tmp_path, ToyTarget(step_s=0.01), max_active=60, max_waiting=4) as address:
        found = await asyncio.to_thread(use, address)
    assert found == [expected([5 + i, 6], 9) for i in range(150)]


def test_who_asks_a_gateway_loads_no_torch() -> None:
    code = "import sys, outrider.llm; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_the_ngram_names_of_the_old_keywords() -> None:
    assert spoken({"model": "[ngram]", "num_speculative_tokens": 3}).method == "ngram"
    assert spoken({"method": "[ngram]"}, "chains").mode == "chains"
    with pytest.raises(ValueError, match="num_speculative_tokens must be 0 to 128, got '3'"):
        spoken({"num_speculative_tokens": "3"})
    with pytest.raises(Unsupported, match="draft service decides prompt_lookup_max"):
        spoken({"model": "ngram", "prompt_lookup_max": 4})
