"""What OpenTelemetry's GenAI conventions have a model server measure, of every request of a gateway. Names, buckets and
attributes are those of the version GEN_AI_VERSION, as its mapping to Prometheus' format writes them."""

from __future__ import annotations

import time

from prometheus_client import Histogram

from outrider.gateway.engine import GenerationEngine
from outrider.gateway.metrics import GatewayMetrics
from outrider.gateway.request_record import RequestObserver, RequestRecord
from outrider.gateway.tracing import operation_of
from outrider.rpc import telemetry as names
from outrider.rpc.server_calls import as_outrider_error

_REQUEST_S = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_FIRST_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_ATTRIBUTES = (names.GEN_AI_OPERATION_NAME, names.GEN_AI_PROVIDER_NAME, names.GEN_AI_REQUEST_MODEL)


class GenAiMetrics(RequestObserver):
    """Observes all requests of an engine. An attribute that is absent is an empty label, as Prometheus has it."""

    def __init__(self, metrics: GatewayMetrics, engine: GenerationEngine) -> None:
        self._metrics, self._engine = metrics, engine
        self._request = self._histogram(
            names.GEN_AI_SERVER_REQUEST_DURATION, "From request to its end", _REQUEST_S, names.ERROR_TYPE
        )
        self._first = self._histogram(
            names.GEN_AI_SERVER_TIME_TO_FIRST_TOKEN, "From request to first token, of those that ended well", _FIRST_S
        )
        self._token = self._histogram(
            names.GEN_AI_SERVER_TIME_PER_OUTPUT_TOKEN, "Of a completion that ended well, after the first", _TOKEN_S
        )

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], *further: str) -> Histogram:
        labels, registry = map(_in_prometheus, (*_ATTRIBUTES, *further)), self._metrics.registry
        return Histogram(f"{_in_prometheus(name)}_seconds", text, labels, registry=registry, buckets=buckets)

    def ended(self, record: RequestRecord, error: BaseException | None) -> None:
        """Times a request; what a refused one says its adapter is, is no label."""
        adapter = record.request.adapter if record.prepared is not None else ""
        model = self._metrics.adapter_label(adapter) if adapter else self._engine.model_name
        labels, known = (operation_of(record.request), names.PROVIDER, model), as_outrider_error(error)
        kind = "" if known is None else known.code.name
        self._request.labels(*labels, kind).observe(time.monotonic() - record.arrived)
        if known is not None or not record.first_token:
            return
        self._first.labels(*labels).observe(record.first_token - record.arrived)
        for times in record.completions.values():
            if times.num_tokens > 1:
                self._token.labels(*labels).observe(times.decoding_s / (times.num_tokens - 1))


def _in_prometheus(name: str) -> str:
    return name.replace(".", "_")
