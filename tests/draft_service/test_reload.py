"""Another model in the draft's place while it drafts: what was drawn stays, what comes is the new one's, and what
cannot be used changes nothing."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import weakref
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import torch
from support.engines import SAMPLED, DraftHarness, commit, credit, naive, new_open
from support.metrics import samples_of
from support.models import build_decoder, save_tiny, save_words, tiny_config, tiny_hf_model, tiny_state

from outrider.draft_service import boot, reload
from outrider.draft_service.admission import ModelMethod
from outrider.draft_service.boot import DraftService, build_model_method
from outrider.draft_service.settings import DraftSettings
from outrider.engine import memory
from outrider.engine.loader import LoadedModel, load_model
from outrider.engine.model_runner import RunnerOptions
from outrider.gateway.peers.remote import DRAFT_SERVICE
from outrider.proposers.prediction import PredictionProposer
from outrider.rpc.channel import connect
from outrider.rpc.codec import DRAFT_STREAM, RELOADED
from outrider.rpc.engine_service import this_machine
from outrider.rpc.errors import OutriderError
from outrider.rpc.messages import Close, Closed, DraftInfo, DraftTokens, Failure, Reloaded
from outrider.rpc.status import from_rpc_error
from outrider.rpc.stream import client_stream
from outrider.rpc.words.sampling_params import AcceptanceRule, SamplingParams
from outrider.v1 import draft_pb2, draft_pb2_grpc

COUPLED, BLOCK = AcceptanceRule.COUPLED, AcceptanceRule.BLOCK
PENALISED = SamplingParams(
    temperature=0.9, top_p=0.9, repetition_penalty=1.3, presence_penalty=0.4, min_tokens=6, max_tokens=200,
    stop_token_ids=(5,), logit_bias={7: 1.5}, bad_words_ids=((9,), (3, 4)),
)  # fmt: skip
REQUESTS = {
    1: new_open(1, range(3, 20)),
    2: new_open(2, range(30, 36), SAMPLED, seed=2**63 + 5),
    3: new_open(3, [8] * 33, SAMPLED, seed=7, acceptance=COUPLED, completion=2),
    4: new_open(4, range(40, 56), PENALISED, seed=11, output_ids=(3, 5, 5)),
    5: new_open(5, range(60, 70), PENALISED, seed=12, acceptance=COUPLED),
    6: new_open(6, range(20, 25), SAMPLED, seed=3, one_hot=True),
    7: new_open(7, range(10, 30), SAMPLED, seed=5, acceptance=BLOCK),
}


def other_model(seed: int = 1, **options: Any) -> LoadedModel:
    config = tiny_config("llama", **options)
    return build_decoder(config, tiny_state(tiny_hf_model("llama", seed, **options)), batch_invariant=True)


def method_of(loaded: LoadedModel, num_blocks: int = 128) -> ModelMethod:
    return build_model_method(loaded, RunnerOptions(num_blocks=num_blocks))


class Chains:
    """What was sent of every chain, from its beginning."""

    def __init__(self) -> None:
        self.committed = {number: [*request.prompt_ids, *request.output_ids] for number, request in REQUESTS.items()}
        self.pieces: dict[tuple[int, int], list[DraftTokens]] = {}

    def take(self, events: Sequence[Any]) -> None:
        for piece in events:
            assert isinstance(piece, DraftTokens)
            if piece.ids:
                self.pieces.setdefault((piece.sequence_id, piece.chain), []).append(piece)

    def check(self, number: int, chain: int, models: Sequence[tuple[int, LoadedModel]]) -> None:
        """Every token of a chain is the naive draft's of the model that had the positions from a given one on."""
        pieces = self.pieces[number, chain]
        start = pieces[0].position
        tokens = self.committed[number][:start]
        for piece in pieces:
            assert piece.position == len(tokens), "a chain without gaps, and no token of it twice"
            for index, token in enumerate(piece.ids):
                loaded = [model for first, model in models if len(tokens) >= first][-1]
                expected, weights = naive(REQUESTS[number], tokens, loaded, chain=(chain, start))
                assert (token, piece.weights[index] if piece.weights else None) == (expected, weights)
                tokens.append(token)


@pytest.mark.parametrize("passes", range(1, 5))
def test_what_was_drawn_stays_and_what_comes_is_the_new_models(passes: int) -> None:
    """Four tokens a piece, of which one to four are drawn when the model changes; three pieces, then a commit."""
    harness = DraftHarness(num_blocks=128)
    chains, old, new = Chains(), harness.loaded, other_model(vocab_size=98)
    numbers = list(REQUESTS)
    harness.send(*REQUESTS.values(), *(credit(number, len(chains.committed[number]) + 12) for number in numbers))
    for _ in range(passes):
        assert harness.engine.step(0.0) == 0.0
    drawn = {draft.key[1]: len(draft.text) for draft in harness.engine.sequences.values()}
    assert {drawn[number] - len(chains.committed[number]) for number in numbers} == {passes}
    assert harness.engine.replace_model(method_of(new)) == len(numbers)
    assert harness.method.cache.pool.num_free == 128, "nothing is held in the cache of before"
    harness.run()
    chains.take(harness.events)
    for number in numbers:
        assert sum(len(piece.ids) for piece in chains.pieces[number, 0]) == 12
        chains.check(number, 0, [(0, old), (drawn[number], new)])
    assert {len(sequence.sequence) - sequence.sequence.num_computed_tokens for sequence in sequences(harness)} == {1}

    rng = random.Random(passes)
    for number in numbers:
        ahead = [token for piece in chains.pieces[number, 0] for token in piece.ids]
        length, kept = len(chains.committed[number]), [*ahead[: passes + 1], (ahead[passes + 1] + 1) % 97]
        chains.committed[number] += kept
        chains.take(harness.run(commit(number, length, *kept), credit(number, length + 30)))
        (latest,) = {chain for known, chain in chains.pieces if known == number and chain > 0}
        chains.check(number, latest, [(0, new)])
    harness.run(*(Close(number) for number in rng.sample(numbers, len(numbers))))
    assert harness.engine.cache.pool.num_free == 128


def sequences(harness: DraftHarness) -> list[Any]:
    return list(harness.engine.sequences.values())


def test_branches_that_left_may_still_hold_and_later_ones_are_the_new_models() -> None:
    harness = DraftHarness(num_blocks=128)
    request = new_open(1, range(3, 20), SAMPLED, seed=9, acceptance=COUPLED)
    pieces = [e for e in harness.run(request, credit(1, 25, 3, max_branches=4)) if isinstance(e, DraftTokens)]
    branch = next(piece for piece in pieces if piece.parent is not None)
    harness.engine.replace_model(method_of(other_model()))
    (draft,) = harness.engine.sequences.values()
    assert not draft.branches and not draft.sequence.block_table
    chain = [token for piece in pieces if piece.parent is None for token in piece.ids]
    before = [*chain[: branch.position - 17], branch.ids[0]]
    events = harness.run(commit(1, 17, *before), credit(1, 40, 3, max_branches=4))
    assert max(e.chain for e in events if isinstance(e, DraftTokens)) > max(piece.chain for piece in pieces)
    new = other_model()
    tokens = [*range(3, 20), *before]
    first = next(e for e in events if isinstance(e, DraftTokens) and e.parent is None and e.ids)
    assert first.position == len(tokens)
    for token in first.ids:
        assert token == naive(request, tokens, new)[0]
        tokens.append(token)
    assert any(e.parent is not None for e in events if isinstance(e, DraftTokens))
    harness.engine.cache.pool.check_integrity(
        [line.block_table for line in (draft.sequence, *(held.sequence for held in draft.branches))]
    )


def test_what_the_new_model_cannot_hold_goes_without_it_and_the_others_stay() -> None:
    harness = DraftHarness(num_blocks=128)
    harness.run(new_open(1, range(40)), new_open(2, range(8)), new_open(3, [96, 1]), credit(2, 12), credit(3, 4))
    smaller = method_of(other_model(vocab_size=96, max_position_embeddings=32), num_blocks=2)
    assert harness.engine.replace_model(smaller) == 1
    failed = {event.sequence_id: event.reason for event in harness.run() if isinstance(event, Failure)}
    known = {event.sequence_id: event.reason for event in harness.events if isinstance(event, Failure)}
    assert failed == {} and known == {1: "CONTEXT_TOO_SHORT", 3: "UNKNOWN_TOKEN"}
    assert len(harness.ids(credit(2, 16))) == 1
    (refused,) = harness.run(new_open(4, range(40)))
    assert isinstance(refused, Failure) and refused.reason == "CONTEXT_TOO_SHORT"


def test_of_several_methods_the_models_part_changes() -> None:
    """The guess has left, and a piece of the model's is half drawn: it is one chain."""
    harness, new = DraftHarness(num_blocks=128, more=[PredictionProposer()]), other_model()
    prompt, methods_asked = list(range(5, 15)), ("prediction", "draft_model")
    request = new_open(
        1, prompt, SAMPLED, seed=3, methods=methods_asked, method="prediction", prediction=(20, 21, 22, 23)
    )
    harness.send(request, credit(1, 26, 4))
    while len(sequences(harness)[0].text) < 16:
        assert harness.engine.step(0.0) == 0.0
    (draft,) = sequences(harness)
    changed = len(draft.text)
    harness.engine.replace_model(method_of(new))
    harness.run()
    tokens, methods = list(prompt), list[str]()
    for piece in harness.events:
        assert isinstance(piece, DraftTokens) and (piece.chain, piece.position) == (0, len(tokens))
        methods.append(piece.method)
        for index, token in enumerate(piece.ids):
            if piece.method == "draft_model":
                model = harness.loaded if len(tokens) < changed else new
                assert (token, piece.weights[index]) == naive(request, tokens, model)
            tokens.append(token)
    assert (changed, len(tokens)) == (16, 26) and methods == ["prediction", *["draft_model"] * 3]


def test_a_model_that_does_not_compute_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    harness, expected = DraftHarness(num_blocks=128), DraftHarness(num_blocks=128)
    broken = method_of(other_model())

    def fail(entries: Any) -> torch.Tensor:
        raise RuntimeError("a kernel failed")

    monkeypatch.setattr(broken.proposer.runner, "forward", fail)
    messages = [new_open(1, range(30)), credit(1, 34)]
    assert harness.ids(*messages) == expected.ids(*messages)
    with pytest.raises(RuntimeError, match="a kernel failed"):
        harness.engine.replace_model(broken)
    assert harness.engine.model is harness.method
    assert harness.ids(credit(1, 38)) == expected.ids(credit(1, 38))


WORDS = [f"w{index}" for index in range(97)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models of one tokenizer, of another one, without weights, and with damaged ones."""
    root = tmp_path_factory.mktemp("models")
    found = {name: save_tiny(root / name, seed=seed) for seed, name in enumerate(("old", "new", "other", "damaged"))}
    for name, folder in found.items():
        save_words(folder, WORDS if name != "other" else WORDS[::-1])
    weights = found["damaged"] / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    found["empty"] = root / "empty"
    found["empty"].mkdir()
    for name in ("config.json", "tokenizer.json"):
        (found["empty"] / name).write_bytes((found["old"] / name).read_bytes())
    found["absent"] = root / "absent"
    return found


class Running:
    """A draft service, and a channel to it."""

    def __init__(self, service: DraftService, channel: grpc.aio.Channel) -> None:
        self.service, self.channel = service, channel
        self.stub = draft_pb2_grpc.DraftServiceStub(channel)

    async def reload(self, model: Path | str) -> Reloaded:
        try:
            answer = await self.stub.ReloadModel(draft_pb2.ReloadModelRequest(model=str(model)))
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        return RELOADED.decode(answer)

    async def digest(self) -> str:
        return (await DRAFT_SERVICE.get_info(self.channel)).model.digest


@pytest.fixture
async def running(folders: dict[str, Path]) -> AsyncIterator[Running]:
    settings = DraftSettings(
        model=folders["old"], listen="127.0.0.1:0", threads=1, num_blocks=64, allow_reload=True, metrics="127.0.0.1:0"
    )
    service = await boot.start(settings)
    await service.server.start()
    channel = connect(service.server.address)
    yield Running(service, channel)
    await channel.close()
    await service.stop()


async def piece_of(stream: Any) -> DraftTokens:
    async with asyncio.timeout(30):
        while True:
            for message in await anext(stream):
                assert isinstance(message, DraftTokens)
                return message


async def test_streams_go_on_and_hear_that_something_has_changed(running: Running, folders: dict[str, Path]) -> None:
    before = (await DRAFT_SERVICE.get_info(running.channel)).model
    async with client_stream(DRAFT_STREAM, running.stub.Propose()) as stream:
        stream.send(new_open(1, range(30)), credit(1, 34))
        first, version = await piece_of(stream), stream.peer_info_version
        done = await running.reload(folders["new"])
        assert (done.before, done.num_sequences) == (before, 1) and done.after.digest != before.digest
        assert done.after.name == "new" and done.after.tokenizer_fingerprint == before.tokenizer_fingerprint != ""
        stream.send(credit(1, 38))
        second = await piece_of(stream)
        assert (second.chain, second.position) == (first.chain, 34), "the chain goes on"
        async with asyncio.timeout(30):
            while stream.peer_info_version != version + 1:  # noqa: ASYNC110 (a heartbeat brings it)
                await asyncio.sleep(0.01)
        assert await running.digest() == done.after.digest
        again = await running.reload("")  # the same folder, read again
        assert again.before == again.after == done.after
        stream.send(Close(1))
        async with asyncio.timeout(30):
            assert await anext(stream) == [Closed(1)]
    metrics = running.service.metrics
    assert metrics is not None
    labels = dict(
        next(labels for name, labels in samples_of(metrics.render("")[0].decode()) if name == "draft_model_info")
    )
    assert (labels["model"], labels["digest"]) == ("new", done.after.digest[:12])


async def test_what_its_tokens_take_is_told_and_told_anew(
    running: Running, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def costs_of(info: DraftInfo) -> tuple[tuple[int, int], ...]:
        return {method.name: method.step_costs for method in info.methods}["draft_model"]

    before = await DRAFT_SERVICE.get_info(running.channel)
    assert [rows for rows, _ in costs_of(before)][:3] == [1, 2, 4] and all(us > 0 for _, us in costs_of(before))
    assert before.machine == this_machine() != ""
    monkeypatch.setattr(boot, "measure_steps", lambda *_: ((1, 77),))
    await running.reload(folders["new"])
    assert costs_of(await DRAFT_SERVICE.get_info(running.channel)) == ((1, 77),)


@pytest.mark.parametrize(
    ("name", "reason", "said"),
    [
        ("absent", "INVALID_ARGUMENT", "there is no such folder"),
        ("empty", "INVALID_ARGUMENT", "holds no .safetensors"),
        ("damaged", "INVALID_ARGUMENT", "file not fully covered"),
        ("other", "NOT_A_PAIR", "another tokenizer"),
    ],
)
async def test_what_cannot_be_used_leaves_the_old_one_drafting(
    running: Running, folders: dict[str, Path], name: str, reason: str, said: str
) -> None:
    before = await DRAFT_SERVICE.get_info(running.channel)
    async with client_stream(DRAFT_STREAM, running.stub.Propose()) as stream:
        stream.send(new_open(1, range(30)), credit(1, 34))
        await piece_of(stream)
        with pytest.raises(OutriderError, match=said) as refused:
            await running.reload(folders[name])
        assert refused.value.reason == reason and str(folders[name]) in refused.value.message
        stream.send(credit(1, 38))
        assert (await piece_of(stream)).position == 34
        assert stream.peer_info_version == before.info_version != 0 and await running.digest() == before.model.digest
    assert (await running.reload(folders["new"])).after.digest != before.model.digest, "the next one may do"


async def test_without_room_beside_it_the_old_one_stays(
    running: Running, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reload, "free_bytes", lambda device: 0)
    with pytest.raises(OutriderError, match=r"needs \d+ MiB beside the present model, and 0 MiB are free") as refused:
        await running.reload(folders["new"])
    assert refused.value.reason == "NO_MEMORY"


async def test_one_at_a_time_and_none_while_draining(
    running: Running, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, let_go = threading.Event(), threading.Event()

    def slow(*arguments: Any, **options: Any) -> LoadedModel:
        begun.set()
        assert let_go.wait(60)
        return load_model(*arguments, **options)

    monkeypatch.setattr(boot, "load_model", slow)
    first = asyncio.create_task(running.reload(folders["new"]))
    try:
        assert await asyncio.to_thread(begun.wait, 60)
        with pytest.raises(OutriderError) as refused:
            await running.reload("absent")
        assert refused.value.reason == "RELOADING"
        async with client_stream(DRAFT_STREAM, running.stub.Propose()) as stream:
            stream.send(new_open(1, range(30)), credit(1, 34))
            assert (await piece_of(stream)).position == 30, "it drafts while it loads"
            running.service.servicer.drain()
            with pytest.raises(OutriderError) as refused:
                await running.reload(folders["new"])
            assert refused.value.reason == "DRAINING"
            let_go.set()
            assert (await first).num_sequences == 1, "what began before goes on"
            stream.send(credit(1, 38))
            assert (await piece_of(stream)).position == 34
    finally:
        let_go.set()
        first.cancel()


async def test_a_caller_that_leaves_does_not_stop_it(
    running: Running, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    began, let_go = threading.Event(), threading.Event()

    def slow(*arguments: Any, **options: Any) -> LoadedModel:
        began.set()
        assert let_go.wait(60)
        return load_model(*arguments, **options)

    monkeypatch.setattr(boot, "load_model", slow)
    digest = await running.digest()
    call = running.stub.ReloadModel(draft_pb2.ReloadModelRequest(model=str(folders["new"])))
    waiting = asyncio.ensure_future(call)
    assert await asyncio.to_thread(began.wait, 60)
    call.cancel()
    with pytest.raises((asyncio.CancelledError, grpc.aio.AioRpcError)):
        await waiting
    let_go.set()
    async with asyncio.timeout(60):
        while await running.digest() == digest:  # noqa: ASYNC110 (the service changes it)
            await asyncio.sleep(0.01)


async def test_nothing_of_the_model_before_is_kept(running: Running, folders: dict[str, Path]) -> None:
    """Also where nobody looks for circles: a server has what was there at its start frozen."""
    async with client_stream(DRAFT_STREAM, running.stub.Propose()) as stream:
        stream.send(new_open(1, range(30), SAMPLED), credit(1, 34, 4, max_branches=2))
        await piece_of(stream)
        method = running.service.engine.model
        kept = [weakref.ref(each) for each in (method.proposer.runner.model, method.proposer.runner, method.cache)]
        del method
        gc.disable()
        try:
            await running.reload(folders["new"])
            stream.send(credit(1, 38))
            await piece_of(stream)
            assert [each() for each in kept] == [None] * 3
        finally:
            gc.enable()


async def test_it_has_to_be_allowed(folders: dict[str, Path]) -> None:
    service = await boot.start(DraftSettings(model=folders["old"], listen="127.0.0.1:0", threads=1, num_blocks=8))
    await service.server.start()
    async with connect(service.server.address) as channel:
        with pytest.raises(OutriderError, match="--allow-reload") as refused:
            await Running(service, channel).reload(folders["new"])
    await service.stop()
    assert refused.value.reason == "PERMISSION_DENIED"
    with pytest.raises(ValueError, match="allow_reload"):
        DraftSettings(method="ngram", allow_reload=True)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"allow_reload": True, "listen": ":0", "insecure": True}, "allow_reload .*others reach listen"),
        ({"allow_hub_reload": True}, "give --allow-reload, too"),
    ],
)
def test_settings_that_are_none(options: dict[str, Any], said: str) -> None:
    """Whoever reaches a draft may have it load any folder there: strangers may not."""
    with pytest.raises(ValueError, match=said):
        DraftSettings(model=Path("m"), **options)


@pytest.mark.parametrize("allowed", [False, True])
async def test_a_model_of_the_hub_is_downloaded_only_where_that_is_allowed(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, allowed: bool
) -> None:
    asked: list[str] = []

    def download(repo: str, **options: Any) -> str:
        asked.append(repo)
        return str(folders["new"])

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    common: dict[str, Any] = {"listen": "127.0.0.1:0", "threads": 1, "num_blocks": 8, "allow_reload": True}
    service = await boot.start(DraftSettings(model=folders["old"], allow_hub_reload=allowed, **common))
    await service.server.start()
    async with connect(service.server.address) as channel:
        if allowed:
            await Running(service, channel).reload("somebody/model")
        else:
            with pytest.raises(OutriderError, match="ids of the hub are for a draft with --allow-hub-reload"):
                await Running(service, channel).reload("somebody/model")
    await service.stop()
    assert asked == (["somebody/model"] if allowed else [])


def test_free_memory_is_the_least_of_the_machines_and_the_containers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    assert memory.free_bytes(cpu) == 1 << 62
    (tmp_path / "meminfo").write_text("MemTotal: 90 kB\nMemAvailable: 50 kB\n")
    assert memory.free_bytes(cpu) == 50 << 10
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.free_bytes(cpu) == 50 << 10
    (tmp_path / "memory.max").write_text("20000\n")
    (tmp_path / "memory.current").write_text("15000\n")
    (tmp_path / "memory.stat").write_text("anon 9\ninactive_file 4000\n")
    assert memory.free_bytes(cpu) == 9000
