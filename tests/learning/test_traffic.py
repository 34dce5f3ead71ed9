"""What is kept of lessons: what comes again teaches nothing, what judges never teaches, and all is bounded."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

from support.lessons import DRAWN

from outrider.learning.traffic import LEAST_TOKENS, MAX_CALLERS, MAX_WAITING, Pool, PoolPlan
from outrider.rpc.messages import Lesson
from outrider.rpc.words.sampling_params import AcceptanceRule

VOCAB = 100


def lesson(prompt: list[int], output: list[int], **options: Any) -> Lesson:
    return Lesson("d", "", prompt, output, DRAWN, AcceptanceRule.COUPLED, 1, **options)


def some(count: int, length: int = 20, seed: int = 1) -> list[Lesson]:
    dice = random.Random(seed)
    return [lesson([dice.randrange(VOCAB) for _ in range(4)], [dice.randrange(VOCAB)] * length) for _ in range(count)]


def test_what_judges_teaches_nothing_however_often_its_prompt_comes() -> None:
    pool, judging = Pool(PoolPlan(hold_out=4), VOCAB), set()
    for one in some(400):
        pool.take(one)
        pool.take(lesson([*one.prompt_ids], [5, *one.output_ids]))
        judging |= {tuple(one.prompt_ids) for (one,) in pool.rounds()}
    learnt = {tuple(one.prompt_ids) for _ in range(200) for one in pool.batch(8)}
    assert judging and not judging & learnt and 0.15 < 2 * 1.0 * len(judging) / (2 * 400) < 0.45
    assert pool.rounds() == [] and pool.num_taken == 800


def test_what_comes_again_is_taken_once() -> None:
    pool = Pool(PoolPlan(), VOCAB)
    for one in some(10) * 3:
        pool.take(one)
    assert (pool.num_taken, pool.num_again, pool.num_tokens) == (10, 20, 200)


def test_what_cannot_be_learned_from_is_counted() -> None:
    pool, least = Pool(PoolPlan(max_tokens=64), VOCAB), [1] * LEAST_TOKENS
    for one in (
        lesson([], least), lesson([1], []), lesson([1], least[1:]), lesson([1], [3, *least], num_given=2),
        lesson([VOCAB], least), lesson([1], [*least, 2**32 - 1]), lesson([1] * 57, least),
    ):  # fmt: skip
        pool.take(one)
    assert (pool.num_taken, pool.num_refused) == (0, 7)
    pool.take(lesson([1] * 56, least))
    assert pool.num_taken == 1
    biased = replace(DRAWN, logit_bias=dict.fromkeys(range(3), 1.0))
    pool.take(replace(lesson([1] * 20, least), sampling=biased))
    assert pool.num_refused == 8, "its biases are as long as the longest text"


def test_memory_is_bounded_and_what_is_old_keeps_a_share() -> None:
    plan = PoolPlan(max_bytes=1 << 20, max_tokens=64)
    pool = Pool(plan, VOCAB)
    for number in range(4000):
        pool.take(lesson([number % 97, number // 97 % 97, 1, number % 7], [number % VOCAB] * 20))
        assert pool.num_bytes <= plan.max_bytes + MAX_WAITING * 1300
    early = sum(1 for _ in range(200) for one in pool.batch(8) if one.prompt_ids[1] < 20)
    assert 0.05 < early / 1600 < 0.5, "of the first half of all"


def of(caller: str, count: int, seed: int) -> list[Lesson]:
    return [replace(one, caller=caller) for one in some(count, seed=seed)]


def test_every_caller_has_an_equal_share_until_its_lessons_were_read_often_enough() -> None:
    pool = Pool(PoolPlan(), VOCAB)
    for one in [*of("much", 900, 1), *of("little", 100, 2)]:
        pool.take(one)
    read = Counter(one.caller for _ in range(200) for one in pool.batch(8))
    assert 0.4 < read["little"] / read.total() < 0.6
    for _ in range(1000):
        pool.batch(8)
    late = Counter(one.caller for _ in range(200) for one in pool.batch(8))
    assert 0.02 < late["little"] / late.total() < 0.2, "they would be learned by heart"


def test_a_text_of_every_caller_judges_together() -> None:
    pool = Pool(PoolPlan(hold_out=1), VOCAB)
    for one in [*of("much", 20, 1), *of("little", 3, 2)]:
        pool.take(one)
    assert [[one.caller for one in round] for round in pool.rounds()] == [["much", "little"]] * 3
    assert not pool.has_rounds and pool.rounds() == [], "one who sends little is waited for"
    pool.take(of("little", 4, 2)[3])
    assert [len(round) for round in pool.rounds()] == [2]
    for one in of("much", 2 * MAX_WAITING, 3):
        pool.take(one)
    assert [[one.caller for one in round] for round in pool.rounds()] == [["much"]] * MAX_WAITING, "but not for ever"
    pool.take(of("much", 1, 4)[0])
    assert len(pool.rounds()) == 1


def test_callers_are_bounded_and_so_is_what_they_send_together() -> None:
    plan = PoolPlan(max_bytes=1 << 20, max_tokens=64, hold_out=10**6)
    pool = Pool(plan, VOCAB)
    for one in of("much", 3000, 1):
        pool.take(one)
    for number in range(2 * MAX_CALLERS):
        for one in of(str(number), 20, number + 2):
            pool.take(one)
            assert pool.num_bytes <= plan.max_bytes
    assert pool.num_callers == MAX_CALLERS
