"""GGUF files: what their headers say, and what that means to a loader and a tokenizer. No torch."""
