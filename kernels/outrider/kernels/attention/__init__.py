"""Attention over a paged cache: the plan of a batch, the reference, the Triton kernels, masks of trees."""
