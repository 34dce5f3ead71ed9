"""A progress bar around requests as they end."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from outrider.llm.batch import Job


def with_progress(ended: Iterator[Job], total: int, use_tqdm: bool | Callable[..., Any]) -> Iterator[Job]:
    """Passes on what has ended. `use_tqdm` may be a class or function that makes the bar."""
    if not use_tqdm:
        yield from ended
        return
    make = use_tqdm if callable(use_tqdm) else importlib.import_module("tqdm.auto").tqdm
    began, num_in, num_out = time.monotonic(), 0, 0
    with make(total=total, desc="Processed prompts", dynamic_ncols=True) as bar:
        for job in ended:
            output = job.builder.output
            num_in += len(output.prompt_token_ids or ()) * len(output.outputs)
            num_out += sum(len(completion.token_ids) for completion in output.outputs)
            seconds = max(time.monotonic() - began, 1e-9)
            bar.set_postfix_str(
                f"est. speed input: {num_in / seconds:.2f} toks/s, output: {num_out / seconds:.2f} toks/s",
                refresh=False,
            )
            bar.update(1)
            yield job
