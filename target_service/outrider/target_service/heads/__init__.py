"""Heads that draft beside the target: what they draft in a step, what they know of a text, what they learn, and whether
they are worth it."""
