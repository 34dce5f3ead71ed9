"""The metrics that `LLM.get_metrics` gives, where vLLM has them."""

from outrider.llm.metrics import Counter, Gauge, Histogram, Metric, Vector

__all__ = ["Counter", "Gauge", "Histogram", "Metric", "Vector"]
