"""Many prompts, with a bar that says how many are done."""

from outrider.llm import LLM, SamplingParams

llm = LLM(
    model="python",
    speculative_config={
        "method": "ngram",
        "num_speculative_tokens": 5,
        "prompt_lookup_max": 4,
    },
)

prompts = [f"def step_{i}(self):" for i in range(20)]
sampling_params = SamplingParams(temperature=0.0, max_tokens=100)

outputs = llm.generate(prompts, sampling_params, use_tqdm=True)

print(f"Generated {len(outputs)} outputs")
print(f"Total tokens: {sum(len(o.outputs[0].token_ids) for o in outputs)}")
