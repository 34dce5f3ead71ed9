"""Remote peers over real gRPC on the loopback: what a broken stream, a stuck device or a draining service does."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest
from support import fakes
from support.fakes import (
    PROMPT,
    QUICK,
    DraftServicer,
    TargetServicer,
    ToyDraft,
    ToyTarget,
    draft_info,
    expected,
    generate,
    request,
    serving,
    target_info,
    until,
)

from outrider.gateway.peers.remote import RemoteDrafts, RemoteTargets
from outrider.gateway.peers.replicas import MAX_FAILURES
from outrider.gateway.peers.untrusted import UntrustedDrafts
from outrider.gateway.speculation.backends import Lost
from outrider.gateway.speculation.loop import speculate
from outrider.planner.policy import Policy, Round
from outrider.rpc.errors import FailedPrecondition, ResourceExhausted, Unavailable
from outrider.rpc.messages import OVERCOMMIT, Commit, Credit, DraftInfo, DraftMethod, Failure, TargetInfo
from outrider.rpc.stream import StreamConfig
from outrider.rpc.words.sampling_params import BASELINE, CAPABILITIES, FRESH_SEED, AcceptanceRule, SamplingParams
from outrider.rpc.words.structured import StructuredOutput


async def test_speculates_over_the_loopback() -> None:
    target, draft = TargetServicer(ToyTarget()), DraftServicer(ToyDraft(wrong_every=3))
    async with (
        serving(target) as one,
        serving(draft) as two,
        RemoteTargets([one.address], stream_config=QUICK) as targets,
    ):
        with pytest.raises(Unavailable, match="no target has answered"):
            _ = targets.info
        await asyncio.wait_for(targets.wait_usable(), 30)
        assert targets.info.model.name == "toy"
        async with RemoteDrafts([two.address], stream_config=QUICK) as drafts:
            assert drafts.info is None
            assert await drafts.wait_attempted() is None and drafts.info == draft_info()
            whole = expected(PROMPT, 100)
            results = await asyncio.gather(
                *(generate(drafts, targets, request(100, completion=number)) for number in range(8))
            )
            assert results == [whole] * 8
            assert len(draft.opens) == 8 and len(target.streams) == len(draft.streams) == 1
            await until(lambda: len(draft.closes) == 8)
            assert targets.replicas[0].num_sequences == drafts.replicas[0].num_sequences == 0
            assert targets.replicas[0].round_trip_us > 0


async def test_reconnects_and_the_sequence_goes_on() -> None:
    target = TargetServicer(ToyTarget(step_s=0.002))
    async with serving(target) as server, RemoteTargets([server.address], stream_config=QUICK) as targets:
        await targets.wait_usable()
        tokens: list[int] = []

        async def read() -> None:
            async for item in speculate(None, targets, request(), Policy(0)):
                assert isinstance(item, Round)
                tokens.extend(item.commit.ids)

        task = asyncio.create_task(read())
        await until(lambda: len(tokens) > 5)
        await target.streams[0].close()
        await asyncio.wait_for(task, 30)
        assert tokens == expected(PROMPT, 200)
        assert len(target.streams) == 2 and target.opens[1].output_ids


async def test_the_room_is_that_of_all_targets_of_the_model() -> None:
    one, two, other = (TargetServicer(ToyTarget(info=target_info(num_blocks=10))) for _ in range(3))
    other.toy.info = target_info(num_blocks=10, digest="another")
    async with serving(one) as first, serving(two) as second, serving(other) as third:
        addresses = [server.address for server in (first, second, third)]
        async with RemoteTargets(addresses, stream_config=QUICK) as targets:
            await until(lambda: all(replica.usable for replica in targets.replicas))
            assert targets.max_open_tokens == 2 * OVERCOMMIT * 160
            two.toy.info = target_info()
            await until(lambda: two.streams)
            await two.streams[0].close()
            await until(
                lambda: len(two.streams) == 2 and targets.max_open_tokens == 0
            )  # one does not say what it holds


async def test_a_request_goes_where_all_that_it_sets_is_known() -> None:
    able, older = TargetServicer(ToyTarget()), TargetServicer(ToyTarget())
    known = ("sampling.temperature", "acceptance.rejection")
    older.toy.info = replace(older.toy.info, capabilities=known)
    draft = DraftServicer(ToyDraft())
    draft.toy.info = replace(draft_info(), capabilities=known)
    async with (
        serving(able) as first,
        serving(older) as second,
        serving(draft) as third,
        RemoteTargets([first.address, second.address], stream_config=QUICK) as targets,
        RemoteDrafts([third.address], stream_config=QUICK) as drafts,
    ):
        await until(lambda: all(one.usable for peers in (targets, drafts) for one in peers.replicas))
        salts = [str(number) for number in range(12)]
        for salt in salts:
            wanted = replace(request(8, salt=salt), acceptance=AcceptanceRule.COUPLED)
            assert await generate(drafts, targets, wanted) == expected(PROMPT, 8)
        assert len(able.opens) == 12 and not older.opens and not draft.opens
        for salt in salts:
            assert await generate(drafts, targets, request(8, salt=salt)) == expected(PROMPT, 8)
        assert older.opens and len(draft.opens) == 12


async def test_a_draft_that_would_recall_what_a_seed_said_before_is_not_asked() -> None:
    """One that learns, and is older than the field. What is told to be fresh it drafts for, and greedy output."""
    older, newer = DraftServicer(ToyDraft()), DraftServicer(ToyDraft())
    learning = replace(draft_info(), methods=(DraftMethod("draft_model", learns=True),))
    older.toy.info = learning
    newer.toy.info = replace(learning, capabilities=(*CAPABILITIES, FRESH_SEED))
    sampled = replace(request(8), sampling=SamplingParams())
    async with (
        serving(older) as first,
        serving(newer) as second,
        RemoteDrafts([first.address], stream_config=QUICK) as one,
        RemoteDrafts([second.address], stream_config=QUICK) as other,
        UntrustedDrafts([second.address], stream_config=QUICK) as untrusted,
    ):
        await until(lambda: one.usable and other.usable and untrusted.usable)
        for drafts in (one, untrusted):
            assert (
                drafts.open(sampled, print)
                is drafts.open(replace(sampled, acceptance=AcceptanceRule.BLOCK), print)
                is None
            )
        asked = replace(sampled, acceptance=AcceptanceRule.COUPLED), replace(sampled, fresh_seed=True), request(8)
        links = [drafts.open(each, print) for each in asked for drafts in (one, other, untrusted)]
        assert None not in [*links, other.open(sampled, print)]


async def test_a_grammar_is_the_targets_to_keep_and_no_draft_lacks_it() -> None:
    able, older, draft = TargetServicer(ToyTarget()), TargetServicer(ToyTarget()), DraftServicer(ToyDraft())
    able.toy.info = replace(target_info(), capabilities=(*BASELINE, "sampling.structured_output"))
    older.toy.info, draft.toy.info = (replace(info(), capabilities=BASELINE) for info in (target_info, draft_info))
    async with (
        serving(able) as first,
        serving(older) as second,
        serving(draft) as third,
        RemoteTargets([first.address, second.address], stream_config=QUICK) as targets,
        RemoteDrafts([third.address], stream_config=QUICK) as drafts,
    ):
        await until(lambda: all(one.usable for peers in (targets, drafts) for one in peers.replicas))
        for salt in range(8):
            wanted = request(8, salt=str(salt))
            constrained = replace(wanted.sampling, structured_output=StructuredOutput(regex="[a-z]*"))
            assert await generate(drafts, targets, replace(wanted, sampling=constrained)) == expected(PROMPT, 8)
        assert len(able.opens) == 8 and not older.opens
        assert len(draft.opens) == 8


async def test_the_rule_is_one_that_every_target_has_and_all_else_what_any_has() -> None:
    """Whichever answers first: a rule that some lack would send every request past them."""
    able, older = TargetServicer(ToyTarget()), TargetServicer(ToyTarget())
    able.toy.info = replace(target_info(), capabilities=(*BASELINE, "acceptance.block", "sampling.structured_output"))
    older.toy.info = replace(target_info(), capabilities=BASELINE)
    async with serving(able) as first, serving(older) as second:
        for addresses in permutations([first.address, second.address]):
            async with RemoteTargets(addresses, stream_config=QUICK) as targets:
                await targets.wait_usable()
                await until(lambda: all(replica.usable for replica in targets.replicas))
                assert set(targets.info.capabilities) == {*BASELINE, "sampling.structured_output"}
        await second.stop()
        async with RemoteTargets([first.address, second.address], stream_config=QUICK) as targets:
            await targets.wait_usable()
            assert "acceptance.block" in targets.info.capabilities


async def test_a_sequence_goes_where_the_head_is_that_it_asks_for() -> None:
    """As long as it is there; what any of the targets has is offered."""
    head = DraftMethod("eagle3", needs_features=True, can_run_ahead=False)
    without, having = (TargetServicer(ToyTarget(info=replace(target_info(), methods=own))) for own in ((), (head,)))
    async with (
        serving(without) as one,
        serving(having) as two,
        RemoteTargets([one.address, two.address], stream_config=QUICK) as targets,
    ):
        await asyncio.wait_for(targets.wait_admitted(), 30)
        await until(lambda: targets.info.methods == (head,))
        asked = [request(9, completion=number, method="eagle3") for number in range(6)]
        assert await asyncio.gather(*(generate(None, targets, one) for one in asked)) == [expected(PROMPT, 9)] * 6
        assert (len(without.opens), len(having.opens)) == (0, 6)
        await two.stop()
        assert await generate(None, targets, request(9, method="eagle3")) == expected(PROMPT, 9)
        assert len(without.opens) == 1


async def test_a_server_that_was_not_there_yet() -> None:
    async with serving(TargetServicer(ToyTarget())) as server:
        address = server.address
    async with RemoteTargets([address], stream_config=QUICK) as targets:
        await asyncio.wait_for(targets.wait_attempted(), 30)
        assert not targets.usable and targets.open(request(), print) is None
        async with serving(TargetServicer(ToyTarget()), address):
            await asyncio.wait_for(targets.wait_usable(), 30)


async def test_an_unexpected_error_does_not_end_the_attempts() -> None:
    attempts: list[TargetInfo] = []

    def check(info: TargetInfo) -> None:
        attempts.append(info)
        if len(attempts) == 1:
            raise TypeError("a bug")

    async with serving(TargetServicer(ToyTarget())) as server, RemoteTargets([server.address], check, QUICK) as targets:
        await asyncio.wait_for(targets.wait_usable(), 30)
        assert len(attempts) == 2 and targets.refusal is None


async def test_a_lost_target_is_replaced_by_another_with_the_same_model() -> None:
    one, two = TargetServicer(ToyTarget(step_s=0.002)), TargetServicer(ToyTarget(step_s=0.002))
    async with (
        serving(one) as first,
        serving(two) as second,
        RemoteTargets([first.address, second.address], stream_config=QUICK) as targets,
    ):
        await until(lambda: all(replica.usable for replica in targets.replicas))
        task = asyncio.create_task(generate(None, targets, request()))
        await until(lambda: one.opens or two.opens)
        await asyncio.sleep(0.05)
        busy, idle = (one, two) if one.opens else (two, one)
        await busy.streams[0].close()
        assert await asyncio.wait_for(task, 30) == expected(PROMPT, 200)
        assert len(idle.opens) == 1 and idle.opens[0].prompt_ids == PROMPT


async def test_prompts_that_begin_alike_meet_while_there_is_room() -> None:
    one, two = TargetServicer(ToyTarget()), TargetServicer(ToyTarget())
    async with (
        serving(one) as first,
        serving(two) as second,
        RemoteTargets([first.address, second.address], stream_config=QUICK) as targets,
    ):
        await until(lambda: all(replica.usable for replica in targets.replicas))
        for _ in range(4):  # one after the other: always the same
            link = targets.open(request(), lambda event: None)
            assert link is not None
            chosen = [replica.num_sequences for replica in targets.replicas]
            link.close()
        links = [targets.open(request(), lambda event: None) for _ in range(16)]
        assert None not in links
        spread = [replica.num_sequences for replica in targets.replicas]
        assert spread == [10, 6] if chosen == [1, 0] else [6, 10]
        assert len({targets.open(replace(request(), prompt_ids=(token,)), print) is None for token in range(20)}) == 1


async def test_a_draft_that_fails_again_and_again_is_left_alone() -> None:
    bad, target = DraftServicer(ToyDraft()), TargetServicer(ToyTarget(step_s=0.002))
    bad.refuse = Failure(0, 8, "no room", "RESOURCE_EXHAUSTED")
    async with (
        serving(bad) as draft,
        serving(target) as server,
        RemoteTargets([server.address], stream_config=QUICK) as targets,
        RemoteDrafts([draft.address], stream_config=QUICK) as drafts,
    ):
        await until(lambda: drafts.usable and targets.usable)
        for number in range(8):
            assert await generate(drafts, targets, request(20, completion=number)) == expected(PROMPT, 20)
        assert len(bad.opens) == MAX_FAILURES


@pytest.mark.parametrize("reason", ["PARENT_GONE", "DRAINING"])
async def test_what_says_nothing_of_the_next_sequence_is_no_fault(reason: str) -> None:
    """A parent that has ended, and a refusal on the way out: whoever comes next is not to wait for a breaker."""
    servicer = TargetServicer(ToyTarget())
    servicer.refuse = Failure(0, 14, "not this one", reason)
    async with serving(servicer) as server, RemoteTargets([server.address], stream_config=QUICK) as targets:
        await targets.wait_usable()
        with pytest.raises(Unavailable, match="not this one"):
            await generate(None, targets, request(20))
        assert servicer.opens and not targets.replicas[0].breaker._failures


async def test_a_full_draft_is_no_faulty_one() -> None:
    """Every request asks it once, and again when it has said to; it does not rest as one does that fails."""
    full, target = DraftServicer(ToyDraft()), TargetServicer(ToyTarget(step_s=0.002))
    full.refuse = Failure(0, 8, "256 sequences are open already", "BUSY", retry_after_ms=100)
    async with (
        serving(full) as draft,
        serving(target) as server,
        RemoteTargets([server.address], stream_config=QUICK) as targets,
        RemoteDrafts([draft.address], stream_config=QUICK) as drafts,
    ):
        await until(lambda: drafts.usable and targets.usable)
        for number in range(2 * MAX_FAILURES):
            assert await generate(drafts, targets, request(5, completion=number)) == expected(PROMPT, 5)
        assert len(full.opens) >= 2 * MAX_FAILURES and not drafts.replicas[0].breaker.open
        rounds = speculate(drafts, targets, request(200), Policy(4))
        async with asyncio.timeout(30), aclosing(rounds):
            async for item in rounds:
                assert isinstance(item, Round)
                full.refuse = None  # once it was asked
                if item.commit.num_drafted:
                    return
        pytest.fail("it was not asked again")


async def test_another_draft_is_asked_before_a_full_one() -> None:
    full, roomy = DraftServicer(ToyDraft()), DraftServicer(ToyDraft())
    async with (
        serving(full) as one,
        serving(roomy) as two,
        RemoteDrafts([one.address, two.address], stream_config=QUICK) as drafts,
    ):
        await until(lambda: all(replica.usable for replica in drafts.replicas))
        events: list[Any] = []
        assert drafts.open(request(), events.append) is not None
        await until(lambda: full.opens or roomy.opens)
        if roomy.opens:
            full, roomy = roomy, full
        full.refuse = Failure(0, 8, "256 sequences are open already", "BUSY", retry_after_ms=60_000)
        for number in range(4):
            assert drafts.open(request(completion=number), events.append) is not None
            await until(lambda number=number: len(full.opens) + len(roomy.opens) == number + 2)
            await until(lambda: events)
        assert (len(full.opens), len(roomy.opens)) == (2, 3)


async def test_a_full_target_is_passed_over_and_two_are_a_refusal_at_once() -> None:
    one, two = TargetServicer(ToyTarget()), TargetServicer(ToyTarget())
    full = Failure(0, 8, "256 sequences are open already", "BUSY", 700)
    async with (
        serving(one) as first,
        serving(two) as second,
        RemoteTargets([first.address, second.address], stream_config=QUICK) as targets,
    ):
        await until(lambda: all(replica.usable for replica in targets.replicas))
        for one.refuse, two.refuse in ((full, None), (None, full)):  # one of them is what the prompt would choose
            assert await generate(None, targets, request(20)) == expected(PROMPT, 20)
        assert len(one.opens) + len(two.opens) == 3
        one.refuse = full
        with pytest.raises(ResourceExhausted) as raised:
            await asyncio.wait_for(generate(None, targets, request(20)), 30)
        assert raised.value.retry_after_ms == 700 and len(one.opens) + len(two.opens) == 5


async def test_a_fork_goes_beside_its_parent_while_that_lives() -> None:
    one, two = TargetServicer(ToyTarget()), TargetServicer(ToyTarget())
    async with (
        serving(one) as first,
        serving(two) as second,
        RemoteTargets([first.address, second.address], stream_config=QUICK) as targets,
    ):
        await until(lambda: all(replica.usable for replica in targets.replicas))
        parent = targets.open(request(), lambda event: None)
        child = targets.open(request(completion=1), lambda event: None, parent)
        assert parent is not None and child is not None
        await until(lambda: len(one.opens) == 2 or len(two.opens) == 2)
        home = one if one.opens else two
        assert home.opens[1].fork_of == home.opens[0].sequence_id and home.opens[1].prompt_ids == ()
        parent.close()
        targets.open(request(completion=2), lambda event: None, parent)
        await until(lambda: len(one.opens) + len(two.opens) == 3)
        (last,) = (opened for opened in (*one.opens, *two.opens) if opened.completion == 2)
        assert last.fork_of is None and last.prompt_ids == PROMPT


async def test_two_gateways_share_two_targets_and_two_drafts() -> None:
    targets = [TargetServicer(ToyTarget()) for _ in range(2)]
    drafts = [DraftServicer(ToyDraft(wrong_every=3)) for _ in range(2)]
    async with AsyncExitStack() as stack:
        places = [(await stack.enter_async_context(serving(servicer))).address for servicer in (*targets, *drafts)]
        gateways = [
            (
                await stack.enter_async_context(RemoteDrafts(places[2:], stream_config=QUICK)),
                await stack.enter_async_context(RemoteTargets(places[:2], stream_config=QUICK)),
            )
            for _ in range(2)
        ]
        await until(lambda: all(replica.usable for pair in gateways for side in pair for replica in side.replicas))
        prompts = [(number, 5, 9) for number in range(1, 17)]
        results = await asyncio.gather(
            *(generate(*pair, replace(request(60), prompt_ids=prompt)) for pair in gateways for prompt in prompts)
        )
        assert results == 2 * [expected(prompt, 60) for prompt in prompts]
        assert all(len(servicer.streams) == 2 and servicer.opens for servicer in (*targets, *drafts))
        times = Counter((id(side), opened.prompt_ids) for side in (*targets, *drafts) for opened in side.opens)
        assert sum(count == 2 for count in times.values()) >= 12  # of 32: where there is room both choose alike


async def test_a_draining_peer_gets_no_new_sequences() -> None:
    target = TargetServicer(ToyTarget(step_s=0.003))
    async with serving(target) as server, RemoteTargets([server.address], stream_config=QUICK) as targets:
        await targets.wait_usable()
        task = asyncio.create_task(generate(None, targets, request(60)))
        await until(lambda: len(target.opens) == 1)
        target.streams[0].drain()
        await until(lambda: not targets.usable)
        assert targets.open(request(), print) is None
        assert await asyncio.wait_for(task, 30) == expected(PROMPT, 60)  # its last sequence ends well


async def test_a_stuck_device_loses_its_sequences() -> None:
    target = TargetServicer(ToyTarget())
    async with serving(target) as server, RemoteTargets([server.address], stream_config=QUICK) as targets:
        await targets.wait_usable()
        events: list[Any] = []
        targets.open(request(), events.append)
        target.step_age_ms = 2_000
        await until(lambda: events)
        assert isinstance(events[0], Lost) and "stuck" in events[0].reason and not targets.usable
        await until(lambda: target.closes == [1])
        target.step_age_ms = 0
        await until(lambda: targets.usable)


async def test_a_sequence_of_a_silent_target_knows_whether_anything_came_since(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fakes, "QUICK", StreamConfig(heartbeat_s=60, silence_s=60))  # the target's: commits alone
    async with (
        serving(TargetServicer(ToyTarget())) as server,
        RemoteTargets([server.address], stream_config=replace(QUICK, silence_s=1.0)) as targets,
    ):
        await targets.wait_usable()
        heard: list[Any] = []
        unheard: list[Any] = []
        first = targets.open(request(), heard.append)
        assert first is not None
        first.send(Credit(0, len(PROMPT) + 1, 0))
        await until(lambda: heard)
        targets.open(request(), unheard.append)
        await until(lambda: unheard)
        assert isinstance(heard[0], Commit) and [event.unheard for event in (heard[-1], unheard[0])] == [False, True]


async def test_nothing_follows_a_close_and_stale_links_are_mute() -> None:
    target = TargetServicer(ToyTarget())
    async with serving(target) as server, RemoteTargets([server.address], stream_config=QUICK) as targets:
        await targets.wait_usable()
        events: list[Any] = []
        old = targets.open(request(), events.append)
        assert old is not None
        await until(lambda: target.opens)
        await target.streams[0].close()
        await until(lambda: events and targets.usable)
        new = targets.open(request(), events.append)
        assert new is not None
        old.close()  # has the same number as the new one
        old.send(Credit(0, 99, 0))
        new.send(Credit(0, 5, 0))
        await until(lambda: any(isinstance(event, Commit) for event in events))
        assert targets.replicas[0].num_sequences == 1 and not target.closes


async def test_another_protocol_or_another_model_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    strange = TargetServicer(ToyTarget(info=target_info(protocol_major=2)))
    async with serving(strange) as server, RemoteTargets([server.address], stream_config=QUICK) as targets:
        refusal = await asyncio.wait_for(targets.wait_admitted(), 30)
        assert isinstance(refusal, FailedPrecondition) and "protocol 2" in str(refusal) and not targets.usable
    one, two = TargetServicer(ToyTarget()), TargetServicer(ToyTarget(info=target_info(name="big", digest="d9")))
    async with (
        serving(one) as first,
        serving(two) as second,
        RemoteTargets([first.address, second.address], stream_config=QUICK) as targets,
    ):
        assert await asyncio.wait_for(targets.wait_attempted(), 30) is None
        assert targets.info.model.name == "toy" and targets.replicas[1].usable  # for requests under way with its model


async def test_a_draft_that_does_not_fit_counts_as_absent(caplog: pytest.LogCaptureFixture) -> None:
    def check(info: DraftInfo) -> None:
        raise FailedPrecondition(f"not a pair: {info.model.name}")

    draft = DraftServicer(ToyDraft(info=replace(draft_info(), methods=())))
    with caplog.at_level(logging.WARNING, "outrider.gateway"):
        async with serving(draft) as server, RemoteDrafts([server.address], check, QUICK) as drafts:
            refusal = await drafts.wait_attempted()
            assert "not a pair" in str(refusal)
            await asyncio.sleep(0.4)  # several attempts
            assert drafts.info is None and drafts.open(request(), print) is None
    assert sum("not a pair" in record.message for record in caplog.records) == 1


async def test_a_draft_that_dies_costs_speed_only() -> None:
    target, draft = TargetServicer(ToyTarget(step_s=0.002)), DraftServicer(ToyDraft(wrong_every=3))
    async with (
        serving(target) as one,
        RemoteTargets([one.address], stream_config=QUICK) as targets,
        serving(draft) as two,
        RemoteDrafts([two.address], stream_config=QUICK) as drafts,
    ):
        await asyncio.gather(targets.wait_usable(), drafts.wait_usable())
        task = asyncio.create_task(generate(drafts, targets, request()))
        await until(lambda: draft.opens)
        await asyncio.sleep(0.03)
        await two.stop(0)
        assert await asyncio.wait_for(task, 30) == expected(PROMPT, 200)
