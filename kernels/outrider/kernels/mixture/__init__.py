"""Mixtures of experts: which rows go to which, and what they give together."""
