"""vLLM's offline API over Outrider's loop:

    from outrider.llm import LLM, SamplingParams

    llm = LLM("models/large", speculative_config={"model": "models/small", "num_speculative_tokens": 4})
    for output in llm.generate(["Once upon a time"], SamplingParams(temperature=0, max_tokens=64)):
        print(output.outputs[0].text)

`outrider.llm.inputs`, `.config`, `.logprobs`, `.outputs`, `.sampling_params`, `.lora.request` and `.v1.metrics.reader`
are where vLLM's modules of these names are."""

from __future__ import annotations

from importlib.metadata import version

from outrider.rpc.systems import require_posix

require_posix()  # first: what fails to be imported elsewhere would say less

# ruff: noqa: E402
from outrider.gateway.spec_decode_metrics import SpecDecodeMetrics
from outrider.llm.arguments import EngineArgs
from outrider.llm.config import SpeculativeConfig
from outrider.llm.inputs import PromptType, TextPrompt, TokensPrompt
from outrider.llm.llm import LLM
from outrider.llm.logprobs import FlatLogprobs, Logprob
from outrider.llm.lora.request import LoRARequest
from outrider.llm.metrics import Counter, Gauge, Histogram, Metric, Vector
from outrider.llm.outputs import CompletionOutput, RequestOutput
from outrider.llm.sampling_params import RequestOutputKind, SamplingParams
from outrider.llm.structured_outputs import GuidedDecodingParams, StructuredOutputsParams
from outrider.llm.validation import Unsupported

__version__ = version("outrider")

__all__ = [
    "LLM",
    "CompletionOutput",
    "Counter",
    "EngineArgs",
    "FlatLogprobs",
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
    "__version__",
]
