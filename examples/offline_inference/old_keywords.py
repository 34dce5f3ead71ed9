"""The keywords of before `speculative_config`: they act, with a deprecation warning."""

from outrider.llm import LLM, SamplingParams

prompts = ["The future of"]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95)

llm = LLM(
    model="python",
    tensor_parallel_size=1,
    speculative_model="python",
    num_speculative_tokens=5,
    use_v2_block_manager=True,
)
outputs = llm.generate(prompts, sampling_params)

for output in outputs:
    print(f"Draft model: {output.prompt!r}, Generated text: {output.outputs[0].text!r}")
llm.close()

llm = LLM(
    model="python",
    tensor_parallel_size=1,
    speculative_model="[ngram]",
    num_speculative_tokens=5,
    ngram_prompt_lookup_max=4,
    use_v2_block_manager=True,
)
outputs = llm.generate(prompts, sampling_params)

for output in outputs:
    print(f"N-grams: {output.prompt!r}, Generated text: {output.outputs[0].text!r}")
