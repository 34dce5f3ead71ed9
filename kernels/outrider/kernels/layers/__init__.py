"""Norms, gates, rotary positions and linear layers."""
