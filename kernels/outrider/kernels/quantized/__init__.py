"""Weights of few bits: what their blocks mean."""
