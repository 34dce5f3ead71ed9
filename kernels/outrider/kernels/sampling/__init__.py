"""Logits to probabilities, their cuts, and drafts drawn from them."""
