"""Targets' vocabularies that come in slices: over real gRPC, from a gateway's pool of drafts, and from peers that send
what would do harm."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from support.gateways import PANICS, panicking_tokenizer
from support.models import save_tiny, train_byte_fallback, train_byte_level

from outrider.draft_service import vocabularies
from outrider.draft_service.boot import start
from outrider.draft_service.settings import DraftSettings
from outrider.draft_service.trial import check
from outrider.gateway.peers.handshake import vocabulary_for
from outrider.gateway.peers.remote import RemoteDrafts
from outrider.gateway.text.tokenizer import Tokenizer
from outrider.rpc.channel import connect
from outrider.rpc.messages import Credit, DraftInfo, DraftTokens, ModelInfo, Open
from outrider.rpc.pair import check_pair
from outrider.rpc.vocabulary import TokenizerFile
from outrider.rpc.words.sampling_params import SamplingParams
from outrider.v1 import draft_pb2, draft_pb2_grpc


@pytest.fixture(scope="module")
def draft_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_tiny(tmp_path_factory.mktemp("draft"), vocab_size=400)
    train_byte_level(300).save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The target's."""
    folder = tmp_path_factory.mktemp("target")
    train_byte_fallback().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return Tokenizer.load(folder)


@pytest.fixture
async def address(draft_folder: Path) -> AsyncIterator[str]:
    service = await start(DraftSettings(model=draft_folder, listen="127.0.0.1:0", threads=1, cache_mb=16))
    await service.server.start()
    yield service.server.address
    await service.stop()


def target_of(tokenizer: Tokenizer) -> ModelInfo:
    return ModelInfo("target", "t", 420, 512, tokenizer.num_tokens, tokenizer.fingerprint)


async def test_a_gateway_gives_a_draft_what_it_lacks(address: str, tokenizer: Tokenizer) -> None:
    target, offered = target_of(tokenizer), []

    def offer(info: DraftInfo) -> TokenizerFile | None:
        offered.append(vocabulary_for(info, target, tokenizer))
        return offered[-1]

    def judge(info: DraftInfo) -> None:
        assert check_pair(target, info.model) == ""

    prompt = tuple(tokenizer.encode("the quick brown fox"))
    request = Open(0, prompt, SamplingParams(temperature=0.0), tokenizer_fingerprint=target.tokenizer_fingerprint)
    for _ in range(2):  # the second gateway finds it there
        said: asyncio.Queue[Any] = asyncio.Queue()
        async with RemoteDrafts([address], judge, offer=offer) as drafts:
            assert await asyncio.wait_for(drafts.wait_attempted(), 60) is None
            info = drafts.info
            assert info is not None and info.model.mapped_fingerprints == (target.tokenizer_fingerprint,)
            (row,) = info.vocabularies
            assert (row.greedy, row.sampled) == ("string", "token") and 0.1 < row.overlap < 0.95
            link = drafts.open(request, said.put_nowait)
            assert link is not None
            link.send(Credit(0, len(prompt) + 4, 4))
            piece = await asyncio.wait_for(said.get(), 60)
            assert isinstance(piece, DraftTokens) and len(piece.ids) > 0 and max(piece.ids) < tokenizer.num_tokens
    assert offered[0] is not None and offered[1:] == [None]


async def put(address: str, *slices: draft_pb2.PutVocabularyRequest) -> tuple[grpc.StatusCode, str]:
    channel = connect(address)
    stub: Any = draft_pb2_grpc.DraftServiceStub(channel)
    try:
        await asyncio.wait_for(stub.PutVocabulary(iter(slices)), 60)
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    finally:
        await channel.close()
    return grpc.StatusCode.OK, ""


def whole(file: TokenizerFile, **head: Any) -> draft_pb2.PutVocabularyRequest:
    fields: dict[str, Any] = {"num_bytes": len(file.layout), "special_tokens": file.special, "data": file.layout}
    return draft_pb2.PutVocabularyRequest(tokenizer_fingerprint=file.fingerprint, **fields | head)


async def test_what_is_not_what_it_says_is_refused(
    address: str, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, invalid = tokenizer.file, grpc.StatusCode.INVALID_ARGUMENT
    many = {str(number): "<x>" for number in range(vocabularies.MAX_SPECIAL_TOKENS + 1)}
    for refused, word in (
        ([whole(file, num_bytes=vocabularies.MAX_BYTES + 1)], "num_bytes"),
        ([whole(file, num_bytes=7)], "data"),
        ([whole(file, num_bytes=len(file.layout) + 1)], "data"),
        ([whole(file, special_tokens=many)], "special_tokens"),
        ([], "data"),
        ([whole(replace(file, fingerprint="another"))], "fingerprint"),
        ([whole(replace(file, layout=b"{"))], "tokenizer.json"),
    ):
        code, said = await put(address, *refused)
        assert code == invalid and word in said, said
    monkeypatch.setattr(vocabularies, "MAX_VOCABULARIES", 0)
    assert (await put(address, whole(file)))[0] == grpc.StatusCode.RESOURCE_EXHAUSTED
    monkeypatch.undo()
    assert (await put(address, whole(file)))[0] == grpc.StatusCode.OK


def test_a_text_at_which_the_library_panics_has_no_draft() -> None:
    """As one in which there is no token for a character."""
    backend = panicking_tokenizer().backend
    assert vocabularies._encode(backend, PANICS) is None and vocabularies._encode(backend, "a fox") is not None


def changed(file: TokenizerFile, **parts: Any) -> TokenizerFile:
    layout = json.loads(file.layout)
    for name, part in parts.items():
        layout[name] = part
    return replace(file, layout=json.dumps(layout).encode())


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


USUAL = (
    r"(?i:'s|'t|'re|'ve|'m)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}]*[\p{Ll}\p{Lm}]+(?i:'s|'t)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+",
)


def test_usual_patterns_are_taken(tokenizer: Tokenizer) -> None:
    for pattern in USUAL:
        check(changed(tokenizer.file, pre_tokenizer=split(pattern)))


def harmful(file: TokenizerFile) -> Iterator[tuple[TokenizerFile, str]]:
    for pattern in ("(a+)+b", "((a+))+b", r"(a*)*", r"(\w+\s?)*$", r"(a)\1", "(?:a{1,9}){1,9}"):
        yield changed(file, pre_tokenizer=split(pattern)), "repeated groups|repeated group"
    grown = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 5000}
    yield changed(file, normalizer=grown), "characters"
    model = json.loads(file.layout)["model"]
    yield changed(file, model=model | {"vocab": model["vocab"] | {"x": 2**31}}), "id 2147483648"
    yield changed(file, model=model | {"vocab": model["vocab"] | {"x" * 2000: 420}}), "2000 characters"


def test_what_would_do_harm_is_not_read(tokenizer: Tokenizer) -> None:
    for file, word in harmful(tokenizer.file):
        with pytest.raises(ValueError, match=word):
            check(file)
