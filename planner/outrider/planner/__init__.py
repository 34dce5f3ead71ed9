"""The arithmetic of speed: how many drafted tokens are accepted, what a step costs, what a round makes of it. No torch,
no I/O."""
