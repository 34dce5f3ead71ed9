"""What the experts of a mixture cost, as a target measures it and its gateways hear of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExpertCosts:
    """What a step takes more for each expert that its rows wake, beside their number."""

    num_layers: int  # that have experts
    num_experts: int  # of a layer; one that every row goes to does not count
    num_chosen: int  # of these, by a row
    expert_us: float  # of one more in one layer, microseconds
    along: float  # independent rows that each further row of the measured steps counted as: see planner/woken.py
