"""The same across processes: what befalls the services while a row's request runs, by what way it came, how it is
drafted and judged, and what it wants. Two targets, two drafts and two gateways of the embedded pair."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from chaos.asks import PATIENT, RULES, SHAPES, TIMEOUT_S, Answer, Ask, expectations
from chaos.faults import Kill
from chaos.fleet import Drafting, Fleet, Member
from chaos.over_http import SHAPES as OVER_HTTP
from chaos.over_http import Asker, Choices
from chaos.proxy import DOWN
from chaos.streams import Stream, judge
from lossless.composition.replay import Judged, Replay
from lossless.composition.table import Combination, Exclusion, covering
from lossless.composition.telling import Told, telling
from support.models import other_weights

from outrider.client import Client
from outrider.gateway.peers.remote import reload_model
from outrider.llm import LLM, SamplingParams
from outrider.llm.structured_outputs import StructuredOutputsParams
from outrider.pairs import pair_path
from outrider.rpc.channel import connect
from outrider.rpc.words.sampling_params import FinishReason

NUM_TOKENS = 96
REACH_S, WHOLE_S = 60.0, 120.0
Fault = Literal["none", "draft killed", "target killed", "gateway killed", "draft reloaded"]
Transport = Literal["gRPC", "HTTP", "LLM over a gateway"]
Drafts = Literal["a model", "ngram", "suffix", "a prediction", "a head", "in turn", "ahead", "the gateway's choice"]
Shape = Literal[
    "plain text", "penalties", "logprobs", "stop", "schema", "regex", "long prompt", "two completions",
]  # fmt: skip
RuleName = Literal["greedy", "coupled", "rejection", "block"]


@dataclass(frozen=True, slots=True)
class ProcessRow(Combination):
    """One that runs across processes."""

    fault: Fault
    transport: Transport
    drafts: Drafts
    rule: RuleName
    shape: Shape


FACTORS = ProcessRow.factors()
BY_HAND = "a client over HTTP goes on by hand after a fault"
EXCLUSIONS = (
    Exclusion(
        ("fault", "drafts"),
        lambda row: row["fault"] == "draft killed" and row["drafts"] == "a head",
        "the end of a draft service, for a head",
        "a head drafts beside the target: its requests ask no draft service",
    ),
    Exclusion(
        ("transport", "shape"),
        lambda row: row["transport"] == "HTTP" and row["shape"] not in OVER_HTTP,
        "log probabilities and constraints over HTTP",
        f"{BY_HAND}, and this one knows texts alone; both are in the first table, without faults",
    ),
    Exclusion(
        ("transport", "rule"),
        lambda row: row["transport"] == "HTTP" and row["rule"] in ("rejection", "block"),
        "rejection over HTTP",
        f"{BY_HAND}, and what it has to get is known of exact rules alone; both are in the first table",
    ),
    Exclusion(
        ("transport", "drafts"),
        lambda row: row["transport"] != "gRPC" and row["drafts"] == "a prediction",
        "a prediction over HTTP, and by LLM over a gateway",
        "it is told in token ids here; texts are in the first table",
    ),
    Exclusion(
        ("transport", "drafts"),
        lambda row: row["transport"] == "LLM over a gateway" and row["drafts"] in ("ahead", "the gateway's choice"),
        "how far a draft runs ahead, by LLM over a gateway",
        "LLM's mode is its own keyword, and the gateway's default is what the other rows of LLM have",
    ),
    Exclusion(
        ("transport", "shape"),
        lambda row: row["transport"] == "LLM over a gateway" and row["shape"] == "logprobs",
        "log probabilities by LLM over a gateway",
        "it has them as vLLM's objects; they are compared in tests/llm",
    ),
)


def process_rows(strength: int, seed: int) -> list[ProcessRow]:
    """A covering array, faults of a kind together."""
    return sorted((ProcessRow(**row) for row in covering(FACTORS, EXCLUSIONS, strength, seed)), key=str)


def ask_of(row: ProcessRow, number: int, fleet: Fleet) -> Ask:
    """What it asks for."""
    model, head = fleet.drafting.model, fleet.drafting.head
    names: dict[str, dict[str, Any]] = {
        "a model": {"method": model}, "ngram": {"method": "ngram"}, "suffix": {"method": "suffix"},
        "a prediction": {"method": "prediction"}, "a head": {"method": head}, "in turn": {"method": f"ngram,{model}"},
        "ahead": {"mode": "branches"}, "the gateway's choice": {},
    }  # fmt: skip
    how = names[row.drafts] | ({"num_draft_tokens": 4} if names[row.drafts] else {})
    options: dict[str, Any] = {"prompt": "def parse_args(argv):\n", "max_tokens": NUM_TOKENS, "ignore_eos": True}
    options |= {"seed": number, "salt": f"composition {number}", **RULES[row.rule], **how, **SHAPES[row.shape]}
    return Ask(str(row), row.rule, row.shape, options)


@dataclass(slots=True)
class Across:
    """What was wrong with each row, empty: nothing; and how many windows were judged again."""

    problems: dict[ProcessRow, str] = field(default_factory=dict)
    num_replayed: int = 0


async def run(rows: Sequence[ProcessRow], folder: Path, seed: int, say: Callable[[str], None]) -> Across:
    """All of them, by a fleet whose targets tell what they judge."""
    with telling(folder / "told") as told, LLM(str(pair_path().target), batch_invariant=True, threads=1) as llm:
        backend: Any = llm._backend
        replay, found = Replay(backend.target.engine), Across()
        async with Fleet("20", Drafting.of(seed)) as fleet:
            asks = [ask_of(row, number, fleet) for number, row in enumerate(rows)]
            expected = await expectations(asks, fleet)
            worse = other_weights(pair_path().draft_by(fleet.drafting.model), folder / "worse")
            for row, ask in zip(rows, asks, strict=True):
                stream = await _one(fleet, row, ask, expected, worse)
                problem = stream.error or stream.change
                if not problem and row.rule in ("rejection", "block"):
                    found.num_replayed += len(windows := windows_of(ask, told))
                    problem = await asyncio.to_thread(_judged_again, stream.answer, windows, replay)
                found.problems[row] = problem
                say(f"{row}: {problem or 'as plain decoding'}")
        return found


def windows_of(ask: Ask, told: Told) -> list[Judged]:
    """What targets judged of a request, which is the only one that runs."""
    return [window for window in told.news() if window.request.seed == ask.options["seed"]]


def _judged_again(answer: Answer | None, windows: Sequence[Judged], replay: Replay) -> str:
    """Every window, whichever target judged it, and whether all tokens of the answer come of some; what is wrong."""
    for window in windows:
        try:
            replay.check(window)
        except AssertionError as error:
            return f"replayed: {error}"
    for number, completion in enumerate(answer.completions if answer else ()):
        missing = set(range(len(completion.ids)))
        for window in (one for one in windows if one.request.completion == number):
            whole = (*window.tokens[window.prompt_len :], *window.ids)
            shared = min(len(whole), len(completion.ids))  # a string may have ended the answer before the window's end
            if whole[:shared] == completion.ids[:shared]:
                missing -= set(range(len(whole) - len(window.ids), shared))
        if missing:
            return f"completion {number}: no target judged tokens {sorted(missing)}"
    return ""


async def _one(fleet: Fleet, row: ProcessRow, ask: Ask, expected: dict[str, Answer], worse: Path) -> Stream:
    """A row's request, and what befalls who serves it meanwhile."""
    stream = Stream(ask, row.transport, time.monotonic())
    fault = asyncio.create_task(_befall(fleet, row, stream.arrivals, worse)) if row.fault != "none" else None
    await asyncio.sleep(0)  # it watches
    try:
        stream.answer = await asyncio.wait_for(ASKING[row.transport](fleet, ask, stream.arrivals), TIMEOUT_S)
    except Exception as error:
        stream.error = f"{type(error).__name__}: {error}"
    if stream.answer is not None:
        judge(stream, stream.answer, expected, left=False)
    missed = "" if fault is None else await fault
    stream.error = stream.error or stream.change or missed
    return stream


async def _befall(fleet: Fleet, row: ProcessRow, arrivals: list[float], worse: Path) -> str:
    """Does it once the request's tokens pass, and puts all in order again; what did not take place."""
    role, what = row.fault.split()
    members: list[Member] = {"draft": fleet.drafts, "target": fleet.targets, "gateway": fleet.gateways}[role]
    if what == "reloaded":
        return await _reload(fleet, worse)
    if role == "gateway" and row.transport == "HTTP":
        blow = await _kill_who_answers(members, arrivals)
    else:
        message = {"draft": "piece", "target": "commit", "gateway": "tokens"}[role]
        blow = await _kill_who_sends(members, message)
    took_place = blow is not None and await blow.heal()
    return "" if await fleet.whole(WHOLE_S) and took_place else f"{role}: no fault took place"


async def _kill_who_sends(members: Sequence[Member], message: str) -> Kill | None:
    """The first of them from whom such a message comes, which is lost; None: none came."""
    watches = [member.proxy.watch(DOWN, message) for member in members]
    waits = [asyncio.create_task(watch.reached.wait()) for watch in watches]
    done, rest = await asyncio.wait(waits, timeout=REACH_S, return_when=asyncio.FIRST_COMPLETED)
    blow = next((Kill(member) for member, wait in zip(members, waits, strict=True) if wait in done), None)
    if blow is not None:
        await blow.strike()
    for member, watch, wait in zip(members, watches, waits, strict=True):
        if wait in rest:
            wait.cancel()
            member.proxy.unwatch()
        else:
            watch.release(lost=True)
    return blow


async def _kill_who_answers(gateways: Sequence[Member], arrivals: list[float]) -> Kill | None:
    """The gateway that has a connection over HTTP, once tokens have come; None: none came."""
    end = time.monotonic() + REACH_S
    while not arrivals and time.monotonic() < end:  # noqa: ASYNC110 (others add to it)
        await asyncio.sleep(0.005)
    blow = next((Kill(gateway) for gateway in gateways if gateway.proxies[-1].num_connections), None)
    if blow is not None:
        await blow.strike()
    return blow


async def _reload(fleet: Fleet, worse: Path) -> str:
    await asyncio.sleep(0.05)
    own = pair_path().draft_by(fleet.drafting.model)
    for folder in (worse, own):
        for draft in fleet.drafts:
            async with connect(draft.service.address) as channel:
                await reload_model(channel, str(folder))
    return ""


async def _over_grpc(fleet: Fleet, ask: Ask, arrivals: list[float]) -> Answer:
    async with Client(fleet.addresses, retry=PATIENT) as client:
        return Answer.of([part async for part in client.generate(timeout=TIMEOUT_S, **ask.options)])


async def _over_http(fleet: Fleet, ask: Ask, arrivals: list[float]) -> Answer:
    choices = Choices(ask)
    if problem := await Asker(fleet).ask(choices, arrivals):
        raise RuntimeError(problem)
    return choices.answer()


async def _by_llm(fleet: Fleet, ask: Ask, arrivals: list[float]) -> Answer:
    return await asyncio.to_thread(_generated, fleet.addresses, ask)


def _generated(addresses: Sequence[str], ask: Ask) -> Answer:
    """By `LLM`, whose requests have vLLM's words."""
    options = dict(ask.options)
    config = {name: options.pop(name) for name in ("method",) if name in options}
    if "num_draft_tokens" in options:
        config["num_speculative_tokens"] = options.pop("num_draft_tokens")
    rule = options.pop("acceptance", None)
    prompt, salt = options.pop("prompt"), options.pop("salt")
    if (constraint := options.pop("structured_output", None)) is not None:
        given = {"json": constraint.json_schema, "regex": constraint.regex}
        options["structured_outputs"] = StructuredOutputsParams(**{n: v for n, v in given.items() if v is not None})
    acceptance = "auto" if rule is None else rule.name.lower()
    with LLM(gateway=",".join(addresses), acceptance=acceptance, speculative_config=config or None) as llm:
        asked = [{"prompt": prompt, "cache_salt": salt}]
        (output,) = llm.generate(asked, SamplingParams(**options), use_tqdm=False)
    first, *others = (Answer(tuple(one.token_ids), one.text, REASONS[one.finish_reason], ()) for one in output.outputs)
    return replace(first, others=tuple(others))


REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, None: None}
ASKING = {"gRPC": _over_grpc, "HTTP": _over_http, "LLM over a gateway": _by_llm}
