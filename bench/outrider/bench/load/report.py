"""What a load came to: percentiles, throughput, goodput, acceptance; as JSON holds it and as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from statistics import fmean

from outrider.bench.load.requests import BenchServeSettings, Record
from outrider.bench.results import Json, align, percentile
from outrider.cli.access import AccessSettings

UNSAID = {"json_file", "plot", "api_key", *AccessSettings.model_fields}  # settings that a result does not hold
PERCENTS = (50, 90, 95, 99)
# Key, what the table calls it.
TIMES = (
    ("ttft_ms", "time to first token"),
    ("itl_ms", "inter-token latency (between deliveries)"),
    ("tpot_ms", "time per output token (of a request)"),
    ("e2e_ms", "end to end"),
)


def summarise(settings: BenchServeSettings, server: str, records: Sequence[Record]) -> Json:
    """The whole result; only completions that ended count in the times."""
    done = [record for record in records if not record.error]
    seconds = max(record.ended for record in records) - min(record.due for record in records)
    tokens = sum(record.num_tokens for record in done)
    result: Json = {
        "server": server,
        "place": settings.place,
        "loop": settings.loop,
        "setup": settings.model_dump(
            mode="json", exclude={"json_file", "plot", "api_key", *AccessSettings.model_fields}
        ),
        "seconds": round(seconds, 4),
        "requests": len(records),
        "completed": len(done),
        "failed": dict(Counter(record.error for record in records if record.error)),
        "prompt_tokens": sum(record.prompt_tokens for record in done),
        "output_tokens": tokens,
        "requests_per_s": round(len(done) / seconds, 4),
        "output_tokens_per_s": round(tokens / seconds, 4),
        "tokens_per_delivery": _ratio(tokens, sum(len(record.times) for record in done)),
        "most_late_ms": round(max(record.sent - record.due for record in records) * 1e3, 3),
        "times": {name: distribution(values) for name, values in times_ms(done).items()},
        "goodput": _goodput(settings, records, seconds),
        "speculation": _speculation(done),
    }
    start = min(record.due for record in records)
    return result | {"records": [_row(settings, record, start) for record in records]}


def times_ms(records: Sequence[Record]) -> dict[str, list[float]]:
    """All times in milliseconds, by name."""
    return {
        "ttft_ms": [record.ttft * 1e3 for record in records if record.ttft is not None],
        "itl_ms": [gap * 1e3 for record in records for gap in record.gaps],
        "tpot_ms": [record.per_token * 1e3 for record in records if record.per_token is not None],
        "e2e_ms": [record.e2e * 1e3 for record in records],
    }


def distribution(values: Sequence[float]) -> Json | None:
    """Mean, percentiles, greatest; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    percentiles = {f"p{percent}": round(percentile(ordered, percent), 3) for percent in PERCENTS}
    return {"mean": round(fmean(ordered), 3), **percentiles, "max": round(ordered[-1], 3), "count": len(ordered)}


def is_good(settings: BenchServeSettings, record: Record) -> bool:
    """Whether a request met what was asked for. One that failed did not."""
    if record.error or record.ttft is None:
        return False
    first = settings.slo_ttft_ms is None or record.ttft * 1e3 <= settings.slo_ttft_ms
    each = settings.slo_itl_ms is None or record.per_token is None or record.per_token * 1e3 <= settings.slo_itl_ms
    return first and each


def render(result: Json) -> Iterator[str]:
    """The result as lines."""
    yield f"{result['server']} at {result['place']}; {result['loop']}"
    failed = sum(result["failed"].values())
    yield f"{result['completed']} of {result['requests']} requests in {result['seconds']:.2f} s, {failed} failed"
    for problem, count in result["failed"].items():
        yield f"  {count} x {problem}"
    if result["setup"]["rate"] is not None and result["most_late_ms"] > 5:
        yield f"  the generator was up to {result['most_late_ms']:.0f} ms late; its lateness counts as the server's"
    yield ""
    yield from align([("ms", "mean", *(f"p{percent}" for percent in PERCENTS), "max"), *_rows(result)])
    yield ""
    speed = f"{result['output_tokens_per_s']:.1f} output tokens/s, {result['requests_per_s']:.2f} requests/s"
    yield f"  throughput   {speed}"
    if (good := result["goodput"]) is not None:
        yield (
            f"  goodput      {good['requests_per_s']:.2f} requests/s: {good['good']} of {result['requests']} requests "
            f"with {_objective(good)}"
        )
    yield f"  acceptance   {_acceptance(result['speculation'])}"


def _rows(result: Json) -> Iterator[tuple[str, ...]]:
    for key, name in TIMES:
        found = result["times"][key]
        values = ("mean", *(f"p{percent}" for percent in PERCENTS), "max")
        yield (name, *(("-" if found is None else f"{found[value]:.1f}") for value in values))


def _objective(good: Json) -> str:
    words = []
    if good["slo_ttft_ms"] is not None:
        words.append(f"a first token within {good['slo_ttft_ms']:g} ms")
    if good["slo_itl_ms"] is not None:
        words.append(f"{good['slo_itl_ms']:g} ms a token after it")
    return " and ".join(words)


def _acceptance(found: Json | None) -> str:
    if found is None:
        return "not known: the server does not say"
    if not found["num_draft_tokens"]:
        return f"nothing was drafted; {found['tokens_per_round']:.2f} tokens a round"
    positions = zip(found["accepted_per_position"], found["tested_per_position"], strict=True)
    shares = " ".join(f"{accepted / tested:.2f}" if tested else "-" for accepted, tested in positions)
    return (
        f"{found['acceptance_rate']:.1%} ({found['num_accepted_tokens']}/{found['num_draft_tokens']}), "
        f"{found['tokens_per_round']:.2f} tokens a round, by position {shares}"
    )


def _goodput(settings: BenchServeSettings, records: Sequence[Record], seconds: float) -> Json | None:
    """Only where an objective was given."""
    if settings.slo_ttft_ms is None and settings.slo_itl_ms is None:
        return None
    good = sum(is_good(settings, record) for record in records)
    return {
        "slo_ttft_ms": settings.slo_ttft_ms,
        "slo_itl_ms": settings.slo_itl_ms,
        "good": good,
        "requests_per_s": round(good / seconds, 4),
    }


def _speculation(records: Sequence[Record]) -> Json | None:
    """Sums over the completions whose rounds are known."""
    known = [(record, record.speculation) for record in records if record.speculation is not None]
    if not known:
        return None
    names = ("num_rounds", "num_drafts", "num_draft_tokens", "num_accepted_tokens")
    sums: Json = {name: sum(found[name] for _, found in known) for name in names}
    for name in ("accepted_per_position", "tested_per_position"):
        sums[name] = [sum(column) for column in zip_longest(*(found[f"num_{name}"] for _, found in known), fillvalue=0)]
    sums["acceptance_rate"] = _ratio(sums["num_accepted_tokens"], sums["num_draft_tokens"])
    sums["tokens_per_round"] = _ratio(sum(record.num_tokens for record, _ in known), sums["num_rounds"])
    return sums


def _row(settings: BenchServeSettings, record: Record, start: float) -> Json:
    """One request; milliseconds, from the load's start."""
    return {
        "index": record.index,
        "due_ms": round((record.due - start) * 1e3, 3),
        "ttft_ms": None if record.ttft is None else round(record.ttft * 1e3, 3),
        "e2e_ms": round(record.e2e * 1e3, 3),
        "itl_ms": [round(gap * 1e3, 3) for gap in record.gaps],
        "prompt_tokens": record.prompt_tokens,
        "output_tokens": record.num_tokens,
        "finish_reason": record.finish,
        "good": is_good(settings, record),
        "error": record.error or None,
    }


def _ratio(part: float, whole: float) -> float:
    return round(part / whole, 4) if whole else 0.0
