"""The other engine behind the same servicer: vLLM, for targets that need several GPUs, quantised weights or mixtures of
experts. Its processes load what `outrider.vllm` has."""
