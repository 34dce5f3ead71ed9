"""Every field of every entry point at its bounds and beyond them, one by one and several at once: each answer is one,
or an error that names what is wrong, and afterwards the services answer to the bit as they did before. What the fields
are is read from the protocol's descriptors, the bodies' models and the table of sampling parameters."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import grpc.aio
import pytest
from safetensors.torch import load_file
from support.adapters import save_adapter
from support.deployment import PROMPT, Deployment
from support.gateways import toy_tokenizer
from support.hostile import (
    JSON,
    JSON_VALUES,
    PROPOSE,
    VERIFY,
    HandStream,
    Place,
    drawn,
    leaves,
    messages,
    name_of,
    places_in,
    values_of,
    with_leaf,
    with_value,
)
from test_layout import REPOSITORY

from outrider.gateway.http.protocol import ChatBody, CompletionBody
from outrider.gateway.http.responses_input import ResponsesBody
from outrider.gateway.http.tokenize import DetokenizeBody, TokenizeBody
from outrider.rpc.errors import Internal, OutriderError
from outrider.rpc.status import from_rpc_error, from_status
from outrider.rpc.words.sampling_params import PARAMETERS
from outrider.v1 import common_pb2, draft_pb2, generation_pb2, learning_pb2, target_pb2

pytestmark = pytest.mark.timeout(900)
AT_ONCE = 12  # requests
# A field's name comes first; what no field is to blame for has a reason.
NAMED = ("[", ".", ": ")
UNNAMED = {
    "PROTOCOL_ERROR", "PARENT_GONE", "OTHER_MODEL", "MODEL_NOT_FOUND", "UNKNOWN_METHOD", "DOES_NOT_FIT",
    "CONTEXT_TOO_SHORT", "UNKNOWN_TOKEN", "COMMIT_GAP", "DEADLINE", "NOT_A_PAIR", "RELOADING", "NOT_LOADED",
    "DEADLINE_EXCEEDED", "CALL_ENDED",
}  # fmt: skip

Item = TypeVar("Item")


def some(cases: Iterable[Item], prove: bool, one_in: int) -> list[Item]:
    """All of them in the long form, else one in so many."""
    listed = list(cases)
    return listed if prove else listed[::one_in]


async def at_once(cases: Sequence[Item], ask: Callable[[Item], Awaitable[str | None]]) -> None:
    """Asks for all of them, some at a time; what is wrong with an answer fails the test with its request."""
    free = asyncio.Semaphore(AT_ONCE)

    async def asked(case: Item) -> str | None:
        async with free:
            problem = await ask(case)
        return None if problem is None else f"{str(case)[:300]}: {problem}"

    problems = [problem for problem in await asyncio.gather(*map(asked, cases)) if problem is not None]
    assert cases and not problems, f"{len(problems)} of {len(cases)}:\n" + "\n".join(problems[:20])


def problem_of(error: OutriderError) -> str | None:
    """What is wrong with a refusal."""
    if error.reason in UNNAMED:  # of codes without a class of their own, too, which read as Internal
        return None
    if isinstance(error, Internal) or error.code is grpc.StatusCode.UNKNOWN:
        return f"{error.code.name}: {error.message}"
    field = error.message.partition(": ")[0]
    if field == error.message or " " in field:
        return f"names no field: {error.code.name} {error.reason}: {error.message}"
    return None


IDS: Any = {"ids": PROMPT}
SAMPLING: Any = {"temperature": 0, "max_tokens": 2, "seed": 7}
CHAT: Any = {"messages": [{"role": "user", "content": "hi"}]}
TOOL = json.dumps({"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}})


def generate_requests() -> Iterator[tuple[str, Any]]:
    """One leaf changed in a request that is fine."""
    by_ids = generation_pb2.GenerateRequest(token_ids=IDS, sampling=SAMPLING)
    by_chat = generation_pb2.GenerateRequest(chat=CHAT, sampling=SAMPLING, tools=[TOOL])
    by_chat.chat.messages[0].tool_calls.add(id="c", name="f", arguments="{}")
    for path in leaves(generation_pb2.GenerateRequest.DESCRIPTOR):
        base = by_chat if path[0].name in ("chat", "tools", "tool_choice", "parallel_tool_calls") else by_ids
        for value in values_of(path[-1]):
            yield f"{name_of(path)} = {str(value)[:60]!r}", with_leaf(base, path, value)


async def generated(served: Deployment, request: Any) -> str | None:
    """What is wrong with what a gateway makes of a request."""
    call = served.to_gateway.unary_stream(
        "/outrider.v1.GenerationService/Generate",
        request_serializer=bytes,
        response_deserializer=generation_pb2.GenerateResponse.FromString,
    )
    try:
        parts = [part async for part in call(request.SerializeToString(), timeout=60)]
    except grpc.aio.AioRpcError as error:
        return problem_of(from_rpc_error(error))
    return None if any(part.finish_reason for part in parts) else "an answer without an end"


async def test_generate(unharmed: Deployment, prove: bool) -> None:
    cases = some(generate_requests(), prove, 3)
    await at_once(cases, lambda case: generated(unharmed, case[1]))


async def test_generate_with_several_at_once(unharmed: Deployment, prove: bool) -> None:
    cases = drawn(messages(generation_pb2.GenerateRequest), 3000 if prove else 120)
    await at_once(cases, lambda case: generated(unharmed, case))


# Streams: a good sequence, then one message that may be anything, then the good one's Close.
GOOD, OTHER = 5, 6


def good_open(sequence_id: int) -> Any:
    sampling = generation_pb2.SamplingParams(**{**SAMPLING, "max_tokens": 64})
    coupled = generation_pb2.ACCEPTANCE_RULE_COUPLED
    return common_pb2.Open(
        sequence_id=sequence_id, num_prompt_ids=3, prompt_ids=PROMPT, sampling=sampling, acceptance=coupled, method=""
    )


PIECE = common_pb2.Piece(
    sequence_id=GOOD, position=4, ids=[7, 8], weights=[{"ids": b"\7\0\0\0", "weights": b"\1\0\0\0"}]
)
COMMIT = common_pb2.Commit(sequence_id=GOOD, position=3, ids=[7], origins=[generation_pb2.TOKEN_ORIGIN_PLAIN])
BASES: dict[str, Any] = {
    "open": good_open(OTHER),
    "open_slice": common_pb2.OpenSlice(sequence_id=GOOD, ids=[4]),
    "piece": PIECE,
    "credit": common_pb2.Credit(sequence_id=GOOD, until=6, max_window=2),
    "close": common_pb2.Close(sequence_id=GOOD),
    "commit": COMMIT,
}
SLICED = {"prompt_ids": "num_prompt_ids", "output_ids": "num_output_ids", "prediction": "num_prediction_ids"}


def commands(stream: HandStream) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """A command with one leaf changed, or a frame with another header."""
    for field in stream.entry.DESCRIPTOR.fields:
        base = BASES[field.name]
        for path in leaves(base.DESCRIPTOR):
            for value in values_of(path[-1]):
                changed: Any = with_leaf(base, path, value)
                if field.name == "open" and path[-1].name in SLICED:
                    setattr(changed, SLICED[path[-1].name], len(value))
                label = f"{field.name}.{name_of(path)} = {str(value)[:60]!r}"
                yield label, stream.entry(**{field.name: changed}), {}
    for (field,) in leaves(common_pb2.FrameHeader.DESCRIPTOR):
        for value in values_of(field):
            yield f"header.{field.name} = {value!r}", stream.entry(credit=BASES["credit"]), {field.name: value}


async def played(served: Deployment, stream: HandStream, entry: Any, header: dict[str, Any]) -> str | None:
    """What is wrong with what becomes of one such message."""
    peer, kind = stream.peer(served), entry.WhichOneof(stream.entry.DESCRIPTOR.oneofs[0].name)
    number = entry.open.sequence_id if kind == "open" else GOOD
    try:
        await peer.send(stream.entry(open=good_open(GOOD)), stream.entry(credit={"sequence_id": GOOD, "until": 5}))
        credit = common_pb2.Credit(sequence_id=number, until=2**20, max_window=2)
        more = [stream.entry(credit=credit)] if kind == "open" else []
        await peer.send(entry, *more, **header)
        if kind == "open":  # that is refused, or gets something
            await peer.listen(lambda heard: any(sequence_of(event) == number for event in heard))
        await peer.send(stream.entry(close={"sequence_id": GOOD}))
        await peer.listen(lambda heard: any(ends(event) and sequence_of(event) == GOOD for event in heard))
    except TimeoutError:
        return f"neither an answer nor an end; heard {peer.heard[-3:]}"
    finally:
        peer.close()
    failures = [event.failure.status for event in peer.heard if event.WhichOneof("event") == "failure"]
    found = [problem_of(from_status(status)) for status in failures]
    if peer.error is not None:
        found.append(problem_of(peer.error))
    return next((problem for problem in found if problem is not None), None)


def sequence_of(event: Any) -> int:
    return int(getattr(event, event.WhichOneof("event")).sequence_id)


def ends(event: Any) -> bool:
    kind = event.WhichOneof("event")
    return kind in ("closed", "failure") or (kind == "commit" and event.commit.finish_reason != 0)


@pytest.mark.parametrize("stream", [VERIFY, PROPOSE], ids=["verify", "propose"])
async def test_streams(unharmed: Deployment, stream: HandStream, prove: bool) -> None:
    cases = some(commands(stream), prove, 3)
    await at_once(cases, lambda case: played(unharmed, stream, case[1], case[2]))


@pytest.mark.parametrize("stream", [VERIFY, PROPOSE], ids=["verify", "propose"])
async def test_streams_with_several_at_once(unharmed: Deployment, stream: HandStream, prove: bool) -> None:
    """Any frames, one after the other; the stream may end, and nothing else does."""

    async def ask(frames: list[Any]) -> str | None:
        peer = stream.peer(unharmed)
        await peer.send(stream.entry(open=good_open(GOOD)), stream.entry(credit={"sequence_id": GOOD, "until": 5}))
        for frame in frames:
            await peer.send(*frame.messages)
        try:
            await peer.send(stream.entry(close={"sequence_id": GOOD}))
            await peer.listen(lambda heard: any(ends(event) and sequence_of(event) == GOOD for event in heard))
        except TimeoutError:
            return "neither an answer nor an end"
        finally:
            peer.close()
        return None if peer.error is None else problem_of(peer.error)

    frames = messages(stream.frame)
    cases = drawn(frames.flatmap(lambda one: frames.map(lambda other: [one, other])), 2000 if prove else 100)
    await at_once(cases, ask)


# Bodies: a good one for each path, and what may stand in it.
SAMPLED: list[Place] = [(name,) for name, row in PARAMETERS.items() if row.http == ""]
BODIES: dict[str, tuple[dict[str, Any], list[Place]]] = {
    "/v1/completions": (
        {"prompt": PROMPT, "max_tokens": 2, "temperature": 0, "seed": 7},
        [*places_in(CompletionBody), *SAMPLED],
    ),
    "/v1/chat/completions": (
        {**CHAT, "max_tokens": 2, "temperature": 0, "seed": 7},
        [*places_in(ChatBody), *SAMPLED, ("tools", 0), ("tools", 0, "function", "parameters")],
    ),
    "/v1/responses": (
        {"input": "hi", "max_output_tokens": 2, "temperature": 0, "seed": 7},
        [*places_in(ResponsesBody), *SAMPLED, ("input", 0), ("input", 0, "content"), ("tools", 0)],
    ),
    "/tokenize": ({"prompt": "hi"}, [*places_in(TokenizeBody), ("messages", 0, "content")]),
    "/detokenize": ({"tokens": [11]}, list(places_in(DetokenizeBody))),
}
HEADERS = {"content-type": "application/json"}
STATUSES = (200, 400, 404, 504)  # a timeout may be asked for that nothing is answered in


async def posted(served: Deployment, path: str, body: bytes, headers: dict[str, str] = HEADERS) -> str | None:
    """What is wrong with the answer to a body."""
    answer = await served.http.post(path, content=body, headers=headers)
    if answer.status_code not in STATUSES or "server_error" in answer.text:
        return f"{answer.status_code}: {answer.text[:300]}"
    if answer.status_code == 400:
        error = answer.json()["error"]
        if error["param"] is None or not error["message"]:
            return f"names no field: {answer.text[:300]}"
    return None


@pytest.mark.parametrize("path", BODIES)
async def test_bodies(unharmed: Deployment, path: str, prove: bool) -> None:
    base, places = BODIES[path]
    cases = [with_value(base, place, value) for place in places for value in JSON_VALUES]
    await at_once(some(cases, prove, 7), lambda body: posted(unharmed, path, body))


async def test_bodies_with_several_at_once(unharmed: Deployment, prove: bool) -> None:
    pairs = []
    for path, (base, places) in BODIES.items():
        names = sorted({str(place[0]) for place in places})
        for values in drawn(_objects(names), 400 if prove else 15):
            whole = ", ".join(f"{json.dumps(name)}: {value}" for name, value in {**_texts(base), **values}.items())
            pairs.append((path, f"{{{whole}}}".encode(errors="surrogatepass")))
    await at_once(pairs, lambda pair: posted(unharmed, *pair))


def _objects(names: list[str]) -> Any:
    from hypothesis import strategies as st

    return st.dictionaries(st.sampled_from(names), JSON, min_size=2, max_size=6)


def _texts(values: dict[str, Any]) -> dict[str, str]:
    return {name: json.dumps(value) for name, value in values.items()}


RAW = [
    b"", b"{", b"null", b"[]", b'"x"', b"\xff\xfe", b"{}" * 2, b'{"prompt": "\xed\xa0\x80"}', b"\xef\xbb\xbf{}",
    '{"prompt": "x"}'.encode("utf-16"), '{"prompt": "x"}'.encode("utf-32"), b'{"prompt": "x", "prompt": 1}',
    b"{" * 50_000, b'{"a":' * 50_000, b"\0" * 1000,
]  # fmt: skip
ODD_HEADERS = [
    {"x-request-id": "x" * 3000}, {"x-request-id": "\x7f\xe9"}, {"traceparent": "00-x"}, {"traceparent": "x" * 3000},
    {"traceparent": f"00-{'0' * 32}-{'0' * 16}-00"}, {"traceparent": f"ff-{'f' * 32}-{'f' * 16}-ff"},
    {"content-type": "application/json; charset=utf-7"}, {"content-type": "APPLICATION/JSON;;;"},
    {"accept": "\xff"}, {"accept-encoding": "x" * 500}, {"content-encoding": "gzip"},
]  # fmt: skip


async def test_raw_bodies_and_headers(unharmed: Deployment) -> None:
    for path, (base, _) in BODIES.items():
        await at_once(RAW, lambda body, path=path: posted(unharmed, path, body))  # type: ignore[misc]
        for headers in ODD_HEADERS:
            raw = {name: value.encode("latin-1") for name, value in {**HEADERS, **headers}.items()}
            problem = await posted(unharmed, path, json.dumps(base).encode(), raw)  # type: ignore[arg-type]
            assert problem is None, (path, headers, problem)


async def test_queries(unharmed: Deployment) -> None:
    """The live page's: every answer is a stream."""
    for name in (
        "prompt",
        "max_tokens",
        "seed",
        "temperature",
        "top_p",
        "k",
        "acceptance",
        "mode",
        "method",
        "speculate",
    ):
        for value in ("", "-1", "1e400", "nan", "9" * 5000, "\0", "\ud7ff", "x" * 3000):
            query = {"prompt": "x", "max_tokens": "2", name: value}
            answer = await unharmed.http.get("/live", params=query)
            assert answer.status_code == 200 and "server_error" not in answer.text, (name, value, answer.text)


# Bytes that are no message, to every method; and the methods beside the streams.
GARBAGE = [b"\xff", b"\x0a", b"\x0a\x05x", b"\x0a\x01\xff", b"\x08" + b"\xff" * 20, b"\0" * 64, bytes(range(256))]
CHANNELS = {
    "TargetService": "to_target", "DraftService": "to_draft", "LearningService": "to_draft",
    "GenerationService": "to_gateway",
}  # fmt: skip
METHODS: dict[str, Any] = {  # with the message that each takes
    f"{service.name}/{method.name}": method.input_type
    for file in (target_pb2, draft_pb2, learning_pb2, generation_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
TRIED_ABOVE = {"TargetService/Verify", "DraftService/Propose", "GenerationService/Generate"}
LEARN = "LearningService/Learn"  # which has no end
SLOW = {"DraftService/PutVocabulary", "DraftService/ReloadModel", "TargetService/ReloadWeights"}
LOAD, UNLOAD = "TargetService/LoadAdapter", "TargetService/UnloadAdapter"


def test_these_are_all_methods() -> None:
    protos = (REPOSITORY / "protos/outrider/v1").glob("*.proto")
    named = [name for path in protos for name in re.findall(r"^ *rpc (\w+)", path.read_text(), re.MULTILINE)]
    assert sorted(named) == sorted(method.partition("/")[2] for method in METHODS)


async def called(served: Deployment, method: str, raw: bytes) -> tuple[list[bytes], str | None]:
    """The answers to bytes, and what is wrong with a refusal of them."""
    call = getattr(served, CHANNELS[method.partition("/")[0]]).stream_stream(
        f"/outrider.v1.{method}", request_serializer=bytes, response_deserializer=bytes
    )(iter([raw]), timeout=120)
    try:
        if method == LEARN:
            first = await call.read()
            call.cancel()
            return [first], None
        return [answer async for answer in call], None
    except grpc.aio.AioRpcError as error:
        return [], problem_of(from_rpc_error(error))


async def test_bytes_that_are_no_request(unharmed: Deployment) -> None:
    async def ask(case: tuple[str, bytes]) -> str | None:
        return (await called(unharmed, *case))[1]

    await at_once([(method, raw) for method in METHODS for raw in GARBAGE], ask)


async def test_methods_beside_these(unharmed: Deployment, prove: bool, tmp_path: Path) -> None:
    """What loads an adapter unloads it, and none stays."""
    layout = toy_tokenizer().backend.to_str().encode()[:2000]
    weights = load_file(unharmed.folder.parent / "target" / "model.safetensors")
    bases: dict[str, Any] = {
        "DraftService/PutVocabulary": draft_pb2.PutVocabularyRequest(
            tokenizer_fingerprint="f", num_bytes=len(layout), data=layout
        ),
        LOAD: target_pb2.LoadAdapterRequest(name="a", path=str(save_adapter(tmp_path / "adapter", weights))),
    }
    num_loaded = 0
    for method in [name for name in METHODS if name not in TRIED_ABOVE]:
        base = bases.get(method, METHODS[method]._concrete_class())
        cases = [with_leaf(base, path, value) for path in leaves(METHODS[method]) for value in values_of(path[-1])]
        for request in some(cases, prove, 9 if method in SLOW else 1):  # one at a time, as services take them
            answers, problem = await called(unharmed, method, request.SerializeToString())
            assert problem is None, (method, str(request)[:200], problem)
            if method == LOAD and answers:
                num_loaded += 1
                unload = target_pb2.UnloadAdapterRequest(name=cast(Any, request).name)
                assert await called(unharmed, UNLOAD, unload.SerializeToString()) == ([b""], None)
    info = await called(unharmed, "TargetService/GetTargetInfo", b"")
    assert num_loaded > 5 and not target_pb2.GetTargetInfoResponse.FromString(info[0][0]).adapters
