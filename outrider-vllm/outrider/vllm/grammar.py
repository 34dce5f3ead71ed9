"""Grammars of vLLM's own under continuations: what a request generated before is a prompt to vLLM, so that its matcher
is put behind it before the first step."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any


def continue_grammar(request: Any, manager: Any, output_len: int) -> None:
    """Has a matcher that is being compiled advanced by the output with which its request began, the last `output_len`
    ids of vLLM's prompt; on the compilers' threads, where it was submitted before. Output that it does not follow ends
    the request as a bad grammar does."""
    constraint = request.structured_output_request
    if not output_len or constraint is None:
        return
    compiled, output = constraint._grammar, request.prompt_token_ids[-output_len:]
    if isinstance(compiled, Future):
        constraint.grammar = manager.executor.submit(advanced, compiled, request.request_id, output)


def advanced(compiled: Future[Any], request_id: str, output: Sequence[int]) -> Any:
    """The matcher behind its output. Raises ValueError where that is none of the grammar's."""
    grammar = compiled.result()
    if not grammar.accept_tokens(request_id, list(output)):
        raise ValueError(f"the {len(output)} tokens that were generated before are none of the grammar's")
    return grammar
