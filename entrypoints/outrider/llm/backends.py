"""What an LLM asks (`Backend`): here a gateway that runs, in `outrider.llm.local` its own engines. The requests of one
call run together, on a thread with an event loop of its own: so a blocking call works anywhere, a running loop (a
notebook) included."""

from __future__ import annotations

import asyncio
import inspect
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from outrider.client import Client
from outrider.gateway.media import MediaLimits, load_media
from outrider.gateway.request_record import RequestRecord, Watch
from outrider.gateway.text.tokenizer import Tokenizer
from outrider.llm.arguments import EngineArguments
from outrider.llm.config import NGRAM_NAMES, SpeculativeConfig, acceptance_of, named_method
from outrider.llm.lora.request import LoRARequest
from outrider.llm.metrics import Statistics
from outrider.llm.outputs import OutputBuilder
from outrider.llm.sampling_params import NO_BOUND
from outrider.llm.validation import Unsupported, is_int, require_known
from outrider.rpc.media import MAX_MEDIA_BYTES, MOST_PIXELS
from outrider.rpc.messages import MAX_DRAFT_TOKENS, ModelInfo
from outrider.rpc.words.answer import GenerationDelta
from outrider.rpc.words.request import DRAFT_OPTIONS, GenerationRequest, MediaSource, SpeculationOptions

if TYPE_CHECKING:
    from outrider.llm.weights import ServedWeights  # torch comes with it


class Backend(Protocol):
    """What an LLM asks: its own engines, or a gateway."""

    @property
    def info(self) -> ModelInfo:
        """The target's model."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        """None where only the gateway has one."""

    @property
    def num_draft_tokens(self) -> int:
        """k of this LLM's requests; 0 where nothing drafts."""

    @property
    def speculation(self) -> SpeculationOptions:
        """What every request says of speculation."""

    @property
    def can_couple(self) -> bool:
        """Whether requests may be accepted by the coupled rule, as far as is known."""

    def encode(self, text: str) -> tuple[int, ...] | None:
        """A prompt's ids; None where the gateway makes them."""

    def generate(
        self, request: GenerationRequest, lora: LoRARequest | None = None
    ) -> AsyncGenerator[GenerationDelta, None]:
        """The deltas of a request, whose adapter `lora` describes. Called on the loop."""

    @property
    def weights(self) -> ServedWeights | None:
        """The target's, where they may change."""

    def cache_usage(self) -> float | None:
        """The share of the key-value cache in use, where it is known."""

    def reset_prefix_cache(self) -> None:
        """Forgets every cached prefix."""

    def close(self) -> None:
        """Ends everything; from any thread."""


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt of a call."""

    record: RequestRecord
    builder: OutputBuilder
    lora: LoRARequest | None = None

    @property
    def request(self) -> GenerationRequest:
        """What is asked of the backend."""
        return self.record.request


async def run_jobs(backend: Backend, jobs: Sequence[Job], statistics: Statistics, put: Callable[[Job], None]) -> None:
    """Starts all jobs, the lowest priority number first; the first error ends them all."""
    statistics.num_unfinished += sum(job.request.n for job in jobs)
    ordered = sorted(jobs, key=lambda job: job.request.priority)
    tasks = [asyncio.create_task(_run(backend, job, statistics, put)) for job in ordered]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        statistics.num_unfinished -= sum(not c.finished() for job in jobs for c in job.builder.output.outputs)


async def _run(backend: Backend, job: Job, statistics: Statistics, put: Callable[[Job], None]) -> None:
    with Watch(job.record, [statistics]) as watch:
        async with aclosing(backend.generate(job.request, job.lora)) as deltas:
            async for delta in deltas:
                watch.add(delta)
                job.builder.add(delta)
    put(job)


T = TypeVar("T")

JOIN_S = 30.0


class LoopThread:
    """Runs coroutines for threads that have no loop."""

    def __init__(self, name: str = "llm-loop") -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Starts a coroutine."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine to its end; Ctrl-C cancels it."""
        future = self.submit(coroutine)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def call(self, function: Callable[[], T]) -> T:
        """Runs a function on the loop."""

        async def once() -> T:
            return function()

        return self.run(once())

    def iterate(self, start: Callable[[Callable[[T], None]], Coroutine[Any, Any, None]]) -> Generator[T, None, None]:
        """Runs `start(put)` and yields what it puts, as it comes; raises what it raises. Whoever stops reading (Ctrl-C)
        closes this: it ends, and has ended then."""
        items: queue.SimpleQueue[tuple[T] | None] = queue.SimpleQueue()
        tasks: list[asyncio.Task[None]] = []
        ended = threading.Event()

        def end(_: asyncio.Task[None]) -> None:
            ended.set()
            items.put(None)

        def begin() -> None:
            tasks.append(self.loop.create_task(start(lambda item: items.put((item,)))))
            tasks[0].add_done_callback(end)

        self.loop.call_soon_threadsafe(begin)
        try:
            while (item := items.get()) is not None:
                yield item[0]
            if tasks[0].cancelled():
                raise RuntimeError("closed while it ran")
            tasks[0].result()
        finally:
            if not ended.is_set():
                self.loop.call_soon_threadsafe(lambda: tasks[0].cancel())
                ended.wait(JOIN_S)

    def close(self, last: Callable[[], None] = lambda: None) -> None:
        """Runs `last` on the loop, cancels what runs and ends the thread. A second call does nothing."""
        if self.loop.is_closed():
            return
        with suppress(RuntimeError):  # another call was first
            self.loop.call_soon_threadsafe(last)
            self.loop.call_soon_threadsafe(self.loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join(JOIN_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
            tasks = asyncio.all_tasks(self.loop)
            for task in tasks:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.run_until_complete(self.loop.shutdown_default_executor())
        finally:
            self.loop.close()


INFO_S = 10.0
MAX_CALLS = 64  # at once; a gateway refuses what it cannot queue
# Keywords that this process decides; all others are the services' own.
OWN = (  # enable_lora: adapters need no leave here, the gateway has them or not
    "gateway", "credentials", "server_name", "token", "served_model_name", "tokenizer", "seed", "max_logprobs",
    "logprobs_mode", "disable_log_stats", "generation_config", "override_generation_config",
    "per_request_spec_decode_metrics", "acceptance", "mode", "enable_lora",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class AttachedBackend:
    """A gateway behind an address."""

    runtime: LoopThread
    client: Client
    tokenizer: Tokenizer | None
    info: ModelInfo
    num_draft_tokens: int
    speculation: SpeculationOptions
    weights: None = None  # they are the target service's
    model: str = ""  # its name, where the gateway has several; empty: the gateway's own
    _room: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_CALLS))

    @property
    def can_couple(self) -> bool:
        """A target on vLLM cannot."""
        return not self.info.engine.startswith("vllm-")

    def encode(self, text: str) -> None:
        """The gateway's own tokenizer does."""

    async def generate(
        self, request: GenerationRequest, lora: LoRARequest | None = None
    ) -> AsyncGenerator[GenerationDelta, None]:
        """The deltas of a request; where an adapter's files are its targets know. Called on the loop."""
        request = replace(self._bounded(request), model=self.model)
        if request.media:  # URLs and files are this process's
            media = await load_media(request.media, MediaLimits(MAX_MEDIA_BYTES, MOST_PIXELS))
            request = replace(request, media=tuple(MediaSource(one.data) for one in media))
        async with self._room, aclosing(self.client.generate(request)) as deltas:
            async for delta in deltas:
                yield delta

    def cache_usage(self) -> float | None:
        """The target's own business."""
        return None

    def reset_prefix_cache(self) -> None:
        """Not from here."""
        raise Unsupported("reset_prefix_cache: the cache is the target service's")

    def close(self) -> None:
        """Ends the connection and the loop."""
        if not self.runtime.loop.is_closed():
            self.runtime.run(self.client.close())
        self.runtime.close()

    def _bounded(self, request: GenerationRequest) -> GenerationRequest:
        """A gateway refuses more tokens than the context leaves; here, as in vLLM, they are just not generated."""
        sampling, ids = request.sampling, request.token_ids
        if sampling is None:
            return request
        request = replace(request, unset=())  # its values are this process's, and sent
        if ids is None and request.text is not None and self.tokenizer is not None:
            ids = tuple(self.tokenizer.encode(request.text))
        if ids is not None:
            room = max(1, self.info.max_model_len - len(ids))
            return replace(request, sampling=replace(sampling, max_tokens=min(sampling.max_tokens, room)))
        if sampling.max_tokens == NO_BOUND:
            raise ValueError("max_tokens=None needs the prompt's length: give LLM(tokenizer=...), or token ids")
        return request


def attach(
    runtime: LoopThread, arguments: EngineArguments, config: SpeculativeConfig | Mapping[str, Any] | None
) -> AttachedBackend:
    """Connects. `config` is the speculative configuration."""
    given = {entry.name for entry in fields(arguments) if getattr(arguments, entry.name) != entry.default}
    if foreign := sorted(given - set(OWN)):
        raise Unsupported(f"LLM(gateway=...): the services behind the gateway decide {', '.join(foreign)}")
    if arguments.per_request_spec_decode_metrics == "detailed":
        raise Unsupported("LLM(gateway=...): per_request_spec_decode_metrics is 'none' or 'summary' over a gateway")
    speculation = speculation_options(config, arguments.mode or "")

    async def connect() -> Client:
        access: dict[str, Any] = {name: getattr(arguments, name) for name in ("credentials", "server_name", "token")}
        addresses = [address.strip() for address in (arguments.gateway or "").split(",")]
        return Client(addresses, **access)

    client, model = runtime.run(connect()), arguments.served_model_name or ""
    try:
        info = runtime.run(client.info(INFO_S, model))
    except BaseException:
        runtime.run(client.close())
        raise
    tokenizer = None if arguments.tokenizer is None else Tokenizer.load(arguments.tokenizer)
    k = info.num_draft_tokens if speculation.num_draft_tokens is None else speculation.num_draft_tokens
    return AttachedBackend(runtime, client, tokenizer, info.target, k, speculation, model=model)


def speculation_options(config: SpeculativeConfig | Mapping[str, Any] | None, mode: str = "") -> SpeculationOptions:
    """What a request can say of speculation; the draft service decides the rest."""
    if isinstance(config, SpeculativeConfig):
        raise Unsupported("LLM(gateway=...): give speculative_config as a dict of method and num_speculative_tokens")
    given = dict(config or {})
    require_known(given, inspect.signature(SpeculativeConfig).parameters, "speculative_config")
    if given.get("model") in NGRAM_NAMES and given.setdefault("method", "ngram") in NGRAM_NAMES:
        del given["model"]
    method, k = named_method(given.pop("method", None)) or "", given.pop("num_speculative_tokens", None)
    if k is not None and not (is_int(k) and 0 <= k <= MAX_DRAFT_TOKENS):
        raise ValueError(f"num_speculative_tokens must be 0 to {MAX_DRAFT_TOKENS}, got {k!r:.100}")
    rule = acceptance_of(given.pop("rejection_sample_method", None))
    to_draft = {name: given.pop(name) for name in DRAFT_OPTIONS if name in given}
    if given:
        raise Unsupported(
            f"LLM(gateway=...): the draft service decides {', '.join(given)}; a request says method, "
            f"num_speculative_tokens, {', '.join(DRAFT_OPTIONS)} and rejection_sample_method"
        )
    return SpeculationOptions(method=method, acceptance=rule, num_draft_tokens=k, mode=mode, **to_draft)
