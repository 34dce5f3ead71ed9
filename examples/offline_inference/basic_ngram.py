"""Drafts by looking n-grams up in the text so far: no second model."""

from outrider.llm import LLM, SamplingParams

llm = LLM(
    model="python",
    tensor_parallel_size=1,
    speculative_config={
        "method": "ngram",
        "num_speculative_tokens": 5,
        "prompt_lookup_max": 4,
    },
)

prompts = ["import os\nimport sys\nimport", "def add(a, b):\n    return a + b\n\n\ndef sub"]
sampling_params = SamplingParams(temperature=0.0, max_tokens=100)
outputs = llm.generate(prompts, sampling_params)

for output in outputs:
    print(f"Prompt: {output.prompt}")
    print(f"Generated: {output.outputs[0].text}")
    print(f"Finish reason: {output.outputs[0].finish_reason}")
    print("-" * 50)
