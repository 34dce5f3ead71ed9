"""What a head is worth beside its target: the target's engine goes on from places of a text, with the head, and what it
keeps of the drafted tokens is counted at each position of the window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from outrider.engine.models.base import UnsupportedModel
from outrider.planner.policy import Round, SpeculationTally
from outrider.proposers.heads.loading import AnyHead, drafts_in_one_pass
from outrider.target_service.boot import limits_of, load, load_head, new_engine, new_runner
from outrider.target_service.heads.trial import completed
from outrider.target_service.settings import TargetSettings

PLACES = 16
CONTEXT = 256  # tokens before a place
NUM_TOKENS = 32  # generated there
TEMPERATURES = {"greedy": 0.0, "at temperature 1": 1.0}


@dataclass(slots=True)
class HeadAgreement:
    """The head, and what came of its drafts by the temperature's name."""

    head: AnyHead
    num_places: int = 0
    tallies: dict[str, SpeculationTally] = field(default_factory=dict)
    num_tokens: dict[str, int] = field(default_factory=dict)  # in rounds that had a draft


def judge_head(
    target: Path, folder: Path, ids: Sequence[int], num_draft_tokens: int, threads: int | None = None
) -> HeadAgreement:
    """`ids` are a text's; without any the head is loaded, and no more. Raises ValueError for one that does not fit."""
    if threads is not None:
        torch.set_num_threads(threads)
    settings = TargetSettings.model_validate(
        {"model": target, "head": folder, "max_window": num_draft_tokens, "cut_windows": False}
    )
    try:
        loaded = load(settings)
        head = load_head(settings, loaded)
    except UnsupportedModel as error:
        raise ValueError(str(error)) from error
    if head is None:
        raise ValueError(f"{folder} holds no head")
    found = HeadAgreement(head)
    if not ids:
        return found
    runner = new_runner(settings, loaded, head)
    engine = new_engine(settings, runner, limits_of(settings, loaded, runner), head=head)
    prompts = list(_prompts(ids, min(CONTEXT, loaded.max_model_len - NUM_TOKENS)))
    found.num_places = len(prompts)
    for name, temperature in TEMPERATURES.items():
        said = completed(engine, head.name, prompts, num_draft_tokens, NUM_TOKENS, temperature)
        rounds = [commit for commit in said if commit.num_drafted]
        found.tallies[name] = SpeculationTally()
        for index, commit in enumerate(rounds):
            found.tallies[name].add(Round(index, commit, commit.num_drafted, 0.0, 0.0, 0))
        found.num_tokens[name] = sum(len(commit.ids) for commit in rounds)
    return found


def _prompts(ids: Sequence[int], context: int) -> list[Sequence[int]]:
    """What stands before places of the text that are equally far apart."""
    count = min(PLACES, len(ids))
    places = [len(ids) * number // count for number in range(1, count + 1)]
    return [ids[max(0, place - context) : place] for place in places]


def describe_head(found: HeadAgreement) -> list[str]:
    """What the head is and what became of its drafts, a line each."""
    head = found.head
    how = "all in one pass" if drafts_in_one_pass(head) else "one after the other"
    lines = [
        f"head          {head.name}, from layers {', '.join(map(str, head.taps))} of the target; "
        f"it drafts {how}, at most {head.most_tokens}"
    ]
    if not found.tallies:
        return lines
    lines.append(
        f"read          {found.num_places} places of the text, {NUM_TOKENS} tokens of the target's own at each"
    )
    for name, tally in found.tallies.items():
        pairs = zip(tally.num_accepted_per_position, tally.num_tested_per_position, strict=True)
        shares = " ".join(f"{accepted / tested:.3f}" for accepted, tested in pairs if tested)
        a_round = found.num_tokens[name] / max(1, tally.num_rounds)
        lines.append(
            f"acceptance    {shares or 'none'} {name} (by position, of those tested); {a_round:.2f} tokens a round"
        )
    return lines
