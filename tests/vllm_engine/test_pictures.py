"""Pictures through vLLM: a tiny random Idefics3 behind the three services. What it says with drafts is what vLLM says
by itself, in a process of its own, without any."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from PIL import Image
from support.environment import START_S
from support.fakes import read_slowly, until
from support.models import tiny_hf_model
from support.pictures import EOS_ID, NUM_PLACES, TEXT_SHAPE, data_url, picture, save_seeing
from support.services import wait_for_draft
from vllm_engine.test_service import start, tokens_of

from outrider.cli.local_services import Service, Services
from outrider.gateway.peers.remote import RemoteTargets
from outrider.gateway.text.tokenizer import Tokenizer
from outrider.llm import LLM
from outrider.llm import SamplingParams as LlmParams
from outrider.rpc.channel import connect
from outrider.rpc.media import Media, look_at
from outrider.rpc.messages import Open
from outrider.rpc.words.sampling_params import SamplingParams
from outrider.v1 import generation_pb2 as pb
from outrider.v1 import generation_pb2_grpc

HTTP = re.compile(r"gateway http on (\S+)")
pytestmark = pytest.mark.filterwarnings("ignore:Unclosed context:ResourceWarning")  # ZeroMQ's, which vLLM leaves
BLOCK, NUM_BLOCKS, MAX_MODEL_LEN = 32, 32, 128
COUNT = 40
# At start it would try out as many pictures as fit a step.
QUICK = {"limit_mm_per_prompt": {"image": 2}, "max_num_batched_tokens": 256, "skip_mm_profiling": True}
FILES = [picture("PNG", 40, 30, 1), picture("JPEG", 28, 28, 2), picture("WEBP", 9, 50, 3, lossless=True)]
# Texts, and which of the files they are about.
ASKED: list[tuple[str, list[int]]] = [
    ("USER: <image>\nWhat is this?\nASSISTANT:", [0]),
    ("USER: <image>\nWhat is this?\nASSISTANT:", [1]),
    ("<image><image> compare", [2, 0]),
    ("A long story about <image> that goes on and on, until it names <image> and says:", [1, 2]),
    ("No picture here at all:", []),
]
PLAIN = """
import json, sys
from io import BytesIO
from PIL import Image
from vllm import LLM, SamplingParams

asked, files = json.load(open(sys.argv[2])), [Image.open(name).convert("RGB") for name in sys.argv[5:]]
llm = LLM(sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=128, kv_cache_memory_bytes=64 << 20,
          max_num_seqs=4, disable_log_stats=True, enable_chunked_prefill=False,
          distributed_executor_backend="vllm.v1.executor.uniproc_executor.UniProcExecutor", **json.loads(sys.argv[4]))
params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
prompts = [{"prompt": text, **({"multi_modal_data": {"image": [files[n] for n in which]}} if which else {})}
           for text, which in asked]
ids = [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]
json.dump(ids, open(sys.argv[3], "w"))
"""


@dataclass
class Started:
    """The services, and what vLLM says by itself."""

    folder: Path
    target: Service
    gateway: Service
    plain: list[list[int]]

    @property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.load(self.folder / "target")

    def ids_of(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)


def say_plainly(folder: Path) -> subprocess.Popen[str]:
    """In a process of its own, with vLLM's own scheduler, runner and classes."""
    (folder / "asked.json").write_text(json.dumps(ASKED))
    names = []
    for number, data in enumerate(FILES):
        names.append(str(folder / f"{number}.bin"))
        Path(names[-1]).write_bytes(data)
    paths = [str(folder / name) for name in ("target", "asked.json", "said.json")]
    command = [sys.executable, "-c", PLAIN, *paths, json.dumps(QUICK), *names]
    alone = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=alone)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    folder = tmp_path_factory.mktemp("pictures")
    save_seeing(folder / "target")
    tiny_hf_model("llama", 3, **TEXT_SHAPE, bos_token_id=None, eos_token_id=EOS_ID).save_pretrained(folder / "draft")
    (folder / "draft" / "tokenizer.json").write_text((folder / "target" / "tokenizer.json").read_text())
    shape = ["--num-blocks", str(NUM_BLOCKS), "--max-model-len", str(MAX_MODEL_LEN), "--threads", "1"]
    arguments = json.dumps({"block_size": BLOCK, **QUICK})
    own = ["--engine", "vllm", "--engine-args", arguments, "--max-media-bytes", "100000"]
    with say_plainly(folder) as plain, Services() as services:
        try:
            target = start(services, "target", "target", "--model", str(folder / "target"), *shape, *own)
            draft = start(services, "draft", "draft", "--model", str(folder / "draft"), "--threads", "1")
            for service in (target, draft):
                services.wait(service, START_S)
            addresses = ["--target", target.address, "--draft", draft.address]
            gateway = start(
                services, "gateway", "gateway", "--tokenizer", str(folder / "target"), *addresses,
                "--http", "127.0.0.1:0", "--max-media-bytes", "200000",
            )  # fmt: skip
            wait_for_draft(services.wait(gateway, START_S), START_S, services.check)
            out, _ = plain.communicate(timeout=START_S)
        finally:
            plain.kill()
        assert plain.returncode == 0, out[-3000:]
        said = json.loads((folder / "said.json").read_text())
        yield Started(folder, target, gateway, said)


@pytest.fixture
async def stub(started: Started) -> AsyncIterator[Any]:
    channel = connect(started.gateway.address)
    yield generation_pb2_grpc.GenerationServiceStub(channel)
    await channel.close()


def files_of(which: Sequence[int]) -> list[bytes]:
    return [FILES[number] for number in which]


async def generate(
    stub: Any, text: str, files: Sequence[bytes], k: int = 4, n: int = 1, output: Sequence[int] = (), **sampling: Any
) -> list[Any]:
    """All responses of a request, greedy where nothing else is said."""
    sampling = {"temperature": 0.0, "max_tokens": COUNT, "ignore_eos": True, **sampling}
    request = pb.GenerateRequest(text=text, sampling=sampling, n=n, media=[pb.Media(data=data) for data in files])
    request.speculation.num_draft_tokens, request.speculation.enabled = k, k > 0
    request.speculation.mode = "sequential" if k else ""
    if output:
        request.output_ids.add(ids=output)
    return [response async for response in stub.Generate(request, timeout=120, wait_for_ready=True)]


async def test_greedy_output_is_vllms_own_whatever_is_drafted(started: Started, stub: Any) -> None:
    for depths in ([4] * len(ASKED), [0, 2, 4, 1, 8]):
        results = await asyncio.gather(
            *(
                generate(stub, text, [FILES[n] for n in which], k)
                for (text, which), k in zip(ASKED, depths, strict=True)
            )
        )
        assert [tokens_of(responses) for responses in results] == started.plain
        for (text, _), k, responses in zip(ASKED, depths, results, strict=True):
            last = responses[-1]
            assert (last.speculation.num_draft_tokens > 0) == (k > 0)
            assert last.usage.prompt_tokens == len(started.ids_of(text))  # of the ids as they were sent
            assert list(responses[0].prompt_token_ids) == started.ids_of(text)
        drafted = sum(responses[-1].speculation.num_draft_tokens for responses in results)
        assert 0 < sum(responses[-1].speculation.num_accepted_tokens for responses in results) < drafted


async def test_one_text_with_two_pictures_shares_no_more_than_what_comes_before(started: Started, stub: Any) -> None:
    text = "x" * 20 + "<image>" + "y" * 40 + ":"
    place = 20
    one = await generate(stub, text, FILES[:1])
    again = await generate(stub, text, FILES[:1])
    other = await generate(stub, text, FILES[1:2])
    assert tokens_of(one) == tokens_of(again) != tokens_of(other)
    assert again[-1].usage.cached_tokens == 2 * BLOCK - (NUM_PLACES - 1) > place
    assert other[-1].usage.cached_tokens <= place


async def test_completions_share_their_picture_and_one_that_is_resumed_goes_on(started: Started, stub: Any) -> None:
    (text, which), plain = ASKED[0], started.plain[0]
    files = files_of(which)
    resumed = await generate(stub, text, files, output=plain[:15])
    assert tokens_of(resumed) == plain[15:]
    several = await generate(stub, text, files, n=3, temperature=1.0, seed=5, max_tokens=9)
    assert {response.index for response in several} == {0, 1, 2} and len(tokens_of(several)) == 27


async def test_what_is_none_costs_its_own_request_alone(started: Started, stub: Any) -> None:
    truncated = picture("PNG", 300, 300, 7)[:400]
    long = "<image>" + "z" * (MAX_MODEL_LEN - 6)
    refused: list[tuple[str, list[bytes], str]] = [
        ("a <image> b", [truncated], r"open.media\[0\]: cannot be decoded"),
        ("a <image> <image>", [FILES[0], truncated], r"open.media\[1\]: cannot be decoded"),
        ("no place for it", FILES[:1], "open.media: vLLM's processor refuses the prompt with its pictures"),
        ("<image> and one more", FILES[:2], "open.media: vLLM's processor refuses the prompt with its pictures"),
        ("<image>", [FILES[0] + bytes(150_000)], "open.media: has .* allowed: at most 100000"),
        (long, FILES[:1], f"open.media: makes a prompt of {len(started.ids_of(long)) + NUM_PLACES - 1} tokens"),
    ]
    running = asyncio.create_task(generate(stub, ASKED[0][0], FILES[:1]))
    for text, files, said in refused:
        with pytest.raises(grpc.aio.AioRpcError, match=said) as caught:
            await generate(stub, text, files, max_tokens=2)
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert tokens_of(await running) == started.plain[0]


async def test_a_completion_ends_where_the_context_does(started: Started, stub: Any) -> None:
    """With its pictures' places: the gateway cannot know how many there are."""
    text = "<image>" + "z" * 80
    responses = await generate(stub, text, FILES[:1], max_tokens=MAX_MODEL_LEN - 81)
    assert responses[-1].finish_reason == pb.FINISH_REASON_LENGTH
    assert len(tokens_of(responses)) == MAX_MODEL_LEN - 80 - NUM_PLACES


async def test_over_http_a_conversation_with_a_data_url(started: Started, stub: Any) -> None:
    content = [{"type": "text", "text": "What?"}, {"type": "image_url", "image_url": {"url": data_url(FILES[0])}}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    async with httpx.AsyncClient(
        base_url=f"http://{started.gateway.find(HTTP)}", timeout=60, trust_env=False
    ) as client:
        answer = (await client.post("/v1/chat/completions", json={**body, "return_token_ids": True})).json()
        assert (await client.get("/v1/models")).json()["data"][0]["modalities"] == ["text", "image"]
    rendered = started.tokenizer.render_chat([{"role": "user", "content": [{"type": "image"}, content[0]]}])
    assert rendered == "USER: <image>What?\nASSISTANT:"
    same = await generate(stub, rendered, FILES[:1], max_tokens=20)
    assert answer["choices"][0]["token_ids"] == tokens_of(same)


async def read(
    targets: RemoteTargets, text: Sequence[int], files: Sequence[bytes], read_on: asyncio.Event
) -> list[int]:
    """A completion by the gateway's loop in this process, which reads no further than its first round until told."""
    sampling = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)
    media = tuple(Media.of(looks.mime_type, data) for data in files if (looks := look_at(data)))
    request = Open(0, tuple(text), sampling, model_digest=targets.info.model.digest, media=media)
    return await read_slowly(targets, request, read_on)


async def test_pictures_come_again_where_a_stream_is_lost(started: Started) -> None:
    """In mid-answer: what was said is a prompt then, behind the same pictures."""
    async with RemoteTargets([started.target.address]) as targets:
        await targets.wait_usable()
        (replica,) = targets.replicas
        read_on = asyncio.Event()
        streams = [
            asyncio.create_task(read(targets, started.ids_of(text), files_of(which), read_on)) for text, which in ASKED
        ]
        await until(lambda: replica.num_sequences == len(ASKED))
        await asyncio.sleep(1)
        lost = replica._stream
        assert lost is not None
        await lost.close()
        read_on.set()
        assert await asyncio.gather(*streams) == started.plain
        assert replica.num_streams == 2


# As vLLM's documentation has it (features/multimodal_inputs), but for the import line, the model and the file.
SCRIPT = """
from vllm import LLM
import PIL.Image

llm = LLM(model="llava-hf/llava-1.5-7b-hf")

# Refer to the HuggingFace repo for the correct format to use
prompt = "USER: <image>\\nWhat is the content of this image?\\nASSISTANT:"

# Load the image using PIL.Image
image = PIL.Image.open("cherry_blossom.jpg")

# Single prompt inference
outputs = llm.generate({
    "prompt": prompt,
    "multi_modal_data": {"image": image},
})

for o in outputs:
    generated_text = o.outputs[0].text
    print(generated_text)

# Batch inference
image_1 = PIL.Image.open("cherry_blossom.jpg")
image_2 = PIL.Image.open("stop_sign.jpg")
outputs = llm.generate(
    [
        {
            "prompt": "USER: <image>\\nWhat is the content of this image?\\nASSISTANT:",
            "multi_modal_data": {"image": image_1},
        },
        {
            "prompt": "USER: <image>\\nWhat's the color of this image?\\nASSISTANT:",
            "multi_modal_data": {"image": image_2},
        },
    ]
)

for o in outputs:
    generated_text = o.outputs[0].text
    print(generated_text)
"""


def test_scripts_of_vllms_documentation_run(started: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a draft model beside them, and what they say is vLLM's own; conversations and bounds, too."""
    for name, data in zip(("cherry_blossom.jpg", "stop_sign.jpg"), FILES, strict=False):
        (tmp_path / name).write_bytes(data)
    monkeypatch.chdir(tmp_path)
    script = SCRIPT.replace("from vllm import", "from outrider.llm import")
    ours = f'"{started.folder}/target", max_num_seqs=4, max_model_len=128, kv_cache_memory_bytes=64 << 20, '
    ours += f'dtype="float32", limit_mm_per_prompt={{"image": 2}}, allowed_local_media_path="{tmp_path}", '
    ours += (
        f'speculative_config={{"draft_trial": "off", "model": "{started.folder}/draft", "num_speculative_tokens": 3}}'
    )
    names: dict[str, Any] = {}
    exec(script.replace('"llava-hf/llava-1.5-7b-hf"', ours), names)
    assert len(names["outputs"]) == 2 and all(output.finished for output in names["outputs"])
    llm: LLM = names["llm"]
    with llm:
        assert llm._backend.info.engine.startswith("vllm-")  # engine="auto"
        params = LlmParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)
        images = [Image.open(BytesIO(data)).convert("RGB") for data in FILES]
        prompts = [{"prompt": text, "multi_modal_data": {"image": [images[n] for n in which]}} for text, which in ASKED]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert [list(output.outputs[0].token_ids) for output in outputs] == started.plain
        urls = [data_url(FILES[0]), f"file://{tmp_path}/cherry_blossom.jpg"]
        parts: list[Any] = [*({"type": "image_url", "image_url": {"url": url}} for url in urls)]
        parts.append({"type": "image_pil", "image_pil": Image.open(BytesIO(FILES[0]))})
        asked = [[{"role": "user", "content": [part, {"type": "text", "text": "What?"}]}] for part in parts]
        said = llm.chat(asked, params, use_tqdm=False)
        assert said[0].outputs[0].token_ids == said[1].outputs[0].token_ids == said[2].outputs[0].token_ids
        assert said[0].prompt == "USER: <image>What?\nASSISTANT:"
        with pytest.raises(ValueError, match=r"multi_modal_data: vLLM's processor refuses .* image"):
            llm.generate({"prompt": "<image>" * 3, "multi_modal_data": {"image": images}}, params, use_tqdm=False)
