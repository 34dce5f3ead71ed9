"""vLLM behind Verify, through the three services: a tiny random checkpoint on the CPU in float32. One engine for the
module, which the last test kills."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import torch
from lossless.chi_square import LEAST_P_BY_CHANCE, draw_from
from lossless.statistics import DRAFTS, LETTERS, LOGIT_SCALE, MODEL_SEED, VOCAB, Pair, Setting
from support.engines import hf_greedy
from support.environment import START_S
from support.fakes import until
from support.metrics import samples_of
from support.models import letters_backend, tiny_hf_model
from support.services import children_of, wait_for_draft, wait_gone

from outrider.cli.local_services import Service, Services
from outrider.gateway.peers.remote import TARGET_SERVICE, RemoteTargets
from outrider.gateway.speculation.loop import speculate
from outrider.planner.policy import Policy, Round
from outrider.rpc.channel import connect
from outrider.rpc.messages import Open
from outrider.rpc.words.sampling_params import SamplingParams, TokenOrigin
from outrider.v1 import generation_pb2 as pb
from outrider.v1 import generation_pb2_grpc

METRICS = re.compile(r"target metrics on (\S+)")
BLOCK, NUM_BLOCKS, MAX_MODEL_LEN = 32, 24, 128
SHAPE = {"vocab_size": VOCAB, "head_dim": 32}  # its CPU kernels have no smaller heads
NEAR = 1e-4  # logits closer than this may change places by rounding
EOS = 2
PROMPT = [11, 12, 13]


@dataclass
class Started:
    """The services of the module, and the target's weights in transformers."""

    services: Services
    folder: Path
    hf: Any
    target: Service
    drafts: dict[str, Service]
    gateways: dict[str, Service]  # by their drafts


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    folder = tmp_path_factory.mktemp("vllm")
    hf = tiny_hf_model("llama", MODEL_SEED, **SHAPE)
    with torch.no_grad():
        hf.lm_head.weight *= LOGIT_SCALE
    hf.save_pretrained(folder / "target")
    for name in ("opposite", "tempered"):
        draft = tiny_hf_model("llama", MODEL_SEED, **SHAPE)
        with torch.no_grad():
            draft.lm_head.weight.copy_(DRAFTS[name](hf.lm_head.weight))
        draft.save_pretrained(folder / name)
    tiny_hf_model("llama", MODEL_SEED, num_hidden_layers=1, **SHAPE).save_pretrained(folder / "half")
    for name in ("target", "opposite", "tempered", "half"):
        letters_backend(LETTERS).save(str(folder / name / "tokenizer.json"))
    with Services() as services:
        drafts = {
            name: start(services, name, "draft", "--model", str(folder / name), "--threads", "1")
            for name in ("opposite", "tempered", "half")
        }
        target = start(services, "target", *vllm_arguments(folder / "target"))
        for service in (*drafts.values(), target):
            services.wait(service, START_S)
        tokenizer = ["--tokenizer", str(folder / "target"), "--target", target.address]
        gateways = {
            name: start(services, "gateway", "gateway", "--draft", drafts[name].address, *tokenizer)
            for name in ("half", "tempered")
        }
        for service in gateways.values():
            wait_for_draft(services.wait(service, START_S), START_S, services.check)
        yield Started(services, folder, hf, target, drafts, gateways)


def vllm_arguments(model: Path) -> list[str]:
    shape = ["--num-blocks", str(NUM_BLOCKS), "--max-model-len", str(MAX_MODEL_LEN), "--metrics", "127.0.0.1:0"]
    return ["target", "--engine", "vllm", "--model", str(model), *shape, "--engine-args", f'{{"block_size": {BLOCK}}}']


def start(services: Services, name: str, *arguments: str) -> Service:
    return services.start(name, [*arguments, "--listen", "127.0.0.1:0"])


@pytest.fixture
async def stub(started: Started) -> AsyncIterator[Any]:
    channel = connect(started.gateways["half"].address)
    yield generation_pb2_grpc.GenerationServiceStub(channel)
    await channel.close()


async def generate(
    stub: Any, prompt: Sequence[int], count: int, k: int = 4, output: Sequence[int] = (), **sampling: Any
) -> list[Any]:
    """All responses of a request, greedy where nothing else is said."""
    sampling = {"temperature": 0.0, "max_tokens": count, "ignore_eos": True, **sampling}
    request = pb.GenerateRequest(token_ids={"ids": prompt}, sampling=sampling)
    request.speculation.num_draft_tokens, request.speculation.enabled = k, k > 0
    request.speculation.mode = "sequential" if k else ""
    if output:
        request.output_ids.add(ids=output)
    return [response async for response in stub.Generate(request, timeout=120, wait_for_ready=True)]


def tokens_of(responses: list[Any]) -> list[int]:
    return [token for response in responses for token in response.token_ids]


def greedy(started: Started, prompt: Sequence[int], count: int) -> list[int]:
    return hf_greedy(started.hf, prompt, count)


def near_ties(hf: Any, prompt: Sequence[int], one: Sequence[int], other: Sequence[int]) -> int:
    """How often two greedy outputs part by rounding alone, 0 or 1; fails where anything else parts them."""
    assert len(one) == len(other)
    at = next((n for n in range(len(one)) if one[n] != other[n]), None)
    if at is None:
        return 0
    with torch.inference_mode():
        logits = hf(torch.tensor([[*prompt, *one[:at]]])).logits[0, -1].double()  # [vocab]
    gap = float(logits.max() - min(logits[one[at]], logits[other[at]]))
    assert gap < NEAR, f"they part at token {at} of {len(one)} by {gap:.1e}"
    return 1


async def test_a_target_says_what_its_steps_cost(started: Started) -> None:
    channel = connect(started.target.address)
    costs = (await TARGET_SERVICE.get_info(channel)).step_costs
    await channel.close()
    assert [rows for rows, _ in costs] == [1, 2, 4, 8, 16, 32, 64][: len(costs)]
    assert costs and all(step_us > 0 for _, step_us in costs)


async def test_greedy_output_is_plain_decodings_whatever_is_drafted(started: Started, stub: Any) -> None:
    rng = random.Random(1)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(length)] for length in (1, 5, 17, 31, 32, 33, 50, 64)]
    depths = [4, 0, 2, 8, 1, 0, 4, 16]  # windows of unequal lengths, and none, share their steps
    plain = [tokens_of(await generate(stub, prompt, 48, k=0)) for prompt in prompts]

    drafted = await asyncio.gather(*(generate(stub, p, 48, k=k) for p, k in zip(prompts, depths, strict=True)))

    ties = 0
    for prompt, k, one, responses in zip(prompts, depths, plain, drafted, strict=True):
        ties += near_ties(started.hf, prompt, one, tokens_of(responses))
        ties += near_ties(started.hf, prompt, greedy(started, prompt, 48), one)
        last = responses[-1]
        assert (last.speculation.num_draft_tokens > 0) == (k > 0)
        assert last.finish_reason == pb.FINISH_REASON_LENGTH
        assert (last.usage.completion_tokens, last.usage.prompt_tokens) == (48, len(prompt))
    stats = [responses[-1].speculation for responses in drafted]
    accepted = sum(one.num_accepted_tokens for one in stats)
    assert 0 < accepted < sum(one.num_draft_tokens for one in stats)  # of mixed quality
    print(f"{ties} near-ties in {48 * len(prompts)} tokens, {accepted} of them drafted")


@pytest.mark.parametrize(
    "setting",
    [
        Setting("vllm", short=2_000),
        Setting("vllm, bonus", draft="tempered", short=1_000),
        Setting("vllm, top_p and penalties", {"top_p": 0.8, "presence_penalty": -0.6}, short=1_000),
        Setting("vllm, top_k", {"temperature": 0.6, "top_k": 5}, draft="tempered", short=1_000),
        Setting("vllm, chains", k=3, depth=4, windows_ahead=1, short=500),
    ],
    ids=lambda setting: setting.name,
)
async def test_sampled_tokens_follow_the_targets_law(started: Started, setting: Setting) -> None:
    drafts = {name: service.address for name, service in started.drafts.items()}
    pair = Pair(started.hf, started.folder / "target", started.target.address, None, None, drafts)
    draws, found = await draw_from(pair, pair.target, setting, setting.short)
    print(f"{setting.name}: {draws.tokens.size} tokens, least p of {len(found)}: {min(found.values()):.2g}")
    assert draws.drafted[:, 1].mean() == 1.0  # the first waits for no draft
    for origin in (TokenOrigin.ACCEPTED, TokenOrigin.RECOVERED, TokenOrigin.BONUS, TokenOrigin.PLAIN):
        assert draws.share(origin) > 0.01, origin
    assert min(found.values()) > LEAST_P_BY_CHANCE, found


async def test_logprobs_are_the_targets(started: Started, stub: Any) -> None:
    output = greedy(started, PROMPT, 12)
    responses = await generate(stub, PROMPT, 12, logprobs=3, prompt_logprobs=2)
    with torch.inference_mode():
        laws = started.hf(torch.tensor([[*PROMPT, *output]])).logits[0].log_softmax(-1)  # [tokens, vocab]

    assert tokens_of(responses) == output
    rows = [row for response in responses for row in response.logprobs]
    assert len(rows) == 12
    for n, row in enumerate(rows):
        law = laws[len(PROMPT) + n - 1]
        best = law.topk(3)
        assert [one.id for one in row.candidates] == best.indices.tolist()
        assert [one.rank for one in row.candidates] == [1, 2, 3]
        assert [one.logprob for one in row.candidates] == pytest.approx(best.values.tolist(), abs=1e-4)
    prompt_rows = [row for response in responses for row in response.prompt_logprobs]
    assert [len(row.candidates) >= 2 for row in prompt_rows] == [False, True, True]
    for n, row in enumerate(prompt_rows[1:], start=1):
        assert row.candidates[0].id == PROMPT[n]
        for one in row.candidates:
            assert one.logprob == pytest.approx(float(laws[n - 1][one.id]), abs=1e-4)


async def test_stops_are_those_of_plain_decoding(started: Started, stub: Any) -> None:
    output = greedy(started, PROMPT, 40)
    stop = output[9]
    first = output.index(stop)

    responses = await generate(stub, PROMPT, 40, stop_token_ids=[stop])
    assert tokens_of(responses) == output[: first + 1]
    assert responses[-1].finish_reason == pb.FINISH_REASON_STOP
    assert responses[-1].stop_token_id == stop

    plain, drafted = [
        tokens_of(await generate(stub, PROMPT, 12, k=k, stop_token_ids=[output[0]], min_tokens=4)) for k in (0, 4)
    ]
    assert output[0] not in plain[:4]  # masked until then
    assert drafted == plain

    ended = await generate(stub, PROMPT, 40, ignore_eos=False, bad_words_ids=[], allowed_token_ids=[EOS])
    assert tokens_of(ended) == [EOS]
    assert ended[-1].finish_reason == pb.FINISH_REASON_STOP
    assert not ended[-1].HasField("stop_token_id")
    gone_on = await generate(stub, PROMPT, 7, allowed_token_ids=[EOS])
    assert tokens_of(gone_on) == [EOS] * 7
    assert gone_on[-1].finish_reason == pb.FINISH_REASON_LENGTH


async def test_a_row_ends_at_the_model_length(started: Started, stub: Any) -> None:
    rng = random.Random(3)
    prompt = [rng.randrange(3, VOCAB) for _ in range(MAX_MODEL_LEN - 10)]
    for k in (0, 8):
        responses = await generate(stub, prompt, 10, k=k)
        assert near_ties(started.hf, prompt, greedy(started, prompt, 10), tokens_of(responses)) <= 1
        assert responses[-1].finish_reason == pb.FINISH_REASON_LENGTH
    with pytest.raises(grpc.aio.AioRpcError, match="max_tokens") as refused:
        await generate(stub, prompt, 11)
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_prefixes_are_found_whatever_was_drafted(started: Started, stub: Any) -> None:
    """As many with drafts as without: no block holds a token that was refused."""
    found = []
    for k in (0, 4):
        rng = random.Random(f"prefix {k}")
        prompt = [rng.randrange(3, VOCAB) for _ in range(40)]
        output = tokens_of(await generate(stub, prompt, 60, k=k))
        again = await generate(stub, [*prompt, *output], 8, k=k)
        found.append(again[-1].usage.cached_tokens)
        assert near_ties(started.hf, [*prompt, *output], tokens_of(again), greedy(started, [*prompt, *output], 8)) <= 1
    assert found == [3 * BLOCK, 3 * BLOCK]


async def num_preempted(target: Service) -> float:
    async with httpx.AsyncClient(trust_env=False) as client:
        text = (await client.get(f"http://{target.find(METRICS)}/metrics")).text
    return samples_of(text)["target_num_preemptions_total", ()]


async def test_sequences_that_lose_their_blocks_come_back(started: Started, stub: Any) -> None:
    """Twelve of four blocks each, where there are 24; with drafts before and after."""
    rng = random.Random(5)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(20)] for _ in range(12)]
    before = await num_preempted(started.target)
    results = await asyncio.gather(*(generate(stub, prompt, 100) for prompt in prompts))
    assert await num_preempted(started.target) > before
    for prompt, responses in zip(prompts, results, strict=True):
        assert near_ties(started.hf, prompt, greedy(started, prompt, 100), tokens_of(responses)) <= 1
    assert sum(responses[-1].speculation.num_accepted_tokens for responses in results) > 0


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        ({"min_p": 0.1}, "sampling.min_p"),
        ({"logit_bias": {5: 1.0}}, "sampling.logit_bias"),
        ({"logprobs": 1, "logprobs_mode": 3}, "sampling.logprobs_mode"),
        ({"acceptance": 2}, "acceptance"),
    ],
)
async def test_what_it_cannot_do_is_refused_by_name(stub: Any, sampling: dict[str, Any], field: str) -> None:
    acceptance = sampling.pop("acceptance", 0)
    request = pb.GenerateRequest(token_ids={"ids": PROMPT}, sampling={"temperature": 1.0, "max_tokens": 4, **sampling})
    request.speculation.acceptance = acceptance
    with pytest.raises(grpc.aio.AioRpcError, match=field) as refused:
        [response async for response in stub.Generate(request, timeout=60)]
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_continuation_goes_on(started: Started, stub: Any) -> None:
    output = greedy(started, PROMPT, 30)
    responses = await generate(stub, PROMPT, 30, output=output[:11])
    assert tokens_of(responses) == output[11:]
    with pytest.raises(grpc.aio.AioRpcError, match="presence_penalty") as refused:
        await generate(stub, PROMPT, 30, output=output[:11], presence_penalty=0.5)
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def rounds(targets: RemoteTargets, count: int, read_on: asyncio.Event | None = None, **fields: Any) -> list[int]:
    """A completion by the gateway's loop in this process, read as fast as it is told."""
    sampling = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    request = Open(0, tuple(PROMPT), sampling, model_digest=targets.info.model.digest, **fields)
    ids: list[int] = []
    async for item in speculate(None, targets, request, Policy(0, plain_ahead=4, max_unread=8)):
        assert isinstance(item, Round)
        ids += item.commit.ids
        if read_on is not None:
            await read_on.wait()
    return ids


async def test_a_slow_client_holds_itself_alone(started: Started, stub: Any) -> None:
    async with RemoteTargets([started.target.address]) as targets:
        await targets.wait_admitted()
        read_on = asyncio.Event()
        slow = [asyncio.create_task(rounds(targets, 100, read_on)) for _ in range(8)]
        await asyncio.sleep(1)

        rng = random.Random(6)
        prompts = [[rng.randrange(3, VOCAB) for _ in range(20)] for _ in range(8)]  # 32 blocks, of 24
        results = await asyncio.gather(*(generate(stub, prompt, 100) for prompt in prompts))

        for prompt, responses in zip(prompts, results, strict=True):
            assert near_ties(started.hf, prompt, greedy(started, prompt, 100), tokens_of(responses)) <= 1
        assert not any(task.done() for task in slow)
        read_on.set()
        assert await asyncio.gather(*slow) == [greedy(started, PROMPT, 100)] * 8


async def test_deadlines_and_clients_that_leave_free_their_blocks(started: Started, stub: Any) -> None:
    async with RemoteTargets([started.target.address]) as targets:
        await targets.wait_admitted()
        with pytest.raises(Exception, match="time ran out"):
            await rounds(targets, 120, timeout_ms=50)
        left = [asyncio.create_task(rounds(targets, 120, asyncio.Event())) for _ in range(6)]
        await asyncio.sleep(0.5)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await generate(stub, PROMPT, 8)
        await rounds(targets, 8)
        (replica,) = targets.replicas
        assert replica.reported is not None
        assert (replica.reported.running, replica.reported.waiting) == (0, 0)
        assert replica.reported.free_blocks == NUM_BLOCKS - 1  # one is vLLM's own


async def test_a_draft_that_dies_costs_speed_alone(started: Started) -> None:
    channel = connect(started.gateways["tempered"].address)
    stub = generation_pb2_grpc.GenerationServiceStub(channel)
    output = greedy(started, PROMPT, 120)
    running = [asyncio.create_task(generate(stub, PROMPT, 120)) for _ in range(3)]
    await asyncio.sleep(0.3)
    os.killpg(started.drafts["tempered"].pid, signal.SIGKILL)
    for responses in await asyncio.gather(*running):
        assert tokens_of(responses) == output
    responses = await generate(stub, PROMPT, 40)
    assert tokens_of(responses) == output[:40]
    assert responses[-1].speculation.num_draft_tokens == 0
    await channel.close()


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text()


async def test_where_vllm_dies_the_service_ends_and_the_streams_go_on_elsewhere(started: Started) -> None:
    output = greedy(started, PROMPT, 120)
    with Services() as services:
        own = start(services, "own", "target", "--model", str(started.folder / "target"), "--threads", "1")
        await asyncio.to_thread(services.wait, own, START_S)
        await fail_over(started, own, output)


async def fail_over(started: Started, own: Service, output: list[int]) -> None:
    """From vLLM to our engine, in mid-stream."""
    async with RemoteTargets([started.target.address, own.address]) as targets:
        await until(lambda: all(replica.usable for replica in targets.replicas))
        on_vllm, on_ours = targets.replicas
        read_on = asyncio.Event()
        streams = [asyncio.create_task(rounds(targets, 120, read_on)) for _ in range(4)]
        await until(lambda: on_vllm.num_sequences and on_ours.num_sequences)
        await asyncio.sleep(0.5)
        engines = [pid for pid in children_of(started.target.pid) if "Engine" in command_of(pid)]
        assert engines

        for pid in engines:
            os.kill(pid, signal.SIGKILL)
        read_on.set()

        assert await asyncio.gather(*streams) == [output] * 4
        assert await asyncio.to_thread(wait_gone, [started.target.pid, *engines]) == []
