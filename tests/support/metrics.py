"""What a scrape says: the samples of a text in Prometheus' format."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from support.engines import DraftHarness, TargetHarness, tiny_model
from support.fakes import ToyDraft, ToyTarget
from support.gateways import toy_tokenizer

from outrider.draft_service.metrics import DraftMetrics
from outrider.gateway.engine import GenerationEngine
from outrider.gateway.metrics import GatewayMetrics
from outrider.gateway.request_metrics import measure
from outrider.learning.learner import Watches
from outrider.learning.metrics import LearnerMetrics
from outrider.rpc.messages import LearningKey, ModelInfo
from outrider.rpc.metrics import Metrics
from outrider.target_service.metrics import TargetMetrics
from outrider.target_service.observed import stats_of

MODEL = ModelInfo("tiny", "d" * 64, 97, 256, engine="outrider", kernels="c-avx2", dtype="float32")
Samples = Mapping[tuple[str, tuple[tuple[str, str], ...]], float]


def samples_of(text: str) -> Samples:
    """By name, without our prefix, and labels."""
    return {
        (sample.name.removeprefix("outrider_"), tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def scraped(metrics: Metrics) -> Samples:
    """A scrape without HTTP."""
    return samples_of(metrics.render("")[0].decode())


class Idle:
    """A thread between two steps."""

    is_alive = True

    def submit(self, command: object) -> None:
        raise NotImplementedError

    def step_age_s(self) -> float:
        return 0.0


def declared() -> dict[str, str]:
    """Every series of the services, and of a learner, that is ours or under OpenTelemetry's names, as the text format
    names it, and its type."""
    target, draft = TargetMetrics(), DraftMetrics(("draft_model", "ngram"))
    loaded = tiny_model()[1]
    target.attach(partial(stats_of, TargetHarness.of(loaded).engine), Idle(), MODEL)
    draft.attach(DraftHarness().engine, Idle(), MODEL)
    gateway = measure(GenerationEngine(toy_tokenizer(), ToyTarget(), ToyDraft()), gen_ai_names=True)
    found: dict[str, str] = {}
    pool = SimpleNamespace(num_taken=0, num_refused=0, num_again=0, num_tokens=0)
    pupil = SimpleNamespace(
        key=LearningKey("d", ""), pool=pool, scores={"live": 0.5}, num_steps=0, loss=0.0, callers=Watches()
    )
    counts = dict.fromkeys(("num_lost", "num_promoted", "num_taken_back", "num_left_aside"), 0)
    learner: Any = SimpleNamespace(pupils=lambda: [pupil], **counts)
    for metrics in (gateway, target, draft, LearnerMetrics(learner)):
        found |= _declared_by(metrics)
    return found


def sample_names() -> set[str]:
    """What an expression may name: of a histogram its buckets, sum and count."""
    return _samples_of(declared())


def model_series() -> set[str]:
    """What an expression may name of what a gateway says of each of several models."""
    engine = GenerationEngine(toy_tokenizer(), ToyTarget(), ToyDraft())
    return _samples_of(_declared_by(measure(engine, GatewayMetrics(alone=False))))


def _declared_by(metrics: Metrics) -> dict[str, str]:
    families = text_string_to_metric_families(metrics.render("")[0].decode())
    ours = [family for family in families if family.name.startswith(("outrider_", "gen_ai_"))]
    return {f"{family.name}_total" if family.type == "counter" else family.name: family.type for family in ours}


def _samples_of(kinds: dict[str, str]) -> set[str]:
    return {
        name + suffix
        for name, kind in kinds.items()
        for suffix in (("_bucket", "_sum", "_count") if kind == "histogram" else ("",))
    }
