"""Goals for a request's times: those that a call names, whether they can be met, as far as what requests took of late
tells it, and whether they were."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

from outrider.gateway.admission import Admission
from outrider.gateway.prepare import Prepared
from outrider.gateway.request_record import RequestRecord
from outrider.planner.estimates import MOST_WAIT_MS, WAIT_MS, StepTime
from outrider.rpc.errors import ResourceExhausted, Violations
from outrider.rpc.messages import MAX_INT32, MOST_STEPS
from outrider.rpc.words.checks import quoted
from outrider.rpc.words.request import LatencyGoals

HEADERS = {  # of HTTP and of gRPC's metadata, by goal; the first that is there counts
    "ttft": ("x-llm-d-slo-ttft-ms", "x-slo-ttft-ms"),
    "tpot": ("x-llm-d-slo-tpot-ms", "x-slo-tpot-ms"),
}
STRICT = "x-outrider-slo-strict"
MIN_GOAL_MS, MAX_GOAL_MS = 0.001, 86_400_000.0
GOAL_UNREACHABLE = "GOAL_UNREACHABLE"


def goals_of(headers: Mapping[str, str]) -> LatencyGoals:
    """The goals that a call's headers, in lower case, name. InvalidArgument names every header that says something
    else."""
    found, given = Violations(), dict[str, float]()
    for goal, names in HEADERS.items():
        name = next((name for name in names if name in headers), None)
        if name is not None and found.number(name, _number(headers[name]), MIN_GOAL_MS, MAX_GOAL_MS, say=_RANGE):
            given[f"{goal}_ms"] = float(headers[name])
    strict = headers.get(STRICT, "false").lower()
    if strict not in ("true", "false"):
        found.add(STRICT, f"is {quoted(strict)}", "true or false")
    found.raise_if_any()
    return LatencyGoals(**given, strict=strict == "true")


_RANGE = f"{MIN_GOAL_MS:g} to {MAX_GOAL_MS:.0f} milliseconds"


def _number(text: str) -> object:
    """A header's number, else its text."""
    try:
        return float(text)
    except ValueError:
        return text


class ServiceTimes:
    """What requests took of late: to their first token, once they could run, by the length of their prompts, whatever
    the caches had of them, and a token after that, by how many sequences ran."""

    def __init__(self) -> None:
        self._first, self._each = StepTime(), StepTime()

    def add(self, record: RequestRecord, num_running: int) -> None:
        """Learns of a request at its end, beside so many sequences, its own included."""
        if record.prepared is None or not record.first_token:
            return
        self._first.add(len(record.prepared.prompt_ids), (record.first_token - record.started) * 1e6)
        for seconds in _seconds_per_token(record):
            self._each.add(num_running, seconds * 1e6)

    def foreseen_ms(self, prompt_len: int, num_running: int, before_s: float) -> dict[str, float]:
        """Milliseconds by goal, for a prompt of so many tokens beside so many sequences, `before_s` after its arrival.
        What was not seen yet counts as nothing."""
        ttft_ms = before_s * 1e3 + self._first.at(prompt_len) / 1e3
        return {"ttft": ttft_ms, "tpot": self._each.at(num_running) / 1e3}

    def placed(self, prepared: Prepared, record: RequestRecord, admission: Admission, num_running: int) -> Prepared:
        """The request, behind others where one of its goals is foreseen to be missed beside `num_running` sequences,
        which the record says. Raises ResourceExhausted where it is strict."""
        request = prepared.request
        waits_s = admission.foreseen_wait_s(prepared.work, request.priority)
        before_s = time.monotonic() - record.arrived + waits_s
        foreseen = self.foreseen_ms(len(prepared.prompt_ids), num_running, before_s)
        goals = request.goals.by_name
        record.unreachable = tuple(name for name, goal_ms in goals.items() if foreseen[name] > goal_ms)
        if not record.unreachable:
            return prepared
        if request.goals.strict:
            raise _refusal(goals, foreseen, record.unreachable)
        lowered = min(request.priority + MOST_STEPS, MAX_INT32)
        return replace(prepared, request=replace(request, priority=lowered))


def outcomes(record: RequestRecord) -> dict[str, str]:
    """Whether the goals of a request were met or missed; nothing of those that it has made too few tokens for. The
    slowest of several completions counts."""
    took_ms = {}
    if record.first_token:
        took_ms["ttft"] = (record.first_token - record.arrived) * 1e3
    if paces := _seconds_per_token(record):
        took_ms["tpot"] = max(paces) * 1e3
    goals = record.request.goals.by_name
    return {name: "met" if took_ms[name] <= goals[name] else "missed" for name in goals if name in took_ms}


def _seconds_per_token(record: RequestRecord) -> list[float]:
    """Of each completion that has got tokens after its first delivery."""
    paces = (times.seconds_per_token for times in record.completions.values())
    return [seconds for seconds in paces if seconds is not None]


def _refusal(
    goals: Mapping[str, float], foreseen: Mapping[str, float], unreachable: tuple[str, ...]
) -> ResourceExhausted:
    """What a strict request is told: when what it would wait too long for has left."""
    told = (f"{HEADERS[name][0]}: is {goals[name]:g}, and {foreseen[name]:.0f} ms are foreseen" for name in unreachable)
    late_ms = foreseen["ttft"] - goals.get("ttft", foreseen["ttft"])
    message = f"{'; '.join(told)}; allowed: as much, or without {STRICT}, behind others"
    retry_after_ms = round(min(max(late_ms, WAIT_MS), MOST_WAIT_MS))
    return ResourceExhausted(message, reason=GOAL_UNREACHABLE, retry_after_ms=retry_after_ms)
