"""Toys for the gateway's tests: a target that follows an exact rule and a draft that guesses it; in process and over
gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from outrider.gateway.peers.remote import RemoteDrafts, RemoteTargets
from outrider.gateway.speculation.backends import Lost
from outrider.gateway.speculation.loop import speculate
from outrider.planner.policy import Policy, Round
from outrider.rpc.codec import ADAPTER, DRAFT_INFO, DRAFT_STREAM, TARGET_INFO, TARGET_STREAM
from outrider.rpc.errors import InvalidArgument, NotFound
from outrider.rpc.messages import (
    Adapter,
    Close,
    Closed,
    Commit,
    Credit,
    DraftInfo,
    DraftMethod,
    DraftTokens,
    Failure,
    ModelInfo,
    Open,
    PromptLogprobs,
    StepTimings,
    TargetInfo,
)
from outrider.rpc.server import Server, build_server
from outrider.rpc.stream import FrameStream, StreamConfig, server_stream
from outrider.rpc.words.answer import TokenLogprob
from outrider.rpc.words.sampling_params import FinishReason, SamplingParams, TokenOrigin
from outrider.v1 import draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc

PROMPT = (11, 12, 13)


def request(max_tokens: int = 200, **fields: Any) -> Open:
    return Open(0, PROMPT, SamplingParams(temperature=0.0, max_tokens=max_tokens), **fields)


async def read_slowly(targets: RemoteTargets, request: Open, read_on: asyncio.Event) -> list[int]:
    """A greedy completion by the gateway's loop in this process without a draft, by a client that reads no further than
    its first round until told."""
    ids: list[int] = []
    async for item in speculate(None, targets, request, Policy(0, plain_ahead=4, max_unread=8)):
        if not isinstance(item, Round):
            raise TypeError(f"no round but {item!r}")
        ids += item.commit.ids
        await read_on.wait()
    return ids


async def generate(drafts: RemoteDrafts | None, targets: RemoteTargets, opened: Open, k: int = 4) -> list[int]:
    rounds = speculate(drafts, targets, opened, Policy(k, patience_ms=200))
    return [token async for item in rounds if isinstance(item, Round) for token in item.commit.ids]


VOCAB = 400
EOS = 0
QUICK = StreamConfig(heartbeat_s=0.05, silence_s=30.0, device_timeout_s=1.0)  # a busy machine is no silent peer
Rule = Callable[[Sequence[int], int], int]  # tokens and prompt length to the next token


def arithmetic(tokens: Sequence[int], prompt_len: int) -> int:
    """The default rule; never EOS."""
    return (tokens[-1] * 7 + len(tokens) * 3 + prompt_len) % (VOCAB - 10) + 5


def scripted(output: Sequence[int]) -> Rule:
    """A rule that generates the given ids, then EOS."""
    return lambda tokens, prompt_len: [*output, EOS][min(len(tokens) - prompt_len, len(output))]


def expected(prompt: Sequence[int], count: int, rule: Rule = arithmetic) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count:
        tokens.append(rule(tokens, len(prompt)))
    return tokens[len(prompt) :]


def target_info(**fields: Any) -> TargetInfo:
    model = ModelInfo("toy", "d1", VOCAB, 256, eos_token_ids=(EOS,))
    return TargetInfo(replace(model, **fields), 16)


def with_adapters(info: TargetInfo, **digests: str) -> TargetInfo:
    """The same with adapters of these names and digests."""
    return replace(info, adapters=tuple(Adapter(name, digest, 8) for name, digest in digests.items()))


def draft_info(**fields: Any) -> DraftInfo:
    model = ModelInfo("toy-draft", "d2", VOCAB, 256)
    return DraftInfo(replace(model, **fields), (DraftMethod("draft_model"), DraftMethod("eagle", needs_features=True)))


WRONG_EVERY = 5  # positions: where a target that drafts for itself errs


class TargetSequence:
    """One sequence of the toy target, under the rules of the protocol."""

    def __init__(self, request: Open, prompt: tuple[int, ...], emit: Callable[[Any], None], toy: ToyTarget) -> None:
        self.request, self.emit, self.toy = request, emit, toy
        self.prompt_len = len(prompt)
        self.rule = toy.adapter_rules[request.adapter] if request.adapter else toy.rule
        self.tokens = [*prompt, *request.output_ids]
        self.until = self.max_window = self.patience_ms = 0
        self.chains: dict[int, tuple[int, list[int]]] = {}
        self.first, self.over, self.patient = True, False, True
        self.timer: asyncio.TimerHandle | None = None
        self.scheduled = False
        self.drafts = request.method in [method.name for method in toy.info.methods]

    def on(self, message: Any) -> None:
        if isinstance(message, Credit):
            assert message.until >= self.until, "credit fell"
            self.until, self.max_window, self.patience_ms = message.until, message.max_window, message.patience_ms
        elif isinstance(message, DraftTokens):
            self.patient = True
            if message.ids:
                start, ids = self.chains.setdefault(message.chain, (message.position, []))
                if message.position == start + len(ids):
                    ids.extend(message.ids)
            elif message.position == len(self.tokens):
                self.patient = False
        self.schedule()

    def schedule(self) -> None:
        if not self.scheduled and not self.over:
            self.scheduled = True
            asyncio.get_running_loop().call_later(self.toy.step_s, self.step)

    def stop(self) -> None:
        self.over = True
        if self.timer is not None:
            self.timer.cancel()

    def step(self) -> None:
        self.scheduled = False
        if self.over or len(self.tokens) >= self.until:
            return
        if self.request.prompt_ids and self.first and self.request.sampling.prompt_logprobs is not None:
            rows = tuple((TokenLogprob(token, -1.0, 1),) for token in self.request.prompt_ids)
            self.emit(PromptLogprobs(0, 0, rows))
        chain, window = self.live_chain()
        if not window and not self.first and self.max_window and self.patience_ms and self.patient:
            if self.timer is None:
                self.timer = asyncio.get_running_loop().call_later(self.patience_ms / 1000, self.lose_patience)
            return
        self.first = False
        if self.timer is not None:
            self.timer.cancel()  # the wait that it was for is over
            self.timer = None
        self.commit(chain, window)
        self.schedule()

    def lose_patience(self) -> None:
        self.timer, self.patient = None, False
        self.toy.num_patiences += 1
        self.schedule()

    def live_chain(self) -> tuple[int | None, list[int]]:
        length = len(self.tokens)
        if self.drafts and not self.first:
            room = min(self.max_window, self.until - length, self.left)
            tokens = list(self.tokens)
            while len(tokens) < length + room:
                token = self.rule(tokens, self.prompt_len)
                tokens.append((token + 1) % VOCAB if len(tokens) % WRONG_EVERY == 0 else token)
            return length, tokens[length:]
        for chain, (start, ids) in sorted(self.chains.items()):
            inside = max(0, length - start)
            if start <= length < start + len(ids) and ids[:inside] == self.tokens[start:length]:
                room = min(self.max_window, self.until - length, self.left)
                return chain, ids[inside : inside + room]
        return None, []

    @property
    def left(self) -> int:
        return self.request.sampling.max_tokens - (len(self.tokens) - self.prompt_len)

    def forced(self, window: list[int]) -> list[int]:
        """What a constraint forces behind the window, the last of it wrong."""
        tokens = [*self.tokens, *window]
        for _ in range(self.toy.num_forced if self.request.sampling.structured_output else 0):
            tokens.append(self.rule(tokens, self.prompt_len))
        forced = tokens[len(self.tokens) + len(window) :]
        return [*forced[:-1], *((token + 1) % VOCAB for token in forced[-1:])]

    def commit(self, chain: int | None, drafted: list[int]) -> None:
        window = [*drafted, *self.forced(drafted)]
        position, ids, origins, num_accepted = len(self.tokens), [], [], 0
        finish = stop = None
        for index in range(len(window) + 1):
            if finish is not None or not self.left or len(self.tokens) >= self.until:
                break
            token = self.rule(self.tokens, self.prompt_len)
            accepted = index < len(window) and window[index] == token
            refused = TokenOrigin.RECOVERED if index < len(window) else TokenOrigin.BONUS
            origins.append(TokenOrigin.ACCEPTED if accepted else refused if window else TokenOrigin.PLAIN)
            ids.append(token)
            self.tokens.append(token)
            num_accepted += accepted
            finish, stop = self.finish(token)
            if not accepted:
                break
        listed = self.request.sampling.logprob_token_ids
        logprobs = tuple(
            (TokenLogprob(token, -0.5, 1), *(TokenLogprob(own, -2.0, 2) for own in listed if own != token))
            for token in ids
        )
        self.over = finish is not None
        timings = StepTimings(10, 200, 30, len(window) + 1, 1, 50 * self.drafts * len(drafted))
        if self.request.sampling.structured_output:
            timings.mask_us, timings.compile_us = 20, 1500 if position == self.prompt_len else 0
        self.emit(
            Commit(
                0, position, tuple(ids), tuple(origins), chain, len(drafted), min(num_accepted, len(drafted)),
                logprobs if self.request.sampling.logprobs is not None else (),
                finish_reason=finish, stop_token_id=stop, timings=timings,
                num_cached_ids=self.toy.num_cached, num_forced=len(window) - len(drafted),
            )
        )  # fmt: skip

    def finish(self, token: int) -> tuple[FinishReason | None, int | None]:
        sampling = self.request.sampling
        if token in sampling.stop_token_ids:
            return FinishReason.STOP, token
        if token == EOS and not sampling.ignore_eos:
            return FinishReason.STOP, None
        return (FinishReason.LENGTH, None) if not self.left else (None, None)


class DraftSequence:
    """One sequence of the toy draft: it knows the rule, but errs at every `wrong_every`-th position."""

    def __init__(self, request: Open, emit: Callable[[Any], None], toy: ToyDraft) -> None:
        self.request, self.emit, self.toy = request, emit, toy
        self.prompt_len = len(request.prompt_ids)
        self.tokens = [*request.prompt_ids, *request.output_ids]
        self.drafted = list(self.tokens)
        self.chain, self.until, self.window = request.first_chain, 0, 0
        self.over = False

    def on(self, message: Any) -> None:
        if isinstance(message, Commit):
            self.tokens.extend(message.ids)
            if self.drafted[: len(self.tokens)] != self.tokens:
                self.drafted = list(self.tokens)
                self.chain += 1
        elif isinstance(message, Credit):
            assert message.until >= self.until, "credit to the draft fell"
            self.until, self.window = message.until, message.max_window
        if len(self.drafted) < self.until and not self.toy.mute:
            asyncio.get_running_loop().call_later(self.toy.delay_s, self.propose)

    def stop(self) -> None:
        self.over = True

    def propose(self) -> None:
        position, ids = len(self.drafted), list[int]()
        if self.over or self.toy.mute:
            return
        while len(self.drafted) < self.until and len(ids) < self.window:
            token = self.toy.rule(self.drafted, self.prompt_len)
            if self.toy.wrong_every and len(self.drafted) % self.toy.wrong_every == 0:
                token = (token + 1) % VOCAB
            ids.append(token)
            self.drafted.append(token)
        if ids:
            self.emit(DraftTokens(0, self.chain, position, tuple(ids), draft_us=100))


@dataclass(eq=False)
class ToyLink:
    """An in-process link."""

    toy: Any
    sequence: Any
    on_event: Callable[[Any], None]
    sent: list[Any] = field(default_factory=list)
    open: bool = True

    @property
    def model(self) -> ModelInfo:
        model: ModelInfo = self.toy.info.model
        return model

    def send(self, *messages: Any) -> None:
        if self.open:
            self.sent.extend(messages)
            for message in messages:
                self.sequence.on(message)

    def close(self) -> None:
        if self.open:
            self.open = False
            self.sequence.stop()
            self.toy.num_closed += 1

    def emit(self, event: Any) -> None:
        if self.open:
            self.on_event(event)

    def lose(self, reason: str = "gone") -> None:
        self.open = False
        self.sequence.stop()
        self.on_event(Lost(reason))


@dataclass(eq=False)
class ToyTarget:
    """A Verifier in process; the gRPC servicer below uses its settings as well."""

    rule: Rule = arithmetic
    step_s: float = 0.0
    info: TargetInfo = field(default_factory=target_info)
    adapter_rules: dict[str, Rule] = field(default_factory=dict)  # by name, for those that `info` has
    available: bool = True
    full: Failure | None = None  # what it answers every Open
    num_cached: int = 0
    num_forced: int = 0  # tokens of each window, where there is a constraint
    links: list[ToyLink] = field(default_factory=list)
    opens: list[Open] = field(default_factory=list)
    num_closed: int = 0
    num_patiences: int = 0

    def open(
        self,
        request: Open,
        on_event: Callable[[Any], None],
        fork_of: Any = None,
        like: Any = None,
        refused_by: Sequence[Any] = (),
    ) -> ToyLink | None:
        if not self.available or refused_by:
            return None
        self.opens.append(request)
        link = ToyLink(self, None, on_event)
        link.sequence = TargetSequence(request, request.prompt_ids, link.emit, self)
        self.links.append(link)
        if self.full is not None:
            link.sequence.stop()
            asyncio.get_running_loop().call_soon(link.emit, self.full)
        return link


@dataclass(eq=False)
class ToyDraft:
    """A Drafter in process; the gRPC servicer below uses its settings as well."""

    rule: Rule = arithmetic
    wrong_every: int = 0
    delay_s: float = 0.0
    mute: bool = False
    info: DraftInfo | None = field(default_factory=draft_info)
    round_trip_us: float = 0.0
    available: bool = True
    links: list[ToyLink] = field(default_factory=list)
    opens: list[Open] = field(default_factory=list)
    num_closed: int = 0

    def open(self, request: Open, on_event: Callable[[Any], None]) -> ToyLink | None:
        if not self.available:
            return None
        self.opens.append(request)
        link = ToyLink(self, None, on_event)
        link.sequence = DraftSequence(request, link.emit, self)
        self.links.append(link)
        return link


_info_versions = count(1, 1000)


class _StreamServicer:
    """What both toy services share: sequences by id on every stream."""

    def __init__(self, toy: Any, config: StreamConfig | None = None) -> None:
        self.toy, self.config = toy, config
        self.max_media_bytes = 0
        self.streams: list[FrameStream] = []
        self.opens: list[Open] = []
        self.closes: list[int] = []
        self.step_age_ms, self.info_version = 0, next(_info_versions)
        self.refuse: Failure | None = None

    async def serve(self, kind: Any, context: Any) -> None:
        sequences: dict[int, Any] = {}
        stream = server_stream(
            kind,
            context,
            config=self.config or QUICK,
            step_age_ms=lambda: self.step_age_ms,
            info_version=lambda: self.info_version,
            max_media_bytes=self.max_media_bytes,
        )
        async with stream:
            self.streams.append(stream)
            async for batch in stream:
                for message in batch:
                    self.take(stream, sequences, message)
        for sequence in sequences.values():
            sequence.stop()

    def take(self, stream: FrameStream, sequences: dict[int, Any], message: Any) -> None:
        number = message.sequence_id
        if isinstance(message, Open):
            self.opens.append(message)
            if self.refuse is not None:
                stream.send(replace(self.refuse, sequence_id=number))
                return
            sequences[number] = self.start(
                message, sequences, lambda event: stream.send(replace(event, sequence_id=number))
            )
        elif isinstance(message, Close):
            self.closes.append(number)
            if number in sequences:
                sequences.pop(number).stop()
            stream.send(Closed(number))
        elif number in sequences:
            sequences[number].on(message)

    def start(self, request: Open, sequences: dict[int, Any], emit: Callable[[Any], None]) -> Any:
        raise NotImplementedError


class TargetServicer(_StreamServicer, target_pb2_grpc.TargetServiceServicer):
    num_left = 0  # sequences that go on with an adapter that is unloaded

    async def GetTargetInfo(self, request: Any, context: Any) -> Any:
        return TARGET_INFO.encode(replace(self.toy.info, info_version=self.info_version))

    async def LoadAdapter(self, request: Any, context: Any) -> Any:
        if not request.path.endswith(".peft"):
            raise InvalidArgument(f"path: {request.path} holds no adapter; allowed: a folder in PEFT's layout")
        adapter = Adapter(request.name, f"digest of {request.path}", 8)
        self._put((*self.toy.info.adapters, adapter))
        return target_pb2.LoadAdapterResponse(adapter=ADAPTER.encode(adapter))

    async def UnloadAdapter(self, request: Any, context: Any) -> Any:
        left = tuple(one for one in self.toy.info.adapters if one.name != request.name)
        if left == self.toy.info.adapters:
            raise NotFound(f"name: there is no adapter {request.name!r}")
        self._put(left)
        return target_pb2.UnloadAdapterResponse(num_sequences=self.num_left)

    def _put(self, adapters: tuple[Adapter, ...]) -> None:
        self.toy.info, self.info_version = replace(self.toy.info, adapters=adapters), self.info_version + 1

    async def Verify(self, request: Any, context: Any) -> None:
        await self.serve(TARGET_STREAM, context)

    def start(self, request: Open, sequences: dict[int, Any], emit: Callable[[Any], None]) -> Any:
        prompt = request.prompt_ids
        if request.fork_of is not None:
            parent = sequences[request.fork_of]
            prompt = tuple(parent.tokens[: parent.prompt_len])
        return TargetSequence(request, prompt, emit, self.toy)


class DraftServicer(_StreamServicer, draft_pb2_grpc.DraftServiceServicer):
    async def GetDraftInfo(self, request: Any, context: Any) -> Any:
        return DRAFT_INFO.encode(replace(self.toy.info, info_version=self.info_version))

    async def Propose(self, request: Any, context: Any) -> None:
        await self.serve(DRAFT_STREAM, context)

    def start(self, request: Open, sequences: dict[int, Any], emit: Callable[[Any], None]) -> Any:
        return DraftSequence(request, emit, self.toy)


@asynccontextmanager
async def serving(servicer: Any, address: str = "127.0.0.1:0") -> AsyncIterator[Server]:
    """Serves a toy on the loopback."""
    if isinstance(servicer, TargetServicer):
        name = target_pb2.DESCRIPTOR.services_by_name["TargetService"].full_name
        server = build_server(
            address, [name], lambda s: target_pb2_grpc.add_TargetServiceServicer_to_server(servicer, s)
        )
    else:
        name = draft_pb2.DESCRIPTOR.services_by_name["DraftService"].full_name
        server = build_server(address, [name], lambda s: draft_pb2_grpc.add_DraftServiceServicer_to_server(servicer, s))
    await server.start()
    try:
        yield server
    finally:
        await server.stop(0)


async def until(condition: Callable[..., object], timeout_s: float = 30.0) -> None:
    """Waits for something to become true."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 (a condition of another object)
            await asyncio.sleep(0.002)
