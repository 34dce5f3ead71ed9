"""Suffix decoding: drafts from what a sequence, and those before it, said already."""
