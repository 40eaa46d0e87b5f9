"""Checkpoints to an engine directory: planning, precision, weights of a rank, the TensorRT compiler, export."""
