"""Drafts by a small model, and says how well they fit."""

from outrider.llm import LLM, SamplingParams

llm = LLM(
    model="python",
    speculative_config={
        "model": "python",
        "num_speculative_tokens": 3,
    },
    enforce_eager=False,
    gpu_memory_utilization=0.9,
)

prompts = ["class Stack:\n    def __init__(self):"]
sampling_params = SamplingParams(temperature=0.0, max_tokens=200)
outputs = llm.generate(prompts, sampling_params)
print(outputs[0].outputs[0].text)

metrics = llm.get_metrics()

for metric in metrics:
    if metric.name == "vllm:spec_decode_num_accepted_tokens":
        print(f"Accepted tokens: {metric.value}")
    elif metric.name == "vllm:spec_decode_num_draft_tokens":
        print(f"Draft tokens: {metric.value}")

num_drafts = sum(m.value for m in metrics if m.name == "vllm:spec_decode_num_drafts")
num_accepted = sum(m.value for m in metrics if m.name == "vllm:spec_decode_num_accepted_tokens")
if num_drafts > 0:
    mean_acceptance_length = 1 + (num_accepted / num_drafts)
    print(f"Mean acceptance length: {mean_acceptance_length:.2f}")
