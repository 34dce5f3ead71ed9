"""Drafts from the text so far and from earlier answers: the second request is like the first, and so is its draft."""

from outrider.llm import LLM, SamplingParams

# Suffix decoding excels at repetitive patterns
llm = LLM(
    model="python",
    speculative_config={
        "method": "suffix",
        "num_speculative_tokens": 32,  # Maximum, adjusted dynamically
        "suffix_decoding_max_spec_factor": 1.0,
        "suffix_decoding_min_token_prob": 0.1,
        "suffix_decoding_max_cached_requests": 1000,
    },
)

# Example: Code refactoring (repetitive patterns)
for task in ("list comprehension", "a generator"):
    prompts = [f"Refactor this code to use {task}: result = []\nfor i in range(10):\n    result.append(i*2)"]
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=200))
    print(f"Generated: {outputs[0].outputs[0].text}")

for metric in llm.get_metrics():
    if "spec_decode_num" in metric.name:
        print(f"{metric.name}: {metric.value if hasattr(metric, 'value') else metric.values}")
