"""Prompts that are token ids already."""

from transformers import AutoTokenizer

from outrider.llm import LLM, SamplingParams
from outrider.llm.inputs import TokensPrompt
from outrider.pairs import pair_path

tokenizer = AutoTokenizer.from_pretrained(pair_path().target)
llm = LLM(
    model=pair_path().target,
    speculative_config={
        "method": "ngram",
        "num_speculative_tokens": 5,
        "prompt_lookup_max": 4,
    },
)

prompts_text = [
    "def add(a, b): return a + b\ndef subtract(a, b):",
    "import json\nimport",
]

tokens_prompts = [TokensPrompt(prompt_token_ids=tokenizer.encode(p, add_special_tokens=False)) for p in prompts_text]

outputs = llm.generate(tokens_prompts, SamplingParams(temperature=0.0, max_tokens=100))

for output in outputs:
    print(f"Generated: {output.outputs[0].text}")
