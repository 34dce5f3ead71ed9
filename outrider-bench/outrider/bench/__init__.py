"""Everything that measures: pairs of models, networks, load, kernels."""
