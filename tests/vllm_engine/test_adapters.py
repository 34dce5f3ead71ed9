"""Adapters on vLLM, through the services: a tiny random checkpoint on the CPU in float32, more adapters than a step
takes, and a draft with one of its own. One engine for the module, which the last test kills."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import torch
from e2e.test_adapters import PROMPT, VOCAB, Slow, answer, ids_of, tally_of
from hostile.test_adapters import as_pickle, set_first, set_number
from support.adapters import WEIGHTS_FILE, merged, save_adapter
from support.engines import hf_greedy
from support.environment import START_S
from support.fakes import until
from support.models import tiny_hf_model, tiny_state, train_byte_level
from support.services import children_of, wait_for_draft
from vllm_engine.test_service import BLOCK, command_of, near_ties, start

from outrider.cli.local_services import Service, Services
from outrider.engine.adapters.loader import load_adapter as load_on_ours
from outrider.engine.loader import load_model
from outrider.gateway.engine import EngineConfig, GenerationEngine
from outrider.gateway.peers.remote import RemoteDrafts, RemoteTargets, load_adapter, unload_adapter
from outrider.gateway.text.tokenizer import Tokenizer
from outrider.rpc.channel import connect
from outrider.rpc.errors import InvalidArgument, NotFound, OutriderError
from outrider.rpc.words.request import GenerationRequest, SpeculationOptions
from outrider.rpc.words.sampling_params import SamplingParams
from outrider.vllm.target.assembly import ONE_PROCESS

AWAY_WAIT_S = 30.0  # on a machine that is shared, a connection may end
NAMES = ("sql", "law", "mixed")
COUNT, LONG = 40, 300  # a slow reader is granted less than the latter
NUM_BLOCKS, MAX_MODEL_LEN = 120, 400
HTTP = re.compile(r"gateway http on (\S+)")
K = 4
SHAPE: dict[str, Any] = {"vocab_size": VOCAB, "eos_token_id": None, "head_dim": 32}  # no smaller heads on a CPU


@dataclass
class Started:
    """The services of the module; the model with each adapter ("": without) in transformers, and what greedy decoding
    is with it: that is done before a loop runs, since one that is held up loses its connections."""

    services: Services
    base: Path
    adapters: dict[str, Path]
    hf: dict[str, Any]
    decoded: dict[str, list[int]]  # LONG tokens each
    target: Service
    draft: Service
    tokenizer: Tokenizer

    def check(self, name: str, ids: list[int]) -> None:
        """They are plain decoding's, up to near-ties."""
        near_ties(self.hf[name], PROMPT, self.decoded[name][: len(ids)], ids)


def save_adapters(folder: Path, state: Any) -> dict[str, Path]:
    """Of several ranks, modules and rules; the last one has another content for a name."""
    return {
        "sql": save_adapter(folder / "sql", state, seed=1),
        "law": save_adapter(folder / "law", state, ("q_proj", "v_proj", "down_proj"), seed=2, r=8, use_rslora=True),
        "mixed": save_adapter(
            folder / "mixed", state, ("o_proj", "gate_proj"), seed=3, r=4, target_modules=r".*\.(o_proj|gate_proj)",
            ranks={"model.layers.1.mlp.gate_proj": 7}, rank_pattern={"layers.1.mlp.gate_proj": 7},
            alpha_pattern={"o_proj": 20},
        ),
        "other sql": save_adapter(folder / "other sql", state, seed=4),
    }  # fmt: skip


SCALINGS: dict[str, Any] = {
    "sql": 2.0, "law": 8 / 8**0.5, "other sql": 2.0,
    "mixed": {
        "model.layers.0.self_attn.o_proj": 5.0, "model.layers.1.self_attn.o_proj": 5.0,
        "model.layers.0.mlp.gate_proj": 2.0, "model.layers.1.mlp.gate_proj": 8 / 7,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    folder = tmp_path_factory.mktemp("vllm")
    hf = {"": tiny_hf_model("llama", 3, **SHAPE)}
    hf[""].save_pretrained(folder / "base")
    train_byte_level(VOCAB).save(str(folder / "base" / "tokenizer.json"))
    state = tiny_state(hf[""])
    adapters = save_adapters(folder, state)
    for name, path in adapters.items():
        hf[name] = tiny_hf_model("llama", 3, **SHAPE)
        hf[name].load_state_dict(merged(state, path, SCALINGS[name]), strict=False)
    decoded = {name: hf_greedy(one, PROMPT, LONG) for name, one in hf.items()}
    flags = [f"--adapter={name}={adapters[name]}" for name in NAMES]
    size = ["--num-blocks", str(NUM_BLOCKS), "--max-model-len", str(MAX_MODEL_LEN)]
    own = ["--max-adapters", "2", "--max-adapter-rank", "8", "--allow-adapter-changes", "--max-window", "8"]
    of_vllm = ["--engine", "vllm", "--engine-args", f'{{"block_size": {BLOCK}}}', "--max-sequences", "32"]
    with Services() as services:
        target = start(services, "target", "target", "--model", str(folder / "base"), *flags, *size, *own, *of_vllm)
        draft = start(
            services, "draft", "draft", "--model", str(folder / "base"), "--draft-adapter", f"law={adapters['law']}",
            "--threads", "1",
        )  # fmt: skip
        for service in (target, draft):
            services.wait(service, START_S)
        yield Started(services, folder / "base", adapters, hf, decoded, target, draft, Tokenizer.load(folder / "base"))


@pytest.fixture
async def targets(started: Started) -> AsyncIterator[RemoteTargets]:
    async with RemoteTargets([started.target.address]) as remote:
        await remote.wait_admitted()
        yield remote


@pytest.fixture
def plain(started: Started, targets: RemoteTargets) -> GenerationEngine:
    """No drafts."""
    return GenerationEngine(started.tokenizer, targets, None, EngineConfig(away_wait_s=AWAY_WAIT_S))


@pytest.fixture
async def channel(started: Started) -> AsyncIterator[grpc.aio.Channel]:
    async with connect(started.target.address) as opened:
        yield opened


def asking(
    adapter: str,
    temperature: float = 0.0,
    count: int = COUNT,
    mode: str = "",
    prompt: Sequence[int] = PROMPT,
    **more: Any,
) -> GenerationRequest:
    sampling = SamplingParams(temperature=temperature, max_tokens=count, ignore_eos=True, seed=7, **more)
    options = SpeculationOptions(mode=mode)
    return GenerationRequest(token_ids=tuple(prompt), sampling=sampling, adapter=adapter, speculation=options)


async def test_digests_are_those_of_our_engine(started: Started, targets: RemoteTargets) -> None:
    loaded = load_model(started.base)
    told = {one.name: (one.digest, one.rank) for one in targets.info.adapters}
    ours = {name: load_on_ours(started.adapters[name], loaded.model, loaded.digest) for name in NAMES}
    assert told == {name: (one.digest, one.rank) for name, one in ours.items()}
    assert targets.info.model.digest == loaded.digest


@pytest.mark.parametrize("mode", ["plain", "sequential", "chains"])
async def test_greedy_output_is_plain_decodings(started: Started, targets: RemoteTargets, mode: str) -> None:
    """Of requests with three adapters and with none in one batch, where a step takes two: whatever is drafted, by the
    base or by an adapter of the draft's own, and whoever has to wait for a turn."""
    names = ("", *NAMES, "", *NAMES)
    assert len({tuple(started.decoded[name][:COUNT]) for name in names}) == 4
    config = EngineConfig(num_draft_tokens=K, draft_patience_ms=60_000, away_wait_s=AWAY_WAIT_S)
    async with RemoteDrafts([started.draft.address]) as drafts:
        await drafts.wait_usable()
        engine = GenerationEngine(started.tokenizer, targets, None if mode == "plain" else drafts, config)
        way = "" if mode == "plain" else mode
        answers = await asyncio.gather(*(answer(engine, asking(name, mode=way)) for name in names))
    for name, deltas in zip(names, answers, strict=True):
        started.check(name, ids_of(deltas))
        assert deltas[0].model_digest == targets.info.digest_of(name)
    if mode == "sequential":
        shares = [tally_of(deltas).num_accepted_tokens / tally_of(deltas).num_draft_tokens for deltas in answers]
        by_name = dict(zip(names, shares, strict=True))
        assert by_name[""] > 0.9 and by_name["law"] > 0.9, "the draft has the base, and an adapter of its own"
        assert by_name["sql"] < 0.7 and by_name["mixed"] < 0.9, "of others it knows nothing"


PLAIN_VLLM = """
import json, sys
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

given = json.loads(sys.argv[1])
llm = LLM(**given["engine"])
params = SamplingParams(temperature=0, max_tokens=given["count"], ignore_eos=True, detokenize=False)
made = []
for number, folder in enumerate(given["adapters"], start=1):
    lora = LoRARequest(f"lora {number}", number, folder) if folder else None
    (output,) = llm.generate({"prompt_token_ids": given["prompt"]}, params, use_tqdm=False, lora_request=lora)
    made.append(list(output.outputs[0].token_ids))
print("made", json.dumps(made))
"""


async def test_vllms_plain_decoding_says_the_same(started: Started, plain: GenerationEngine) -> None:
    """With the same folders, and nothing of ours."""
    names = ("", *NAMES)
    engine = {
        "model": str(started.base), "enable_lora": True, "max_lora_rank": 8, "dtype": "float32", "enforce_eager": True,
        "skip_tokenizer_init": True, "max_model_len": MAX_MODEL_LEN, "kv_cache_memory_bytes": 64 << 20,
        "distributed_executor_backend": ONE_PROCESS,
    }  # fmt: skip
    folders = [str(started.adapters[name]) if name else "" for name in names]
    given = {"engine": engine, "count": COUNT, "adapters": folders, "prompt": PROMPT}
    environment = {**os.environ, "VLLM_PLUGINS": "", "VLLM_USE_V2_MODEL_RUNNER": "0"}
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    ran = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", PLAIN_VLLM, json.dumps(given)],
        env=environment, capture_output=True, text=True, timeout=START_S,
    )  # fmt: skip
    (line,) = [line for line in ran.stdout.splitlines() if line.startswith("made ")] or [ran.stderr[-2000:]]
    for name, ids in zip(names, json.loads(line.removeprefix("made ")), strict=True):
        near_ties(started.hf[name], PROMPT, ids_of(await answer(plain, asking(name))), ids)


async def test_drawn_tokens_and_log_probabilities_are_the_adapters(started: Started, plain: GenerationEngine) -> None:
    """Beside rows of the base; log probabilities of a prompt, too."""
    asked = [asking(name, 1.0, 24) for name in ("law", "", "law")]
    drawn = [ids_of(deltas) for deltas in await asyncio.gather(*(answer(plain, one) for one in asked))]
    assert drawn[0] == drawn[2] != drawn[1]
    for name in ("law", ""):
        told = await answer(plain, asking(name, 0.0, 6, logprobs=2, prompt_logprobs=1))
        ids = ids_of(told)
        with torch.inference_mode():
            laws = started.hf[name](torch.tensor([[*PROMPT, *ids]])).logits[0].log_softmax(-1)  # [tokens, vocab]
        rows = [row for delta in told for row in delta.logprobs]
        assert len(rows) == 6
        for at, row in enumerate(rows):
            assert row[0].logprob == pytest.approx(float(laws[len(PROMPT) + at - 1][ids[at]]), abs=1e-4)
        rows = [row for delta in told for row in delta.prompt_logprobs]
        assert len(rows) == len(PROMPT)
        for at, row in enumerate(rows[1:]):
            assert row[0].logprob == pytest.approx(float(laws[at][PROMPT[at + 1]]), abs=1e-4)


async def test_no_prefix_is_shared_between_adapters(plain: GenerationEngine) -> None:
    cached = []
    rng = random.Random(7)
    prompt = tuple(rng.randrange(3, VOCAB) for _ in range(BLOCK + 8))
    for name in ("sql", "", "law", "sql", "", "law"):
        cached.append(await cached_of(plain, name, prompt))
    assert cached == [0, 0, 0, BLOCK, BLOCK, BLOCK]


async def cached_of(plain: GenerationEngine, name: str, prompt: Sequence[int] = PROMPT) -> int:
    usage = (await answer(plain, asking(name, count=2, prompt=prompt)))[-1].usage
    assert usage is not None
    return usage.cached_tokens


async def test_an_adapter_is_replaced_under_load(
    started: Started, targets: RemoteTargets, plain: GenerationEngine, channel: grpc.aio.Channel
) -> None:
    """What runs goes on with it; what is new is refused by name, and gets other weights once they have the name, and no
    block of the first ones."""
    streams = [Slow(plain, asking(name, 0.0, LONG)) for name in ("sql", "sql", "law", "")]
    for stream in streams:
        await stream.begun()
    before = targets.info.digest_of("sql")
    assert await unload_adapter(channel, "sql") == 2, "neither is at its end"
    await until(lambda: targets.info.digest_of("sql") is None)
    with pytest.raises(NotFound, match="adapter: is 'sql', which does not exist; served here: 'law', 'mixed'"):
        await answer(plain, asking("sql"))
    added = await load_adapter(channel, "sql", str(started.adapters["other sql"]))
    await until(lambda: targets.info.digest_of("sql") == added.digest)
    assert added.digest != before
    assert await cached_of(plain, "sql") == 0, "blocks of other weights by this name"
    started.check("other sql", ids_of(await answer(plain, asking("sql"))))
    assert await cached_of(plain, "sql") == BLOCK
    for name, stream in zip(("sql", "sql", "law", ""), streams, strict=True):
        started.check(name, await stream.rest())
    assert await unload_adapter(channel, "sql") == 0
    again = await load_adapter(channel, "sql", str(started.adapters["sql"]))
    assert again.digest == before
    await until(lambda: targets.info.digest_of("sql") == before)
    started.check("sql", ids_of(await answer(plain, asking("sql"))))


async def test_two_names_of_one_content(
    started: Started, targets: RemoteTargets, plain: GenerationEngine, channel: grpc.aio.Channel
) -> None:
    """vLLM has it once: it goes with the last name."""
    copy = await load_adapter(channel, "copy", str(started.adapters["law"]))
    assert copy.digest == targets.info.digest_of("law")
    await until(lambda: targets.info.digest_of("copy") is not None)
    answers = await asyncio.gather(*(answer(plain, asking(name)) for name in ("copy", "law", "sql")))
    for name, deltas in zip(("law", "law", "sql"), answers, strict=True):
        started.check(name, ids_of(deltas))
    assert await unload_adapter(channel, "copy") == 0
    started.check("law", ids_of(await answer(plain, asking("law"))))


def another_base(folder: Path) -> None:
    set_first(torch.zeros(4, 32))(folder)


HOSTILE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a pickle": (as_pickle, "holds only adapter_model.bin, which is a pickle"),
    "NaN": (set_number(float("nan")), "holds NaN or infinity"),
    "another base's": (another_base, r"lora_A.weight has shape \(4, 32\), not \(4, 64\)"),
    "cut off": (lambda path: (path / WEIGHTS_FILE).write_bytes((path / WEIGHTS_FILE).read_bytes()[:-1]), "cut off"),
    "no folder": (shutil.rmtree, "there is no such folder"),
}


async def test_what_cannot_be_used_is_refused_by_name(
    started: Started, plain: GenerationEngine, channel: grpc.aio.Channel, tmp_path: Path
) -> None:
    """Before vLLM sees it; the service goes on."""
    for number, (breaks, said) in enumerate(HOSTILE.values()):
        folder = Path(shutil.copytree(started.adapters["sql"], tmp_path / f"{number}"))
        breaks(folder)
        with pytest.raises(InvalidArgument, match=said) as refused:
            await load_adapter(channel, "hostile", str(folder))
        assert str(folder) in str(refused.value) and "path" in str(refused.value)
    with pytest.raises(OutriderError, match="r: is 9; allowed: 1 to 8"):
        large = save_adapter(tmp_path / "large", tiny_state(started.hf[""]), r=9)
        await load_adapter(channel, "large", str(large))
    with pytest.raises(OutriderError, match="stands for other weights"):
        await load_adapter(channel, "law", str(started.adapters["other sql"]))
    started.check("sql", ids_of(await answer(plain, asking("sql"))))


def test_over_http_a_model_is_an_adapter(started: Started) -> None:
    with Services() as services:
        gateway = start(
            services, "gateway", "gateway", "--target", started.target.address, "--draft", started.draft.address,
            "--tokenizer", str(started.base), "--http", "127.0.0.1:0", "--model-name", "tiny",
        )  # fmt: skip
        wait_for_draft(services.wait(gateway, START_S), START_S, services.check)
        with httpx.Client(base_url=f"http://{gateway.find(HTTP)}", trust_env=False, timeout=60) as client:
            named = {one["id"] for one in client.get("/v1/models").json()["data"]}
            assert named == {"tiny", *NAMES}
            body = {"prompt": list(PROMPT), "max_tokens": 12, "temperature": 0, "ignore_eos": True}
            texts = {}
            for name in ("tiny", *NAMES):
                answered = client.post("/v1/completions", json={**body, "model": name}).json()
                texts[name] = answered["choices"][0]["text"]
            assert len(set(texts.values())) == 4
            missing = client.post("/v1/completions", json={**body, "model": "none"})
            assert missing.status_code == 404 and "none" in missing.text


async def test_where_vllm_dies_streams_go_on_at_our_engine(started: Started) -> None:
    """With the same adapter, by its content, and not where the name is another's."""
    with Services() as services:
        flags = ["--model", str(started.base), "--threads", "1", "--adapter"]
        own = [
            start(services, content, "target", *flags, f"sql={started.adapters[content]}")
            for content in ("sql", "other sql")
        ]
        for service in own:
            await asyncio.to_thread(services.wait, service, START_S)
        async with RemoteTargets([started.target.address, *(service.address for service in own)]) as targets:
            await until(lambda: all(replica.usable for replica in targets.replicas))
            on_vllm, on_ours, elsewhere = targets.replicas
            engine = GenerationEngine(started.tokenizer, targets, None, EngineConfig(away_wait_s=AWAY_WAIT_S))
            streams: list[Slow] = []
            while not on_vllm.num_sequences:  # one that was silent for a moment gets none
                assert len(streams) < 20, "vLLM gets none"
                streams += [Slow(engine, asking("sql", 0.0, LONG)) for _ in range(4)]
                for stream in streams:
                    await stream.begun()
            engines = [pid for pid in children_of(started.target.pid) if "Engine" in command_of(pid)]
            for pid in engines:
                os.kill(pid, signal.SIGKILL)
            await until(lambda: not on_vllm.usable)
            for stream in streams:
                started.check("sql", await stream.rest())
            assert elsewhere.num_sequences == 0 and on_ours.usable and engines
