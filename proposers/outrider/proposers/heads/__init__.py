"""Heads: what drafts from the target's hidden states, beside it."""
