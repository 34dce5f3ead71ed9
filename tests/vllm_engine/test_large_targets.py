"""What our engine cannot run, through the three services: a mixture of experts over two ranks, greedy in float32, and
weights in 8 bits."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lossless.statistics import LETTERS, MODEL_SEED, VOCAB
from support.engines import hf_greedy
from support.environment import START_S
from support.models import TINY, letters_backend, tiny_hf_model
from transformers import AutoConfig, AutoModelForCausalLM
from vllm_engine.test_llm import quantised
from vllm_engine.test_service import generate, near_ties, start, tokens_of, vllm_arguments

from outrider.cli.local_services import Services, wait_for_draft
from outrider.pairs import pair_path
from outrider.rpc.channel import connect
from outrider.v1 import generation_pb2_grpc

EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "vocab_size": VOCAB, "head_dim": 32}
COUNT = 32


@pytest.mark.timeout(600)
async def test_a_mixture_of_experts_over_two_ranks(tmp_path: Path) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(MODEL_SEED)
        config = AutoConfig.for_model("mixtral", **{**TINY, **EXPERTS, "intermediate_size": 128})
        hf = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
        with torch.no_grad():
            for parameter in hf.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(0.0, 0.12)
    hf.save_pretrained(tmp_path / "target")
    tiny_hf_model("llama", MODEL_SEED, vocab_size=VOCAB).save_pretrained(tmp_path / "draft")
    for name in ("target", "draft"):
        letters_backend(LETTERS).save(str(tmp_path / name / "tokenizer.json"))
    rng = random.Random(8)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(length)] for length in (3, 20, 33)]
    plain, drafted = await plain_and_drafted(
        tmp_path / "target", tmp_path / "draft", prompts, "--tensor-parallel-size", "2"
    )
    for prompt, one, responses in zip(prompts, plain, drafted, strict=True):
        assert near_ties(hf, prompt, one, tokens_of(responses)) <= 1
        assert near_ties(hf, prompt, one, hf_greedy(hf, prompt, COUNT)) <= 1
        assert responses[-1].speculation.num_draft_tokens > 0


@pytest.mark.timeout(600)
async def test_quantised_weights(tmp_path: Path) -> None:
    """In 8 bits each row has a scale of its own, so that who shares a step changes nothing but roundings."""
    target = quantised(pair_path().target, tmp_path / "w8a8")
    rng = random.Random(9)
    prompts = [[rng.randrange(3, 4000) for _ in range(length)] for length in (3, 20, 33)]
    plain, drafted = await plain_and_drafted(target, pair_path().draft, prompts)
    assert [tokens_of(responses) for responses in drafted] == plain
    accepted = [responses[-1].speculation.num_accepted_tokens for responses in drafted]
    assert sum(accepted) > COUNT / 2, accepted


async def plain_and_drafted(
    target: Path, draft: Path, prompts: Sequence[Sequence[int]], *more: str
) -> tuple[list[list[int]], list[list[Any]]]:
    """Of a target on vLLM, through the three services: each prompt's tokens alone and without drafts, and the responses
    of all side by side with them."""
    with Services() as services:
        drafts = start(services, "draft", "draft", "--model", str(draft), "--threads", "1")
        verifies = start(services, "target", *vllm_arguments(target), *more)
        for service in (drafts, verifies):
            await asyncio.to_thread(services.wait, service, START_S)
        peers = ["--draft", drafts.address, "--target", verifies.address, "--tokenizer", str(target)]
        gateway = start(services, "gateway", "gateway", *peers)
        address = await asyncio.to_thread(services.wait, gateway, START_S)
        await wait_for_draft(address, START_S, services.check)  # two ranks may answer late
        async with connect(address) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            plain = [tokens_of(await generate(stub, prompt, COUNT, k=0)) for prompt in prompts]
            drafted = await asyncio.gather(*(generate(stub, prompt, COUNT) for prompt in prompts))
    return plain, list(drafted)
