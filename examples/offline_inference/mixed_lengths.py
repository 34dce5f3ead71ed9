"""Prompts of different lengths, each with parameters of its own."""

from outrider.llm import LLM, SamplingParams

llm = LLM(
    model="python",
    speculative_config={
        "method": "ngram",
        "num_speculative_tokens": 5,
        "prompt_lookup_max": 4,
    },
)

prompts = [
    "import",
    '"""Helpers for tests.\n\nThey read a file, compare its lines with others, and say where they differ.\n"""\n',
    "def factorial(n):",
]

sampling_params_list = [
    SamplingParams(temperature=0.0, max_tokens=10),
    SamplingParams(temperature=0.0, max_tokens=300),
    SamplingParams(temperature=0.0, max_tokens=100),
]

outputs = llm.generate(prompts, sampling_params_list)

for i, output in enumerate(outputs):
    print(f"Prompt {i}: {output.prompt}")
    print(f"Generated tokens: {len(output.outputs[0].token_ids)}")
    print(f"Text: {output.outputs[0].text[:100]}...")
    print("-" * 50)
