"""Low-rank adapters of an LLM's target; `outrider.llm.lora.request` is where vLLM's module of this name is."""
