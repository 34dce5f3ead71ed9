"""The most probable tokens at each position, and the metrics of speculation."""

from outrider.llm import LLM, SamplingParams

llm = LLM(
    model="python",
    speculative_config={
        "model": "python",
        "num_speculative_tokens": 3,
    },
)

prompts = ["with open("]
sampling_params = SamplingParams(
    temperature=0.0,
    max_tokens=50,
    logprobs=5,
)

outputs = llm.generate(prompts, sampling_params)

output = outputs[0]
for i, token_logprobs in enumerate(output.outputs[0].logprobs):
    print(f"Token {i}: {token_logprobs}")

metrics = llm.get_metrics()
for metric in metrics:
    if "spec_decode" in metric.name:
        print(f"{metric.name}: {metric.value}")
