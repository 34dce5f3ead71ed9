"""vLLM's scheduler as a client of draft services, without vLLM: rows and steps are toys, the streams are real."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from support.drafted_rows import Steps, vllm_config, vllm_request, vllm_sampling
from support.fakes import QUICK, VOCAB, DraftServicer, ToyDraft, draft_info, expected, serving, until

from outrider.rpc.errors import InvalidArgument
from outrider.rpc.messages import Close, Commit, Credit, DraftTokens, Failure, Load, Open, StepTimings
from outrider.rpc.security import ClientTls
from outrider.rpc.words.sampling_params import AcceptanceRule, FinishReason
from outrider.vllm.draft_client import (
    MOST_BRANCHES,
    TRIAL_EVERY,
    AskedRow,
    BranchUse,
    DraftClient,
    Patience,
    draft_client,
    draft_tls,
    joined_salt,
)
from outrider.vllm.source import StepReport

K = 4
PROMPT = (11, 12, 13)


class Recorded(DraftServicer):
    """Notes what it is told, in order, and says what a test has it say instead."""

    def __init__(self, toy: ToyDraft | None = None) -> None:
        super().__init__(toy or ToyDraft())
        self.told: list[Any] = []
        self.answer: Any = None

    def take(self, stream: Any, sequences: dict[int, Any], message: Any) -> None:
        self.told.append(message)
        if self.answer is not None and isinstance(message, Open):
            self.opens.append(message)
            stream.send(replace(self.answer, sequence_id=message.sequence_id))
        else:
            super().take(stream, sequences, message)


@asynccontextmanager
async def asking(*addresses: str, **options: Any) -> AsyncIterator[tuple[DraftClient, Steps]]:
    client = DraftClient(addresses, vllm_config(K), stream_config=QUICK, **options)
    try:
        yield client, Steps(client, K)
    finally:
        await asyncio.to_thread(client.close)


async def connected(servicer: DraftServicer) -> None:
    await until(lambda: servicer.streams and servicer.streams[0].round_trip_us)  # the client has answered


async def test_what_a_draft_is_told() -> None:
    servicer = Recorded()
    async with serving(servicer) as server, asking(server.address, salt="here") as (_, steps):
        await connected(servicer)
        row = steps.add(vllm_request(PROMPT, max_tokens=30))
        await steps.run(1)
        await steps.until_drafted(row)
        await steps.run()
        await until(lambda: servicer.closes)
    opened, credit, *rest = servicer.told
    assert isinstance(opened, Open) and opened.prompt_ids == PROMPT and not opened.output_ids
    assert (opened.acceptance, opened.salt, opened.sampling.max_tokens) == (AcceptanceRule.REJECTION, "here", 30)
    assert credit == Credit(opened.sequence_id, len(PROMPT) + 2 * (K + 1), K, max_branches=MOST_BRANCHES)
    assert isinstance(rest[-1], Close)
    position = len(PROMPT)
    for commit, following in zip(rest[0:-2:2], rest[1:-2:2], strict=True):  # a commit, then the credit that follows
        assert isinstance(commit, Commit) and commit.position == position
        position += len(commit.ids)
        assert following.until == min(position + 2 * (K + 1), len(PROMPT) + 30)
    assert isinstance(rest[-2], Commit) and rest[-2].finish_reason is FinishReason.LENGTH
    assert list(row.tokens[len(PROMPT) :])[:30] == expected(PROMPT, 30)
    assert steps.num_accepted > steps.num_drafted * 0.8 > 0


@pytest.mark.parametrize(("name", "told"), [("sql", "sql"), ("x" * 129, ""), ("a\nb", "")])
async def test_a_draft_hears_of_an_adapter(name: str, told: str) -> None:
    """By the name that its own has, where an Open takes it."""
    servicer, lora = Recorded(), SimpleNamespace(lora_name=name, lora_int_id=1)
    async with serving(servicer) as server, asking(server.address) as (_, steps):
        await connected(servicer)
        row = steps.add(vllm_request(PROMPT, max_tokens=8, lora_request=lora))
        await steps.run(1)
        await steps.until_drafted(row)
        await steps.run()
        await until(lambda: servicer.closes)
    assert isinstance(servicer.told[0], Open) and servicer.told[0].adapter == told


async def test_an_absent_draft_costs_nothing_and_is_found() -> None:
    servicer = Recorded()
    async with serving(servicer) as server:
        address = server.address
    async with asking(address) as (client, steps):
        row = steps.add(vllm_request(PROMPT, max_tokens=2000))
        await steps.run(20)
        assert steps.num_drafted == steps.num_held == 0
        async with serving(servicer, address):
            await until(lambda: servicer.opens, 60)
            committed = row.committed
            await steps.until_drafted(row)
            await steps.run(30)
        assert steps.num_accepted > 0
        opened = servicer.opens[0]
        assert opened.output_ids == tuple(row.tokens[len(PROMPT) : len(PROMPT) + len(opened.output_ids)])
        assert len(PROMPT) < len(PROMPT) + len(opened.output_ids) <= committed
        await until(lambda: not client._pool._drafts[0].usable)  # it is gone again
        await steps.run(20)
        accepted = steps.num_accepted
        await steps.run(20)
        assert steps.num_accepted == accepted
        assert list(row.tokens[len(PROMPT) :]) == expected(PROMPT, row.num_own_tokens)


async def test_another_draft_goes_on_for_one_that_dies() -> None:
    first, second = Recorded(), Recorded()
    async with serving(second) as other:
        async with serving(first) as server, asking(server.address, other.address) as (_, steps):
            await connected(first)
            await connected(second)
            rows = [steps.add(vllm_request((*PROMPT, n), max_tokens=2000)) for n in range(4)]
            await steps.run(10)
            await until(lambda: len(first.opens) == len(second.opens) == 2)
            await server.stop(0)
            await steps.run(10)
            accepted = steps.num_accepted
            await until(lambda: len(second.opens) == 4)
            await steps.until_drafted(*rows)
            await steps.run(20)
            assert steps.num_accepted > accepted + 2 * len(rows)
        before = {opened.seed: opened for opened in first.opens}
        for again in second.opens[2:]:
            assert again.output_ids and again.first_chain > 0 and again.seed not in before
        for row in rows:
            assert list(row.tokens[row.prompt_len :]) == expected(row.tokens[: row.prompt_len], row.num_own_tokens)


async def test_a_stuck_draft_is_left() -> None:
    first, second = Recorded(), Recorded()
    addresses = serving(first), serving(second)
    async with addresses[0] as server, addresses[1] as other, asking(server.address, other.address) as (_, steps):
        await connected(first)
        await connected(second)
        rows = [steps.add(vllm_request((*PROMPT, n), max_tokens=2000)) for n in range(2)]
        await steps.run(5)
        first.step_age_ms = 60_000
        await until(lambda: len(second.opens) == 2)
        await steps.until_drafted(*rows)
        await steps.run(10)
        assert steps.num_accepted > steps.num_drafted / 2 > 0


@pytest.mark.parametrize(
    ("answer", "goes_on"),
    [
        (DraftTokens(0, 3, 3, (5,), parent=7), False),  # a parent behind its chain
        (Failure(0, 11, "longer than the draft's context"), False),
        (Failure(0, 8, "full", retry_after_ms=100), True),
        (Failure(0, 14, "draining"), True),
    ],
)
async def test_what_a_draft_cannot_take(answer: Any, goes_on: bool) -> None:
    servicer = Recorded()
    async with serving(servicer) as server, asking(server.address) as (_, steps):
        await connected(servicer)
        servicer.answer = answer
        row = steps.add(vllm_request(PROMPT, max_tokens=2000))
        await until(lambda: servicer.opens)
        servicer.answer = None
        other = steps.add(vllm_request((*PROMPT, 14), max_tokens=2000))
        if goes_on:
            await until(lambda: len(servicer.opens) == 3)
        else:
            await asyncio.sleep(1.2)
            assert len(servicer.opens) == 2 and len(servicer.closes) == isinstance(answer, DraftTokens)
        await steps.run(1)
        await steps.until_drafted(other)
        await steps.run(20)
        assert steps.num_accepted > 0
        for one in (row, other):
            assert list(one.tokens[one.prompt_len :]) == expected(one.tokens[: one.prompt_len], one.num_own_tokens)


async def test_a_draft_of_another_vocabulary_counts_as_absent(caplog: pytest.LogCaptureFixture) -> None:
    servicer = Recorded(ToyDraft(info=draft_info(vocab_size=2 * VOCAB)))
    async with serving(servicer) as server:
        with caplog.at_level(logging.WARNING, "outrider.vllm.draft_pool"):
            async with asking(server.address) as (_, steps):
                steps.add(vllm_request(PROMPT, max_tokens=40))
                await steps.run()
                await asyncio.sleep(1.5)
    assert not servicer.streams and not steps.num_drafted
    said = [record.message for record in caplog.records if "not a pair" in record.message]
    assert len(said) == 1 and "differ in size" in said[0]


async def test_a_draft_that_never_answers_costs_no_wait() -> None:
    servicer = Recorded(ToyDraft(mute=True))
    async with serving(servicer) as server, asking(server.address) as (_, steps):
        await connected(servicer)
        steps.add(vllm_request(PROMPT, max_tokens=40))
        await steps.run()
    assert steps.num_steps == 40 and steps.num_held == 0


async def test_an_aborted_request_is_closed() -> None:
    servicer = Recorded()
    async with serving(servicer) as server, asking(server.address) as (client, steps):
        await connected(servicer)
        row = steps.add(vllm_request(PROMPT, max_tokens=2000))
        await steps.run(3)
        client.closed(steps.rows.pop(row.sequence_id))
        client.take(steps.rows)
        await until(lambda: servicer.closes)
        client.take(steps.rows)  # its pieces may still be on the way


def test_patience_is_a_share_of_a_step_while_waits_pay() -> None:
    patience = Patience(0.25)
    assert patience.grant() == 0
    for seconds in (0.5, 0.02, 0.02, 0.02):  # the first one was a prompt
        patience.stepped(seconds)
    assert patience.grant() == pytest.approx(0.005)
    patience.judged(-0.005)
    granted = [patience.grant() for _ in range(3 * TRIAL_EVERY)]
    assert len([seconds for seconds in granted if seconds]) == 3
    for _ in range(100):
        patience.judged(-0.005)
    assert [patience.grant() for _ in range(TRIAL_EVERY)].count(0.0) == TRIAL_EVERY - 1
    patience.judged(0.06)  # three tokens behind one wait
    assert patience.grant() == pytest.approx(0.005)
    for _ in range(200):
        patience.stepped(10.0)
    assert patience.grant() == pytest.approx(0.1)


async def test_a_row_without_drafted_tokens_waits_for_a_draft_that_answers() -> None:
    servicer = Recorded(ToyDraft(wrong_every=2, delay_s=0.001))  # every second place leaves the row with nothing
    async with serving(servicer) as server, asking(server.address) as (_, steps):
        await connected(servicer)
        for _ in range(20):  # a busy machine may have no time for the draft
            steps.add(vllm_request(PROMPT, max_tokens=300))
            await steps.run()
            if steps.num_held > 0 and steps.num_accepted > 0:
                return
    pytest.fail(f"{steps.num_held} waits, {steps.num_accepted} accepted tokens")


class Branching(Recorded):
    """Sends beside every chain a branch where it errs, of the next number, if it may."""

    def start(self, request: Any, sequences: dict[int, Any], emit: Any) -> Any:
        def emit_both(piece: DraftTokens) -> None:
            sequence = sequences[request.sequence_id]
            chain = 2 * piece.chain
            emit(replace(piece, chain=chain))
            right = [*sequence.drafted[: piece.position], *expected_from(sequence.drafted[: piece.position], K + 3)]
            at = next((at for at, token in enumerate(piece.ids) if token != right[piece.position + at]), None)
            credit = next(one for one in reversed(self.told) if isinstance(one, Credit))
            if at is not None and credit.max_branches:
                first = piece.position + at
                emit(DraftTokens(0, chain + 1, first, tuple(right[first : first + 3]), parent=chain))

        return super().start(request, sequences, emit_both)


def expected_from(tokens: list[int], count: int) -> list[int]:
    """What the toys' rule says behind tokens that begin with PROMPT."""
    return expected(PROMPT, len(tokens) - len(PROMPT) + count)[len(tokens) - len(PROMPT) :]


@pytest.mark.parametrize("most", [0, MOST_BRANCHES])
async def test_branches_are_verified_where_a_chain_was_refused(most: int) -> None:
    servicer = Branching(ToyDraft(wrong_every=7))
    async with serving(servicer) as server, asking(server.address, max_branches=most) as (_, steps):
        await connected(servicer)
        for times in range(1, 21):  # a busy machine may have no time for the draft
            row = steps.add(vllm_request(PROMPT, max_tokens=200))
            await steps.run()
            await until(lambda times=times: len(servicer.closes) == times)
            branches = [one for one in servicer.told if isinstance(one, Commit) and (one.chain or 0) % 2]
            if bool(branches) == bool(most):
                break
    assert bool(branches) == bool(most)
    assert all(one.num_accepted == one.num_drafted for one in branches)
    assert list(row.tokens[len(PROMPT) :])[:200] == expected(PROMPT, 200)


def test_branches_are_asked_for_while_they_come_into_use() -> None:
    use = BranchUse()
    row: Any = None

    def granted(requests: int) -> list[int]:
        return [use.grant() for _ in range(requests)]

    def follow(branches: set[int], *chains: int) -> None:
        asked = AskedRow(row, max_branches=use.grant())
        for chain in chains:
            asked.branches |= branches
            asked.verified(chain, use)

    assert granted(3) == [MOST_BRANCHES] * 3
    for _ in range(100):
        follow({1}, 0, 0, 1)  # the first of a request follows none
    assert granted(3) == [MOST_BRANCHES] * 3
    while use.grant():
        follow({1, 3}, 0, 2, 4)
    assert sorted(granted(2 * TRIAL_EVERY)) == [0] * (2 * TRIAL_EVERY - 2) + [MOST_BRANCHES] * 2
    for _ in range(10 * TRIAL_EVERY):
        follow({1, 3, 5, 7}, 0, 1, 3, 5, 7)
    assert granted(3) == [MOST_BRANCHES] * 3
    assert BranchUse(0).grant() == 0


async def test_what_came_during_a_step_is_not_waited_for() -> None:
    servicer = Recorded(ToyDraft(mute=True))
    async with serving(servicer) as server, asking(server.address) as (client, steps):
        await connected(servicer)
        row = steps.add(vllm_request(PROMPT, max_tokens=40))
        await steps.run(2)
        tokens: Any = row.tokens
        for heard in (False, True):
            client._asked[row.sequence_id].is_heard, row.patience_spent = True, False
            following = tuple(expected_from(tokens, 3))
            if heard:
                client._on_news(DraftTokens(row.sequence_id, 0, row.committed, following))
            tokens.append(following[0])
            row.advance(time.monotonic())
            commit = Commit(row.sequence_id, row.committed - 1, following[:1])
            client.committed(StepReport(0, 0.004, StepTimings(), [commit], Load()))
            assert (row.patience == 0.0) == heard


def test_the_engines_thread_does_not_keep_the_interpreter() -> None:
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.005)
    try:
        DraftClient(["127.0.0.1:1"], vllm_config()).close()
        assert sys.getswitchinterval() < 0.001
    finally:
        sys.setswitchinterval(before)


async def test_which_requests_are_drafted_for() -> None:
    servicer = Recorded()
    async with serving(servicer) as server, asking(server.address) as (client, _):
        await connected(servicer)
        for fields in (
            {"sampling_params": None},
            {"prompt_token_ids": None},
            {"prompt_embeds": object()},
            {"mm_features": [object()]},
            {"resumable": True},
        ):
            assert client.opened(vllm_request(**fields)) is None
        drawn = vllm_sampling(temperature=0.7, top_k=-1, bad_words_token_ids=[[1, 2]], all_stop_token_ids={9, 3})
        plain = client.opened(vllm_request(sampling_params=drawn))
        bound = client.opened(vllm_request(sampling_params=drawn, structured_output_request=object()))
        nearly_greedy = client.opened(vllm_request(sampling_params=vllm_sampling(temperature=1e-6)))
        assert plain is not None and bound is not None and nearly_greedy is not None
        assert (plain.weighs, bound.weighs, nearly_greedy.weighs) == (True, False, False)
        await until(lambda: len(servicer.opens) == 3)
        credits = [one.max_branches for one in servicer.told if isinstance(one, Credit)]
        assert credits == [0, MOST_BRANCHES, MOST_BRANCHES]  # a guess among drawn tokens hardly ever holds
    first, second, third = servicer.opens
    assert (first.one_hot, second.one_hot, third.sampling.greedy) == (False, True, True)
    assert first.sampling.bad_words_ids == ((1, 2),) and first.sampling.stop_token_ids == (3, 9)
    assert len({first.seed, second.seed, third.seed}) == 3  # two that shared noise would draw alike
    assert not (first.fresh_seed or second.fresh_seed or third.fresh_seed)  # vLLM's comes again when it starts again


def test_a_requests_salt_parts_what_its_deployments_shares() -> None:
    assert joined_salt("here", None) == "here"
    salts = {joined_salt("here", "mine"), joined_salt("here", "yours"), joined_salt("there", "mine"), "here"}
    assert len(salts) == 4 and all(len(salt) <= 64 for salt in salts)


def test_what_the_environment_says_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidArgument, match="address"):
        draft_client("127.0.0.1", vllm_config())
    for name, value in (("OUTRIDER_BRANCHES", "65"), ("OUTRIDER_PATIENCE", "much")):
        monkeypatch.setenv(name, value)
        with pytest.raises(ValueError, match=f"{name} is '{value}'"):
            draft_client("127.0.0.1:1", vllm_config())


def test_drafts_are_known_by_what_the_environment_names(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(ClientTls, "of", lambda settings, name: made.append((settings, name)))
    draft_tls({"OUTRIDER_PEER_CA": "ca.pem", "OUTRIDER_PEER_KEY": ""})
    draft_tls(
        {f"OUTRIDER_PEER_{name.upper()}": f"{name}.pem" for name in ("ca", "cert", "key")}
        | {"OUTRIDER_DRAFT_TLS_NAME": "draft.example"}
    )
    files = [tuple(map(str, (given.peer_ca, given.peer_cert, given.peer_key))) for given, _ in made]
    assert files == [("ca.pem", "None", "None"), ("ca.pem", "cert.pem", "key.pem")]
    assert [name for _, name in made] == ["", "draft.example"]
    with pytest.raises(ValueError, match="peer_key"):
        draft_tls({"OUTRIDER_PEER_CA": "ca.pem", "OUTRIDER_PEER_CERT": "cert.pem"})
