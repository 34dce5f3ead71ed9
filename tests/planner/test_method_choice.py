"""Which method drafts next: the order first, then what was measured."""

from __future__ import annotations

from outrider.planner.method_choice import MethodChoice, MethodRates, Offer

MODEL = Offer.of_model("draft_model", 4)


def lookup(num_tokens: int) -> Offer:
    return Offer.of_lookup("suffix", num_tokens)


def measured(choice: MethodChoice, offer: Offer, num_accepted: int, rounds: int = 8, rest_us: float = 10_000.0) -> None:
    for _ in range(rounds):
        choice.add_round(offer.kind, offer.num_tokens, num_accepted, rest_us)


def test_the_first_of_the_list_goes_first_and_then_each_is_tried() -> None:
    choice = MethodChoice(MethodRates())
    assert choice.choose([lookup(4), MODEL], is_awaited=True) == lookup(4)
    assert choice.choose([MODEL, lookup(4)], is_awaited=True) == MODEL
    measured(choice, lookup(4), 4)
    assert choice.choose([lookup(4), MODEL], is_awaited=True) == MODEL
    assert choice.choose([lookup(8), MODEL], is_awaited=True) == lookup(8)  # a kind of its own


def test_another_model_is_tried_anew() -> None:
    rates = MethodRates()
    choice = MethodChoice(rates)
    rates.add_draft("draft_model", 4, 4 * 1_000)
    measured(choice, MODEL, 0)
    measured(choice, lookup(4), 4)
    assert choice.choose([MODEL, lookup(4)], is_awaited=True) == lookup(4)
    rates.forget("draft_model")
    assert rates.draft_us(MODEL) == 0 and choice.choose([MODEL, lookup(4)], is_awaited=True) == MODEL
    rates.forget("suffix")
    assert choice.choose([lookup(4), MODEL], is_awaited=True) == lookup(4)


def test_then_the_one_that_brings_the_most_tokens_for_its_time() -> None:
    rates = MethodRates()
    choice = MethodChoice(rates)
    rates.add_draft("draft_model", 4, 4 * 1_000)
    measured(choice, MODEL, 3)
    measured(choice, lookup(4), 1)
    assert choice.choose([lookup(4), MODEL], is_awaited=True) == MODEL
    rates.add_draft("draft_model", 4, 4 * 30_000)  # another machine is at work there
    assert choice.choose([lookup(4), MODEL], is_awaited=True) == lookup(4)
    # Beside a verification of 10 ms nothing is gained by drafting faster than that.
    slow = MethodRates()
    slow.add_draft("draft_model", 4, 4 * 2_400)
    ahead = MethodChoice(slow)
    measured(ahead, MODEL, 4)
    measured(ahead, lookup(4), 3)
    assert ahead.choose([lookup(4), MODEL], is_awaited=True) == lookup(4)
    assert ahead.choose([lookup(4), MODEL], is_awaited=False) == MODEL


def test_one_sequence_may_differ_from_most() -> None:
    rates = MethodRates()
    others, own = MethodChoice(rates), MethodChoice(rates)
    measured(others, MODEL, 3, rounds=40)
    measured(others, lookup(4), 1, rounds=40)
    measured(own, lookup(4), 4, rounds=30)
    assert others.choose([lookup(4), MODEL], is_awaited=True) == MODEL
    assert own.choose([lookup(4), MODEL], is_awaited=True) == lookup(4)


def test_what_is_passed_over_is_forgotten_and_tried_again() -> None:
    choice = MethodChoice(MethodRates())
    measured(choice, MODEL, 4, rounds=40)
    measured(choice, lookup(4), 0)
    chosen = [choice.choose([lookup(4), MODEL], is_awaited=True) for _ in range(600)]
    assert chosen[:100] == [MODEL] * 100
    assert lookup(4) in chosen


def test_without_a_clock_tokens_alone_count() -> None:
    rates = MethodRates()
    choice = MethodChoice(rates)
    rates.add_draft("draft_model", 4, 1e9)
    for offer, num_accepted in ((MODEL, 4), (lookup(4), 1)):
        for _ in range(8):
            choice.add_round(offer.kind, 4, num_accepted, None)
    assert choice.choose([lookup(4), MODEL], is_awaited=True) == MODEL
