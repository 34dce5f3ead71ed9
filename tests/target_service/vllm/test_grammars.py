"""Constraints that are tried before vLLM gets them: what is told of those that it does not get."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.engines import GRAMMAR_EOS, VOCAB, opened
from support.models import ascii_backend

from outrider.engine.grammar import queue as grammar_queue
from outrider.rpc.errors import InvalidArgument, ResourceExhausted
from outrider.rpc.messages import Open
from outrider.rpc.words.structured import StructuredOutput
from outrider.vllm.target import grammars
from outrider.vllm.target.grammars import VllmGrammars


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[VllmGrammars]:
    monkeypatch.setattr(grammars, "structured_outputs_of", lambda constraint, special_ids: constraint.regex)
    found = VllmGrammars(ascii_backend(VOCAB, GRAMMAR_EOS).to_str().encode(), VOCAB, (GRAMMAR_EOS,))
    yield found
    found.close()


def asked(regex: str, output_ids: tuple[int, ...] = ()) -> Open:
    return opened(1, (5, 6, 7), structured_output=StructuredOutput(regex=regex), output_ids=output_ids)


async def test_a_constraint_is_tried_before_vllm_gets_it(made: VllmGrammars, monkeypatch: pytest.MonkeyPatch) -> None:
    digit = ascii_backend(VOCAB, GRAMMAR_EOS).encode("7").ids[0]
    assert await made.params_of(asked("[0-9]+", (digit, digit))) == "[0-9]+"
    assert await made.params_of(opened(1, (5, 6, 7))) is None
    with pytest.raises(InvalidArgument, match=r"^sampling\.structured_output: "):
        await made.params_of(asked("(a"))
    with pytest.raises(InvalidArgument, match=r"^open\.output_ids: does not fit"):
        await made.params_of(asked("[a-z]+", (digit,)))
    monkeypatch.setattr(grammar_queue, "MAX_WAITING", 0)
    with pytest.raises(ResourceExhausted) as full:
        await made.params_of(asked("[A-Z]+"))
    assert (full.value.reason, full.value.retry_after_ms > 0) == ("BUSY", True)
    assert await made.params_of(asked("[0-9]+")) == "[0-9]+", "what is known needs no room"
