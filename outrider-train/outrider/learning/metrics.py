"""The series of a learner. Imported only where they are asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from outrider.rpc.metrics import Metrics, Samples

if TYPE_CHECKING:
    from outrider.learning.learner import Learner, Pupil

LABELS = ("target", "group")
SHOWN = 12  # characters of a digest


class LearnerMetrics(Metrics):
    """Reads a learner at the scrape."""

    def __init__(self, learner: Learner) -> None:
        super().__init__("learner", "learner")

        def each(read: str) -> Samples:
            return [(labels_of(one), float(getattr(one.pool, read))) for one in learner.pupils()]

        def worths() -> Samples:
            return [((*labels_of(one), by), value) for one in learner.pupils() for by, value in [*one.scores.items()]]

        for name, text, read in (
            ("lessons", "Lessons that were kept", "num_taken"),
            ("refused", "Lessons that nothing could be learned from", "num_refused"),
            ("repeats", "Lessons that had come before", "num_again"),
            ("tokens", "Tokens that targets drew, of lessons that were kept", "num_tokens"),
        ):
            self.read_labelled(CounterMetricFamily, name, text, LABELS, lambda read=read: each(read))  # type: ignore[misc]
        self.read_labelled(
            CounterMetricFamily, "steps", "Steps of training", LABELS,
            lambda: [(labels_of(one), one.num_steps) for one in learner.pupils()],
        )  # fmt: skip
        self.read_labelled(
            GaugeMetricFamily, "loss", "Of the last step, nats a token", LABELS,
            lambda: [(labels_of(one), one.loss) for one in learner.pupils()],
        )  # fmt: skip
        self.read_labelled(
            GaugeMetricFamily, "callers_left_out", "For whom the model alone drafts all the same", LABELS,
            lambda: [(labels_of(one), len(one.callers.left_out)) for one in learner.pupils()],
        )  # fmt: skip
        self.read_labelled(
            GaugeMetricFamily, "acceptance", "Of lessons held out, in shadow, by what drafts", (*LABELS, "by"), worths
        )
        self.read_counter("lost", "Lessons that services gave up, since nobody took them", lambda: learner.num_lost)
        self.read_counter(
            "left_aside", "Lessons of targets that are not known, or of no use", lambda: learner.num_left_aside
        )
        self.read_counter("promoted", "Versions that were put in use", lambda: learner.num_promoted)
        self.read_counter("taken_back", "Versions that were taken back", lambda: learner.num_taken_back)


def labels_of(pupil: Pupil) -> tuple[str, str]:
    """A key's, bounded by the number of keys."""
    return pupil.key.target_digest[:SHOWN], pupil.key.group[:SHOWN]
