"""vLLM's offline API over Outrider's loop:

    from outrider.llm import LLM, SamplingParams

    llm = LLM("models/large", speculative_config={"model": "models/small", "num_speculative_tokens": 4})
    for output in llm.generate(["Once upon a time"], SamplingParams(temperature=0, max_tokens=64)):
        print(output.outputs[0].text)

`outrider.llm.inputs`, `outrider.llm.config` and `outrider.llm.lora.request` are where vLLM's modules of these names
are."""

from __future__ import annotations

from outrider.gateway.spec_decode_metrics import SpecDecodeMetrics
from outrider.llm.config import SpeculativeConfig
from outrider.llm.inputs import PromptType, TextPrompt, TokensPrompt
from outrider.llm.llm import LLM
from outrider.llm.lora.request import LoRARequest
from outrider.llm.metrics import Counter, Gauge, Histogram, Metric, Vector
from outrider.llm.outputs import CompletionOutput, Logprob, RequestOutput
from outrider.llm.sampling_params import RequestOutputKind, SamplingParams
from outrider.llm.structured_outputs import GuidedDecodingParams, StructuredOutputsParams
from outrider.llm.validation import Unsupported

__all__ = [
    "LLM",
    "CompletionOutput",
    "Counter",
    "Gauge",
    "GuidedDecodingParams",
    "Histogram",
    "LoRARequest",
    "Logprob",
    "Metric",
    "PromptType",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "SpecDecodeMetrics",
    "SpeculativeConfig",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "Unsupported",
    "Vector",
]
