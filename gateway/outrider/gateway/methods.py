"""The drafting methods that a request may name, and what is wrong with those that it does."""

from __future__ import annotations

from outrider.gateway.prediction import PREDICTION
from outrider.proposers.registry import HEADS, list_problem
from outrider.rpc.errors import Violations, quoted
from outrider.rpc.messages import MAX_METHODS, MAX_NAME_CHARS, DraftInfo, TargetInfo
from outrider.rpc.words.request import split_methods


def offered(target: TargetInfo, draft: DraftInfo | None) -> tuple[str, ...]:
    """The methods that a request may name, the default first; the target's own drafts where there is no draft."""
    known = () if draft is None else draft.methods
    return tuple(row.name for row in (*known, *target.methods) if row in target.methods or not row.needs_features)


def check_method_names(found: Violations, method: str, methods: tuple[str, ...]) -> None:
    """The names by themselves, of either field; of both they have to agree."""
    found.text("speculation.method", method, MAX_METHODS * (MAX_NAME_CHARS + 1))
    if not found.length("speculation.methods", methods, MAX_METHODS):
        return
    for index, name in enumerate(methods):
        found.text(f"speculation.methods[{index}]", name, MAX_NAME_CHARS, empty=False)
    if not (method or methods) or not all(isinstance(name, str) and name for name in methods):
        return
    split = split_methods(method)
    if method and methods and split != methods:
        allowed = f"{quoted(','.join(methods))}, as there, or none"
        found.add("speculation.method", f"is {quoted(method)} beside speculation.methods", allowed)
    elif len(split) > MAX_METHODS:
        found.add("speculation.method", f"names {len(split)} methods", f"at most {MAX_METHODS}")
    elif problem := list_problem(methods or split):
        what, _, allowed = problem.partition("; allowed: ")
        found.add("speculation.methods" if methods else "speculation.method", what, allowed)


def check_methods(
    found: Violations,
    names: tuple[str, ...],
    by_list: bool,
    predicts: bool,
    target: TargetInfo,
    draft: DraftInfo | None,
) -> None:
    """Checks that the target or the draft has the methods of a request, which are given as a list or by one text, with
    a prediction or without."""
    fields = [f"speculation.methods[{index}]" if by_list else "speculation.method" for index in range(len(names))]
    if names == (PREDICTION,):  # the gateway itself drafts by it where its draft does not
        if not predicts:
            found.add(fields[0], f"is {quoted(PREDICTION)}, and there is no prediction", "with a prediction alone")
        return
    known = offered(target, draft)
    for where, name in zip(fields, names, strict=True):
        if not isinstance(name, str) or not name or name in known:
            continue
        if name in HEADS:
            found.add(where, f"is {quoted(name)}, a head that the target does not have", ", ".join(known) or "none")
        elif draft is not None:
            found.add(where, f"is {quoted(name)}, which the draft does not know", ", ".join(known))
