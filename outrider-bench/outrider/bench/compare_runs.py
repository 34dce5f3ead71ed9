"""The methods at work: a target, the gateway's engine in this process with each method in front of it, and requests
that every way of drafting is asked in turn. A method with a model has a draft service; one without drafts where the
gateway runs, unless it is to have a service, too."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from outrider.bench.harness import EXPAND, rounds_of
from outrider.bench.prompts import read_values
from outrider.cli.local_services import LOOPBACK, Services
from outrider.cli.serve import ServeSettings
from outrider.gateway.engine import EngineConfig, GenerationEngine
from outrider.gateway.peers.local_drafts import LocalDrafter
from outrider.gateway.peers.remote import RemoteDrafts, RemoteTargets
from outrider.gateway.speculation.backends import Verifier
from outrider.gateway.text.tokenizer import Tokenizer
from outrider.llm.services import LocalTarget
from outrider.planner.policy import Round, SpeculationTally
from outrider.proposers.registry import HEADS, TOKEN_METHODS, make_proposer
from outrider.rpc.pair import check_pair
from outrider.rpc.settings import parse_settings
from outrider.rpc.words.request import GenerationRequest, SpeculationOptions
from outrider.rpc.words.sampling_params import AcceptanceRule, SamplingParams
from outrider.rpc.words.structured import StructuredOutput
from outrider.target_service.boot import believed_head
from outrider.target_service.boot import load as load_target
from outrider.target_service.settings import TargetSettings

PLAIN = "plain"
PREDICTION = "prediction"
WARM_TOKENS = 16
Ids = Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)]
Text = Annotated[str, Field(min_length=1)]


class CompareRequest(BaseModel):
    """A prompt with all that is its own."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    prompt: Text | Ids = Field(union_mode="left_to_right")
    prediction: Text | Ids | None = Field(None, union_mode="left_to_right")  # a guess at the answer
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0)
    json_schema: dict[str, Any] | None = None  # that the answer satisfies
    counts: bool = True  # else it is asked, and learned from, but not measured


def read_requests(path: Path, whole: bool = False) -> list[CompareRequest]:
    """The requests of a file: JSON lines (or a JSON list) of objects, texts or lists of token ids; else a prompt a
    line, or, if `whole`, the text as one prompt. Raises OSError, and ValueError that names the line and the field."""
    values = [path.read_text(encoding="utf-8")] if whole else read_values(path)
    requests = [_request(path, number, value) for number, value in enumerate(values, 1)]
    if not any(request.counts for request in requests):
        raise ValueError(f"{path} has no prompt that counts")
    return requests


def _request(path: Path, number: int, value: Any) -> CompareRequest:
    fields = value if isinstance(value, dict) else {"prompt": value}
    try:
        return CompareRequest.model_validate_json(json.dumps(fields))
    except ValidationError as error:
        first = error.errors()[0]
        name = first["loc"][0] if first["loc"] else "prompt"
        allowed = ", ".join(CompareRequest.model_fields)
        problem = f"is no field; allowed: {allowed}" if first["type"] == "extra_forbidden" else first["msg"].lower()
        raise ValueError(f"{path}, prompt {number}: {name}: {problem}") from error


@dataclass(frozen=True, slots=True)
class Method:
    """A method, or several that draft together: `suffix+draft_model`."""

    name: str

    @property
    def parts(self) -> tuple[str, ...]:
        """The names in the registry."""
        return tuple(self.name.split("+"))

    @property
    def is_local(self) -> bool:
        """Whether a gateway can draft by it in its own process."""
        return self.name in TOKEN_METHODS

    @property
    def is_head(self) -> bool:
        """Whether the target itself drafts by it: one of its own, since a target has one head."""
        return self.name in HEADS

    def fits(self, requests: Sequence[CompareRequest]) -> bool:
        """Whether it has anything to draft from."""
        return self.parts != (PREDICTION,) or all(request.prediction for request in requests)


@dataclass(frozen=True, slots=True)
class Way:
    """How a request is decoded: by a method, in a mode of the gateway's; or plainly."""

    method: Method | None = None
    mode: str = ""

    @property
    def name(self) -> str:
        """As results call it."""
        return PLAIN if self.method is None else f"{self.method.name}, {self.mode}"


class Options(BaseModel):
    """What all ways have in common. Sampled answers are coupled, so that all ways give the same."""

    local: bool = Field(
        True, description="methods without a model draft in this process, as in a gateway with --draft METHOD"
    )
    in_process: bool = Field(False, description="the target runs in this process, too, as with LLM")
    expand: bool = Field(False, description=EXPAND)
    num_draft_tokens: int = Field(8, ge=1, le=32, description="tokens drafted a round; in mode auto at most")
    max_tokens: int = Field(128, ge=1, description="tokens of an answer, where its prompt says nothing else")
    temperature: float = Field(0.0, ge=0, description="0 is greedy, where a prompt says nothing else")
    seed: int = Field(0, ge=0, description="of the order and the sampling")

    def request(self, asked: CompareRequest, way: Way, number: int, salt: str) -> GenerationRequest:
        """As a client of a gateway would ask."""
        parts = () if way.method is None else way.method.parts
        schema = None if asked.json_schema is None else StructuredOutput(json_schema=json.dumps(asked.json_schema))
        k = None if way.mode == "auto" else self.num_draft_tokens
        speculation = SpeculationOptions(num_draft_tokens=k, methods=parts, mode=way.mode)
        if way.method is None:
            speculation = SpeculationOptions(enabled=False)
        return GenerationRequest(
            text=asked.prompt if isinstance(asked.prompt, str) else None,
            token_ids=None if isinstance(asked.prompt, str) else asked.prompt,
            prediction=asked.prediction if PREDICTION in parts else None,
            sampling=SamplingParams(
                temperature=self.temperature if asked.temperature is None else asked.temperature,
                max_tokens=asked.max_tokens or self.max_tokens,
                seed=self.seed + number,
                ignore_eos=True,
                structured_output=schema,
            ),
            unset=("max_tokens",),  # at most what the context leaves
            speculation=replace(speculation, acceptance=AcceptanceRule.COUPLED),
            salt=salt,
        )


@dataclass(slots=True)
class WayRun:
    """All requests of a file that count, decoded one way once."""

    tally: SpeculationTally = field(default_factory=SpeculationTally)
    seconds: float = 0.0
    num_tokens: int = 0
    draft_us: int = 0
    num_different: int = 0  # answers that were not plain decoding's

    def add(self, rounds: Sequence[Round], seconds: float) -> None:
        """Counts an answer."""
        for closed in rounds:
            self.tally.add(closed)
        self.seconds += seconds
        self.num_tokens += sum(len(closed.commit.ids) for closed in rounds)
        self.draft_us += sum(closed.draft_us for closed in rounds)

    @property
    def tokens_per_round(self) -> float:
        """The target's own among them."""
        return self.num_tokens / self.tally.num_rounds

    @property
    def draft_ms(self) -> float:
        """Device time of the draft, a round."""
        return self.draft_us / 1e3 / self.tally.num_rounds

    @property
    def share_off(self) -> float:
        """Of rounds in which the gateway did not speculate."""
        return self.tally.num_rounds_by_mode.get("off", 0) / self.tally.num_rounds


Engines = dict[Method | None, GenerationEngine]


@asynccontextmanager
async def serving(settings: Sequence[tuple[Method, ServeSettings]], options: Options) -> AsyncIterator[Engines]:
    """The gateway's engine for each method, and one without a draft, before one target; a head has the same with it
    beside. Raises ServiceFailed."""
    common = settings[0][1].model_copy(update={"head": None, "method": "draft_model"})
    async with AsyncExitStack() as stack:
        services = stack.enter_context(Services())
        targets = await stack.enter_async_context(_target(services, common, options))
        drafts = {
            method: services.start("draft", each.draft_arguments())
            for method, each in settings
            if each.draft is not None and not (options.local and method.is_local)
        }
        for service in drafts.values():
            await asyncio.to_thread(services.wait, service, common.start_timeout)
        tokenizer = Tokenizer.load(common.target.model)
        config = EngineConfig(num_draft_tokens=options.num_draft_tokens, max_draft_tokens=options.num_draft_tokens)
        engines: Engines = {None: GenerationEngine(tokenizer, targets, config=config)}
        for method, each in settings:
            if method.is_head:
                own = await stack.enter_async_context(_target(services, each, options))
                engines[method] = GenerationEngine(tokenizer, own, config=config)
            elif method not in drafts:
                drafter = LocalDrafter([make_proposer(method.name, {})])
                stack.callback(drafter.close)
                engines[method] = GenerationEngine(tokenizer, targets, drafter, config)
        for method, service in drafts.items():
            pool = await stack.enter_async_context(RemoteDrafts([service.address]))
            await asyncio.wait_for(pool.wait_usable(), common.start_timeout)
            own_draft = dict(settings)[method].draft
            if pool.info is not None and own_draft is not None and own_draft.model is not None:
                check_pair(targets.info.model, pool.info.model)
            engines[method] = GenerationEngine(tokenizer, targets, pool, config)
        yield engines


@asynccontextmanager
async def _target(services: Services, settings: ServeSettings, options: Options) -> AsyncIterator[Verifier]:
    arguments = settings.target_arguments(expand=options.expand or None)
    if options.in_process:
        own = parse_settings(TargetSettings, arguments[1:], "target", "")
        loaded = load_target(own)
        target = LocalTarget(own, loaded, asyncio.get_running_loop(), believed_head(own, loaded))
        yield target
        await asyncio.to_thread(target.stop)
        return
    service = services.start("target", arguments)
    await asyncio.to_thread(services.wait, service, settings.start_timeout)
    async with RemoteTargets([service.address]) as targets:
        await asyncio.wait_for(targets.wait_usable(), settings.start_timeout)
        yield targets


def services_of(
    common: Mapping[str, object], target: Mapping[str, object], method: Method, draft: str
) -> ServeSettings:
    """What `outrider serve` would start for a method; `draft` is its model's or head's folder, where it is not the
    pair's draft."""
    of_draft: dict[str, object] = {"method": ",".join(method.parts)}
    of_head = {"head": draft or None, "head_trial": "off"} if method.is_head else {}  # it is measured here
    own = {"target": {**target, **of_head}, "draft": of_draft, "gateway": {"listen": LOOPBACK}}
    if not method.is_head:
        of_draft["model"] = draft or None
    return ServeSettings.model_validate({**common, **own})


async def measure(
    engines: Engines, files: Sequence[Sequence[CompareRequest]], modes: Sequence[str], options: Options, repeats: int
) -> AsyncIterator[list[dict[Way, WayRun]]]:
    """One repeat after another: for each file its runs. A request is asked all ways in turn, in an order of chance;
    every way of every repeat has a salt of its own, so that what it has learned and cached is of this run's answers."""
    order = random.Random(options.seed)
    methods = [method for method in engines if method is not None]
    drafting = [Way(method, mode) for method, mode in product(methods, modes)]
    await _warm_up(engines, [Way(), *drafting], files, options)
    for repeat in range(repeats):
        found: list[dict[Way, WayRun]] = []
        for file, requests in enumerate(files):
            ways = [Way(), *(way for way in drafting if way.method is None or way.method.fits(requests))]
            runs = {way: WayRun() for way in ways}
            for number, asked in enumerate(requests):
                answers: dict[Way, list[int]] = {}
                for way in order.sample(ways, len(ways)):
                    request = options.request(asked, way, number, f"{repeat} {file} {way.name}")
                    began = time.perf_counter()
                    rounds = await rounds_of(engines[way.method], request)
                    seconds = time.perf_counter() - began  # prompt included
                    answers[way] = [token for closed in rounds for token in closed.commit.ids]
                    if asked.counts:
                        runs[way].add(rounds, seconds)
                for way, ids in answers.items():
                    runs[way].num_different += ids != answers[Way()]
            found.append(runs)
        yield found


async def _warm_up(
    engines: Engines, ways: Sequence[Way], files: Sequence[Sequence[CompareRequest]], options: Options
) -> None:
    """Of each way a few tokens, which count for nothing."""
    short = options.model_copy(update={"max_tokens": WARM_TOKENS})
    for way in ways:
        fitting = [requests for requests in files if way.method is None or way.method.fits(requests)]
        for requests in fitting[:1]:
            await rounds_of(engines[way.method], short.request(requests[0], way, 0, "warm-up"))
