"""Grammars of vLLM's own under continuations: what a request generated before is a prompt to vLLM, so that its matcher
is put behind it before the first step."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from outrider.vllm.link import EXTRA


def continue_grammar(request: Any, manager: Any) -> None:
    """Has a matcher that is being compiled advanced by the output with which its request began; on the compilers'
    threads, where it was submitted before. Output that it does not follow ends the request as a bad grammar does."""
    output = output_before(request)
    constraint = request.structured_output_request
    if not output or constraint is None:
        return
    compiled = constraint._grammar
    if isinstance(compiled, Future):
        constraint.grammar = manager.executor.submit(advanced, compiled, request.request_id, output)


def output_before(request: Any) -> Sequence[int]:
    """The end of vLLM's prompt, which was generated before."""
    extra = (request.sampling_params.extra_args or {}).get(EXTRA) if request.sampling_params is not None else None
    count = 0 if extra is None else extra["num_output"]
    ids: list[int] = request.prompt_token_ids[-count:] if count else []
    return ids


def advanced(compiled: Future[Any], request_id: str, output: Sequence[int]) -> Any:
    """The matcher behind its output. Raises ValueError where that is none of the grammar's."""
    grammar = compiled.result()
    if not grammar.accept_tokens(request_id, list(output)):
        raise ValueError(f"the {len(output)} tokens that were generated before are none of the grammar's")
    return grammar
