"""Constraints on the text: compiled on threads of their own, tried out in a process, followed as masks of tokens."""
