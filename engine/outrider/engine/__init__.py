"""What runs a model: paged key-value blocks, sequences, batches, models, the runner, sampling, the device thread. No
gRPC."""
