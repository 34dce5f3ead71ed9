"""Where vLLM's modules of this name are."""
