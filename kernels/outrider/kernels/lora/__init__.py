"""Low-rank products of adapters, row by row."""
