"""The gateway: the loop between draft and target, and what clients talk to. Imports no torch."""
