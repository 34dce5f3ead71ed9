"""Constraints before vLLM gets them: tried out here, where a bad one costs its own request alone, and said so that
vLLM's backend allows the same texts as our engine, since a stream may move between both."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from functools import partial
from typing import Any

from outrider.engine.grammar.compiler import CompiledGrammar, GrammarCompiler
from outrider.engine.grammar.lark import GrammarError, schema_object
from outrider.engine.grammar.queue import GrammarQueue, GrammarQueueFull
from outrider.engine.grammar.source import GrammarSpec, lark_of_grammar
from outrider.engine.grammar.structural_tag import lark_of
from outrider.engine.grammar.trial import TrialFailed
from outrider.rpc.errors import InvalidArgument, ResourceExhausted, Violation
from outrider.rpc.messages import Open
from outrider.rpc.words.structured import StructuredOutput
from outrider.target_service.grammars import untried

FIELD = "sampling.structured_output"


class VllmGrammars:
    """Compiles the constraints over one tokenizer, for one event loop."""

    def __init__(self, tokenizer_json: bytes, vocab_size: int, eos_ids: Sequence[int]) -> None:
        """Raises GrammarError for a tokenizer that does not say its tokens' bytes."""
        compiler = GrammarCompiler(tokenizer_json, vocab_size, eos_ids)
        self._queue = GrammarQueue(lambda: compiler)
        added = json.loads(tokenizer_json).get("added_tokens") or []
        self._special_ids = {token["content"]: token["id"] for token in added if token.get("special")}

    async def params_of(self, message: Open) -> Any:
        """vLLM's StructuredOutputsParams, of a constraint that compiles and fits what was generated before. Raises
        InvalidArgument, ResourceExhausted where too many wait, or Unavailable where another try may do."""
        constraint = message.sampling.structured_output
        spec = GrammarSpec.of(constraint, None)
        if constraint is None or spec is None:
            return None
        try:
            await asyncio.wrap_future(self._queue.submit(spec, partial(_check, message.output_ids)))
        except GrammarError as error:
            raise InvalidArgument.of([Violation(FIELD, str(error))]) from error
        except GrammarQueueFull as full:
            raise ResourceExhausted(str(full), reason="BUSY", retry_after_ms=full.wait_ms) from full
        except TrialFailed as error:
            raise untried(error) from error
        return await asyncio.to_thread(structured_outputs_of, constraint, self._special_ids)

    def close(self) -> None:
        """Ends the processes in which constraints are tried."""
        self._queue.close()


def _check(output_ids: Sequence[int], compiled: CompiledGrammar, seconds: float) -> None:
    try:
        compiled.matcher(output_ids)
    except GrammarError as error:
        problem = f"does not fit {FIELD}: {error}; allowed: what it generated"
        raise InvalidArgument.of([Violation("open.output_ids", problem)]) from error


def structured_outputs_of(constraint: StructuredOutput, special_ids: dict[str, int]) -> Any:
    """vLLM's StructuredOutputsParams of one that compiles."""
    from vllm.sampling_params import StructuredOutputsParams

    schema = '{"type": "object"}' if constraint.json_object else constraint.json_schema
    if schema is not None:
        return StructuredOutputsParams(json=json.dumps(schema_object(json.loads(schema))))
    if constraint.structural_tag is not None:
        return StructuredOutputsParams(grammar=lark_of(constraint.structural_tag, special_ids))
    if constraint.grammar is not None:
        return StructuredOutputsParams(grammar=lark_of_grammar(constraint.grammar))
    choice = None if constraint.choice is None else list(constraint.choice)
    return StructuredOutputsParams(regex=constraint.regex, choice=choice)
