"""Weights that a checkpoint keeps as integers, or as bytes of floats, with scales: read and told apart."""
