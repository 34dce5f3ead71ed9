"""A draft's series move with what they say."""

from __future__ import annotations

import time

from support.engines import STREAM, DraftHarness, commit, credit, new_open
from support.metrics import MODEL, Idle, scraped

from outrider.draft_service.boot import new_metrics
from outrider.draft_service.metrics import DraftMetrics
from outrider.draft_service.settings import DraftSettings
from outrider.rpc.messages import Close, DraftCommand, DraftTokens
from outrider.rpc.servicer import Deliver

PROMPT = [5, 6, 7, 8]


class Metered(DraftHarness):
    """An engine whose series are scraped."""

    def __init__(self, num_blocks: int = 64) -> None:
        self.metrics = DraftMetrics(("draft_model", "ngram"))
        super().__init__(num_blocks, observer=self.metrics)
        self.metrics.attach(self.engine, Idle(), MODEL)

    def read(self, name: str, **labels: str) -> float:
        return scraped(self.metrics)[f"draft_{name}", tuple(sorted(labels.items()))]

    def deliver(self, age_s: float, *messages: DraftCommand) -> list[object]:
        """As `run`, of a frame that has waited so long for the thread."""
        first = len(self.events)
        self.engine.handle(Deliver(STREAM, messages, self.events.append, time.monotonic() - age_s))
        while self.engine.step(time.monotonic()) == 0.0:
            pass
        return list(self.events[first:])


def test_passes_and_what_they_draft() -> None:
    metered = Metered()
    pieces = metered.run(new_open(1, PROMPT), new_open(2, PROMPT[::-1]), credit(1, 8), credit(2, 8))
    drafted = sum(len(piece.ids) for piece in pieces if isinstance(piece, DraftTokens))
    assert metered.read("tokens_total", method="draft_model") == drafted == 8
    assert metered.read("tokens_total", method="ngram") == 0
    passes = metered.read("passes_total")
    assert passes == len(metered.batches) == 4
    assert metered.read("batch_sequences_sum") == sum(map(len, metered.batches)) == 8
    assert metered.read("pass_seconds_count") == 4 and metered.read("pass_seconds_sum") > 0
    assert metered.read("num_preemptions_total") == 0 < metered.read("device_idle_seconds_total")


def test_acceptance_by_method() -> None:
    metered = Metered()
    (piece,) = (found for found in metered.run(new_open(1, PROMPT), credit(1, 8)) if isinstance(found, DraftTokens))
    metered.run(commit(1, 4, *piece.ids[:2], 96, chain=piece.chain, num_drafted=4, num_accepted=2))
    looped = [7, 8, 9, 7, 8, 9, 7, 8]
    metered.run(new_open(2, looped, method="ngram"), credit(2, 12))
    metered.run(commit(2, 8, 9, 7, 8, 9, 7, chain=0, num_drafted=4, num_accepted=4))
    verified = [metered.read("verified_tokens_total", method=method) for method in ("draft_model", "ngram")]
    accepted = [metered.read("accepted_tokens_total", method=method) for method in ("draft_model", "ngram")]
    assert (verified, accepted) == ([4, 4], [2, 4])
    assert metered.read("tokens_total", method="ngram") >= 4


def test_a_piece_waits_for_the_device() -> None:
    """From the arrival of the credit, not from when the thread got to it."""
    metered = Metered()
    metered.deliver(0.5, new_open(1, PROMPT), credit(1, 8))
    assert metered.read("piece_wait_seconds_count") == 1
    assert 0.5 <= metered.read("piece_wait_seconds_sum") < 5
    metered.deliver(0.0, credit(1, 12))
    assert metered.read("piece_wait_seconds_count") == 2 and metered.read("piece_wait_seconds_sum") < 5.5


def test_a_sequence_waits_for_credit() -> None:
    metered = Metered()
    metered.run(new_open(1, PROMPT), credit(1, 8))
    assert metered.read("credit_wait_seconds_count") == 0
    assert metered.read("num_sequences", state="resting") == 1
    time.sleep(0.05)
    metered.run(credit(1, 12))
    assert metered.read("credit_wait_seconds_count") == 1 and metered.read("credit_wait_seconds_sum") >= 0.05


def test_what_is_held() -> None:
    metered = Metered()
    names = ("kv_blocks", "branches", "unsent_tokens", "lookup_tokens")
    assert [metered.read("store_entries", store=name) for name in names] == [0, 0, 0, 0]
    metered.send(new_open(1, PROMPT), credit(1, 8), new_open(2, PROMPT, method="ngram"))
    assert metered.read("num_sequences", state="drafting") == 1
    assert metered.read("store_entries", store="lookup_tokens") == len(PROMPT)
    metered.engine.step(time.monotonic())
    assert metered.read("store_entries", store="kv_blocks") == 1
    assert metered.read("store_entries", store="unsent_tokens") == 1
    assert metered.read("kv_cache_usage_perc") == 1 / 64
    metered.run(credit(1, 12, max_branches=4))
    assert metered.read("store_entries", store="branches") > 0
    metered.run(Close(1), Close(2))
    assert [metered.read("store_entries", store=name) for name in names] == [0, 0, 0, 0]
    assert metered.read("num_sequences", state="resting") == 0 and not metered.metrics._clocks


def test_nothing_is_counted_without_the_flag() -> None:
    assert new_metrics(DraftSettings(method="ngram"), ["ngram"]) is None
    assert new_metrics(DraftSettings(method="ngram", metrics=":0"), ["ngram"]) is not None
