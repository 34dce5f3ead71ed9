from __future__ import annotations

from outrider.gateway.request import GenerationDelta
from outrider.llm.inputs import Prompt
from outrider.llm.outputs import OutputBuilder
from outrider.rpc.messages import TokenLogprob


def test_a_long_prompts_log_probabilities_come_in_slices() -> None:
    builder = OutputBuilder("r", Prompt(None, (5, 6, 7)), 1, False, None)
    for rows in (((), (TokenLogprob(6, -1.0, 2),)), ((TokenLogprob(7, -2.0, 1), TokenLogprob(9, -3.0, 2)),)):
        builder.add(GenerationDelta("r", 0, prompt_logprobs=rows))
    rows = builder.output.prompt_logprobs
    assert rows is not None and rows[0] is None
    assert [list(row) for row in rows[1:] if row is not None] == [[6], [7, 9]]
