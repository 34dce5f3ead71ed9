"""The entry point: what it refuses, how it merges, cuts, counts and ends."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.fakes import EOS, ToyDraft, ToyTarget, draft_info, expected, scripted, target_info, until
from support.models import train_byte_level

from outrider.gateway import engine as gateway_engine
from outrider.gateway.admission import AdmissionCost
from outrider.gateway.engine import EngineConfig, GenerationEngine
from outrider.gateway.learning import RequestKind
from outrider.gateway.peers.local_drafts import LocalDrafter
from outrider.gateway.speculation.controller import Controller
from outrider.gateway.speculation.schedule import BatchSchedule
from outrider.gateway.text.tokenizer import Tokenizer
from outrider.planner.forecast import Forecast
from outrider.planner.policy import Round
from outrider.proposers.ngram import NgramProposer
from outrider.rpc.errors import DeadlineExceeded, InvalidArgument, OutriderError, ResourceExhausted
from outrider.rpc.messages import Credit, DraftMethod, Failure
from outrider.rpc.words.answer import GenerationDelta
from outrider.rpc.words.request import GenerationRequest, SpeculationOptions
from outrider.rpc.words.sampling_params import AcceptanceRule, FinishReason, SamplingParams

PROMPT = (11, 12, 13)
TEMPLATE = "{% for message in messages %}{{ message.role + ': ' + message.content }}\n{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tokenizer]:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    train_byte_level().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>", "chat_template": TEMPLATE}))
    yield Tokenizer.load(folder)


def ask(n: int = 1, speculation: SpeculationOptions | None = None, **sampling: Any) -> GenerationRequest:
    sampling = {"temperature": 0.0, "max_tokens": 20, **sampling}
    return GenerationRequest(
        token_ids=PROMPT,
        sampling=SamplingParams(**sampling),
        n=n,
        speculation=speculation or SpeculationOptions(),
    )


async def run(engine: GenerationEngine, request: GenerationRequest) -> dict[int, list[GenerationDelta]]:
    deltas: dict[int, list[GenerationDelta]] = {}
    async for delta in engine.generate(request):
        deltas.setdefault(delta.index, []).append(delta)
    return deltas


def ids_of(deltas: list[GenerationDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def text_of(deltas: list[GenerationDelta]) -> str:
    return "".join(delta.text for delta in deltas)


SAMPLING_CASES: list[tuple[str, dict[str, Any]]] = [
    ("sampling.temperature", {"temperature": -1.0}),
    ("sampling.temperature", {"temperature": float("nan")}),
    ("sampling.top_p", {"top_p": 0.0}),
    ("sampling.top_k", {"top_k": -2}),
    ("sampling.min_p", {"min_p": 2.0}),
    ("sampling.repetition_penalty", {"repetition_penalty": 0.0}),
    ("sampling.presence_penalty", {"presence_penalty": 3.0}),
    ("sampling.logit_bias[4000]", {"logit_bias": {4000: 1.0}}),
    ("sampling.allowed_token_ids[0]", {"allowed_token_ids": (400,)}),
    ("sampling.max_tokens", {"max_tokens": 0}),
    ("sampling.max_tokens", {"max_tokens": 254}),
    ("sampling.min_tokens", {"min_tokens": 21}),
    ("sampling.stop[0]", {"stop": ("",)}),
    ("sampling.stop", {"stop": ("a",), "detokenize": False}),
    ("sampling.bad_words[0]", {"bad_words": ("",)}),
    ("sampling.bad_words", {"bad_words": (" ",)}),
    ("sampling.logprobs", {"logprobs": 21}),
    ("sampling.prompt_logprobs", {"prompt_logprobs": -2}),
    ("sampling.truncate_prompt_tokens", {"truncate_prompt_tokens": 0}),
    ("sampling.seed", {"seed": -1}),
]
CHAT = ({"role": "user", "content": "hello"},)
REQUEST_CASES: list[tuple[str, dict[str, Any]]] = [
    ("n", {"n": 65}),
    ("request_id", {"request_id": "x" * 129}),
    ("request_id", {"request_id": "two\nlines"}),
    ("salt", {"salt": "x" * 129}),
    ("output_ids", {"output_ids": ((1,), (2,))}),
    ("output_ids[0].ids[0]", {"output_ids": ((400,),)}),
    ("output_ids[0].ids", {"output_ids": ((1,) * 21,)}),
    ("token_ids.ids", {"token_ids": ()}),
    ("token_ids.ids[1]", {"token_ids": (1, 400)}),
    ("token_ids.ids", {"token_ids": (1,) * 256}),
    ("input", {"text": "both"}),
    ("input", {"token_ids": None}),
    ("text", {"token_ids": None, "text": ""}),
    ("text", {"token_ids": None, "text": "x" * 200_000}),
    ("chat", {"token_ids": None, "messages": ()}),
    ("prediction.text", {"prediction": ""}),
    ("prediction.text", {"prediction": "x" * 200_000}),
    ("prediction.text", {"prediction": "x y z " * 300}),
    ("prediction.token_ids.ids", {"prediction": ()}),
    ("prediction.token_ids.ids", {"prediction": (1,) * 257}),
    ("prediction.token_ids.ids[1]", {"prediction": (1, 400)}),
    ("speculation.method", {"speculation": SpeculationOptions(method="prediction")}),
    ("speculation.num_draft_tokens", {"speculation": SpeculationOptions(num_draft_tokens=129)}),
    ("speculation.method", {"speculation": SpeculationOptions(method="medusa")}),
    ("speculation.method", {"speculation": SpeculationOptions(method="eagle")}),
]


def requests() -> list[Any]:
    cases = []
    for field, fields in SAMPLING_CASES:
        sampling = SamplingParams(**{"max_tokens": 20, **fields})
        cases.append((field, GenerationRequest(token_ids=PROMPT, sampling=sampling)))
    base: dict[str, Any] = {"token_ids": PROMPT, "sampling": SamplingParams(max_tokens=20)}
    cases += [(field, GenerationRequest(**{**base, **fields})) for field, fields in REQUEST_CASES]
    return cases


@pytest.mark.parametrize(("field", "request_"), requests())
async def test_names_the_field_in_10_ms(tokenizer: Tokenizer, field: str, request_: GenerationRequest) -> None:
    target = ToyTarget()
    engine = GenerationEngine(tokenizer, target, ToyDraft())
    times = []
    for _ in range(3):
        began = time.thread_time()  # which a busy machine does not lengthen
        with pytest.raises(InvalidArgument) as raised:
            await run(engine, request_)
        times.append(time.thread_time() - began)
    assert field in [violation.field for violation in raised.value.violations]
    assert "allowed:" in str(raised.value) or field == "chat" or field == "sampling.bad_words"
    assert min(times) < 0.01 and not target.opens and engine.admission.num_active == 0


async def test_a_prompt_too_long_for_max_tokens_names_both_numbers(tokenizer: Tokenizer) -> None:
    engine = GenerationEngine(tokenizer, ToyTarget())
    with pytest.raises(InvalidArgument, match=r"max_tokens: is 100 after a prompt of 200 tokens.*at most 56"):
        await run(engine, GenerationRequest(token_ids=(7,) * 200, sampling=SamplingParams(max_tokens=100)))
    default = GenerationRequest(token_ids=(7,) * 250, unset=("max_tokens",))
    assert len(ids_of((await run(engine, default))[0])) == 6


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("n", [1, 3])
async def test_usage_equals_what_was_streamed(tokenizer: Tokenizer, k: int, n: int) -> None:
    target = ToyTarget(num_cached=2)
    engine = GenerationEngine(tokenizer, target, ToyDraft(wrong_every=3), EngineConfig(num_draft_tokens=k))
    answer = await run(engine, ask(n, logprobs=1))
    assert sorted(answer) == list(range(n)) and engine.admission.num_active == 0
    for index, deltas in answer.items():
        first, last = deltas[0], deltas[-1]
        assert ids_of(deltas) == expected(PROMPT, 20)
        assert all(len(delta.origins) == len(delta.logprobs) == len(delta.token_ids) for delta in deltas)
        assert last.usage is not None and last.usage.completion_tokens == 20
        assert (last.usage.prompt_tokens, last.usage.cached_tokens) == (3, 2)
        assert last.finish_reason is FinishReason.LENGTH and first.seed is not None and 0 <= first.seed < 1 << 63
        assert last.speculation is not None and last.speculation.num_rounds == len(deltas)
        assert last.speculation.acceptance is AcceptanceRule.BLOCK
        assert all(delta.finish_reason is None and delta.seed is None for delta in deltas[1:-1])
        assert target.opens[index].completion == index
    assert len({opened.seed for opened in target.opens}) == 1


async def test_controllers_are_told_how_many_sequences_run(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of two requests, of three completions and of one; none are left at the end."""
    told: list[Callable[[], int]] = []

    def controller(*arguments: Any) -> Controller:
        told.append(arguments[4])
        return Controller(*arguments)

    monkeypatch.setattr(gateway_engine, "Controller", controller)
    engine = GenerationEngine(tokenizer, ToyTarget(), ToyDraft(), EngineConfig(mode="auto"))
    async with aclosing(engine.generate(ask(3))) as first, aclosing(engine.generate(ask())) as second:
        await anext(first)
        assert told[0]() == 3
        await anext(second)
        assert told[0]() == told[-1]() == 4
    assert told[0]() == 0


@pytest.mark.parametrize("mode", ["auto", "chains", "branches"])
async def test_what_cannot_run_ahead_is_drafted_in_lock_step(tokenizer: Tokenizer, mode: str) -> None:
    """Alone, as the draft's default, and in a list; another method of the same draft does run ahead."""
    methods = (DraftMethod("slow", can_run_ahead=False), DraftMethod("draft_model"))
    target, draft = ToyTarget(), ToyDraft(info=replace(draft_info(), methods=methods))
    engine = GenerationEngine(tokenizer, target, draft, EngineConfig(mode=mode))
    for named in ("", "slow", "draft_model,slow", "draft_model"):
        answer = await run(engine, ask(speculation=SpeculationOptions(method=named)))
        (deltas,) = answer.values()
        assert deltas[-1].speculation is not None
        modes = {delta.round.mode for delta in deltas if delta.round is not None and delta.round.commit.num_drafted}
        if named == "draft_model":
            assert deltas[-1].speculation.acceptance is AcceptanceRule.COUPLED
            assert mode == "auto" or modes == {mode}
        else:
            assert modes <= {"sequential"} and deltas[-1].speculation.acceptance is AcceptanceRule.BLOCK


HEAD = (DraftMethod("eagle3", needs_features=True, can_run_ahead=False),)


@pytest.mark.parametrize("mode", ["auto", "sequential", "chains"])
async def test_a_target_with_a_head_drafts_for_itself(tokenizer: Tokenizer, mode: str) -> None:
    """Where there is no draft, or where it is asked for; as many tokens as are asked for, none where none are."""
    target = ToyTarget(info=replace(target_info(), methods=HEAD))
    for drafter, named in ((None, ""), (None, "eagle3"), (ToyDraft(), "eagle3")):
        engine = GenerationEngine(tokenizer, target, drafter, EngineConfig(mode=mode))
        for k in (3, 0):
            options = SpeculationOptions(method=named, num_draft_tokens=k)
            deltas = (await run(engine, ask(speculation=options)))[0]
            assert ids_of(deltas) == expected(PROMPT, 20)
            credits = [message for message in target.links[-1].sent if isinstance(message, Credit)]
            assert all((credit.max_window, credit.patience_ms) == (k, 0) for credit in credits)
            assert target.opens[-1].method == "eagle3" and (drafter is None or not drafter.opens)
            tally = deltas[-1].speculation
            assert tally is not None and tally.method == ("eagle3" if k else "")
            assert tally.by_method.keys() == ({"eagle3"} if k else set())
            if k:
                rounds = [delta.round for delta in deltas if delta.round is not None]
                assert {closed.mode for closed in rounds} == {"sequential"}
                assert rounds[1].draft_us == 50 * rounds[1].commit.num_drafted
                assert len(credits) < len(rounds), "credit reaches over several rounds"


async def test_a_head_is_left_alone_where_a_draft_is_the_default(tokenizer: Tokenizer) -> None:
    target, draft = ToyTarget(info=replace(target_info(), methods=HEAD)), ToyDraft()
    deltas = (await run(GenerationEngine(tokenizer, target, draft), ask()))[0]
    assert deltas[-1].speculation is not None and deltas[-1].speculation.by_method.keys() == {"draft_model"}


async def test_auto_turns_a_head_off_that_does_not_pay(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing of a wire is counted for it."""
    target = ToyTarget(info=replace(target_info(), methods=HEAD))
    engine = GenerationEngine(tokenizer, target, None, EngineConfig(mode="auto"))

    def in_turn(self: Controller, closed: Round) -> bool:
        before, self.policy = self.policy, replace(self.policy, num_draft_tokens=3 * (closed.index % 4 < 2))
        return self.policy != before

    monkeypatch.setattr(Controller, "on_round", in_turn)
    deltas = (await run(engine, ask(max_tokens=60)))[0]
    assert ids_of(deltas) == expected(PROMPT, 60)
    windows = {message.max_window for message in target.links[0].sent if isinstance(message, Credit)}
    assert windows >= {0, 3} and engine.learned is not None
    stats, _ = engine.learned.of(("eagle3",))
    assert stats.draft_pass.or_else(0) == 50
    assert Forecast(stats, False, stats.acceptance, stats.hits, lambda: 9e9, lambda: 1).away_us == 0


async def test_a_head_keeps_to_the_schedule(tokenizer: Tokenizer) -> None:
    target = ToyTarget(info=replace(target_info(), methods=HEAD))
    config = EngineConfig(num_draft_tokens=4, schedule=BatchSchedule.parse("1:4,2:1,3:0", 4, None))
    engine = GenerationEngine(tokenizer, target, None, config)
    for n, k in ((1, 4), (2, 1), (3, 0)):
        answer = await run(engine, ask(n, max_tokens=30))
        assert [ids_of(deltas) for deltas in answer.values()] == [expected(PROMPT, 30)] * n
        credits = [message for message in target.links[-1].sent if isinstance(message, Credit)]
        assert {credit.max_window for credit in credits} == {k} and len(credits) < 20


async def test_a_successor_without_the_head_decodes_plainly(tokenizer: Tokenizer) -> None:
    target = ToyTarget(info=replace(target_info(), methods=HEAD))
    engine = GenerationEngine(tokenizer, target, None)
    async with aclosing(engine.generate(ask(max_tokens=40))) as deltas:
        found = list((await anext(deltas)).token_ids)
        target.info = target_info()
        target.links[0].lose()
        found += ids_of([delta async for delta in deltas])
    assert found == expected(PROMPT, 40)
    assert len(target.opens) == 2 and not target.num_patiences


async def test_requests_of_different_kinds_learn_apart(tokenizer: Tokenizer) -> None:
    """Drawn tokens are guessed less often than greedy ones, and both would be judged by neither's average."""
    engine = GenerationEngine(tokenizer, ToyTarget(), ToyDraft(), EngineConfig(mode="auto"))
    for temperature in (0.0, 1.0, 0.0, 0.7):
        await run(engine, ask(temperature=temperature))
    assert engine.learned is not None
    assert set(engine.learned.by_methods[()].by_kind) == {RequestKind(), RequestKind(is_drawn=True)}


async def test_requests_of_different_methods_learn_apart(tokenizer: Tokenizer) -> None:
    """But what a verification takes, they learn together."""
    methods = (DraftMethod("draft_model"), DraftMethod("ngram"))
    engine = GenerationEngine(
        tokenizer, ToyTarget(), ToyDraft(info=replace(draft_info(), methods=methods)), EngineConfig(mode="auto")
    )
    for named in ("", "ngram", "ngram,draft_model"):
        await run(engine, ask(speculation=SpeculationOptions(method=named)))
    assert engine.learned is not None
    known = engine.learned.by_methods
    assert list(known) == [(), ("ngram",), ("ngram", "draft_model")]
    found = [engine.learned.of(methods) for methods in list(known)]
    assert len({id(stats) for stats, _ in found}) == len({id(trials) for _, trials in found}) == 3
    assert {id(stats.costs) for stats, _ in found} == {id(engine.learned.costs)}


async def test_a_given_seed_and_rule_travel(tokenizer: Tokenizer) -> None:
    target = ToyTarget()
    engine = GenerationEngine(tokenizer, target, ToyDraft())
    options = SpeculationOptions(acceptance=AcceptanceRule.COUPLED, num_draft_tokens=2, method="draft_model")
    answer = await run(engine, ask(speculation=options, seed=77))
    opened = target.opens[0]
    assert (opened.seed, opened.acceptance, opened.method) == (77, AcceptanceRule.COUPLED, "draft_model")
    assert opened.sampling.seed is None and answer[0][0].seed == 77
    stats = answer[0][-1].speculation
    assert stats is not None and stats.acceptance is AcceptanceRule.COUPLED


async def test_what_the_target_does_not_know_is_refused_by_name(tokenizer: Tokenizer) -> None:
    limited = replace(target_info(), capabilities=("sampling.temperature", "acceptance.rejection"))
    engine = GenerationEngine(tokenizer, ToyTarget(info=limited), ToyDraft(), EngineConfig(mode="auto"))
    for problem, request in (
        ("sampling.min_p: sampling.min_p is not supported by this target; allowed: leave it unset", ask(min_p=0.2)),
        (
            "speculation.acceptance: acceptance.coupled is not supported by this target; allowed: leave it unset",
            ask(speculation=SpeculationOptions(acceptance=AcceptanceRule.COUPLED)),
        ),
        (
            "speculation.acceptance: acceptance.block is not supported by this target; allowed: leave it unset",
            ask(speculation=SpeculationOptions(acceptance=AcceptanceRule.BLOCK)),
        ),
    ):
        with pytest.raises(InvalidArgument, match=f"^{re.escape(problem)}$"):
            await run(engine, request)
    answer = await run(engine, ask())
    stats = answer[0][-1].speculation  # the gateway's own choice is one that the target knows
    assert stats is not None and stats.acceptance is AcceptanceRule.REJECTION


async def test_all_log_probabilities_need_the_flag(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidArgument, match=r"^sampling.logprobs: is -1; allowed: a whole number, 0 to 20$"):
        await run(GenerationEngine(tokenizer, ToyTarget()), ask(logprobs=-1))
    target = ToyTarget()
    await run(GenerationEngine(tokenizer, target, config=EngineConfig(max_logprobs=-1)), ask(logprobs=-1))
    assert target.opens[0].sampling.logprobs == -1


async def test_speculation_can_be_switched_off(tokenizer: Tokenizer) -> None:
    draft = ToyDraft()
    engine = GenerationEngine(tokenizer, ToyTarget(), draft)
    answer = await run(engine, ask(speculation=SpeculationOptions(enabled=False)))
    assert not draft.opens and answer[0][-1].speculation is not None and answer[0][-1].speculation.num_drafts == 0


async def test_prompt_logprobs_are_completion_zeros(tokenizer: Tokenizer) -> None:
    answer = await run(GenerationEngine(tokenizer, ToyTarget()), ask(2, prompt_logprobs=1))
    rows = {index: [row for delta in deltas for row in delta.prompt_logprobs] for index, deltas in answer.items()}
    assert len(rows[0]) == 3 and not rows[1]


async def test_text_and_chat_become_ids(tokenizer: Tokenizer) -> None:
    target = ToyTarget()
    engine = GenerationEngine(tokenizer, target)
    answer = await run(engine, GenerationRequest(text="the quick fox"))
    assert list(answer[0][0].prompt_token_ids) == tokenizer.encode("the quick fox") == list(target.opens[0].prompt_ids)
    assert len(ids_of(answer[0])) == 16  # the default
    answer = await run(engine, GenerationRequest(messages=CHAT, sampling=SamplingParams(truncate_prompt_tokens=2)))
    assert list(answer[0][0].prompt_token_ids) == tokenizer.encode("user: hello\n")[-2:]
    kept = GenerationRequest(text="the quick fox", sampling=SamplingParams(truncate_prompt_tokens=2), n=2)
    for side, ids in (
        ("left", tokenizer.encode("the quick fox")[-2:]),
        ("right", tokenizer.encode("the quick fox")[:2]),
    ):
        answer = await run(engine, replace(kept, truncation_side=side))
        assert [list(deltas[0].prompt_token_ids) for deltas in answer.values()] == [ids, ids]


async def test_bad_words_become_ids_and_text_fields_stay_here(tokenizer: Tokenizer) -> None:
    target = ToyTarget()
    await run(GenerationEngine(tokenizer, target), ask(bad_words=("fox",), stop=("zzz",), bad_words_ids=((5, 6),)))
    sampling = target.opens[0].sampling
    assert sampling.bad_words_ids == ((5, 6), *tokenizer.bad_words_ids(("fox",)))
    assert not sampling.bad_words and not sampling.stop


OUTPUT = "the quick brown fox jumps over the lazy dog"


@pytest.mark.parametrize("k", [0, 1, 4, 8])
@pytest.mark.parametrize("include", [False, True])
async def test_stop_strings_at_every_offset_in_a_window(tokenizer: Tokenizer, k: int, include: bool) -> None:
    ids = tokenizer.encode(OUTPUT)
    for start in range(len(OUTPUT) - 3):
        stop = OUTPUT[start : start + 3]
        end = OUTPUT.index(stop) + 3
        target = ToyTarget(rule=scripted(ids))
        engine = GenerationEngine(
            tokenizer, target, ToyDraft(rule=scripted(ids), wrong_every=5), EngineConfig(num_draft_tokens=k)
        )
        deltas = (await run(engine, ask(stop=(stop,), max_tokens=60, include_stop_str_in_output=include)))[0]
        count = next(n for n in range(1, len(ids) + 1) if stop in tokenizer.decode(ids[:n]))
        last = deltas[-1]
        assert text_of(deltas) == OUTPUT[: end if include else end - 3]
        assert ids_of(deltas) == ids[:count] and last.stop_reason == stop
        assert last.usage is not None and last.usage.completion_tokens == count
        assert not any(link.open for link in target.links)


async def test_eos_and_stop_ids_end_a_completion(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(OUTPUT)
    engine = GenerationEngine(tokenizer, ToyTarget(rule=scripted(ids)), ToyDraft(rule=scripted(ids)))
    deltas = (await run(engine, ask(max_tokens=60)))[0]
    assert text_of(deltas) == OUTPUT and ids_of(deltas) == [*ids, EOS] and deltas[-1].stop_reason is None
    deltas = (await run(engine, ask(max_tokens=60, stop_token_ids=(ids[3],))))[0]
    assert ids_of(deltas) == ids[:4] and deltas[-1].stop_reason == ids[3]
    assert deltas[-1].finish_reason is FinishReason.STOP


async def test_resume_goes_on_after_what_the_client_has(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(OUTPUT)
    target = ToyTarget(rule=scripted(ids))
    engine = GenerationEngine(tokenizer, target, ToyDraft(rule=scripted(ids)))
    request = GenerationRequest(
        token_ids=PROMPT,
        sampling=SamplingParams(temperature=0.0, max_tokens=60, seed=5),
        n=3,
        output_ids=((*ids, EOS), tuple(ids[:4]), ()),
    )
    answer = await run(engine, request)
    assert ids_of(answer[0]) == [] and answer[0][-1].finish_reason is FinishReason.STOP
    assert ids_of(answer[1]) == [*ids[4:], EOS] and tokenizer.decode(ids[:4]) + text_of(answer[1]) == OUTPUT
    assert text_of(answer[2]) == OUTPUT
    assert answer[1][-1].usage is not None and answer[1][-1].usage.completion_tokens == len(ids) - 3
    assert [opened.completion for opened in target.opens] == [1, 2]


async def test_too_many_requests_are_refused_at_once(tokenizer: Tokenizer) -> None:
    engine = GenerationEngine(
        tokenizer, ToyTarget(step_s=0.01), config=EngineConfig(max_active=1, max_waiting=1, num_draft_tokens=0)
    )
    running = [asyncio.create_task(run(engine, ask())) for _ in range(2)]
    await until(lambda: engine.admission.num_waiting == 1)
    with pytest.raises(ResourceExhausted) as raised:
        await run(engine, ask())
    assert engine.admission.num_waiting == 1 and not any(task.done() for task in running)
    assert raised.value.retry_after_ms > 0
    assert all(ids_of(answer[0]) == expected(PROMPT, 20) for answer in await asyncio.gather(*running))
    assert engine.admission.num_active == engine.admission.num_waiting == 0


async def test_no_more_runs_than_the_target_s_cache_takes(tokenizer: Tokenizer) -> None:
    """The rest waits here, in its order, and is not refused there."""
    target = ToyTarget(step_s=0.01, info=target_info(num_blocks=5))  # of 16 tokens, let in four times over
    engine = GenerationEngine(tokenizer, target, config=EngineConfig(num_draft_tokens=0))
    running = [asyncio.create_task(run(engine, ask(max_tokens=100))) for _ in range(4)]
    await until(lambda: engine.admission.num_waiting == 1)
    assert engine.admission.num_active == 3 and len(target.opens) <= 3
    assert all(len(ids_of(answer[0])) == 100 for answer in await asyncio.gather(*running))
    assert engine.admission.num_active == engine.admission.num_tokens == 0


async def test_each_completion_counts_until_it_ends(tokenizer: Tokenizer) -> None:
    config = EngineConfig(max_active=4, max_waiting=0, max_admitted_tokens=1000, num_draft_tokens=0)
    engine = GenerationEngine(tokenizer, ToyTarget(), config=config)
    seen = set()
    whole = tuple(expected(PROMPT, 20))
    async for _ in engine.generate(replace(ask(n=3), output_ids=((), whole, whole))):
        seen.add((engine.admission.num_active, engine.admission.num_tokens))
        if len(seen) == 1:
            with pytest.raises(ResourceExhausted, match="5 sequences"):
                await run(engine, ask(n=3))
    assert seen >= {(2, 43), (1, 23)} and engine.admission.num_tokens == 0
    with pytest.raises(InvalidArgument, match="asks for 5 completions; allowed: at most 4 sequences"):
        await run(engine, ask(n=5))
    small = GenerationEngine(tokenizer, ToyTarget(), config=EngineConfig(max_admitted_tokens=62))
    with pytest.raises(InvalidArgument, match="asks for 63 tokens"):
        await run(small, ask(n=3))


async def test_what_is_surely_too_much_is_refused_before_it_is_tokenised(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(max_admitted_tokens=100, num_draft_tokens=0)
    engine = GenerationEngine(tokenizer, ToyTarget(), config=config)
    await engine.admission.enter(AdmissionCost(1, 60))
    monkeypatch.setattr(gateway_engine, "prepare", None)
    hello = ({"role": "user", "content": "hi"},)
    for request in (
        ask(max_tokens=38),  # and three of the prompt
        ask(n=3, max_tokens=13),
        replace(ask(max_tokens=41), token_ids=None, text="hi"),
        replace(ask(n=2, max_tokens=21), token_ids=None, messages=hello),
    ):
        with pytest.raises(ResourceExhausted, match=r"there would be 10[12] tokens"):
            await run(engine, request)
    assert engine.admission.num_tokens == 60


@pytest.mark.parametrize(
    ("changes", "sampling"),
    [
        ({}, {"max_tokens": 37}),  # with the prompt's three
        ({}, {"max_tokens": 10**9}),
        ({}, {"max_tokens": float("nan")}),
        ({}, {"max_tokens": True}),
        ({}, {"max_tokens": 101}),  # of 100 in all: for good, and not for now
        ({"n": 2**70}, {"max_tokens": 40}),
        ({"n": "2"}, {"max_tokens": 40}),
        ({"unset": ("max_tokens",)}, {"max_tokens": 200}),
        ({"token_ids": PROMPT * 90}, {"max_tokens": 40}),
        ({}, {"max_tokens": 39, "truncate_prompt_tokens": 1}),
        ({"sampling": None}, {}),
    ],
)
async def test_what_is_not_surely_too_much_is_read(
    tokenizer: Tokenizer, changes: dict[str, Any], sampling: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that all that is wrong with it is told."""
    config = EngineConfig(max_admitted_tokens=100, num_draft_tokens=0)
    engine = GenerationEngine(tokenizer, ToyTarget(), config=config)
    await engine.admission.enter(AdmissionCost(1, 60))

    def read(*_: Any) -> Any:
        raise InvalidArgument("it is read")

    monkeypatch.setattr(gateway_engine, "prepare", read)
    with pytest.raises(InvalidArgument, match="it is read"):
        await run(engine, replace(ask(**sampling), **changes))


async def test_who_waits_may_go_and_the_lowest_priority_number_is_first(tokenizer: Tokenizer) -> None:
    engine = GenerationEngine(tokenizer, ToyTarget(), config=EngineConfig(max_active=1))
    await engine.admission.enter(AdmissionCost(1))
    order: list[int] = []

    async def wait(priority: int) -> None:
        await engine.admission.enter(AdmissionCost(1), priority)
        order.append(priority)
        engine.admission.leave(AdmissionCost(1))

    tasks = [asyncio.create_task(wait(priority)) for priority in (5, 1, 3, -2)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    await asyncio.sleep(0)
    engine.admission.leave(AdmissionCost(1))
    await asyncio.gather(*tasks, return_exceptions=True)
    assert order == [-2, 3, 5] and engine.admission.num_active == 0


async def test_the_deadline_ends_a_request(tokenizer: Tokenizer) -> None:
    target = ToyTarget(step_s=0.2)
    engine = GenerationEngine(tokenizer, target, ToyDraft(), EngineConfig(max_active=1))
    request = GenerationRequest(token_ids=PROMPT, sampling=SamplingParams(max_tokens=200), n=2, timeout_s=1.0)
    waiting = asyncio.create_task(run(engine, request))
    queued = asyncio.create_task(run(engine, GenerationRequest(token_ids=PROMPT, timeout_s=0.5)))
    for task in (waiting, queued):
        with pytest.raises(DeadlineExceeded):
            await task
    assert engine.admission.num_active == 0
    assert not any(link.open for link in target.links) and 0 < target.opens[0].timeout_ms <= 1000


@pytest.mark.parametrize("n", [1, 3])
async def test_cancelling_closes_every_link_at_once(tokenizer: Tokenizer, n: int) -> None:
    draft, target = ToyDraft(), ToyTarget(step_s=0.005)
    engine = GenerationEngine(tokenizer, target, draft)
    task = asyncio.create_task(run(engine, ask(n, max_tokens=200)))
    await until(lambda: len(target.links) == n)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not any(link.open for link in (*target.links, *draft.links)) and engine.admission.num_active == 0


async def test_a_slow_reader_holds_its_completions_up(tokenizer: Tokenizer) -> None:
    target = ToyTarget(info=target_info(max_model_len=4096))
    engine = GenerationEngine(tokenizer, target, config=EngineConfig(num_draft_tokens=0))
    async with aclosing(engine.generate(ask(2, max_tokens=3000))) as deltas:
        await anext(deltas)
        await asyncio.sleep(0.1)
        assert all(len(link.sequence.tokens) < 400 for link in target.links)


async def test_an_error_of_one_completion_ends_all(tokenizer: Tokenizer) -> None:
    target = ToyTarget(step_s=0.005)
    engine = GenerationEngine(tokenizer, target)
    task = asyncio.create_task(run(engine, ask(3, max_tokens=200)))
    await until(lambda: len(target.links) == 3)
    target.links[1].emit(Failure(0, 13, "NaN in a row"))
    with pytest.raises(OutriderError, match="NaN"):
        await task
    assert sum(link.open for link in target.links) <= 1  # the failed one is over by itself


async def test_a_missing_draft_is_logged_once(tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    engine = GenerationEngine(tokenizer, ToyTarget(), ToyDraft(available=False))
    with caplog.at_level(logging.WARNING, "outrider.gateway"):
        for _ in range(3):
            assert ids_of((await run(engine, ask()))[0]) == expected(PROMPT, 20)
    assert sum("without a draft" in record.message for record in caplog.records) == 1


async def test_patience_is_at_least_the_round_trip(tokenizer: Tokenizer) -> None:
    draft, target = ToyDraft(round_trip_us=80_000.0), ToyTarget()
    await run(GenerationEngine(tokenizer, target, draft, EngineConfig(draft_patience_ms=10)), ask())
    assert target.links[0].sent[0].patience_ms == 80


async def test_prompt_lookup_in_process(tokenizer: Tokenizer) -> None:
    rule = scripted([5, 6, 7, 8] * 10)
    engine = GenerationEngine(tokenizer, ToyTarget(rule=rule), LocalDrafter([NgramProposer()]))
    deltas = (await run(engine, ask(max_tokens=40)))[0]
    assert ids_of(deltas) == [5, 6, 7, 8] * 10
    tally = deltas[-1].speculation
    assert tally is not None and tally.num_accepted_tokens > 15 and tally.num_rounds < 25


def test_the_toys_tokenizers_ids_exist() -> None:
    assert draft_info().model.vocab_size == target_info().model.vocab_size
