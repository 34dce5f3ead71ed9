"""Causal language models over the paged cache: our own decoder, and every other one through transformers."""
