"""A head beside the target drafts from its hidden states: as vLLM's page on EAGLE-3 has it, with its metrics."""

from outrider.llm import LLM, SamplingParams

llm = LLM(
    model="python",
    tensor_parallel_size=1,
    speculative_config={
        "method": "eagle3",
        "model": "python",
        "num_speculative_tokens": 3,
        "draft_tensor_parallel_size": 1,
    },
    gpu_memory_utilization=0.85,
)

prompts = ["def parse_args(argv):", "class Stack:\n    def push(self, item):"]
outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=100))
for output in outputs:
    print(f"Generated: {output.outputs[0].text}")

metrics = {metric.name: metric for metric in llm.get_metrics()}
num_drafts = metrics["vllm:spec_decode_num_drafts"].value
num_accepted = metrics["vllm:spec_decode_num_accepted_tokens"].value
print(f"Mean acceptance length: {1 + num_accepted / num_drafts:.2f}")
