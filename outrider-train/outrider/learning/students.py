"""The student for what a folder holds."""

from __future__ import annotations

from pathlib import Path

from outrider.engine.checkpoint import mask_token_id, read_config
from outrider.learning.head_student import HeadStudent
from outrider.learning.parallel_student import ParallelStudent
from outrider.learning.student import Student, StudentPlan
from outrider.learning.token_student import TokenStudent


def student_of(folder: Path, plan: StudentPlan, head: Path | None = None, max_tokens: int = 2048) -> Student:
    """Of a draft's model, by how it drafts: in parallel if its config.json names a mask token. Where a `head` is given,
    of that, and `folder` is its target's; texts of at most `max_tokens` are learned from. Raises ValueError."""
    if head is not None:
        return HeadStudent(head, folder, plan, max_tokens)
    mask = mask_token_id(read_config(folder))
    return TokenStudent(folder, plan) if mask is None else ParallelStudent(folder, plan, mask)
