"""One file per operation: its PyTorch reference, which is the CPU path and the specification of any faster kernel."""
